"""The checks of one host: each on its own, and none longer than its time."""

from __future__ import annotations

import fcntl
import importlib.metadata
import math
import os
import platform
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from clusterprof import __version__
from clusterprof.agent.contracts import clocks
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.agent.nsys import MINIMUM, free_bytes
from clusterprof.doctor import leftovers
from clusterprof.doctor.table import BAD, OK, WARN, Check
from clusterprof.errors import ProfilerError
from clusterprof.launch import profiling
from clusterprof.words import counted, size

#: A file system that hangs, or an nsys that does not answer, is found out by this.
PATIENCE_S = 6.0

#: The options that the launch of a profiled rank gives to nsys' verbs.
_NEEDED = (
    "launch --session-new", "launch --trace", "start --session", "start --sample",
    "start --cpuctxsw", "start --force-overwrite", "start --output", "stop --session",
    "profile --capture-range", "profile --capture-range-end",
)  # fmt: skip

_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")

#: File systems that other hosts serve: nsys' data would cross the network while it is captured.
_REMOTE = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p", "pvfs2", "wekafs",
    "afs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "orangefs",
}  # fmt: skip
#: Windows of five steps took some hundred MB of temporary data.
TOO_LITTLE_B = 2e8
#: How long a file of another node may take to appear: clients of NFS look every few seconds.
VISIBLE_S = 4.0
TOKEN = "token"  # noqa: S105 - a file's name
#: the check of the folder that all nodes must see, and what to do where they do not
RUNS = "run directories"
SHARE = "choose a folder that all nodes share with --run-dir"

Look = Callable[[], "Check | list[Check]"]


def checks(nsys: Path | None, folder: Path, probe: Path | None) -> list[tuple[str, Look]]:
    """The checks by name, in the order in which they are shown; `folder` is where run directories
    are made, `probe` a folder that another node has just made there, None for this host alone.
    """
    table = leftovers.process_table
    return [
        ("nsys", lambda: nsys_checks(nsys)),
        ("gpu", driver),
        ("other profilers", lambda: leftovers.other_profilers(table())),
        ("temporary folder", temporary_folder),
        (leftovers.SHARED_MEMORY, shared_memory),
        ("loopback", loopback),
        (RUNS, lambda: probed_folder(probe, name()) if probe else run_folder(folder)),
        ("clock source", clock_source),
        ("clock", clock_error),
        ("cpu sampling", cpu_sampling),
        ("python", python),
        ("leftovers", lambda: leftovers.leftovers(table())),
    ]


