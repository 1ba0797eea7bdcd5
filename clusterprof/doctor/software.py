"""The software that a capture uses: nsys and its parts, this Python, the GPU's driver."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path

from clusterprof import __version__
from clusterprof.agent.nsys import MINIMUM
from clusterprof.doctor.check import BAD, OK, WARN, Check
from clusterprof.errors import ProfilerError
from clusterprof.launch import nsys_capture

#: What the launch of a chosen rank asks of nsys' verbs.
_NEEDED = {
    "launch": ("--session-new", "--trace"),
    "start": ("--session", "--sample", "--cpuctxsw", "--force-overwrite", "--output"),
    "stop": ("--session",),
    "profile": ("--capture-range", "--capture-range-end"),
}
#: What a newer one offers besides.
_WELCOME = ("--pytorch", "--cuda-graph-trace", "--cuda-event-trace", "--python-sampling")


def profiler(wanted: Path | None) -> list[Check]:
    """nsys: which, what it understands, and whether it can make reports of what it captures."""
    try:
        found = nsys_capture.find(wanted)
    except ProfilerError as error:
        level = WARN if wanted is None and "not installed" in error.what else BAD
        advice = "torch.profiler captures without it; for nsys load its module or give --nsys"
        return [Check("nsys", level, error.what, advice)]
    checks = [Check("nsys", OK, f"{found.version}, {found.path}"), _flags(found)]
    if found.importer is None:
        checks.append(
            Check("nsys importer", WARN, "no QdstrmImporter beside it",
                  "reports may stay .qdstrm: install all of Nsight Systems, not its target alone")
        )  # fmt: skip
    else:
        checks.append(Check("nsys importer", OK, str(found.importer)))
    return checks


def _flags(found: nsys_capture.Nsys) -> Check:
    texts = {verb: found.help(verb) for verb in _NEEDED}
    lacking = [
        f"{verb} {flag}"
        for verb, flags in _NEEDED.items()
        for flag in flags
        if not _has(texts[verb], flag)
    ]
    if lacking:
        return Check("nsys flags", BAD, f"{found.version} has no {', '.join(lacking)}",
                     f"{MINIMUM[0]}.{MINIMUM[1]} and newer have all")  # fmt: skip
    here = [flag for flag in _WELCOME if _has(texts["profile"], flag)]
    return Check("nsys flags", OK, f"all that are needed, and {', '.join(here) or 'no others'}")


def _has(text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


def python() -> Check:
    """What runs clusterprof here, and the training if it is the same environment."""
    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "no torch"
    return Check(
        "python", OK, f"{platform.python_version()}, clusterprof {__version__}, {torch} beside it"
    )


def driver() -> Check:
    """NVIDIA's driver and how many GPUs there are to open."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    version = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    if version is None and not devices:
        return Check("gpu", OK, "none: nsys traces nvtx and the OS runtime here")
    if version is None or not devices:
        found = f"driver {version[0]}, no device" if version else f"{devices} devices, no driver"
        return Check("gpu", WARN, found, "is the node's driver loaded, and given to this job?")
    return Check("gpu", OK, f"driver {version[0]}, {devices} GPU{'s' if devices > 1 else ''}")
