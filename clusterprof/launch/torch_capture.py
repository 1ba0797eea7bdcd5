"""torch.profiler (Kineto): the embedded default where there is no nsys. The agent runs it."""

from __future__ import annotations

from clusterprof.errors import UsageError
from clusterprof.launch.capture import CapturePlan, CaptureRequest


def plan(request: CaptureRequest, because: str) -> CapturePlan:
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
    return CapturePlan("torch", "the program's own", because, {"profiler": "torch"})