def name() -> str:
    """This node, by the name that Slurm has for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def look(
    todo: Sequence[tuple[str, Look]], patience_s: float = PATIENCE_S, clock: Clock = REAL
) -> Iterator[Check]:
    """Do all checks side by side; yields the results in the order given, within `patience_s`."""
    results: dict[str, list[Check]] = {}

    def do(title: str, check: Look) -> None:
        try:
            result = check()
        except Exception as error:  # noqa: BLE001 - a check that fails is a result
            why = str(error) or type(error).__name__
            result = Check(title, BAD, f"the check failed: {why}")
        results[title] = result if isinstance(result, list) else [result]

    # daemons: a check that a file system holds must not hold the doctor's end
    threads = [threading.Thread(target=do, args=pair, daemon=True) for pair in todo]
    for thread in threads:
        thread.start()
    deadline = clock.now() + patience_s
    late = f"no answer within {patience_s:g} s", "does a file system hang on that host?"
    for (title, _), thread in zip(todo, threads, strict=True):
        thread.join(max(0.0, deadline - clock.now()))
        yield from results.get(title) or [Check(title, BAD, *late)]


# -- software ------------------------------------------------------------------------------------


def nsys_checks(wanted: Path | None) -> list[Check]:
    """nsys: which one (`wanted`: by --nsys), its options, and whether it can make reports."""
    try:
        nsys = profiling.find(wanted)
    except ProfilerError as error:
        level = WARN if wanted is None and "not installed" in error.what else BAD
        advice = "load its module or name it with --nsys; torch.profiler captures without it"
        return [Check("nsys", level, error.what, advice)]
    if missing := [flag for flag in _NEEDED if not nsys.offers(*flag.split())]:
        options = Check("nsys flags", BAD, f"{nsys.version} has no {', '.join(missing)}",
                        f"install nsys {MINIMUM[0]}.{MINIMUM[1]} or newer")  # fmt: skip
    else:
        newer = "--pytorch", "--cuda-graph-trace", "--cuda-event-trace", "--python-sampling"
        optional = [flag for flag in newer if nsys.offers("profile", flag)]
        available = f"all that are needed; optional: {', '.join(optional) or 'none'}"
        options = Check("nsys flags", OK, available)
    importer = Check("nsys importer", OK, nsys.importer or "")
    if nsys.importer is None:
        importer = Check("nsys importer", WARN, "there is no QdstrmImporter beside nsys",
                         "install all of Nsight Systems, not only its target part: without the "
                         "importer, reports may stay .qdstrm")  # fmt: skip
    return [Check("nsys", OK, f"{nsys.version}, {nsys.path}"), options, importer]


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
    if version and devices:
        return Check("gpu", OK, f"driver {version[0]}, {counted(devices, 'GPU')}")
    if not version and not devices:
        return Check("gpu", OK, "none: nsys traces NVTX and the OS runtime here")
    present = f"driver {version[0]}, no device" if version else f"{devices} devices, no driver"
    return Check("gpu", WARN, present, "load the node's driver, and request GPUs for this job")


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
    current = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    try:
        source = current.read_text(encoding="ascii").strip()
    except OSError as error:
        return Check("clock source", WARN, f"unknown: {error.strerror}")
    # read without a call into the kernel, in some 20 ns
    fast = "tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase"
    if source in fast:
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
    shown = f"perf_event_paranoid is {level}"
    if level <= 2:
        return Check("cpu sampling", OK, shown)
    return Check("cpu sampling", WARN, shown,
                 "only --cpu-sampling needs it: sysctl kernel.perf_event_paranoid=2")  # fmt: skip


# -- the folders that a capture writes to --------------------------------------------------------


def temporary_folder() -> Check:
    """Where nsys keeps what it captures until the report is made."""
    name, folder = "temporary folder", tempfile.gettempdir()
    advice = "set TMPDIR to a folder on the node's own disk, the same for all ranks of a node"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="clusterprof-doctor-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Check(name, BAD, f"{folder}: no file can be made and locked: {error}", advice)
    kind = file_system(folder)
    limits = [
        (TOO_LITTLE_B, BAD, f"free space there, or {advice}"),
        (math.inf if kind in _REMOTE else 0, WARN, advice),
        (10 * TOO_LITTLE_B, WARN, f"enough for a short window only; {advice}"),
    ]
    return _space(name, folder, f"{folder}, {kind}, ", limits)


def _space(name: str, folder: str, where: str, limits: Sequence[tuple[float, str, str]]) -> Check:
    """How much is free there; of the first of the `limits` (bytes) that is more, level, advice."""
    free = free_bytes(folder)
    reached = ((level, advice) for limit_b, level, advice in limits if free < limit_b)
    level, advice = next(reached, (OK, ""))
    return Check(name, level, f"{where}{size(free)} free", advice, free)


def shared_memory() -> Check:
    """nsys and the program talk through /dev/shm."""
    name = leftovers.SHARED_MEMORY
    try:
        with tempfile.NamedTemporaryFile(dir=name, prefix="clusterprof-doctor-"):
            return _space(name, name, "", [(64e6, WARN, "nsys and NCCL need it: free some")])
    except OSError as error:
        advice = "nsys needs it: in a container --ipc=host or a larger --shm-size"
        return Check(name, BAD, f"cannot be written: {error}", advice)


def run_folder(parent: Path) -> Check:
    """Whether run directories can be made below `parent`, as this host sees it."""
    advice = "choose another with --run-dir"
    try:
        Path(tempfile.mkdtemp(prefix=".clusterprof-doctor-", dir=parent)).rmdir()
    except OSError as error:
        return Check(RUNS, BAD, f"{parent} cannot be written: {error.strerror}", advice)
    limits = [(TOO_LITTLE_B, WARN, f"free space there, or {advice}")]
    return _space(RUNS, str(parent), f"{parent}, {file_system(str(parent))}, ", limits)


def probed_folder(probe: Path, host: str, clock: Clock = REAL) -> Check:
    """Whether this node sees a file that another one has just written, and can write beside it."""
    if not clock.until((probe / TOKEN).exists, VISIBLE_S, 0.1):
        return Check(RUNS, BAD, f"{probe.parent} is another folder on this node", SHARE)
    try:
        (probe / host).touch()
    except OSError as error:
        return Check(RUNS, BAD, f"{probe.parent} cannot be written: {error.strerror}", SHARE)
    return run_folder(probe.parent)


def file_system(folder: str) -> str:
    """The type of the file system that holds `folder`: xfs, tmpfs, nfs4."""
    device = Path(folder).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return "unknown file system"
