"""What the kernel says: of its clocks, and of who may sample the CPU."""

from __future__ import annotations

from pathlib import Path

from clusterprof.agent.contracts import clocks
from clusterprof.doctor.check import OK, WARN, Check

_CLOCKSOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
#: Read without a call into the kernel, in some 20 ns.
_FAST = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase"}


def clock_source() -> Check:
    """What a reading of the clock costs: nsys takes two for each event."""
    try:
        source = _CLOCKSOURCE.read_text(encoding="ascii").strip()
    except OSError as error:
        return Check("clock source", WARN, f"not told: {error.strerror}")
    if source in _FAST:
        return Check("clock source", OK, source)
    advice = "each reading costs microseconds: why did the kernel give up tsc? (dmesg)"
    return Check("clock source", WARN, source, advice)


def clock_error() -> Check:
    """How far the wall clock may be from true time, by the kernel's own account."""
    state = clocks.kernel()
    if state is None:
        return Check("clock", WARN, "the kernel does not tell its error")
    if not state["synchronised"]:
        return Check("clock", WARN, "not synchronised",
                     "start chronyd or ntpd; the ranks' clocks are aligned by their collectives "
                     "all the same")  # fmt: skip
    error_ns = int(state["maxerror_ns"])
    return Check("clock", OK, f"synchronised, within {error_ns / 1e6:.3g} ms of true time", "",
                 -float(error_ns))  # fmt: skip


def cpu_sampling() -> Check:
    """Whether --cpu-sampling would see anything; nothing else needs it."""
    try:
        level = int(_PARANOID.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Check("cpu sampling", WARN, "no perf events here", "only --cpu-sampling needs them")
    found = f"perf_event_paranoid is {level}"
    if level <= 2:
        return Check("cpu sampling", OK, found)
    return Check("cpu sampling", WARN, found,
                 "only --cpu-sampling needs it: sysctl kernel.perf_event_paranoid=2")  # fmt: skip
