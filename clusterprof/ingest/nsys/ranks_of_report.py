"""Which ranks an nsys report is of: their processes, ranks, job and host, by the report itself.

A report holds every child of the profiled program: of a rank its helpers (DataLoader workers,
compilers), of what starts ranks (`nsys profile torchrun ...`) all ranks of that host. It holds the
whole environment as well, secrets included: only the variables of
`clusterprof.agent.contracts.identity` and the rendezvous below are looked at, and of the rendezvous
only a fingerprint is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from clusterprof.agent.contracts import identity as identities
from clusterprof.agent.contracts.identity import Identity, identify
from clusterprof.ingest.nsys import events, schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.events import Ranges
from clusterprof.ingest.nsys.nccl_ranges import Communicators
from clusterprof.ingest.rank_steps import names_steps
from clusterprof.ingest.recording import with_names
from clusterprof.tables import ReportInfo

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


def wanted() -> frozenset[str]:
    """All variables that are ever looked at in the environment of a report."""
    names = {
        name for each in identities.LAUNCHERS
        for name in (each.rank, each.world_size, each.local_rank, each.local_size, each.node,
                     *each.requires)
    }  # fmt: skip
    return frozenset(JOB_VARIABLES).union(names) - {""}


#: a process with less than this part of the kernels of the busiest is a helper, not a rank
_LEAST_WORK = 0.1


def origin(export: Export) -> tuple[ReportInfo, Identity | None]:
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
    names, pairs = wanted(), (line.partition("=") for line in lines)
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
    work = events.kernels_by_process(export)
    calls = ranges.process[ranges.named("^nccl[A-Z]") | ranges.in_domains(schema.NCCL_DOMAIN)]
    steps = ranges.process[with_names(names_steps(ranges.names), ranges.name)]
    inner = {launcher.name for launcher in identities.LAUNCHERS if launcher.inner}
    is_rank = who is not None and who.source in inner and (who.world_size or 1) > 1
    for candidates in (
        {row["process"] for row in work if row["nccl_sum"]} | set(calls.tolist()),
        _computing(work),
        set() if work else set(steps.tolist()),
    ):
        if candidates:
            ordered = sorted(candidates, key=lambda process: (_device(work, process), process))
            # a rank's children come after it
            return [min(candidates)] if alone or is_rank else list(ordered)
    return [_busiest(export, ranges)]


def _computing(work: Sequence[Mapping[str, int]]) -> set[int]:
    """The busiest process of each GPU."""
    busiest_last = sorted(work, key=lambda row: (row["nccl_count"], -row["process"]))
    most = busiest_last[-1]["nccl_count"] if work else 0
    of_device = {row["device"]: row for row in busiest_last}
    return {row["process"] for row in of_device.values() if row["nccl_count"] >= _LEAST_WORK * most}


def driven(kernels: pa.Table) -> list[int]:
    """Return the GPUs that a process drives, by its kernels: none of which it uses a little."""
    gpus, count = np.unique(kernels["device"].to_numpy(), return_counts=True)
    return [int(gpu) for gpu in gpus[count >= _LEAST_WORK * count.max(initial=0)] if gpu >= 0]


def _device(work: Sequence[Mapping[str, int]], process: int) -> int:
    rows = [row for row in work if row["process"] == process]
    return max(rows, key=lambda row: row["nccl_count"])["device"] if rows else -1


def _busiest(export: Export, ranges: Ranges) -> int | None:
    """Return the process with most GPU work, else most ranges, else most OS calls."""
    tables = (schema.KERNEL, schema.GRAPH, schema.MEMCPY, schema.RUNTIME, None, schema.OS_RUNTIME)
    for table in tables:
        if table is None:
            processes = ranges.process
        elif export.has(table.name, table.owner):
            processes = schema.process_of(export.numbers(table, columns=[table.owner])[table.owner])
        else:
            continue
        if processes.size:
            distinct, counts = np.unique(processes, return_counts=True)
            return int(distinct[np.argmax(counts)])
    return None


def numbered(
    communicators: Sequence[Communicators],
    who: Identity | None,
    processes: Sequence[int | None],
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
