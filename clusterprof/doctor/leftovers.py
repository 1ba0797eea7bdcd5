"""Other profilers on this host, and what killed runs have left, with the command that clears it."""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterprof.agent.contracts import paths
from clusterprof.agent.contracts.processes import is_unused
from clusterprof.agent.contracts.words import counted
from clusterprof.doctor.folders import SHARED_MEMORY
from clusterprof.doctor.table import OK, WARN, Check

#: Programs that may hold CUPTI or the GPU's counters.
_PROFILERS = {
    "nv-hostengine": "DCGM", "dcgm-exporter": "DCGM", "dcgmproftester": "DCGM",
    "ncu": "Nsight Compute", "nv-nsight-cu-cli": "Nsight Compute", "nvprof": "nvprof",
    "nsys": "nsys",
}  # fmt: skip
_DAY_S = 86400.0
_REPORTS = (paths.REPORT, paths.RAW)
#: Where nsys puts some files whatever TMPDIR says.
_FIXED = Path("/tmp")  # noqa: S108

#: What was found, and the recommendation.
Found = tuple[str, str]


# -- processes -----------------------------------------------------------------------------------


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


def process_table() -> list[Process]:
    """All processes that are visible here; kernel threads and zombies have no command line."""
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
    """nsys' daemons without a session: each may keep a core busy.

    One is a child of process 1, or of another process that adopts orphans; a session of ours
    is then recognised by its name, which nsys' own command line has as well.
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
    running: dict[str, list[int]] = {}
    for each in processes:
        kind = _PROFILERS.get(each.name)
        asked = each.argv[1:2] == ("--version",) or "--help" in each.argv  # by another check
        if kind and not asked and each.pid not in left:
            running.setdefault(kind, []).append(each.pid)
    if not running:
        return Check("other profilers", OK, "none is running")
    found = "; ".join(f"{kind} (pid {_some_pids(pids)})" for kind, pids in sorted(running.items()))
    advice = []
    if "DCGM" in running:
        advice.append("if reports have no kernels, pause DCGM's profiling: dcgmi profile --pause")
    if set(running) - {"DCGM"}:
        advice.append("a process can have one profiler only: end the other one first")
    return Check("other profilers", WARN, found, "; ".join(advice))


def _some_pids(pids: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(pids)[:4])) + (", ..." if len(pids) > 4 else "")


# -- what runs have left -------------------------------------------------------------------------


def leftovers(processes: Sequence[Process]) -> Check:
    """Daemons, folders, reports that were not collected, lists of sessions, files of nsys."""
    looks = (_daemons(processes), *_folders(), _sessions(processes), _settings())
    found = [each for each in looks if each]
    if not found:
        return Check("leftovers", OK, "none")
    what, advice = ("; ".join(texts) for texts in zip(*found, strict=True))
    return Check("leftovers", WARN, what, advice)


def _daemons(processes: Sequence[Process]) -> Found | None:
    pids = [each.pid for each in abandoned(processes)]
    if not pids:
        return None
    return (
        f"{counted(len(pids), 'nsys daemon')} (pid {_some_pids(pids)})",
        f"kill {' '.join(map(str, pids))}",
    )


def _folders() -> list[Found]:
    """Temporary folders of ranks whose guard is gone: with a report in it, or without."""
    dead = [path for path in _our_folders() if _is_dead(path)]
    kept = [path for path in dead if any((path / name).is_file() for name in _REPORTS)]
    rest = [path for path in dead if path not in kept]
    found = []
    if kept:
        found.append((
            f"{counted(len(kept), 'report')} not yet collected, in {_some(kept)}",
            "copy each to its rank's folder in the run directory, then clusterprof collect RUN",
        ))  # fmt: skip
    if rest:
        found.append((
            f"{counted(len(rest), 'temporary folder')} of ranks that were killed",
            f"rm -r {_some(rest)}",
        ))  # fmt: skip
    return found


def _sessions(processes: Sequence[Process]) -> Found | None:
    """Memory of daemons and programs that have ended; nsys' list of sessions when none runs."""
    memory = Path(SHARED_MEMORY)
    numbered = [*memory.glob("quadd-agent-instance-*"), *memory.glob("sem.nsys_sem_*")]
    pids = {each.pid for each in processes}
    dead = [path for path in numbered if _number(path) not in pids]
    if not any(each.name == "nsys" for each in processes):
        dead += [*memory.glob("NSys-*"), *memory.glob("quadd-create-agent-*")]
    mine = sorted(path for path in dead if _is_unused(path))
    if not mine:
        return None
    return f"{counted(len(mine), 'file')} of an nsys that has ended, in {memory}", (
        f"rm {_some(mine)}"
    )


def _number(path: Path) -> int:
    digits = path.name.replace("_", "-").rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _settings() -> Found | None:
    """Settings that nsys writes for each program and never removes."""
    old = [path for path in _FIXED.glob("injection_config_*") if _is_mine(path) and _is_old(path)]
    if not old:
        return None
    return f"{counted(len(old), 'old file')} injection_config_* of nsys in {_FIXED}", (
        f"find {_FIXED} -maxdepth 1 -name 'injection_config_*' -user $(id -u) -mtime +0 -delete"
    )


def _our_folders() -> list[Path]:
    """Our own temporary folders, and no other user's."""
    places = dict.fromkeys((Path(tempfile.gettempdir()), _FIXED))
    return [
        path
        for place in places
        for path in sorted(place.glob("clusterprof-*"))
        if path.is_dir() and not path.is_symlink() and _is_mine(path)
    ]


def _is_dead(folder: Path) -> bool:
    """Whether no process answers on the sockets in it; a folder without is dead after a day."""
    sockets = [path for path in folder.glob("socket*") if path.is_socket()]
    if not sockets:
        return _is_old(folder)
    return not any(_answers(path) for path in sockets)


def _answers(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as asking:
            asking.setblocking(False)
            try:
                asking.connect(os.fspath(path))
            except ConnectionRefusedError:
                return False
            except BlockingIOError:  # there is a process, and it is busy
                return True
            except OSError:  # the other kind of socket, or a name that is too long: take it as used
                continue
            return True
    return True


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _DAY_S
    except OSError:
        return False


def _is_unused(path: Path) -> bool:
    try:
        return is_unused(str(path))  # in a container /proc does not show who may have it open
    except OSError:
        return False


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _some(paths: Sequence[Path]) -> str:
    shown = shlex.join(map(str, paths[:4]))
    return shown + (" ..." if len(paths) > 4 else "")
