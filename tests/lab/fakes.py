"""Stand-ins for the endings that the real parts cannot be made to show."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

#: An nsys that says a version and does nothing that it is asked to.
FAKE_NSYS = """#!/bin/sh
case "$1" in
  --version) echo "NVIDIA Nsight Systems version {version}" ;;
  profile|launch|start) case "$2" in --help) echo "--trace= cuda nvtx osrt";; *) exit 1;; esac ;;
esac
"""

#: The real one, but for what a rank's own lines say: `"$@"` are the arguments, `$real` the program.
_FAULTY = """#!/bin/bash
real={real}
case "$SLURM_PROCID:{verb}" in
{cases}
esac
exec "$real" "$@"
"""


def fake_nsys(folder: Path, version: str) -> Path:
    """An nsys in `folder` that answers as `version` and fails at everything else."""
    return _script(folder / "nsys", FAKE_NSYS.format(version=version))


def faulty_nsys(folder: Path, real: Path, faults: Mapping[tuple[int, str], str]) -> Path:
    """The nsys `real`, but for what (rank, verb) has here: shell lines of bash."""
    return _script(folder / "bin/nsys", _faulty(real, '${1:-}${2:+:$2}', {
        f"{rank}:{verb}*": lines for (rank, verb), lines in faults.items()
    }))  # fmt: skip


def faulty_importer(folder: Path, real: Path, faults: Mapping[int, str]) -> Path:
    """The QdstrmImporter `real` next to that nsys, but for what the rank has here."""
    return _script(folder / "host-linux-x64/QdstrmImporter", _faulty(real, "", {
        f"{rank}:*": lines for rank, lines in faults.items()
    }))  # fmt: skip


def _faulty(real: Path, verb: str, cases: Mapping[str, str]) -> str:
    text = "\n".join(f"{pattern})\n{lines}\n;;" for pattern, lines in cases.items())
    return _FAULTY.format(real=shlex.quote(str(real)), verb=verb, cases=text)


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
