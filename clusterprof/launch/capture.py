"""The profilers: which one captures, and everything that the ranks must know to use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clusterprof.errors import ProfilerError, UsageError

PROFILERS = ("auto", "nsys", "torch")


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
    #: what the agent reads (JSON)
    agent: dict[str, Any] = field(default_factory=dict)
    #: what the user should know before it runs
    remarks: tuple[str, ...] = ()

    def shown(self) -> list[list[str]]:
        """The profiler's own command lines in a chosen rank, as argv lists."""
        nsys = self.agent.get("nsys")
        if not nsys:
            return []
        by_cuda = self.agent["window_by"] == "cuda"
        verbs = ["profile"] if by_cuda else ["launch", "start", "stop"]
        trace = nsys["trace"]["gpu"]
        return [
            [nsys["path"], *(word.replace("{trace}", trace) for word in nsys[verb])]
            for verb in verbs
        ]


class Profiler(Protocol):
    """One module per profiler: `nsys`, `torch`."""

    def plan(self, request: CaptureRequest, because: str) -> CapturePlan:
        """Turn a request into what the ranks need. Raises ProfilerError where it cannot be had."""


def choose(request: CaptureRequest) -> CapturePlan:
    """The profiler that `--profiler` names; with `auto` nsys where it is, else torch.profiler.

    Raises ProfilerError where the named one cannot be had, UsageError for an unknown name.
    """
    from clusterprof.launch import nsys_capture as nsys
    from clusterprof.launch import torch_capture

    if request.profiler == "nsys":
        return nsys.plan(request, "--profiler nsys")
    if request.profiler == "torch":
        return torch_capture.plan(request, "--profiler torch")
    if request.profiler != "auto":
        raise UsageError(
            f"--profiler {request.profiler}: there is no such profiler",
            f"choose one of {', '.join(PROFILERS)}",
        )
    try:
        return nsys.plan(request, "auto: nsys is installed here")
    except ProfilerError as error:
        if request.nsys is not None or request.nsys_args or request.trace or request.pytorch:
            raise  # these say that nsys is meant
        return torch_capture.plan(request, f"auto: {error.what}")
