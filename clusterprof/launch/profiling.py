"""The profilers: which one captures, and everything that the ranks must know to use it.

What a version of nsys understands is read off its own `--help`, never assumed from its number.
Sources: the nsys user guide (docs.nvidia.com/nsight-systems/UserGuide), and measurements
that `docs/nsys.md` gives. torch.profiler (Kineto) is the default where there is no nsys.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from clusterprof.agent.contracts.plan import MOST_START_S, NsysPlan
from clusterprof.agent.nsys import START_VARIABLE, Nsys
from clusterprof.arguments import path
from clusterprof.errors import ProfilerError, UsageError
from clusterprof.installed_nsys import installed
from clusterprof.results import NODES

PROFILERS = ("auto", "nsys", "torch", "none")
#: `--pytorch`
PYTORCH = ("autograd-nvtx", "autograd-shapes-nvtx", "emit-nvtx")
#: Without OS runtime tracing: it costs 4 to 5 s at the window's end on a GPU rank.
TRACE_CUDA = "cuda,nvtx"
TRACE_CPU = "nvtx,osrt"

#: options that torch.profiler has no use for
_FOR_NSYS = ("trace", "nsys_arg", "nsys", "pytorch", "cpu_sampling")

#: newer than 2025.3: a report then holds no variable of the profiled process
_DISCARD = "--discard-environment"

_INSTALL = (
    "install Nsight Systems (package nsight-systems; module load nsight-systems on many clusters)",
    "or name one with --nsys PATH, or use --profiler torch",
)


@dataclass(frozen=True)
class CaptureRequest:
    """What the user asked of the profiler, by the options of these names."""

    profiler: str = "auto"
    #: an nsys other than the one that would be found
    nsys: str | None = None
    trace: str | None = None
    nsys_arg: Sequence[str] = ()
    pytorch: str | None = None
    cpu_sampling: bool = False
    #: how nsys' window opens: session (nsys start), cuda (cudaProfilerStart), auto (session)
    window_by: str = "auto"
    #: the run that had CUDA graphs in this program, if one did: nsys then records what is in them
    graphs_in: str = ""

    @property
    def needs_nsys(self) -> bool:
        """Whether anything is asked for that only nsys can do."""
        return self.window_by == "cuda" or any(getattr(self, name) for name in _FOR_NSYS)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> CaptureRequest:
        """What the options of these names say."""
        names = [each.name for each in fields(cls) if hasattr(arguments, each.name)]
        return cls(**{name: getattr(arguments, name) for name in names})


@dataclass(frozen=True)
class CapturePlan:
    """A profiler, ready to be used by the agent in every profiled rank."""

    name: str
    version: str
    #: why this one: shown by --dry-run
    because: str
    #: what the user should know before it runs
    remarks: tuple[str, ...] = ()
    nsys: NsysPlan | None = None
    #: how nsys' window opens: session or cuda
    window_by: str = "session"
    emit_nvtx: bool = False

    def shown(self) -> list[list[str]]:
        """The profiler's command lines in a profiled rank, as argv lists."""
        if self.nsys is None:
            return []
        return [
            [self.nsys.path, *(word.replace("{trace}", self.nsys.trace["gpu"]) for word in words)]
            for words in (getattr(self.nsys, verb) for verb in self.nsys.verbs(self.window_by))
        ]


def choose(request: CaptureRequest, launch_bound: str = "") -> CapturePlan:
    """The profiler that `--profiler` names; with `auto` nsys where it is, else torch.profiler.

    `launch_bound` is the run that found the program so, if one did: `auto` then leaves nsys, whose
    cost for each launch stays until the program ends, to those who ask for what it alone can do.
    Raises ProfilerError where the named one cannot be had, UsageError for an unknown name, and for
    a request that only nsys can meet.
    """
    wanted = request.profiler
    remark = ""
    if wanted not in PROFILERS:
        raise UsageError(
            f"--profiler {wanted} does not exist", f"choose one of {', '.join(PROFILERS)}"
        )
    because = f"--profiler {wanted}"
    if wanted == "nsys":
        return _with_nsys(request, because)
    if wanted == "auto":
        try:
            capture = _with_nsys(request, "auto: nsys is installed here")
        except ProfilerError as error:
            if request.nsys or request.nsys_arg or request.trace or request.pytorch:
                raise  # these options require nsys
            because = f"auto: {error.what}"
        else:
            if not launch_bound or request.needs_nsys:
                return capture
            because = f"auto: launch-bound in {launch_bound}"
            remark = (
                f"captured by torch.profiler, since {launch_bound}, the last merged run of this "
                "program, was launch-bound: nsys would slow it until it ends (--profiler nsys "
                "takes it all the same)"
            )
    for name in _FOR_NSYS:
        if getattr(request, name):
            profiler = "none" if wanted == "none" else "torch"
            raise UsageError(
                f"--{name.replace('_', '-')} is for nsys, and the profiler is {profiler}",
                "leave it out, or choose --profiler nsys",
            )
    if wanted == "none":
        return CapturePlan("none", "", "no rank is profiled")
    # nothing has to be found: the program brings its own torch
    return CapturePlan("torch", "the program's own", because, (remark,) if remark else ())


