"""Who an nsys report is about: rank, job, host, as the report itself says.

A report holds the whole environment of the profiled process, secrets included. Only the
variables of `clusterprof.agent.contracts.identity` and the rendezvous below are looked at, and of
the rendezvous only a fingerprint is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clusterprof.agent.contracts.identity import LAUNCHERS, Identity, identify
from clusterprof.ingest.nsys.database import Export

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

#: all that is ever looked at in the environment of a report
WANTED = frozenset(JOB_VARIABLES).union(
    *(
        {each.rank, each.world_size, each.local_rank, *each.requires} - {""}
        for each in LAUNCHERS
    )
)  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """Where a report comes from; each field None or empty where the report does not say."""

    identity: Identity | None
    job: str | None
    host: str
    profiler: str
    device: str


def origin(export: Export, device: int | None) -> Origin:
    """Return who this report is about; `device` is the GPU that the rank used."""
    environ = environment(export)
    system = dict(
        export.rows("SELECT name, value FROM {0} WHERE name = 'Hostname'", "TARGET_INFO_SYSTEM_ENV")
    )
    return Origin(
        identity=identify(environ),
        job=fingerprint(environ),
        host=str(system.get("Hostname", "")),
        profiler=_profiler(export),
        device=_device(export, device),
    )


def environment(export: Export) -> dict[str, str]:
    """Return the rank and rendezvous variables of the profiled process, and no others.

    nsys 2023 and later list them in META_DATA_CAPTURE, 2022 keeps one NUL-separated string in
    TARGET_INFO_SYSTEM_ENV, and some exports have it only among the strings.
    """
    lines = [
        str(value)
        for (value,) in export.rows(
            "SELECT value FROM {0} WHERE name = 'PROCESS_0:ENVIRONMENT_VARIABLE'",
            "META_DATA_CAPTURE",
        )
    ]
    if lines:
        return _wanted(line.replace('="', "=", 1).removesuffix('"') for line in lines)
    for sql, table in (
        ("SELECT value FROM {0} WHERE name = 'DeviceEnvironment'", "TARGET_INFO_SYSTEM_ENV"),
        ("SELECT value FROM {0} WHERE instr(CAST(value AS BLOB), x'00')", "StringIds"),
    ):
        found = [_wanted(str(value).split("\0")) for (value,) in export.rows(sql, table)]
        ranks = {identify(environ) for environ in found} - {None}
        if len(ranks) == 1:
            return next(environ for environ in found if identify(environ) is not None)
    return {}


def _wanted(lines: Iterable[str]) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, _, value in pairs if name in WANTED}


def fingerprint(environ: Mapping[str, str]) -> str | None:
    """Return an opaque name for the job, equal on all its ranks; None where nothing names it."""
    said = [(name, environ[name]) for name in JOB_VARIABLES if environ.get(name)]
    if said and said[0][0] == "SLURM_JOB_ID_HET_GROUP_0":
        said = [pair for pair in said if pair[0] != "SLURM_JOB_ID"]
    # torchrun's run id is "none" unless somebody gave one: alone it names no job
    if not any(name != "TORCHELASTIC_RUN_ID" or value != "none" for name, value in said):
        return None
    text = "\0".join(f"{name}={value}" for name, value in said)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _profiler(export: Export) -> str:
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        sql = "SELECT value FROM {0} WHERE name = 'EXPORT_PRODUCT_VERSION'"
        for (version,) in export.rows(sql, table):
            return f"nsys {str(version).removesuffix('.0')}"
    return "nsys"


def _device(export: Export, device: int | None) -> str:
    if device is None:
        return ""
    names = dict(export.rows("SELECT id, name FROM {0}", "TARGET_INFO_GPU"))
    return str(names.get(device, next(iter(names.values()), "")))
