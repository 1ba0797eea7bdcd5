"""Who else is at the GPU's profiling interface, and what earlier runs have left."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clusterprof.doctor.check import OK, WARN, Check
from clusterprof.doctor.places import SHARED_MEMORY

#: Programs that may hold CUPTI or the GPU's counters.
_PROFILERS = {
    "nv-hostengine": "DCGM", "dcgm-exporter": "DCGM", "dcgmproftester": "DCGM",
    "ncu": "Nsight Compute", "nv-nsight-cu-cli": "Nsight Compute", "nvprof": "nvprof",
    "nsys": "nsys",
}  # fmt: skip
_DAY_S = 86400.0


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
    """nsys' daemons whose session nobody holds any more: each keeps a core busy."""
    return [
        each
        for each in processes
        if each.name == "nsys" and "--start-agent" in each.argv and each.parent == 1
    ]


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
    found = "; ".join(f"{kind} (pid {_pids(pids)})" for kind, pids in sorted(seen.items()))
    advice = []
    if "DCGM" in seen:
        advice.append(
            "where reports have no kernels, pause DCGM's profiling: dcgmi profmodule --pause"
        )
    if set(seen) - {"DCGM"}:
        advice.append("one process can have one profiler only: let the other end first")
    return Check("other profilers", WARN, found, "; ".join(advice))


def leftovers(processes: list[Process]) -> Check:
    """What runs that were killed have left on this host."""
    found, advice = [], []
    if agents := abandoned(processes):
        pids = [each.pid for each in agents]
        found.append(f"{len(agents)} nsys daemons (pid {_pids(pids)})")
        advice.append(f"kill {' '.join(map(str, pids))}")
    old = [path for path in _ours() if time.time() - path.stat().st_mtime > _DAY_S]
    if old:
        folder = tempfile.gettempdir()
        found.append(f"{len(old)} folders clusterprof-* in {folder}, older than a day")
        advice.append(f"rm -r {' '.join(map(str, old[:4]))}{' ...' if len(old) > 4 else ''}")
    if not any(each.name == "nsys" for each in processes):
        memory = [str(path) for path in Path(SHARED_MEMORY).glob("NSys-*") if _is_mine(path)]
        if memory:
            found.append(f"{', '.join(memory)} of an nsys that was killed")
            advice.append(f"rm {' '.join(memory)}")
    if not found:
        return Check("leftovers", OK, "none")
    return Check("leftovers", WARN, "; ".join(found), "; ".join(advice))


def _ours() -> list[Path]:
    """Our own temporary folders that can still be looked at."""
    return [
        path
        for path in Path(tempfile.gettempdir()).glob("clusterprof-*")
        if path.is_dir() and _is_mine(path)
    ]


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _pids(pids: list[int]) -> str:
    shown = ", ".join(map(str, sorted(pids)[:4]))
    return shown + (", ..." if len(pids) > 4 else "")
