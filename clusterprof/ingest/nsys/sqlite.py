"""An nsys SQLite export (`.sqlite`, `.sqlite.xz`) as the canonical tables of its ranks."""

from __future__ import annotations

import errno
import lzma
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from clusterprof.agent.contracts.identity import identify
from clusterprof.errors import ReportError
from clusterprof.ingest.columns import Ints, encoded, fill, joined, nullable
from clusterprof.ingest.nsys import activity, nccl_ranges, nvtx, optimizer_steps, rank_processes
from clusterprof.ingest.nsys import report_identity as identities
from clusterprof.ingest.nsys.activity import Launches
from clusterprof.ingest.nsys.database import Export, unreadable
from clusterprof.ingest.nsys.nvtx import Ranges
from clusterprof.ingest.step_ranges import from_ranges
from clusterprof.ingest.unpacking import opened
from clusterprof.tables import RankTables, ReportInfo

#: nsys says these of every capture window; they tell nothing about this one
_BOILERPLATE = re.compile(
    r"^(Not all .* might have been collected|Scheduling information is absent)"
)
_WARNING, _ERROR = 2, 3

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: CUDA calls carry the version of their API (`cudaLaunchKernel_v7000`), which names nothing
_API_VERSION = re.compile(r"_v\d+$")

_GIL_DOMAIN = "GIL Trace"


def read(
    path: Path,
    origin: Path | None = None,
    elsewhere: nccl_ranges.Elsewhere | None = None,
    *,
    alone: bool = False,
) -> list[RankTables]:
    """Read one export: the tables of each rank in it, in the order of their ranks.

    `origin` is the report it was made from, for messages and `source`. `elsewhere` is asked for
    NCCL's payloads where the export has NCCL's ranges without them. `alone`: the report is known
    to be of one rank, whatever else its children do.

    Raises `ReportError` where the file is missing, empty, truncated, not SQLite, no nsys
    export, or without a single event. The rank is None where a report of one does not say it.
    """
    origin = origin or path
    with _unpacked(path) as database, closing(Export(database, origin)) as export:
        return _read(export, origin, elsewhere, alone)


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """Yield `path`, or its unpacked copy in a temporary folder that is removed afterwards."""
    if path.suffix != ".xz":
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="clusterprof-") as folder:
        database = Path(folder, path.stem)
        try:
            with opened(path) as packed, database.open("wb") as whole:
                shutil.copyfileobj(packed, whole, 1 << 20)
        except (lzma.LZMAError, EOFError) as error:
            empty = path.stat().st_size == 0
            raise ReportError(
                f"{path} is empty" if empty else f"{path} is not a whole xz file: {error}",
                "export or copy it again, and compare the sizes",
            ) from error
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise ReportError(
                    f"{path} cannot be unpacked into {folder}: {error.strerror}",
                    "point TMPDIR to a file system with room for the unpacked report",
                ) from error
            raise unreadable(path, error) from error
        yield database


def _read(
    export: Export, origin: Path, elsewhere: nccl_ranges.Elsewhere | None, alone: bool
) -> list[RankTables]:
    ranges, strings = nvtx.read(export), export.strings()
    who = identify(identities.environment(export))
    found = rank_processes.rank_processes(export, ranges, who, alone=alone)
    read = [
        _read_process(
            export, each, [other for other in found if other != each], ranges, strings, origin,
            elsewhere,
        )
        for each in found
    ]  # fmt: skip
    if len(read) == 1:
        return [tables for tables, _ in read]
    # the environment is of the command that started them all: it names none of them
    said = [communicators for _, communicators in read]
    ranks, world, doubt = rank_processes.numbered(said, who, found)
    several = []
    for place, (tables, _) in enumerate(read):
        warnings = (*tables.warnings, *doubt)
        info = replace(
            tables.info,
            rank=ranks[place],
            world_size=world,
            local_rank=place,
            warnings=warnings,
        )
        several.append(replace(tables, info=info, warnings=warnings))
    return sorted(several, key=lambda tables: tables.rank)


def _read_process(
    export: Export,
    process: int | None,
    others: Sequence[int | None],
    ranges: Ranges,
    strings: Mapping[int, str],
    origin: Path,
    elsewhere: nccl_ranges.Elsewhere | None,
) -> tuple[RankTables, nccl_ranges.Communicators]:
    epoch, warnings = _epoch(export)
    if process is not None:
        ranges = ranges.of_process(process)
    launches = Launches.read(export, process)
    work = activity.read(export, process, launches, strings, epoch)
    calls, communicators = nccl_ranges.read(export, ranges, work.nccl, epoch, elsewhere)
    host = _host_calls(export, process, launches, ranges, strings, epoch)
    if not work.table.num_rows and not host.num_rows:
        raise ReportError(
            f"{origin} holds no events",
            "the capture window was never reached, or nothing was traced in it",
            "record again with: clusterprof ... --steps FIRST:END inside the run",
        )
    who = identities.origin(export, work.device)
    warnings += _gpu_warnings(work, export) + _diagnostics(export, process, others)
    world = who.identity.world_size if who.identity else None
    rank = who.identity.rank if who.identity else communicators.world_rank(world)
    begin, end = _extent(work.table, host)
    info = ReportInfo(
        source=origin,
        profiler=who.profiler,
        rank=rank,
        world_size=world,
        local_rank=who.identity.local_rank if who.identity else None,
        host=who.host,
        device=who.device,
        job=who.job,
        epoch_ns=epoch,
        begin_ns=begin,
        end_ns=end,
        backend="nccl" if calls.num_rows else "",
        warnings=tuple(warnings),
    )
    steps = _steps(ranges, work.compute, begin, epoch)
    return RankTables(info, work.table, calls, steps, host, tuple(warnings)), communicators


