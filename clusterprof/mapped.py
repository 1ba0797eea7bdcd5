"""Large Arrow tables in a file without a name instead of in memory: the system reads what is used.

The kernels and calls of 64 ranks take a gigabyte, of which a merge looks at one rank at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pyarrow as pa

#: All that was mapped. It stays so: Arrow does not say which of its tables still look into a file,
#: and what were mapped at that address later would lose what it holds (`release`).
_mapped: list[pa.Buffer] = []

#: so much of it may be in memory (bytes): giving back takes a call for each rank's file, and is
#: asked for after each rank that is looked at
_MUCH = 1 << 26
#: files' memory that was left when it was given back: programs are files as well (bytes)
_left = 0


def write(tables: Iterable[pa.Table], file: IO[bytes]) -> None:
    """Write tables, one Arrow stream after the other. Raises OSError (no space)."""
    for table in tables:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.unify_dictionaries())


def read(file: Path) -> list[pa.Table]:
    """Return the tables of such a file, which may lose its name then. Raises OSError."""
    try:
        with pa.memory_map(str(file)) as opened:  # closed, it takes no descriptor
            content = opened.read_buffer()
    except UnicodeEncodeError:  # pyarrow opens no path whose bytes are not UTF-8
        content = pa.py_buffer(file.read_bytes())
    else:
        _mapped.append(content)
    tables, streams = [], pa.BufferReader(content)
    while streams.tell() < streams.size():
        tables.append(pa.ipc.open_stream(streams).read_all())
    return tables


def moved(table: pa.Table) -> pa.Table:
    """Return a table that lies in a file where one can be written, else as it is."""
    try:
        with tempfile.NamedTemporaryFile(prefix="clusterprof-") as file:
            write([table], file)
            file.flush()
            return read(Path(file.name))[0]
    except OSError:
        return table


def release() -> None:
    """Give back the memory of what was read, once it is much; whoever looks again reads again."""
    if _mapped and _of_files() > _left + _MUCH:
        _give_back()


def trim() -> None:
    """The same however much it is, and what was freed: the C library may keep a third of it all."""
    if _mapped:
        _give_back()
        with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)


def _give_back() -> None:
    global _left
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for content in _mapped:
        advise(content.address, content.size, mmap.MADV_DONTNEED)
    _left = _of_files()


def _of_files() -> int:
    """How much memory has what files hold (bytes); 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE
    except OSError:  # it takes back what it needs
        return 0
