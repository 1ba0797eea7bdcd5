"""A value that one process hands to another: a file in memory, with large buffers beside the rest.

A report's tables are as large as the report. As bytes they would be copied three times on their way
through a pipe; here they are mapped where they are unpickled, so that only MPI copies them.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

#: Arrow's own alignment of buffers
_ALIGNED = 64
#: bytes; the two tables of a report that may be large are put elsewhere at once (`RankTables`)
_SMALL = 8 << 20
_COUNT = struct.Struct("<Q")


def pack(value: object) -> int:
    """A file in memory that holds a value, for `unpack`. Raises OSError, MemoryError."""
    buffers: list[pickle.PickleBuffer] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is pickled as bytes after all: as a view it would hold the file."""
        small = len(buffer.raw()) < _SMALL
        if not small:
            buffers.append(buffer)
        return small

    head = pickle.dumps(value, protocol=5, buffer_callback=beside)
    parts = [memoryview(head), *(each.raw() for each in buffers)]
    index = b"".join(_COUNT.pack(number) for number in (len(parts), *(len(p) for p in parts)))
    file = _nameless()
    try:
        with open(file, "wb", closefd=False) as out:
            for part in (memoryview(index), *parts):
                out.write(part)
                out.write(bytes(-len(part) % _ALIGNED))
    except BaseException:
        os.close(file)
        raise
    return file


def unpack(file: int) -> Any:
    """The value; the file is closed. Large buffers of it hold the memory until they are gone."""
    memory = memoryview(mapped(file))
    (count,) = _COUNT.unpack_from(memory)
    lengths = [_COUNT.unpack_from(memory, _COUNT.size * (1 + n))[0] for n in range(count)]
    parts, at = [], _aligned(_COUNT.size * (1 + count))
    for length in lengths:
        parts.append(memory[at : at + length])
        at += _aligned(length)
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - our own process packed it


def mapped(file: int) -> mmap.mmap:
    """The file's memory; the file itself is closed."""
    try:
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def empty(size: int) -> tuple[int, mmap.mmap]:
    """A file in memory of so many bytes, and its memory, to be filled. Raises OSError."""
    file = _nameless()
    try:
        # All of it, now: where the disk is full, writing into what is mapped would end us (SIGBUS).
        os.posix_fallocate(file, 0, size)
        return file, mmap.mmap(file, size)
    except BaseException:
        os.close(file)
        raise


def send(to: Connection, file: int) -> None:
    """Hand over a file, which is closed here. Raises OSError."""
    try:
        send_handle(to, file, None)
    finally:
        os.close(file)


def receive(by: Connection) -> int:
    """The file that was handed over. Raises OSError, EOFError."""
    return recv_handle(by)


def _nameless() -> int:
    """A file without a name: in memory, or on disk, where Python cannot make such a one there."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("clusterprof")
    with tempfile.TemporaryFile(prefix="clusterprof-") as file:
        return os.dup(file.fileno())


def _aligned(length: int) -> int:
    return length + -length % _ALIGNED
