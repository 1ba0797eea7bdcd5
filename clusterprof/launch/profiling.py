"""The profilers: which one captures, what the ranks must know, and where reports become tables.

What a version of nsys understands is read off its own `--help`, never assumed from its number.
Sources: the nsys user guide (docs.nvidia.com/nsight-systems/UserGuide), and measurements
that `docs/nsys.md` gives. torch.profiler (Kineto) is the default where there is no nsys.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import clusterprof
from clusterprof.agent.contracts.plan import MOST_START_S, NsysPlan, Reduction
from clusterprof.agent.nsys import START_VARIABLE, Nsys
from clusterprof.arguments import path
from clusterprof.errors import ProfilerError, UsageError
from clusterprof.installed_nsys import installed
from clusterprof.results import NODES

PROFILERS = ("auto", "nsys", "torch", "none")
#: `--pytorch`
PYTORCH = ("autograd-nvtx", "autograd-shapes-nvtx", "emit-nvtx")
#: What is traced on a rank with a GPU and on one without. The former without OS runtime tracing: it
#: costs 4 to 5 s at the window's end on a GPU rank.
TRACES = {"gpu": "cuda,nvtx", "cpu": "nvtx,osrt"}

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

    @property
    def path(self) -> str | None:
        """The nsys that captures; None where none does."""
        return self.nsys.path if self.nsys else None

    def command_lines(self) -> list[str]:
        """What runs around the program in each profiled rank: nsys' command lines."""
        if self.nsys is None:
            return []
        trace = self.nsys.trace["gpu"]
        return [
            shlex.join(word.replace("{trace}", trace) for word in (self.nsys.path, *words))
            for words in (getattr(self.nsys, verb) for verb in self.nsys.verbs(self.window_by))
        ]


class EarlierRun(Protocol):
    """A merged run of the same program: see `clusterprof.launch.planning`."""

    def was_launch_bound(self) -> bool:
        """Whether nsys slows the program."""

    def had_graphs(self) -> bool:
        """Whether nsys has to record what is in CUDA graphs."""


def choose(asked: argparse.Namespace, earlier: EarlierRun | None = None) -> CapturePlan:
    """The profiler that `--profiler` names; with `auto` nsys where it is, else torch.profiler.

    Where an `earlier` run of the program was launch-bound `auto` leaves nsys, whose cost for each
    launch stays until the program ends, to those who ask for what it alone can do. Where it had
    CUDA graphs nsys records what is in them. Raises ProfilerError where the profiler cannot be had,
    UsageError for an unknown one, and for options that only nsys has.
    """
    wanted = asked.profiler
    if wanted not in PROFILERS:
        raise UsageError(
            f"--profiler {wanted} does not exist", f"choose one of {', '.join(PROFILERS)}"
        )
    because = f"--profiler {wanted}"
    remarks: list[str] = []
    if wanted == "nsys":
        return _with_nsys(asked, because, earlier)
    for_nsys = [name for name in _FOR_NSYS if getattr(asked, name)]
    if wanted == "auto":
        try:
            capture = _with_nsys(asked, "auto: nsys is installed here", earlier)
        except ProfilerError as error:
            if {*for_nsys} - {"cpu_sampling"}:
                raise  # the others require nsys
            because = f"auto: {error.what}"
        else:
            needs = (for_nsys, asked.window_by == "cuda", asked.arm not in (None, "none"))
            if any(needs) or earlier is None or not earlier.was_launch_bound():
                return capture
            because = f"auto: launch-bound in {earlier}"
            remarks.append(
                f"captured by torch.profiler, since {earlier}, the last merged run of this "
                "program, was launch-bound: nsys would slow it until it ends (--profiler nsys "
                "takes it all the same)"
            )
    # nothing has to be found: the program brings its own torch
    capture = CapturePlan("torch", "the program's own", because, tuple(remarks))
    if wanted == "none":
        capture = CapturePlan("none", "", "no rank is profiled")
    if for_nsys:
        raise UsageError(
            f"--{for_nsys[0].replace('_', '-')} is for nsys, and the profiler is {capture.name}",
            "leave it out, or choose --profiler nsys",
        )
    return capture


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


def _with_nsys(asked: argparse.Namespace, because: str, earlier: EarlierRun | None) -> CapturePlan:
    """The nsys part of a launch. Raises ProfilerError (missing, too old, refuses a flag)."""
    nsys = find(path(asked.nsys) if asked.nsys else None)
    flags = _flags(nsys, asked)
    start_s, start_remark = _seconds_to_start()
    remarks = [start_remark]
    if _can_add(nsys, flags, NODES) and earlier is not None and earlier.had_graphs():
        flags.append(NODES)
        remarks.append(
            f"nsys records what is in CUDA graphs ({NODES}), since {earlier}, the last merged "
            "run of this program, had some"
        )
    if asked.cpu_sampling:
        remarks.append(
            "CPU sampling takes CPU time on every profiled rank and slows the end of the window; "
            "it needs kernel.perf_event_paranoid <= 2"
        )
    for_start = [flag for flag in flags if flag.startswith("--") and nsys.offers("start", flag)]
    for_launch = [flag for flag in flags if flag not in for_start]
    sampling = "process-tree" if asked.cpu_sampling else "none"
    collecting = [f"--sample={sampling}", f"--cpuctxsw={sampling}", "--force-overwrite=true"]
    commands = NsysPlan(
        nsys.path, nsys.version, nsys.importer,
        {kind: nsys.trace("profile", asked.trace or trace) for kind, trace in TRACES.items()},
        # Every other --capture-range-end ends the program at the window's end, or the launcher's
        # view of it: see docs/nsys.md.
        profile=["profile", "--trace={trace}", *collecting, "--capture-range=cudaProfilerApi",
                 "--capture-range-end=stop", "--session-new={session}", "--output={output}",
                 *flags],
        launch=["launch", "--session-new={session}", "--trace={trace}", *for_launch],
        start=["start", "--session={session}", *collecting, "--output={output}", *for_start],
        stop=["stop", "--session={session}"],
        start_s=start_s,
    )  # fmt: skip
    return CapturePlan(
        "nsys", nsys.version, because, tuple(filter(None, remarks)), commands,
        # A session by default: nsys' own stop then runs beside the training (docs/nsys.md).
        window_by="cuda" if asked.window_by == "cuda" else "session",
        emit_nvtx=asked.pytorch == "emit-nvtx",
    )  # fmt: skip


