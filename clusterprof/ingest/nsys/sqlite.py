"""An nsys SQLite export (`.sqlite`, `.sqlite.xz`) as the recordings of its ranks."""

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

from clusterprof import words
from clusterprof.errors import ReportError
from clusterprof.ingest.nsys import events, nccl_ranges, ranks_of_report, schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.events import Activity, Ranges
from clusterprof.ingest.nsys.nccl_ranges import Communicators, Elsewhere
from clusterprof.ingest.opening import opened, unreadable
from clusterprof.ingest.operations import without_nccl
from clusterprof.ingest.recording import Calls, Recording, encoded
from clusterprof.results import NODES
from clusterprof.tables import ReportInfo

#: nsys gives these of every capture window; they mean nothing for this one
_BOILERPLATE = re.compile(
    r"^(Not all .* might have been collected|Scheduling information is absent)"
)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read(
    path: Path, origin: Path | None = None, elsewhere: Elsewhere | None = None, *,
    alone: bool = False, numbers: Mapping[str, Path] | None = None,
) -> list[Recording]:  # fmt: skip
    """Read one export: each rank in it, in the order of their ranks.

    `origin` is the report it was made from, for messages and `source`. `elsewhere` is asked for
    NCCL's payloads where the export has NCCL's ranges without them. `alone`: the report is known
    to be of one rank, whatever else its children do. `numbers`: tables beside it (`Export`).

    Raises `ReportError` where the file is missing, empty, truncated, no nsys export, or without a
    single event. The rank is None where a report of one does not name it.
    """
    origin = origin or path
    with _unpacked(path) as database, closing(Export(database, origin, numbers)) as export:
        ranges = events.read_ranges(export)
        info, who = ranks_of_report.origin(export)
        processes = ranks_of_report.rank_processes(export, ranges, who, alone=alone)
        read = [
            _read_process(export, info, process, processes, ranges, elsewhere, alone)
            for process in processes
        ]
    recordings = [recording for recording, _ in read]
    if len(read) == 1:
        return recordings
    # the environment is of the command that started them all: it names none of them
    communicators = [of_process for _, of_process in read]
    ranks, world, doubts = ranks_of_report.numbered(communicators, who, processes)
    several = []
    for local, (recording, rank) in enumerate(zip(recordings, ranks, strict=True)):
        info = replace(recording.info, rank=rank, world_size=world, local_rank=local)
        several.append(replace(recording, info=info).warned(*doubts))
    return sorted(several, key=lambda recording: recording.info.rank or 0)


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
            damage = "empty" if path.stat().st_size == 0 else f"not a whole xz file: {error}"
            again = "export or copy it again, and compare the sizes"
            raise ReportError(f"{path} is {damage}", again) from error
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise unreadable(path, error) from error
            raise ReportError(
                f"{path} cannot be unpacked into {folder}: {error.strerror}",
                "point TMPDIR to a file system with enough space for the unpacked report",
            ) from error
        yield database


def _read_process(
    export: Export,
    info: ReportInfo,
    process: int | None,
    processes: Sequence[int | None],
    ranges: Ranges,
    elsewhere: Elsewhere | None,
    alone: bool,
) -> tuple[Recording, Communicators]:
    if process is not None:
        ranges = ranges.where(ranges.process == process)
    cuda, of_the_system = _calls(export, process)
    work = events.read_work(export, process, cuda)
    odd = list(_odd_work(export, work, alone))
    collectives, communicators, on_device = nccl_ranges.read(export, ranges, work.nccl, elsewhere)
    others = [other for other in processes if other != process]
    info = replace(
        info.warned(
            *odd,
            *without_nccl([work.nccl.names[code] for code in work.nccl.name.tolist()]),
            *_diagnostics(export, process, others),
        ),
        rank=communicators.world_rank(None) if info.rank is None else info.rank,
        backend="nccl" if collectives.num_rows else "",
    )
    gpus = export.rows("SELECT id, name FROM {0}", schema.GPUS)
    closed = ranges.where((ranges.end >= ranges.start) & ~np.isin(ranges.row, on_device))
    gil = encoded(closed.in_domains(schema.GIL_DOMAIN).astype(np.int32), ["range", "python"])
    in_ranges = Calls(gil, closed.start, closed.end, closed.thread, closed.name, closed.names)
    marks = ranges.where(~ranges.in_domains(schema.NCCL_DOMAIN, schema.GIL_DOMAIN))
    recording = Recording(
        info=info,
        work=work.work,
        calls=[cuda, of_the_system, in_ranges],
        collectives=collectives,
        marks=Calls("range", marks.start, marks.end, marks.thread, marks.name, marks.names),
        marked_by="nvtx",
        step_ends=work.step_ends,
        devices={number: str(name) for number, name in gpus},
    )
    if not recording.has_events:
        raise ReportError(
            f"{export.origin} holds no events",
            "the capture window was never reached, or nothing was traced in it",
            "record again with: clusterprof ... --steps FIRST:END inside the run",
        )
    return recording, communicators


