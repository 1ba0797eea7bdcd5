"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from clusterprof.errors import RunDirectoryError


def write(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, then rename: no reader ever sees half a file.

    Raises `RunDirectoryError` when the folder is missing, not writable or full; what
    stood at `path` before is then untouched.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunDirectoryError(
            f"cannot write {path.name}",
            f"where: {path.absolute()}",
            f"the system said: {error.strerror or error}",
            "next: free space or permissions there, or give another place with --output",
        ) from error
