"""Stand-ins for the endings that the real parts cannot be made to show."""

from __future__ import annotations

from pathlib import Path

#: An nsys that says a version and does nothing that it is asked to.
FAKE_NSYS = """#!/bin/sh
case "$1" in
  --version) echo "NVIDIA Nsight Systems version {version}" ;;
  profile|launch|start) case "$2" in --help) echo "--trace= cuda nvtx osrt";; *) exit 1;; esac ;;
esac
"""


def fake_nsys(folder: Path, version: str) -> Path:
    """An nsys in `folder` that answers as `version` and fails at everything else."""
    path = folder / "nsys"
    path.write_text(FAKE_NSYS.format(version=version))
    path.chmod(0o755)
    return path
