"""Traces of other tools: named for what they are, with what to give instead.

Each is known by marks that its own writer leaves, never by a file's name alone.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from clusterprof.errors import ReportError

_INSTEAD = "give the trace that torch.profiler wrote of the same run (export_chrome_trace), or nsys"

#: categories that Kineto gives the work of devices which are not read here, and what they are
_ACCELERATORS = {
    "mtia_runtime": "MTIA", "mtia_ccp_events": "MTIA", "mtia_workloadd": "MTIA",
    "mtia_insight": "MTIA", "mtia_counters": "MTIA", "glow_runtime": "Glow",
    "hpu_op": "Gaudi (HPU)", "xpu_runtime": "Intel XPU", "xpu_driver": "Intel XPU",
    "privateuse1_runtime": "a PrivateUse1 device", "privateuse1_driver": "a PrivateUse1 device",
    "async_npu": "Ascend (NPU)", "HostToDevice": "Ascend (NPU)", "enqueue": "Ascend (NPU)",
    "dequeue": "Ascend (NPU)", "async_task_queue": "Ascend (NPU)",
}  # fmt: skip
_ADVICE = {
    "Ascend (NPU)": "MindStudio's msprof-analyze reads it",
    "Intel XPU": "only NVIDIA's and AMD's GPUs are read",
}

#: names of processes in Chrome traces, by the tool that writes them
_PROCESSES = (
    ("Ascend Hardware", "an Ascend profile (msprof)", _ADVICE["Ascend (NPU)"]),
    ("CANN", "an Ascend profile (msprof)", _ADVICE["Ascend (NPU)"]),
    ("/device:", "an XLA trace (TensorBoard, JAX)", "record JAX with nsys: nsys profile"),
    ("/host:", "an XLA trace (TensorBoard, JAX)", "record JAX with nsys: nsys profile"),
    ("CPU HIP API", "a trace of rocprof", _INSTEAD),
    ("CPU HSA API", "a trace of rocprof", _INSTEAD),
)

#: keys at the top of JSON of other kinds: all of them must be there
_KEYS = (
    ({"schema", "nodes"}, "an execution trace (Chakra), which has no times of the GPU", _INSTEAD),
    ({"rocprofiler-sdk-tool"}, "a result of rocprofv3", _INSTEAD),
    (
        {"data"}, "nsys's JSON export, which holds no whole report",
        (
            "give the .nsys-rep that it was made of, or: "
            "nsys export -t sqlite --include-blobs=true REPORT.nsys-rep"
        ),
    ),
    (
        {"schema_version", "findings"}, "clusterprof's own results",
        "show it with: clusterprof report RUN",
    ),
)  # fmt: skip

#: files of other tools, by how their names end
FOREIGN = {
    ".xplane.pb": "an XLA profile (TensorBoard, JAX)",
    ".ncu-rep": "a report of Nsight Compute, which has no timeline",
    ".pftrace": "a Perfetto trace", ".perfetto-trace": "a Perfetto trace",
    ".rocpd": "a database of rocprofv3",
}  # fmt: skip


def by_keys(path: Path, keys: Collection[str]) -> ReportError | None:
    """Return the error for JSON with these keys at its top; None where they are of no tool."""
    for marks, content, instead in _KEYS:
        if marks <= set(keys):
            return ReportError(f"{path} is {content}", instead)
    return None


def by_events(path: Path, categories: Mapping[str, int], processes: Collection[str]) -> ReportError:
    """Return the error for a trace without any event of torch.profiler that is read."""
    if unread := accelerators(categories):
        return accelerator_error(path, unread)
    for mark, content, instead in _PROCESSES:
        if any(name.startswith(mark) for name in processes):
            return ReportError(f"{path} is {content}, which is not read", instead)
    if categories:
        most = ", ".join(name for name, _ in Counter(categories).most_common(5))
        return ReportError(
            f"{path} holds no events of torch.profiler: its categories are {most}", _INSTEAD
        )
    return ReportError(f"{path} holds no events", "the profiler's window was never reached")


def accelerators(categories: Mapping[str, int]) -> dict[str, int]:
    """Return device -> number of its events, of those devices that are not read."""
    counts: Counter[str] = Counter()
    for category in (category for category in categories if category in _ACCELERATORS):
        counts[_ACCELERATORS[category]] += categories[category]
    return dict(counts)


def accelerator_error(path: Path, unread: Mapping[str, int]) -> ReportError:
    """Return the error for a trace whose rank computed on a device that is not read."""
    counts = ", ".join(f"{count} events of {device}" for device, count in unread.items())
    return ReportError(
        f"{path} is of a rank that computes on a device whose work is not read: {counts}",
        next((_ADVICE[device] for device in unread if device in _ADVICE), _INSTEAD),
    )


def by_name(path: Path, suffixes: Collection[str]) -> ReportError | None:
    """Return the error for another tool's file, or a ZIP that holds reports; None for any other.

    `suffixes` are those of reports.
    """
    for suffix, content in FOREIGN.items():
        if path.name.endswith(suffix):
            return ReportError(f"{path} is {content}", _INSTEAD)
    if not path.name.endswith(".zip"):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [name for name in archive.namelist() if name.endswith((*suffixes, ".pb"))]
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return None
    held, unpack = ", ".join(packed[:3]), f"unpack it: unzip {path}"
    return ReportError(f"{path} is an archive of reports ({held})", unpack) if packed else None