def find(wanted: Path | None = None) -> Nsys:
    """The nsys named, or on PATH, or where installers put it.

    Raises ProfilerError where there is none, it does not run, or it is too old.
    """
    candidates = [Nsys(str(wanted))] if wanted is not None else installed()
    if not candidates:
        raise ProfilerError("nsys is not installed on this host", *_INSTALL)
    try:
        return candidates[0].checked()
    except OSError as error:
        raise ProfilerError(str(error), *_INSTALL) from None


def _with_nsys(request: CaptureRequest, because: str) -> CapturePlan:
    """The nsys part of a launch. Raises ProfilerError (missing, too old, refuses a flag)."""
    nsys = find(path(request.nsys) if request.nsys else None)
    for name in request.trace.split(",") if request.trace is not None else ():
        if not nsys.offers("profile", name):
            hint = " (it traces NCCL with nvtx)" if name == "nccl" else ""
            raise ProfilerError(
                f"nsys {nsys.version} has no --trace={name}{hint}",
                f"see: {nsys.path} profile --help",
            )
    flags = _flags(nsys, request)
    of_graphs = NODES.partition("=")[0]
    given = any(flag.partition("=")[0] == of_graphs for flag in flags)
    nodes = bool(request.graphs_in) and not given and nsys.offers("profile", NODES)
    flags += [NODES] if nodes else []
    for_start = [flag for flag in flags if flag.startswith("--") and nsys.offers("start", flag)]
    for_launch = [flag for flag in flags if flag not in for_start]
    sampling = "process-tree" if request.cpu_sampling else "none"
    collecting = [f"--sample={sampling}", f"--cpuctxsw={sampling}", "--force-overwrite=true"]
    commands = NsysPlan(
        nsys.path, nsys.version, nsys.importer,
        {"gpu": nsys.trace("profile", request.trace or TRACE_CUDA),
         "cpu": nsys.trace("profile", request.trace or TRACE_CPU)},
        # Every other --capture-range-end ends the program at the window's end, or the launcher's
        # view of it: see docs/nsys.md.
        profile=["profile", "--trace={trace}", *collecting, "--capture-range=cudaProfilerApi",
                 "--capture-range-end=stop", "--session-new={session}", "--output={output}",
                 *flags],
        launch=["launch", "--session-new={session}", "--trace={trace}", *for_launch],
        start=["start", "--session={session}", *collecting, "--output={output}", *for_start],
        stop=["stop", "--session={session}"],
    )  # fmt: skip
    start_s, remark = _seconds_to_start(commands.start_s)
    remarks = [remark] if remark else []
    if nodes:
        remarks.append(
            f"nsys records what is in CUDA graphs ({NODES}), since {request.graphs_in}, the last "
            "merged run of this program, had some"
        )
    if request.cpu_sampling:
        remarks.append(
            "CPU sampling takes CPU time on every profiled rank and slows the end of the window; "
            "it needs kernel.perf_event_paranoid <= 2"
        )
    return CapturePlan(
        "nsys", nsys.version, because, tuple(remarks), commands._replace(start_s=start_s),
        # A session by default: nsys' own stop then runs beside the training (docs/nsys.md).
        window_by="cuda" if request.window_by == "cuda" else "session",
        emit_nvtx=request.pytorch == "emit-nvtx",
    )  # fmt: skip


def _seconds_to_start(default_s: int) -> tuple[int, str]:
    """The seconds that the user's environment gives nsys to start, or a remark on what it says."""
    given = os.environ.get(START_VARIABLE, "")
    if re.fullmatch("[0-9]{1,3}", given) and 1 <= int(given) <= MOST_START_S:
        return int(given), ""
    wrong = f"{START_VARIABLE}={given[:40]!r} is not a number of seconds from 1 to {MOST_START_S}"
    return default_s, f"{wrong}: nsys has {default_s} s to start a program" if given else ""


def _flags(nsys: Nsys, request: CaptureRequest) -> list[str]:
    """The user's own flags, and ours. Raises ProfilerError for one that this nsys does not know."""
    flags = list(request.nsys_arg)
    # its secrets would be in every report; which rank a report is of, the run directory says
    if not any(flag.startswith(_DISCARD) for flag in flags) and nsys.offers("profile", _DISCARD):
        flags.append(f"{_DISCARD}=true")
    if request.pytorch and request.pytorch != "emit-nvtx":
        if not nsys.offers("profile", "--pytorch"):
            raise ProfilerError(
                f"nsys {nsys.version} has no --pytorch",
                "use --pytorch emit-nvtx, which torch itself provides, or a newer nsys",
            )
        flags.append(f"--pytorch={request.pytorch}")
    for flag in flags:
        if flag.startswith("--") and not nsys.offers("profile", flag):
            raise ProfilerError(
                f"nsys {nsys.version} has no flag {flag.split('=', 1)[0]}",
                f"it was given with --nsys-arg; see: {nsys.path} profile --help",
            )
    return flags
