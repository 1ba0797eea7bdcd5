"""Opening a report's files: regular ones only, unpacked within bounds, errors by their cause."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clusterprof import words
from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.unpacking import VARIABLE, most

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: ns; a time beyond it is none, and would not fit into 64 bits once it is added to another
FARTHEST = 1 << 62

#: bytes that are unpacked ahead
_BLOCK = 1 << 20


def opened(path: Path) -> IO[bytes]:
    """Open a report for reading, unpacking `.gz` and `.xz`.

    Reading raises `ReportError` where more comes out than may. Raises OSError.
    """
    file = files.opened(path, links=True)
    if path.suffix == ".gz":
        return io.BufferedReader(_Unpacked(path, file, gzip.GzipFile(fileobj=file)))
    if path.suffix == ".xz":
        return io.BufferedReader(_Unpacked(path, file, lzma.LZMAFile(file)))
    return file


@contextlib.contextmanager
def opened_ahead(path: Path) -> Iterator[IO[bytes]]:
    """The same, of a packed file in a thread of its own: the next block is unpacked meanwhile.

    What is made of the blocks may run without the interpreter's lock, as unpacking does.
    """
    with opened(path) as file:
        if path.suffix not in (".gz", ".xz"):
            yield file
            return
        with ThreadPoolExecutor(1) as thread:  # waits for the block that is being read
            yield io.BufferedReader(_Ahead(file, thread), _BLOCK)


class _Ahead(io.RawIOBase):
    """What a file holds, of which a thread has always read one block more."""

    def __init__(self, file: IO[bytes], thread: ThreadPoolExecutor) -> None:
        self._file, self._thread = file, thread
        self._next, self._rest = self._submit(), memoryview(b"")

    def _submit(self) -> Future[bytes]:
        return self._thread.submit(self._file.read, _BLOCK)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._rest:
            self._rest = memoryview(self._next.result())
            if self._rest:
                self._next = self._submit()
        count = min(len(self._rest), memoryview(buffer).nbytes)
        memoryview(buffer).cast("B")[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class _Unpacked(io.RawIOBase):
    """What a packed file holds, counted."""

    def __init__(self, path: Path, packed: IO[bytes], inner: io.BufferedIOBase) -> None:
        self.path, self.packed, self.inner = path, packed, inner
        self.size = os.fstat(packed.fileno()).st_size
        self.most = self.left = most(self.size)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.inner.close()
        self.packed.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self.inner.readinto(buffer)
        self.left -= count
        if self.left < 0:
            raise ReportError(
                f"{self.path} holds more than {words.size(self.most)}, packed into"
                f" {words.size(self.size)}: no report packs so well",
                f"if it is one: {VARIABLE}=8G, or how much it may be",
            )
        return count


def check_regular(path: Path) -> None:
    """Raise `ReportError` unless `path` is a regular file: opening a pipe may never return."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            next(path.iterdir(), None)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file (a pipe or a device)"
        raise ReportError(f"{path} is {kind}, not a report", "copy the report into a file")


def unreadable(path: Path, error: OSError) -> ReportError:
    """Return the `ReportError` for a file that the system does not let us read."""
    if isinstance(error, FileNotFoundError):
        return ReportError(f"{path} does not exist", "check the path")
    if isinstance(error, IsADirectoryError):
        return ReportError(f"{path} is a directory, not a report")
    if isinstance(error, PermissionError):
        return ReportError(f"{path} cannot be read: permission denied", f"try: chmod +r {path}")
    return ReportError(f"{path} cannot be read: {error.strerror or error}")
