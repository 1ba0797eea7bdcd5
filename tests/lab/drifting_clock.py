"""A clock for one process that is off, and gains on the true one."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


def library(folder: Path) -> Path:
    """Compile the library that gives a process its clock."""
    made = folder / "drifting_clock.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, _SOURCE], check=True)
    return made
