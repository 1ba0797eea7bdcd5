"""File systems that fail: from some operation on, all that a command and what it starts do to files
below a folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab import command
from lab.command import Completed

_SOURCE = Path(__file__).with_suffix(".c")
#: Each process is to load the library, in whatever environment: as root, in mounts of our own.
_PRELOADED = """
etc=$(mktemp -d) && mount -t tmpfs none "$etc" && cp -a /etc/. "$etc" &&
echo "$0" >"$etc/ld.so.preload" && mount --bind "$etc" /etc && umount -l "$etc" && rmdir "$etc" &&
exec "$@"
"""


def library(folder: Path) -> Path:
    """Compile the library that fails."""
    made = folder / "failing_files.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, _SOURCE, "-ldl"], check=True)
    return made


@dataclass(frozen=True)
class Failing:
    """What fails below the folder `under`: all from the operation `first` on, or it alone."""

    under: Path
    number: int
    first: int
    once: bool = False

    def run(
        self, library: Path, line: Sequence[str | Path], env: Mapping[str, str]
    ) -> tuple[Completed, int]:
        """Run a command, and count its operations."""
        count = library.with_suffix(".count")
        count.write_bytes(bytes(4))
        names = {
            "FAIL_UNDER": f"{self.under}/", "FAIL_FROM": str(self.first),
            "FAIL_ERRNO": str(self.number), "FAIL_COUNT": str(count),
            **({"FAIL_ONCE": "1"} if self.once else {}),
        }  # fmt: skip
        words = ["unshare", "--mount", "sh", "-c", _PRELOADED, library, *line]
        done = command.run(words, env={**env, **names})
        return done, int.from_bytes(count.read_bytes(), "little")
