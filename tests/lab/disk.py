"""A small disk of its own that fills up, that is stalled for a while, or is very slow.

Only this disk: a file that is mounted as ext4. Whatever becomes of the test, it moves again: a
process of its own sees to that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: A disk never is stalled for longer than this.
MOST_S = 240


class Disk:
    """A mounted file system; everybody may write to it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.process: subprocess.Popen[bytes] | None = None

    def freeze(self, seconds: float = MOST_S) -> None:
        """Let it be stalled: whoever changes anything there waits, and cannot be killed."""
        self._do(f"fsfreeze -f {self.place}; echo; sleep {min(seconds, MOST_S)}")

    def slow(self, seconds: float, change_s: float = 1) -> None:
        """Let a change take `change_s`: it moves for a hundredth of a second at a time."""
        every = f"fsfreeze -f {self.place}; sleep {change_s}; fsfreeze -u {self.place}; sleep 0.01"
        self._do(
            f"echo; end=$((SECONDS + {seconds:.0f})); while [ $SECONDS -lt $end ]; do {every}; done"
        )

    def _do(self, script: str) -> None:
        self.thaw()
        # In a session of its own, with nothing of the test's: it outlives the test.
        self.process = subprocess.Popen(
            ["bash", "-c", f"{script}; fsfreeze -u {self.place} || true"], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it is so from now on
        self.process.stdout.close()

    @property
    def still(self) -> bool:
        """Whether it is still to be stalled, or slow, for some time."""
        return self.process is not None and self.process.poll() is None

    def thaw(self) -> None:
        """Let it move again, now."""
        if self.process is not None:
            if self.still:  # one that has ended leaves its number to others
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        # One freeze for each thaw; an error says that it moves.
        subprocess.run(["fsfreeze", "-u", self.place], capture_output=True, check=False)


@contextlib.contextmanager
def disk(megabytes: int = 64) -> Iterator[Disk]:
    """Make one, and remove it."""
    with tempfile.TemporaryDirectory(prefix="clusterprof-still-") as folder:
        image, place = Path(folder) / "image", Path(folder) / "m"
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        place.mkdir()
        subprocess.run(["mount", "-o", "loop", image, place], check=True)
        place.chmod(0o1777)
        made = Disk(place)
        try:
            yield made
        finally:
            made.thaw()
            subprocess.run(["umount", "-l", place], check=True)


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """Mount a disk of its own in memory, and remove it; its name is short, for sockets."""
    place = Path(tempfile.mkdtemp(prefix="clusterprof-disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        place.rmdir()