def _calls(export: Export, process: int | None) -> tuple[Calls, Calls]:
    """Return the calls of CUDA and of the OS runtime."""
    raw = export.spans(schema.RUNTIME, process)
    codes, names = export.names(raw["nameId"])
    plain = [schema.API_VERSION.sub("", name) for name in names]
    times = (raw["start"], raw["end"], schema.thread_of(raw["globalTid"]))
    cuda = Calls("cuda", *times, codes, plain, raw["correlationId"])
    raw = export.numbers(schema.OS_RUNTIME, process)
    # An end equal to the start is nsys's own mark ("... profiling started"), no call.
    raw = {name: values[raw["end"] > raw["start"]] for name, values in raw.items()}
    times = (raw["start"], raw["end"], schema.thread_of(raw["globalTid"]))
    return cuda, Calls("os", *times, *export.names(raw["nameId"]))


def _odd_work(export: Export, work: Activity, alone: bool) -> Iterator[str]:
    """Yield a warning of each thing that is odd about the work of a process.

    Raises ReportError for several GPUs of a report that is not known to be of one rank (`alone`).
    """
    kernels, graphs, *_ = work.work
    gpus = ranks_of_report.driven(kernels)
    if len(gpus) > 1:
        text = f"one process drives {len(gpus)} GPUs ({words.numbers(gpus)})"
        if not alone:
            raise ReportError(
                f"{export.origin} cannot be read: {text}, and nsys does not tell their ranks apart",
                "start a process for each GPU (torchrun), or record with torch.profiler: of its"
                " traces each GPU is read as a rank",
            )
        yield f"{text}: they are read as one, whose work is that of all of them"
    if graphs.num_rows:
        yield (
            f"{graphs.num_rows} CUDA graphs were traced as a whole: the kernels and NCCL inside"
            " them are hidden, and nothing is attributed to them"
            f" (record with --nsys-arg={NODES})"
        )
    elif not kernels.num_rows and schema.RUNTIME.name in export.tables:
        yield "the report holds CUDA calls but no kernels: nothing ran on the GPU in it"


def _diagnostics(export: Export, process: int | None, others: Sequence[int | None]) -> list[str]:
    """Return nsys's own warnings and errors, each once, without those it always gives.

    Of those that are about a process: its own, and with its id those of a process that is none of
    the `others`, the report's other ranks.
    """
    owner = '"globalPid"' if export.has(schema.DIAGNOSTICS, "globalPid") else "NULL"
    rows = export.rows(
        f"SELECT text, CAST({owner} AS INTEGER) FROM {{0}}"
        f" WHERE severity IN ({schema.WARNING}, {schema.ERROR}) ORDER BY timestamp",
        schema.DIAGNOSTICS,
    )
    texts: dict[str, None] = {}
    for text, whose in rows:
        about = schema.process_of(int(whose)) if whose else 0
        if not text or _BOILERPLATE.match(str(text).strip()) or about in others:
            continue
        helper = f" process {about}" if about not in (0, process) else ""
        texts[f"nsys{helper}: {str(text).strip()}"] = None
    return list(texts)
