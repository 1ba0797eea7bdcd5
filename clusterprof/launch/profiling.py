"""The profilers: which one captures, and everything that the ranks must know to use it.

What a version of nsys understands is read off its own `--help`, never assumed from its number.
Sources: the nsys user guide (docs.nvidia.com/nsight-systems/UserGuide), and measurements
that `docs/nsys.md` gives. torch.profiler (Kineto) is the default where there is no nsys.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from clusterprof.agent.contracts.plan import NsysPlan
from clusterprof.agent.nsys import MINIMUM
from clusterprof.errors import ProfilerError, UsageError
from clusterprof.nsys_installed import importer, installed

PROFILERS = ("auto", "nsys", "torch")
#: `--pytorch`
PYTORCH = ("autograd-nvtx", "autograd-shapes-nvtx", "emit-nvtx")
#: Without OS runtime tracing: it costs 4 to 5 s at the window's end on a GPU rank.
TRACE_CUDA = "cuda,nvtx"
TRACE_CPU = "nvtx,osrt"

_INSTALL = (
    "install Nsight Systems (package nsight-systems; module load nsight-systems on many clusters)",
    "or name one with --nsys PATH, or capture with --profiler torch",
)


@dataclass(frozen=True)
class CaptureRequest:
    """What the user asked of the profiler."""

    profiler: str = "auto"
    #: `--nsys`: an nsys other than the one that would be found
    nsys: Path | None = None
    trace: str | None = None
    nsys_args: tuple[str, ...] = ()
    pytorch: str | None = None
    cpu_sampling: bool = False
    #: how nsys' window opens: session (nsys start), cuda (cudaProfilerStart), auto (session)
    window_by: str = "auto"


@dataclass(frozen=True)
class CapturePlan:
    """A profiler, ready to be used by the agent in every chosen rank."""

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
        """The profiler's own command lines in a chosen rank, as argv lists."""
        if self.nsys is None:
            return []
        return [
            [self.nsys.path, *(word.replace("{trace}", self.nsys.trace["gpu"]) for word in words)]
            for words in (getattr(self.nsys, verb) for verb in self.nsys.verbs(self.window_by))
        ]


def choose(request: CaptureRequest) -> CapturePlan:
    """The profiler that `--profiler` names; with `auto` nsys where it is, else torch.profiler.

    Raises ProfilerError where the named one cannot be had, UsageError for an unknown name.
    """
    if request.profiler == "nsys":
        return _with_nsys(request, "--profiler nsys")
    if request.profiler == "torch":
        return _with_torch(request, "--profiler torch")
    if request.profiler != "auto":
        raise UsageError(
            f"--profiler {request.profiler}: there is no such profiler",
            f"choose one of {', '.join(PROFILERS)}",
        )
    try:
        return _with_nsys(request, "auto: nsys is installed here")
    except ProfilerError as error:
        if request.nsys is not None or request.nsys_args or request.trace or request.pytorch:
            raise  # these say that nsys is meant
        return _with_torch(request, f"auto: {error.what}")


@dataclass(frozen=True)
class Nsys:
    """One installed nsys."""

    path: Path
    version: str

    @property
    def release(self) -> tuple[int, int]:
        """Year and number, (2025, 3)."""
        year, number, *_ = self.version.split(".")
        return int(year), int(number)

    @cached_property
    def importer(self) -> Path | None:
        """QdstrmImporter, which Debian's nsys does not find by itself."""
        return importer(self.path)

    def help(self, verb: str) -> str:
        """What `nsys VERB --help` says; "" for a verb that it does not have."""
        return _ask([str(self.path), verb, "--help"])

    def understands(self, verb: str, flag: str) -> bool:
        """Whether `nsys VERB` has this long flag, by its own help."""
        name = re.escape(flag.split("=", 1)[0])
        return re.search(rf"(?<![\w-]){name}(?![\w-])", self.help(verb)) is not None


