"""Who else is at the GPU's profiling interface, and which of nsys' daemons nobody needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clusterprof.doctor.check import OK, WARN, Check

#: Programs that may hold CUPTI or the GPU's counters.
_PROFILERS = {
    "nv-hostengine": "DCGM", "dcgm-exporter": "DCGM", "dcgmproftester": "DCGM",
    "ncu": "Nsight Compute", "nv-nsight-cu-cli": "Nsight Compute", "nvprof": "nvprof",
    "nsys": "nsys",
}  # fmt: skip


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    argv: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program's own name, without its folder."""
        return self.argv[0].rpartition("/")[2] if self.argv else ""


def table() -> list[Process]:
    """All processes that this host shows us; kernel threads and zombies have no command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            argv = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if argv != [b""] and len(fields) > 1:
            words = tuple(map(os.fsdecode, argv))
            found.append(Process(int(entry.name), int(fields[1]), words))
    return found


def abandoned(processes: Iterable[Process]) -> list[Process]:
    """nsys' daemons whose session nobody holds any more: each may keep a core busy.

    One is a child of process 1, or of whoever adopts orphans where that is somebody else; a
    session of ours is then told by its name, which nsys' own command line has as well.
    """
    processes = list(processes)
    held = {
        word.partition("=")[2]
        for each in processes
        for word in each.argv
        if word.startswith("--session-new=")
    }
    return [each for each in processes if _is_daemon(each) and _alone(each, held)]


def _is_daemon(process: Process) -> bool:
    return process.name == "nsys" and "--start-agent" in process.argv


def _alone(daemon: Process, held: set[str]) -> bool:
    names = [word.partition("=")[2] for word in daemon.argv if word.startswith("--session-name=")]
    ours = [name for name in names if name.startswith("clusterprof-")]
    return daemon.parent == 1 if not ours else ours[0] not in held


def other_profilers(processes: list[Process]) -> Check:
    """Programs that use CUPTI or the counters: two of them exclude each other."""
    left = {each.pid for each in abandoned(processes)}
    seen: dict[str, list[int]] = {}
    for each in processes:
        kind = _PROFILERS.get(each.name)
        asked = each.argv[1:2] == ("--version",) or "--help" in each.argv  # by the next check
        if kind and not asked and each.pid not in left:
            seen.setdefault(kind, []).append(each.pid)
    if not seen:
        return Check("other profilers", OK, "none is running")
    found = "; ".join(f"{kind} (pid {pids_text(pids)})" for kind, pids in sorted(seen.items()))
    advice = []
    if "DCGM" in seen:
        advice.append(
            "where reports have no kernels, pause DCGM's profiling: dcgmi profile --pause"
        )
    if set(seen) - {"DCGM"}:
        advice.append("one process can have one profiler only: let the other end first")
    return Check("other profilers", WARN, found, "; ".join(advice))


def pids_text(pids: list[int]) -> str:
    """The first few of them."""
    shown = ", ".join(map(str, sorted(pids)[:4]))
    return shown + (", ..." if len(pids) > 4 else "")
