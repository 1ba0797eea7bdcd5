"""Files and folders that take their place as a whole: under another name first, then by rename."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from clusterprof.agent.contracts import files


def link(source: Path, path: Path) -> None:
    """Let `path`, which may be there, be another name of the file `source`. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        return os.link(source, path, follow_symlinks=False)
    beside = _beside(path)
    os.link(source, beside, follow_symlinks=False)
    try:
        beside.replace(path)
    except OSError:
        beside.unlink()
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A new folder, which is `path` once the block has ended without an exception.

    It replaces what is there; of two at once one stays. Raises OSError; then, and with every
    exception of the block, `path` is as it was before.
    """
    beside, before = _beside(path), _beside(path, ".old")
    beside.mkdir()
    try:
        yield beside
        with contextlib.suppress(FileNotFoundError):
            path.rename(before)
        try:
            beside.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                before.rename(path)
            raise
    finally:
        for leftover in (beside, before):
            files.remove(leftover)


def _beside(path: Path, kind: str = "") -> Path:
    """A name beside it that nothing has."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}{kind}{files.UNFINISHED}")


def beside_steps(steps: str, name: str) -> str:
    """The name of the `pace.csv` or `gc.csv` of this step log: `pace.2.csv` for `steps.2.csv`."""
    before, _, after = steps.rpartition("steps")
    return before + Path(name).stem + after
