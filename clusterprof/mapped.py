"""Large Arrow tables in a file without a name instead of in memory: the system reads what is used.

The kernels and calls of 64 ranks take a gigabyte, of which a merge looks at one rank at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading

import pyarrow as pa

#: Each mapping holds a file descriptor, of which a process may have a thousand.
_SEGMENT = 1 << 28

_PAGE = mmap.PAGESIZE


class _Store:
    """One file for all tables, in segments that are mapped as a whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile(prefix="clusterprof-")  # noqa: SIM115 - while we run
        self._segments: list[mmap.mmap] = []
        self._begin = self._end = self._next = 0

    def put(self, content: pa.Buffer) -> pa.Buffer:
        """Return the same bytes, in the file. Raises OSError."""
        size = -(-content.size // _PAGE) * _PAGE
        with self._lock:
            if self._next + size > self._end:
                self._grow(max(_SEGMENT, size))
            segment, begin = self._segments[-1], self._next - self._begin
            rest, at = memoryview(content), self._next
            while rest:
                written = os.pwrite(self._file.fileno(), rest, at)
                rest, at = rest[written:], at + written
            self._next += size
        return pa.py_buffer(segment).slice(begin, content.size)

    def _grow(self, size: int) -> None:
        begin, file = self._end, self._file.fileno()
        os.ftruncate(file, begin + size)  # takes no space until it is written
        self._segments.append(mmap.mmap(file, size, access=mmap.ACCESS_READ, offset=begin))
        self._begin = self._next = begin
        self._end = begin + size

    def release(self) -> None:
        for each in self._segments:
            each.madvise(mmap.MADV_DONTNEED)


_store: _Store | None = None
_making = threading.Lock()


def packed(table: pa.Table) -> pa.Buffer:
    """Return a table as bytes, which `unpacked` takes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.unify_dictionaries())
    return sink.getvalue()


def unpacked(content: pa.Buffer) -> pa.Table:
    """Return a table that lies in a file where one can be written, else in memory."""
    global _store
    try:
        with _making:
            _store = _store or _Store()
        content = _store.put(content)
    except (OSError, ValueError):  # a full disk, no more file descriptors
        pass
    return pa.ipc.open_stream(content).read_all()


def release() -> None:
    """Give back the memory of what was read; whoever looks again reads again."""
    if _store is not None:
        _store.release()


def trim() -> None:
    """The same, and what was freed: the C library keeps what may be a third of a large merge."""
    if _store is not None:
        _store.release()
        with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
