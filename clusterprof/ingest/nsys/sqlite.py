"""An nsys SQLite export (`.sqlite`, `.sqlite.xz`) as the recordings of its ranks.

A report holds every child of the profiled program: of a rank its helpers (DataLoader workers,
compilers), of what starts ranks (`nsys profile torchrun ...`) all ranks of that host. It holds the
whole environment as well, secrets included: only the variables of
`clusterprof.agent.contracts.identity` and the rendezvous below are looked at, and of the rendezvous
only a fingerprint is kept.
"""

from __future__ import annotations

import errno
import hashlib
import lzma
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from clusterprof import words
from clusterprof.agent.contracts import identity as identities
from clusterprof.agent.contracts.identity import Identity, identify
from clusterprof.errors import ReportError
from clusterprof.ingest.nsys import events, nccl_ranges, schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.events import Activity, Ranges
from clusterprof.ingest.nsys.nccl_ranges import Communicators, Elsewhere
from clusterprof.ingest.opening import opened, unreadable
from clusterprof.ingest.operations import without_nccl
from clusterprof.ingest.rank_steps import step_numbers
from clusterprof.ingest.recording import Calls, Recording, encoded
from clusterprof.results import NODES
from clusterprof.tables import ReportInfo

#: nsys gives these of every capture window; they mean nothing for this one
_BOILERPLATE = re.compile(
    r"^(Not all .* might have been collected|Scheduling information is absent)"
)

#: Equal on every rank of one job, different between jobs. SLURM_STEP_ID is not among them:
#: a job is often started as one step per node. A heterogeneous job has one id per component,
#: and the first of them everywhere.
JOB_VARIABLES = (
    "SLURM_JOB_ID_HET_GROUP_0",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "LSB_JOBID",
    "PBS_JOBID",
)

#: a process with less than this part of the kernels of the busiest is a helper, not a rank
_LEAST_WORK = 0.1


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
        info, who = report_info(export)
        processes = rank_processes(export, ranges, who, alone=alone)
        recordings, communicators = [], []
        for process in processes:
            others = [other for other in processes if other != process]
            of_process = _read_process(export, info, process, others, ranges, elsewhere, alone)
            recordings.append(of_process[0])
            communicators.append(of_process[1])
    if len(recordings) == 1:
        return recordings
    # the environment is of the command that started them all: it names none of them
    ranks, world, doubts = numbered(communicators, who, processes)
    for local, (recording, rank) in enumerate(zip(recordings, ranks, strict=True)):
        info = replace(recording.info, rank=rank, world_size=world, local_rank=local)
        recordings[local] = replace(recording, info=info.warned(*doubts))
    return sorted(recordings, key=lambda recording: recording.info.rank or 0)


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
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise unreadable(path, error) from error
            raise ReportError(
                f"{path} cannot be unpacked into {folder}: {error.strerror}",
                "point TMPDIR to a file system with enough space for the unpacked report",
            ) from error
        yield database


