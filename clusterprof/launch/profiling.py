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
from dataclasses import dataclass
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
_DISCARD = "--discard-environment=true"

_INSTALL = (
    "install Nsight Systems (package nsight-systems; module load nsight-systems on many clusters)",
    "or name one with --nsys PATH, or use --profiler torch",
)


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


def choose(asked: argparse.Namespace, launch_bound: str = "", graphs_in: str = "") -> CapturePlan:
    """The profiler that `--profiler` names; with `auto` nsys where it is, else torch.profiler.

    `launch_bound` is the run that found the program so, if one did: `auto` then leaves nsys, whose
    cost for each launch stays until the program ends, to those who ask for what it alone can do.
    `graphs_in` is the run that had CUDA graphs: nsys then records what is in them. Raises
    ProfilerError where the profiler cannot be had, UsageError for an unknown one, and for options
    that only nsys has.
    """
    wanted = asked.profiler
    remark = ""
    if wanted not in PROFILERS:
        raise UsageError(
            f"--profiler {wanted} does not exist", f"choose one of {', '.join(PROFILERS)}"
        )
    because = f"--profiler {wanted}"
    if wanted == "nsys":
        return _with_nsys(asked, because, graphs_in)
    for_nsys = [name for name in _FOR_NSYS if getattr(asked, name)]
    if wanted == "auto":
        try:
            capture = _with_nsys(asked, "auto: nsys is installed here", graphs_in)
        except ProfilerError as error:
            if {*for_nsys} - {"cpu_sampling"}:
                raise  # the others require nsys
            because = f"auto: {error.what}"
        else:
            if not launch_bound or for_nsys or asked.window_by == "cuda":
                return capture
            because = f"auto: launch-bound in {launch_bound}"
            remark = (
                f"captured by torch.profiler, since {launch_bound}, the last merged run of this "
                "program, was launch-bound: nsys would slow it until it ends (--profiler nsys "
                "takes it all the same)"
            )
    if for_nsys:
        profiler = "none" if wanted == "none" else "torch"
        raise UsageError(
            f"--{for_nsys[0].replace('_', '-')} is for nsys, and the profiler is {profiler}",
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


def _with_nsys(asked: argparse.Namespace, because: str, graphs_in: str) -> CapturePlan:
    """The nsys part of a launch. Raises ProfilerError (missing, too old, refuses a flag)."""
    nsys = find(path(asked.nsys) if asked.nsys else None)
    for name in asked.trace.split(",") if asked.trace is not None else ():
        if not nsys.offers("profile", name):
            hint = " (it traces NCCL with nvtx)" if name == "nccl" else ""
            raise ProfilerError(
                f"nsys {nsys.version} has no --trace={name}{hint}",
                f"see: {nsys.path} profile --help",
            )
    flags = _flags(nsys, asked)
    nodes = bool(graphs_in) and not _has(flags, NODES) and nsys.offers("profile", NODES)
    flags += [NODES] if nodes else []
    for_start = [flag for flag in flags if flag.startswith("--") and nsys.offers("start", flag)]
    for_launch = [flag for flag in flags if flag not in for_start]
    sampling = "process-tree" if asked.cpu_sampling else "none"
    collecting = [f"--sample={sampling}", f"--cpuctxsw={sampling}", "--force-overwrite=true"]
    commands = NsysPlan(
        nsys.path, nsys.version, nsys.importer,
        {"gpu": nsys.trace("profile", asked.trace or TRACE_CUDA),
         "cpu": nsys.trace("profile", asked.trace or TRACE_CPU)},
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
            f"nsys records what is in CUDA graphs ({NODES}), since {graphs_in}, the last merged "
            "run of this program, had some"
        )
    if asked.cpu_sampling:
        remarks.append(
            "CPU sampling takes CPU time on every profiled rank and slows the end of the window; "
            "it needs kernel.perf_event_paranoid <= 2"
        )
    return CapturePlan(
        "nsys", nsys.version, because, tuple(remarks), commands._replace(start_s=start_s),
        # A session by default: nsys' own stop then runs beside the training (docs/nsys.md).
        window_by="cuda" if asked.window_by == "cuda" else "session",
        emit_nvtx=asked.pytorch == "emit-nvtx",
    )  # fmt: skip


def _seconds_to_start(default_s: int) -> tuple[int, str]:
    """The seconds that the user's environment gives nsys to start, or a remark on what it says."""
    given = os.environ.get(START_VARIABLE, "")
    if re.fullmatch("[0-9]{1,3}", given) and 1 <= int(given) <= MOST_START_S:
        return int(given), ""
    wrong = f"{START_VARIABLE}={given[:40]!r} is not a number of seconds from 1 to {MOST_START_S}"
    return default_s, f"{wrong}: nsys has {default_s} s to start a program" if given else ""


def _has(flags: Sequence[str], option: str) -> bool:
    """Whether the user has given this option, with whatever value."""
    return option.partition("=")[0] in {flag.partition("=")[0] for flag in flags}


def _flags(nsys: Nsys, asked: argparse.Namespace) -> list[str]:
    """The user's own flags, and ours. Raises ProfilerError for one that this nsys does not know."""
    flags = list(asked.nsys_arg)
    # its secrets would be in every report; which rank a report is of, the run directory says
    if not _has(flags, _DISCARD) and nsys.offers("profile", _DISCARD):
        flags.append(_DISCARD)
    if asked.pytorch and asked.pytorch != "emit-nvtx":
        if not nsys.offers("profile", "--pytorch"):
            raise ProfilerError(
                f"nsys {nsys.version} has no --pytorch",
                "use --pytorch emit-nvtx, which torch itself provides, or a newer nsys",
            )
        flags.append(f"--pytorch={asked.pytorch}")
    for flag in flags:
        if flag.startswith("--") and not nsys.offers("profile", flag):
            raise ProfilerError(
                f"nsys {nsys.version} has no flag {flag.split('=', 1)[0]}",
                f"it was given with --nsys-arg; see: {nsys.path} profile --help",
            )
    return flags
