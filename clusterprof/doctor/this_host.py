"""The checks of one host: each on its own, and none longer than its time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from clusterprof import __version__
from clusterprof.agent.contracts import clocks
from clusterprof.agent.contracts.words import counted
from clusterprof.agent.nsys import MINIMUM
from clusterprof.doctor import folders, leftovers
from clusterprof.doctor.table import BAD, OK, WARN, Check
from clusterprof.errors import ProfilerError
from clusterprof.launch import profiling

#: A file system that hangs, or an nsys that does not answer, is found out by this.
PATIENCE_S = 6.0

#: The options that the launch of a profiled rank gives to nsys' verbs.
_NEEDED = {
    "launch": ("--session-new", "--trace"),
    "start": ("--session", "--sample", "--cpuctxsw", "--force-overwrite", "--output"),
    "stop": ("--session",),
    "profile": ("--capture-range", "--capture-range-end"),
}
#: Options of newer versions.
_OPTIONAL = ("--pytorch", "--cuda-graph-trace", "--cuda-event-trace", "--python-sampling")

_CLOCKSOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
#: Read without a call into the kernel, in some 20 ns.
_FAST = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase"}

Look = Callable[[], "Check | list[Check]"]


def checks(nsys: Path | None, folder: Path, probe: Path | None) -> list[tuple[str, Look]]:
    """The checks by name, in the order in which they are shown.

    `folder` is where run directories are made; `probe` a folder that another node has just made
    there, None for this host alone.
    """
    table = leftovers.process_table
    return [
        ("nsys", lambda: nsys_checks(nsys)),
        ("gpu", driver),
        ("other profilers", lambda: leftovers.other_profilers(table())),
        ("temporary folder", folders.temporary_folder),
        (folders.SHARED_MEMORY, folders.shared_memory),
        ("loopback", loopback),
        (
            "run directories",
            lambda: folders.probed_folder(probe, name()) if probe else folders.run_folder(folder),
        ),
        ("clock source", clock_source),
        ("clock", clock_error),
        ("cpu sampling", cpu_sampling),
        ("python", python),
        ("leftovers", lambda: leftovers.leftovers(table())),
    ]


def name() -> str:
    """This node, by the name that Slurm has for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def look(todo: Sequence[tuple[str, Look]], patience_s: float = PATIENCE_S) -> Iterator[Check]:
    """Do all checks side by side; yields the results in the order given, within `patience_s`."""
    results: dict[str, list[Check]] = {}
    threads = [
        (title, threading.Thread(target=_one, args=(title, check, results), daemon=True))
        for title, check in todo
    ]
    for _, thread in threads:
        thread.start()
    deadline = time.monotonic() + patience_s
    for title, thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        late = f"no answer within {patience_s:g} s"
        yield from results.get(title) or [
            Check(title, BAD, late, "does a file system hang on that host?")
        ]


def _one(title: str, check: Look, results: dict[str, list[Check]]) -> None:
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - a check that fails is a result
        found = Check(title, BAD, f"the check failed: {str(error) or type(error).__name__}")
    results[title] = found if isinstance(found, list) else [found]


# -- software ------------------------------------------------------------------------------------


def nsys_checks(wanted: Path | None) -> list[Check]:
    """nsys: which one, which options it has, and whether it can make reports of what it captures.

    `wanted` is the one of --nsys.
    """
    try:
        found = profiling.find(wanted)
    except ProfilerError as error:
        level = WARN if wanted is None and "not installed" in error.what else BAD
        advice = "load its module or name it with --nsys; torch.profiler captures without it"
        return [Check("nsys", level, error.what, advice)]
    importer = Check("nsys importer", OK, found.importer or "")
    if found.importer is None:
        importer = Check("nsys importer", WARN, "there is no QdstrmImporter beside nsys",
                         "install all of Nsight Systems, not only its target part: without the "
                         "importer, reports may stay .qdstrm")  # fmt: skip
    missing = [
        f"{verb} {flag}"
        for verb, flags in _NEEDED.items()
        for flag in flags
        if not found.offers(verb, flag)
    ]
    here = [flag for flag in _OPTIONAL if found.offers("profile", flag)]
    options = Check("nsys flags", OK, f"all that are needed; optional: {', '.join(here) or 'none'}")
    if missing:
        options = Check("nsys flags", BAD, f"{found.version} has no {', '.join(missing)}",
                        f"install nsys {MINIMUM[0]}.{MINIMUM[1]} or newer")  # fmt: skip
    return [Check("nsys", OK, f"{found.version}, {found.path}"), options, importer]


def python() -> Check:
    """What runs clusterprof here, and the training if it is the same environment."""
    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "no torch"
    versions = f"{platform.python_version()}, clusterprof {__version__}, {torch} in its environment"
    return Check("python", OK, versions)


def driver() -> Check:
    """NVIDIA's driver, and how many GPUs can be opened."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    version = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    if version is None and not devices:
        return Check("gpu", OK, "none: nsys traces NVTX and the OS runtime here")
    if version is None or not devices:
        found = f"driver {version[0]}, no device" if version else f"{devices} devices, no driver"
        return Check("gpu", WARN, found, "load the node's driver, and request GPUs for this job")
    return Check("gpu", OK, f"driver {version[0]}, {counted(devices, 'GPU')}")


# -- the kernel ----------------------------------------------------------------------------------


def loopback() -> Check:
    """nsys' parts reach each other over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2):
                server.accept()[0].close()
    except OSError as error:
        return Check("loopback", BAD, f"127.0.0.1 does not answer: {error}",
                     "nsys needs it: ip link set lo up")  # fmt: skip
    return Check("loopback", OK, "up")


def clock_source() -> Check:
    """What a reading of the clock costs: nsys takes two for each event."""
    try:
        source = _CLOCKSOURCE.read_text(encoding="ascii").strip()
    except OSError as error:
        return Check("clock source", WARN, f"unknown: {error.strerror}")
    if source in _FAST:
        return Check("clock source", OK, source)
    advice = "each reading takes microseconds: see dmesg for why the kernel rejected tsc"
    return Check("clock source", WARN, source, advice)


def clock_error() -> Check:
    """How far the wall clock may be from true time, as the kernel estimates it."""
    state = clocks.kernel()
    if state is None:
        return Check("clock", WARN, "the kernel does not give its error")
    if not state["synchronised"]:
        return Check("clock", WARN, "not synchronised",
                     "start chronyd or ntpd (clusterprof aligns the ranks' clocks by their "
                     "collectives in any case)")  # fmt: skip
    error_ns = int(state["maxerror_ns"])
    return Check("clock", OK, f"synchronised, within {error_ns / 1e6:.3g} ms of true time", "",
                 -float(error_ns))  # fmt: skip


def cpu_sampling() -> Check:
    """Whether --cpu-sampling can record samples; nothing else needs it."""
    try:
        level = int(_PARANOID.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Check("cpu sampling", WARN, "no perf events here", "only --cpu-sampling needs them")
    found = f"perf_event_paranoid is {level}"
    if level <= 2:
        return Check("cpu sampling", OK, found)
    return Check("cpu sampling", WARN, found,
                 "only --cpu-sampling needs it: sysctl kernel.perf_event_paranoid=2")  # fmt: skip