def _seconds_to_start() -> tuple[int, str]:
    """The seconds that the user's environment gives nsys to start, or a remark on what it says."""
    given = os.environ.get(START_VARIABLE, "")
    if re.fullmatch("[0-9]{1,3}", given) and 1 <= int(given) <= MOST_START_S:
        return int(given), ""
    wrong = f"{START_VARIABLE}={given[:40]!r} is not a number of seconds from 1 to {MOST_START_S}"
    default_s: int = NsysPlan._field_defaults["start_s"]
    return default_s, f"{wrong}: nsys has {default_s} s to start a program" if given else ""


def _can_add(nsys: Nsys, flags: Sequence[str], option: str) -> bool:
    """Whether nsys knows this option, and the user has not given it, with whatever value."""
    given = {flag.partition("=")[0] for flag in flags}
    return option.partition("=")[0] not in given and nsys.offers("profile", option)


def _flags(nsys: Nsys, asked: argparse.Namespace) -> list[str]:
    """The user's own flags, and ours. Raises ProfilerError for what this nsys does not know."""
    see = f"see: {nsys.path} profile --help"
    for name in asked.trace.split(",") if asked.trace is not None else ():
        if not nsys.offers("profile", name):
            hint = " (it traces NCCL with nvtx)" if name == "nccl" else ""
            raise ProfilerError(f"nsys {nsys.version} has no --trace={name}{hint}", see)
    flags = list(asked.nsys_arg)
    # its secrets would be in every report; which rank a report is of, the run directory says
    if _can_add(nsys, flags, _DISCARD):
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
            what = f"nsys {nsys.version} has no flag {flag.split('=', 1)[0]}"
            raise ProfilerError(what, f"it was given with --nsys-arg; {see}")
    return flags


# -- where reports become tables: on the nodes, or where they are merged -------------------------

#: `--reduce`
REDUCE = ("auto", "node", "now", "none")
#: `--keep-reports`
KEEP_REPORTS = ("gather", "node", "none")
#: with more profiled ranks, merging reads for longer than one waits for at a terminal
MANY_RANKS = 8


def reducing_command() -> tuple[str, ...]:
    """What makes the tables of a report: this Python, where a node has it under the same path."""
    # The working directory is not looked for modules, nor PYTHONPATH: the job's.
    start = (
        "import sys; sys.path[0] = sys.argv.pop(1); "
        "from clusterprof import priority; priority.end_with_parent(); priority.step_aside(); "
        "from clusterprof.ingest.reduce import main; sys.exit(main(sys.argv[1:]))"
    )
    home = str(Path(clusterprof.__file__).resolve().parents[1])
    # -B: on a full disk half a module would be left for the next start
    return (sys.executable, "-EB", "-c", start, home)


def reduction_for(when: str, keep_reports: str, profiler: str) -> Reduction | None:
    """What is done on the nodes for these options; None for nothing. Raises UsageError.

    With `auto` each rank decides, in each window: it knows how many ranks there are.
    """
    if keep_reports != "gather" and when == "none" and profiler != "none":
        raise UsageError(
            f"--keep-reports {keep_reports} needs the reports' tables, which --reduce none leaves "
            "to the merge",
            "leave out --reduce none, or keep the reports: --keep-reports gather",
        )
    if keep_reports == "node" and profiler == "torch":
        raise UsageError(
            "--keep-reports node is for nsys: torch.profiler's traces are packed into the run "
            "directory",
            "use --keep-reports gather or none",
        )
    if "none" in (when, profiler):
        return None
    beyond = MANY_RANKS if when == "auto" and keep_reports == "gather" else 0
    return Reduction("node" if when == "auto" else when, keep_reports, reducing_command(), beyond)


def reduction_text(reduction: Reduction | None, expected: tuple[int, ...] | None) -> str:
    """For --dry-run; "" where nothing is done on the nodes of the ranks to profile.

    `expected` are these; None where only the ranks know.
    """
    if reduction is None:
        return ""
    beyond = ""
    if reduction.beyond and expected is None:
        beyond = f"of more than {reduction.beyond} ranks, "
    elif reduction.beyond and len(expected or ()) <= reduction.beyond:
        return ""
    begins = {"node": "once its program has ended", "now": "once its window was captured"}
    reports = {
        "gather": "the reports are gathered too",
        "node": "the reports stay on their nodes",
        "none": "each report is removed then",
    }
    return f"{beyond}on each node, {begins[reduction.when]}; {reports[reduction.keep_reports]}"