def _epoch(export: Export) -> tuple[int, list[str]]:
    """Return the wall-clock time of the report's time 0, in ns."""
    for (epoch,) in export.rows('SELECT "utcEpochNs" FROM {0}', "TARGET_INFO_SESSION_START_TIME"):
        if epoch:
            return int(epoch), []
    missing = "the report does not say when it was recorded: only collectives can align it"
    return 0, [missing]


def _host_calls(
    export: Export,
    process: int | None,
    launches: Launches,
    ranges: Ranges,
    strings: Mapping[int, str],
    epoch: int,
) -> pa.Table:
    """Return CUDA calls, calls of the OS runtime, NVTX ranges and GIL events as one table."""
    codes, names = activity.names_of(launches.name_id, strings)
    cuda = fill(
        "host_calls",
        launches.start.size,
        {
            "start_ns": launches.start + epoch,
            "end_ns": launches.end + epoch,
            "kind": "cuda",
            "name": encoded(codes, [_API_VERSION.sub("", name) for name in names]),
            "thread": launches.thread,
            "correlation": nullable(launches.correlation, launches.correlation > 0),
        },
    )
    parts = [cuda, _os_calls(export, process, strings, epoch), _range_calls(ranges, epoch)]
    return joined("host_calls", parts, by="start_ns")


def _os_calls(
    export: Export, process: int | None, strings: Mapping[int, str], epoch: int
) -> pa.Table:
    columns = ("start", "end", "globalTid", "nameId")
    raw = export.numbers("OSRT_API", columns, nvtx.of_process("globalTid", process))
    # An end equal to the start is nsys's own mark ("... profiling started"), no call.
    mine = raw["end"] > raw["start"]
    start, end, tid, name_id = (raw[name][mine] for name in columns)
    codes, names = activity.names_of(name_id, strings)
    return fill(
        "host_calls",
        start.size,
        {
            "start_ns": start + epoch,
            "end_ns": end + epoch,
            "kind": "os",
            "name": encoded(codes, names),
            "thread": nvtx.thread_of(tid),
        },
    )


def _range_calls(ranges: Ranges, epoch: int) -> pa.Table:
    ranges = ranges.where(ranges.end >= ranges.start)
    gil = ranges.in_domains(_GIL_DOMAIN)
    return fill(
        "host_calls",
        ranges.start.size,
        {
            "start_ns": ranges.start + epoch,
            "end_ns": ranges.end + epoch,
            "kind": encoded(gil.astype(np.int32), ["range", "python"]),
            "name": encoded(ranges.name, ranges.names.to_pylist()),
            "thread": ranges.thread,
        },
    )


def _steps(ranges: Ranges, compute: activity.ComputeKernels, begin: int, epoch: int) -> pa.Table:
    """Return the steps that ranges mark; without any, what ends with the optimizer's kernels."""
    names = [str(name) for name in ranges.names.to_pylist()]
    mine = ranges.where(~ranges.in_domains("NCCL", _GIL_DOMAIN))
    end = np.where(mine.end >= 0, mine.end + epoch, -1)
    marked = from_ranges(names, mine.name, mine.start + epoch, end, mine.thread, "nvtx")
    if marked.num_rows:
        return marked
    starts, ends = compute.launch_start + epoch, compute.launch_end + epoch
    return optimizer_steps.from_kernels(starts, ends, compute.optimizer, begin)


def _extent(work: pa.Table, host: pa.Table) -> tuple[int, int]:
    """Return begin and end of the capture: the first and the last event of either table."""
    columns: list[tuple[Ints, Ints]] = [
        (table.column("start_ns").to_numpy(), table.column("end_ns").to_numpy())
        for table in (work, host)
        if table.num_rows
    ]
    return min(int(start[0]) for start, _ in columns), max(int(end.max()) for _, end in columns)


def _gpu_warnings(work: activity.Activity, export: Export) -> list[str]:
    warnings = []
    if work.graphs:
        warnings.append(
            f"{work.graphs} CUDA graphs were traced as a whole: the kernels and NCCL inside them"
            " are hidden (record with --nsys-arg=--cuda-graph-trace=node)"
        )
    elif not work.kernels and activity.RUNTIME in export.tables:
        warnings.append("the report holds CUDA calls but no kernels: nothing ran on the GPU in it")
    return warnings


def _diagnostics(export: Export, process: int | None, others: Sequence[int | None]) -> list[str]:
    """Return nsys's own warnings and errors, each once, without those it always gives.

    Of those that are about a process: its own, and with its id those of a process that is none of
    the `others`, the report's other ranks.
    """
    of = '"globalPid"' if export.has("DIAGNOSTIC_EVENT", "globalPid") else "NULL"
    said = export.rows(
        f"SELECT text, CAST({of} AS INTEGER) FROM {{0}}"
        f" WHERE severity IN ({_WARNING}, {_ERROR}) ORDER BY timestamp",
        "DIAGNOSTIC_EVENT",
    )
    texts: dict[str, None] = {}
    for text, whose in said:
        about = nvtx.process_of(int(whose)) if whose else 0
        if not text or _BOILERPLATE.match(str(text).strip()) or about in others:
            continue
        helper = f" process {about}" if about not in (0, process) else ""
        texts[f"nsys{helper}: {str(text).strip()}"] = None
    return list(texts)
