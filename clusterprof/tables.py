"""The canonical tables: what every reader writes and everything downstream reads.

All times are integers in nanoseconds on the *rank's own wall clock* (for nsys
`utcEpochNs + start`, for Kineto `baseTimeNanoseconds + ts`). Aligned times, on the
reference rank's clock, are added beside them by `clusterprof.align`, never instead of
them. Units are in the column names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.unpacking import VARIABLE, most, unpacked_size

#: of the tables below: raised when a column is added, or means something else than before
SCHEMA_VERSION = 1

#: the type of columns with few different strings
NAME = pa.dictionary(pa.int32(), pa.string())

#: the tables' ranks have 32 bits, far beyond any job
HIGHEST_RANK = 2**31 - 1

#: bytes; a smaller file is read at once
_AT_ONCE = 1 << 16

_TOO_MUCH = f"it holds more than tables pack into so little (if it is one: {VARIABLE}=8G)"
#: the name of a CUDA graph that was recorded as a whole: what ran in it is not in the report
GRAPH = "CUDA graph"

#: how a call of Python's garbage collector begins its name among the host's calls
GARBAGE = "garbage collection"


def required(name: str, kind: pa.DataType) -> pa.Field:
    """Return a field without nulls."""
    return pa.field(name, kind, nullable=False)


#: by table, what its `kind` may be
KINDS = {
    "activity": ("compute", "collective", "copy", "memset"),
    "host_calls": ("cuda", "os", "python", "range", "op"),
}

#: What ran on the device (GPU streams; on a CPU-only rank, the threads that compute and
#: communicate). `kind` is `compute`, `collective`, `copy` or `memset`. `launch_*` is the
#: host call that put it there, null where the report does not name it.
ACTIVITY = pa.schema(
    [
        required("start_ns", pa.int64()),
        required("end_ns", pa.int64()),
        required("kind", NAME),
        required("name", NAME),
        required("device", pa.int32()),
        required("stream", pa.int64()),
        pa.field("correlation", pa.int64()),
        pa.field("launch_start_ns", pa.int64()),
        pa.field("launch_end_ns", pa.int64()),
        pa.field("launch_thread", pa.int64()),
        pa.field("size_bytes", pa.int64()),
        #: copies only: `host_to_device`, `device_to_host`, `device_to_device`, `peer`, `other`
        pa.field("direction", NAME),
        #: copies only: host memory is pageable (true), pinned (false), unknown (null)
        pa.field("pageable", pa.bool_()),
    ]
)

#: One rank's part of each collective or point-to-point operation, in issue order.
#: `start_ns`/`end_ns` are the device kernel (on gloo: the operation's span), null with a
#: `reason` where none was found. Calls of one NCCL group share one kernel and one `group`.
COLLECTIVE_CALLS = pa.schema(
    [
        required("call", pa.int32()),
        #: AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AllToAll, Gather, Scatter,
        #: Barrier, Send, Recv, SendRecv (a group of both), Exchange (what waits), Unknown
        required("operation", NAME),
        #: the communicator's or process group's id as the report gives it; null if it does not
        pa.field("communicator", pa.string()),
        pa.field("communicator_size", pa.int32()),
        #: global ranks of the members where the report lists them (Kineto), else null
        pa.field("members", pa.list_(pa.int32())),
        required("stream", pa.int64()),
        pa.field("message_bytes", pa.int64()),
        #: Broadcast and Reduce: root, Send and Recv: the other side, in the communicator's ranks
        pa.field("root", pa.int32()),
        pa.field("peer", pa.int32()),
        #: the same on all members of an operation, another for each operation of a communicator;
        #: null where the profiler does not give one. Compared only between reports of one `source`
        pa.field("operation_id", pa.int64()),
        pa.field("group", pa.int32()),
        pa.field("issue_start_ns", pa.int64()),
        pa.field("issue_end_ns", pa.int64()),
        pa.field("start_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        #: nvtx_payload, nvtx_name, kernel_name, kineto, gloo
        required("source", NAME),
        pa.field("reason", pa.string()),
    ]
)

#: Steps as the host saw them. `source` is `steplog`, `nvtx`, `profiler` or `optimizer`.
STEPS = pa.schema(
    [
        required("step", pa.int64()),
        required("begin_ns", pa.int64()),
        required("end_ns", pa.int64()),
        required("source", NAME),
    ]
)

#: Calls of the host: `kind` is `cuda` (runtime and driver API), `os` (OS runtime), `python` (GIL
#: waits, garbage collection, Python's functions of 20 µs and more), `range` (NVTX ranges, user
#: annotations) or `op` (torch ops).
HOST_CALLS = pa.schema(
    [
        required("start_ns", pa.int64()),
        required("end_ns", pa.int64()),
        required("kind", NAME),
        required("name", NAME),
        required("thread", pa.int64()),
        pa.field("correlation", pa.int64()),
    ]
)

SCHEMAS = {
    "activity": ACTIVITY,
    "collective_calls": COLLECTIVE_CALLS,
    "steps": STEPS,
    "host_calls": HOST_CALLS,
}

#: rows of a rank in `SPANS`: the program's ranges, the two threads that launch most, and the device
SPAN_ROWS = ("phase", "host", "second_host", "device")
#: One row per span. Spans of a rank and row do not overlap. A span shorter than `merged_below_ns`
#: may stand for `count` of them of one kind that lie within two such lengths, one behind the other;
#: the name is that of the longest. Times are on the reference rank's clock at the step's begin and
#: pass as on the rank's own, so that lengths are those of the account.
SPANS = pa.schema(
    [
        required("rank", pa.int32()),
        #: null beside the steps that are drawn: while other ranks are in one, this one is before or
        #: behind it
        pa.field("step", pa.int64()),
        required("row", NAME),
        required("kind", NAME),
        required("name", NAME),
        required("start_ns", pa.int64()),
        required("end_ns", pa.int64()),
        required("count", pa.int32()),
        required("merged_below_ns", pa.int64()),
    ]
)


@dataclass(frozen=True)
class ReportInfo:
    """Who a report is about. Holds no environment value beyond rank and version variables."""

    source: Path
    profiler: str
    #: the rank that the report itself names (environment, communicators); None if it does not
    rank: int | None
    world_size: int | None = None
    local_rank: int | None = None
    host: str = ""
    device: str = ""
    #: of what the rank ran on, as far as the report says: `driver`, `CUDA`, `NCCL`
    versions: Mapping[str, str] = field(default_factory=dict)
    #: an opaque fingerprint of the job (rendezvous, job id); None where there is none.
    #: Two reports with two fingerprints are of two jobs.
    job: str | None = None
    #: what was added to the report's own times to make wall-clock times
    epoch_ns: int = 0
    #: first and last event of the capture, wall clock
    begin_ns: int = 0
    end_ns: int = 0
    backend: str = ""
    #: what the program calls its process groups (`mesh_dp`), by the id that calls have
    groups: Mapping[str, str] = field(default_factory=dict)
    #: what a step took before the capture, by the step log; None without one
    usual_step_ns: int | None = None
    warnings: tuple[str, ...] = ()

    def warned(self, *warnings: str) -> ReportInfo:
        """This with further warnings."""
        return replace(self, warnings=(*self.warnings, *warnings))


@dataclass(frozen=True)
class RankTables:
    """One rank's canonical tables, each with exactly its schema above, sorted by begin."""

    info: ReportInfo
    activity: pa.Table
    collective_calls: pa.Table
    steps: pa.Table
    host_calls: pa.Table
    #: the files that hold tables of these as they are, by name (`ingest.reduced`)
    kept: Mapping[str, Path] = field(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about the report."""
        return self.info.warnings

    def warned(self, *warnings: str) -> RankTables:
        """These tables with further warnings."""
        return replace(self, info=self.info.warned(*warnings))

    def changed(self, name: str, table: pa.Table) -> RankTables:
        """These tables with another one; no file holds it."""
        kept = {other: file for other, file in self.kept.items() if other != name}
        return replace(self, kept=kept, **{name: table})

    @property
    def rank(self) -> int:
        """The rank; a `RankTables` that reaches merge always has one."""
        assert self.info.rank is not None, "the reader gives every report a rank or refuses it"
        return self.info.rank


def launches_graphs(host_calls: pa.Table) -> bool:
    """Whether the calls of a host, schema `HOST_CALLS` or the names alone, launch CUDA graphs."""
    import pyarrow.compute as pc

    names = pa.array(host_calls["name"].unique().to_pylist(), pa.string())
    return bool(pc.any(pc.match_substring_regex(names, r"^cu(da)?GraphLaunch")).as_py())


def empty(name: str) -> pa.Table:
    """An empty table of the schema `name` (a key of `SCHEMAS`)."""
    return SCHEMAS[name].empty_table()


def _check_size(stored: Any, file: IO[bytes], limit: int) -> None:
    """Raise ValueError where a Parquet file, or one of its pages, says that it holds more bytes
    than may be.
    """
    groups = [stored.row_group(number) for number in range(stored.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(group.num_columns)]
    unpacked_b = sum(column.total_uncompressed_size for column in columns)
    widest_b = 8 * sum(column.num_values for column in columns)  # a number is not wider
    if max(unpacked_b, widest_b) > limit or sum(unpacked_size(file, c) for c in columns) > limit:
        raise ValueError(_TOO_MUCH)


def _check_texts(table: pa.Table, names: Sequence[str], limit: int) -> None:
    """Raise ValueError where the texts of these columns are more bytes than may be."""
    import pyarrow.compute as pc

    columns = (table[name] for name in names if name in table.column_names)
    for chunk in (chunk for column in columns for chunk in column.chunks):
        if not pa.types.is_dictionary(chunk.type):
            raise ValueError(f"a column is no text but {chunk.type}")
        lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
        limit -= pc.sum(lengths.take(chunk.indices)).as_py() or 0
        if limit < 0:
            raise ValueError(_TOO_MUCH)


def read_table(file: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """One table that merging wrote, or some of its columns, as `schema`. Raises ReportError."""
    import pyarrow.parquet as parquet

    # a text that each of a million rows has is there once, until it is known how much that is
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    try:
        # pyarrow opens no path whose bytes are not UTF-8, and asks for many pieces of a file
        with files.opened(file) as opened:
            limit = most(os.fstat(opened.fileno()).st_size)
            start = opened.read(_AT_ONCE)
            source = opened if len(start) == _AT_ONCE else pa.BufferReader(start)
            stored = parquet.ParquetFile(
                source, page_checksum_verification=True, read_dictionary=texts
            )
            _check_size(stored.metadata, opened, limit)
            # in this thread alone: many small tables are read, several of them at a time
            table = stored.read(columns=columns, use_threads=False).replace_schema_metadata()
            _check_texts(table, texts, limit)
        wanted = pa.schema([schema.field(name) for name in columns]) if columns else schema
        if table.schema != wanted:
            table = table.select(wanted.names).cast(wanted)
        table.validate(full=True)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise ReportError(
            f"{file} cannot be read: {str(error).partition(chr(10))[0][:200]}",
            "write it again: clusterprof merge RUN",
        ) from None
    return table