def _read_process(
    export: Export, info: ReportInfo, process: int | None, others: Sequence[int | None],
    ranges: Ranges, elsewhere: Elsewhere | None, alone: bool,
) -> tuple[Recording, Communicators]:  # fmt: skip
    if process is not None:
        ranges = ranges.where(ranges.process == process)
    cuda, of_the_system = _calls(export, process)
    work = events.read_work(export, process, cuda)
    odd = list(_odd_work(export, work, alone))
    collectives, communicators, on_device = nccl_ranges.read(export, ranges, work.nccl, elsewhere)
    others_kernels = without_nccl([work.nccl.names[code] for code in work.nccl.name.tolist()])
    info = replace(
        info.warned(*odd, *others_kernels, *_diagnostics(export, process, others)),
        rank=communicators.world_rank(None) if info.rank is None else info.rank,
        backend="nccl" if collectives.num_rows else "",
    )
    gpus = export.rows("SELECT id, name FROM {0}", schema.GPUS)
    closed = ranges.where((ranges.end >= ranges.start) & ~np.isin(ranges.row, on_device))
    kinds = encoded(closed.in_domains(schema.GIL_DOMAIN).astype(np.int32), ["range", "python"])
    marks = ranges.where(~ranges.in_domains(schema.NCCL_DOMAIN, schema.GIL_DOMAIN))
    recording = Recording(
        info=info,
        work=work.work,
        calls=[cuda, of_the_system, closed.calls(kinds)],
        collectives=collectives,
        marks=marks.calls("range"),
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
    numbers, counts = np.unique(kernels["device"].to_numpy(), return_counts=True)
    # it does not drive one of which it uses a little
    often = counts >= _LEAST_WORK * counts.max(initial=0)
    gpus = numbers[often & (numbers >= 0)].tolist()
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


# -- which processes are ranks, and whose --------------------------------------------------------


def wanted_variables() -> frozenset[str]:
    """All variables that are ever looked at in the environment of a report."""
    names = {
        name for launcher in identities.LAUNCHERS
        for name in (launcher.rank, launcher.world_size, launcher.local_rank,
                     launcher.local_size, launcher.node, *launcher.requires)
    }  # fmt: skip
    return frozenset(JOB_VARIABLES).union(names) - {""}


def report_info(export: Export) -> tuple[ReportInfo, Identity | None]:
    """Return whom the profiled command's environment names, and all else the report is about."""
    environ = environment(export)
    who = identify(environ)
    named = "SELECT name, value FROM {0} WHERE name IN ('Hostname', 'NvDriverVersion')"
    system = dict(export.rows(named, schema.SYSTEM))
    driver = str(system.get("NvDriverVersion") or "")
    epochs = export.rows('SELECT "utcEpochNs" FROM {0}', schema.SESSION_START)
    epoch = next((int(utc_ns) for (utc_ns,) in epochs if utc_ns), 0)
    sql = "SELECT value FROM {0} WHERE name = 'EXPORT_PRODUCT_VERSION'"
    exporters = [row for table in schema.EXPORTED_BY for row in export.rows(sql, table)]
    untimed = "the report does not state when it was recorded: only collectives can align it"
    info = ReportInfo(
        source=export.origin,
        profiler=" ".join(["nsys", *(str(v).removesuffix(".0") for (v,) in exporters[:1])]),
        rank=who.rank if who else None,
        world_size=who.world_size if who else None,
        local_rank=who.local_rank if who else None,
        host=str(system.get("Hostname", "")),
        versions={"driver": driver} if driver else {},
        job=fingerprint(environ),
        epoch_ns=epoch,
        warnings=() if epoch else (untimed,),
    )
    return info, who


def environment(export: Export) -> dict[str, str]:
    """Return the rank and rendezvous variables of the profiled process, and no others.

    nsys 2023 and later list them in META_DATA_CAPTURE, 2022 keeps one NUL-separated string in
    TARGET_INFO_SYSTEM_ENV, and some exports have it only among the strings.
    """
    listed = "SELECT value FROM {0} WHERE name = 'PROCESS_0:ENVIRONMENT_VARIABLE'"
    if lines := [str(value) for (value,) in export.rows(listed, schema.CAPTURE)]:
        return _wanted(line.replace('="', "=", 1).removesuffix('"') for line in lines)
    for sql, table in (
        ("SELECT value FROM {0} WHERE name = 'DeviceEnvironment'", schema.SYSTEM),
        ("SELECT value FROM {0} WHERE instr(CAST(value AS BLOB), x'00')", schema.STRINGS),
    ):
        environs = [_wanted(str(value).split("\0")) for (value,) in export.rows(sql, table)]
        of_ranks = [environ for environ in environs if identify(environ) is not None]
        if len({identify(environ) for environ in of_ranks}) == 1:
            return of_ranks[0]
    return {}


def _wanted(lines: Iterable[str]) -> dict[str, str]:
    names, pairs = wanted_variables(), (line.partition("=") for line in lines)
    return {name: value for name, _, value in pairs if name in names}


def fingerprint(environ: Mapping[str, str]) -> str | None:
    """Return an opaque name for the job, equal on all its ranks; None where nothing names it."""
    named = [(name, environ[name]) for name in JOB_VARIABLES if environ.get(name)]
    if named and named[0][0] == "SLURM_JOB_ID_HET_GROUP_0":
        named = [pair for pair in named if pair[0] != "SLURM_JOB_ID"]
    # torchrun's run id is "none" unless somebody gave one: alone it names no job
    if not any(name != "TORCHELASTIC_RUN_ID" or value != "none" for name, value in named):
        return None
    text = "\0".join(f"{name}={value}" for name, value in named)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rank_processes(
    export: Export, ranges: Ranges, who: Identity | None, *, alone: bool
) -> list[int | None]:
    """Return the processes that are ranks, in the order of their GPUs, then of their ids.

    Those that use NCCL; where none does, those that keep a GPU each busy; on a CPU those that mark
    steps. `who` is by the profiled command's environment: one that is a rank itself has no
    other ranks among its children, nor has one of which it is known (`alone`). A list of None
    where no process does anything.
    """
    # the last row of a process, and of a GPU, is that with most kernels
    busiest_last = sorted(
        events.kernels_by_process(export),
        key=lambda row: (row["nccl_count"], -row["process"], -row["device"]),
    )
    device_of = {row["process"]: row["device"] for row in busiest_last}
    calls = ranges.process[ranges.named("^nccl[A-Z]") | ranges.in_domains(schema.NCCL_DOMAIN)]
    steps = ranges.process[step_numbers(ranges.names)[ranges.name] >= 0]
    inner = {launcher.name for launcher in identities.LAUNCHERS if launcher.inner}
    is_rank = who is not None and who.source in inner and (who.world_size or 1) > 1
    for candidates in (
        {row["process"] for row in busiest_last if row["nccl_sum"]} | set(calls.tolist()),
        _busiest_of_gpus(busiest_last),
        set() if busiest_last else set(steps.tolist()),
    ):
        if candidates and (alone or is_rank):
            return [min(candidates)]  # a rank's children come after it
        if candidates:
            return sorted(candidates, key=lambda process: (device_of.get(process, -1), process))
    return [_busiest(export, ranges)]


def _busiest_of_gpus(busiest_last: Sequence[Mapping[str, int]]) -> set[int]:
    busiest = {row["device"]: row for row in busiest_last}.values()
    least = _LEAST_WORK * max((row["nccl_count"] for row in busiest), default=0)
    return {row["process"] for row in busiest if row["nccl_count"] >= least}


def _busiest(export: Export, ranges: Ranges) -> int | None:
    """Return the process with most GPU work, else most ranges, else most OS calls."""
    tables = (schema.KERNEL, schema.GRAPH, schema.MEMCPY, schema.RUNTIME, None, schema.OS_RUNTIME)
    for table in tables:
        processes = ranges.process if table is None else np.empty(0, np.int64)
        if table is not None and export.has(table.name, table.owner):
            processes = schema.process_of(export.numbers(table, columns=[table.owner])[table.owner])
        if processes.size:
            distinct, counts = np.unique(processes, return_counts=True)
            return int(distinct[np.argmax(counts)])
    return None


def numbered(
    communicators: Sequence[Communicators], who: Identity | None, processes: Sequence[int | None]
) -> tuple[list[int], int | None, list[str]]:
    """Return the ranks of several processes, their world's size, and warnings.

    `communicators` are each one's, known where they were made inside of the window. Where they do
    not name the ranks, these are counted in the processes' order, on from those of the nodes before
    where the environment names the node.
    """
    count = len(communicators)
    sizes = {process.largest for process in communicators}
    world = max(sizes) if len(sizes) == 1 and max(sizes) >= count else None
    named = [rank for process in communicators if (rank := process.world_rank(world)) is not None]
    if world is not None and len(set(named)) == count:
        return named, world, []
    first = who.rank * count if who is not None else 0
    ranks = list(range(first, first + count))
    order = ", ".join(f"process {p} as rank {r}" for p, r in zip(processes, ranks, strict=True))
    doubt = (
        "the report holds several ranks and does not name them: they are numbered in the order of"
        f" their GPUs, else of their process ids ({order}); give the first with --rank FILE=FIRST"
    )
    return ranks, world, [doubt]