def _ask(command: list[str]) -> str:
    """Run a question that has no effect; its stdout and stderr, "" where it cannot be run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def find(wanted: Path | None = None) -> Nsys:
    """The nsys named, or on PATH, or where installers put it.

    Raises ProfilerError where there is none, it does not run, or it is too old.
    """
    path = str(wanted) if wanted is not None else installed()
    if path is None:
        raise ProfilerError("nsys is not installed on this host", *_INSTALL)
    answer = _ask([str(path), "--version"])
    match = re.search(r"(\d{4}\.\d+(?:\.\d+)*)", answer)
    if match is None:
        said = answer.strip().split("\n")[0] or "nothing"
        raise ProfilerError(f"{path} is no nsys that runs", f'it said: "{said}"', *_INSTALL)
    nsys = Nsys(Path(path), match[1])
    if nsys.release < MINIMUM:
        raise ProfilerError(
            f"nsys {nsys.version} ({path}) is too old",
            f"clusterprof needs {MINIMUM[0]}.{MINIMUM[1]} or newer",
            *_INSTALL,
        )
    return nsys


def _with_nsys(request: CaptureRequest, because: str) -> CapturePlan:
    """The nsys part of a launch. Raises ProfilerError (missing, too old, refuses a flag)."""
    nsys = find(request.nsys)
    _check_trace(nsys, request.trace)
    sampling = "process-tree" if request.cpu_sampling else "none"
    collecting = [f"--sample={sampling}", f"--cpuctxsw={sampling}", "--force-overwrite=true"]
    for_profile, for_launch, for_start = _extra(nsys, request)
    commands = NsysPlan(
        str(nsys.path),
        nsys.version,
        str(nsys.importer) if nsys.importer else None,
        {"gpu": request.trace or TRACE_CUDA, "cpu": request.trace or TRACE_CPU},
        profile=[
            "profile",
            "--trace={trace}",
            *collecting,
            "--capture-range=cudaProfilerApi",
            # Every other value ends the program at the window's end, or the launcher's
            # view of it: see docs/nsys.md.
            "--capture-range-end=stop",
            "--session-new={session}",
            "--output={output}",
            *for_profile,
        ],
        launch=["launch", "--session-new={session}", "--trace={trace}", *for_launch],
        start=["start", "--session={session}", *collecting, "--output={output}", *for_start],
        stop=["stop", "--session={session}"],
    )
    remarks = []
    if request.cpu_sampling:
        remarks.append(
            "CPU sampling takes CPU time from every chosen rank and slows the end of the window; "
            "it needs kernel.perf_event_paranoid <= 2"
        )
    return CapturePlan(
        "nsys", nsys.version, because, tuple(remarks), commands,
        # A session by default: nsys' own stop then runs beside the training (docs/nsys.md).
        window_by="cuda" if request.window_by == "cuda" else "session",
        emit_nvtx=request.pytorch == "emit-nvtx",
    )  # fmt: skip


def _check_trace(nsys: Nsys, trace: str | None) -> None:
    """Refuse a --trace value that this nsys does not list, before a job is started for nothing."""
    if trace is None:
        return
    offered = nsys.help("profile")
    for name in trace.split(","):
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", offered):
            hint = " (NCCL comes through nvtx there)" if name == "nccl" else ""
            raise ProfilerError(
                f"nsys {nsys.version} has no --trace={name}{hint}",
                f"see: {nsys.path} profile --help",
            )


def _extra(nsys: Nsys, request: CaptureRequest) -> tuple[list[str], list[str], list[str]]:
    """The user's own flags, each for the verbs that understand it: profile, launch, start."""
    flags = list(request.nsys_args)
    if request.pytorch and request.pytorch != "emit-nvtx":
        if not nsys.understands("profile", "--pytorch"):
            raise ProfilerError(
                f"nsys {nsys.version} has no --pytorch",
                "use --pytorch emit-nvtx, which asks torch itself, or a newer nsys",
            )
        flags.append(f"--pytorch={request.pytorch}")
    for flag in flags:
        if flag.startswith("--") and not nsys.understands("profile", flag):
            raise ProfilerError(
                f"nsys {nsys.version} has no flag {flag.split('=', 1)[0]}",
                f"it was given with --nsys-arg; see: {nsys.path} profile --help",
            )
    for_start = [
        flag for flag in flags if flag.startswith("--") and nsys.understands("start", flag)
    ]
    for_launch = [flag for flag in flags if flag not in for_start]
    return flags, for_launch, for_start


def _with_torch(request: CaptureRequest, because: str) -> CapturePlan:
    """Nothing has to be found: the program brings its own torch.

    Raises UsageError for a request that only nsys can meet.
    """
    only_nsys = {
        "--trace": request.trace,
        "--nsys-arg": request.nsys_args,
        "--nsys": request.nsys,
        "--pytorch": request.pytorch,
        "--cpu-sampling": request.cpu_sampling,
    }
    for option, value in only_nsys.items():
        if value:
            raise UsageError(
                f"{option} is nsys' and the profiler is torch",
                "leave it out, or choose --profiler nsys",
            )
    return CapturePlan("torch", "the program's own", because)
