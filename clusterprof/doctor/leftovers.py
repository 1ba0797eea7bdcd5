"""Other profilers on this host, and what killed runs have left, with the command that clears it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from clusterprof.agent.contracts import paths, processes
from clusterprof.doctor.table import OK, WARN, Check
from clusterprof.words import counted

#: Programs that may hold CUPTI or the GPU's counters.
_PROFILERS = {
    "nv-hostengine": "DCGM", "dcgm-exporter": "DCGM", "dcgmproftester": "DCGM",
    "ncu": "Nsight Compute", "nv-nsight-cu-cli": "Nsight Compute", "nvprof": "nvprof",
    "nsys": "nsys",
}  # fmt: skip
_DAY_S = 86400.0
#: Where nsys and the program, and NCCL, talk to each other.
SHARED_MEMORY = "/dev/shm"  # noqa: S108
#: Where nsys puts some files whatever TMPDIR says.
_FIXED = Path("/tmp")  # noqa: S108
#: Settings that nsys writes for each program and never removes.
_SETTINGS = "injection_config_*"


class Process(NamedTuple):
    """A process that has a command line."""

    pid: int
    parent: int
    argv: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program's own name, without its folder."""
        return self.argv[0].rpartition("/")[2]

    def values(self, option: str) -> list[str]:
        """What it was given as `option=value`."""
        return [w.removeprefix(f"{option}=") for w in self.argv if w.startswith(f"{option}=")]


def process_table() -> list[Process]:
    """All processes that are visible here; kernel threads and zombies have no command line."""
    table = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            argv = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            parent = processes.parent(int(entry.name))
            if argv != [b""] and parent is not None:
                table.append(Process(int(entry.name), parent, tuple(map(os.fsdecode, argv))))
    return table


def abandoned(table: Sequence[Process]) -> list[Process]:
    """nsys' daemons without a session: each may keep a core busy.

    One is a child of process 1, or of another process that adopts orphans; a session of ours
    is then recognised by its name, which nsys' own command line has as well.
    """
    held = {name for process in table for name in process.values("--session-new")}
    daemons = []
    for process in table:
        if process.name == "nsys" and "--start-agent" in process.argv:
            names = process.values("--session-name")
            ours = [name for name in names if name.startswith("clusterprof-")]
            if ours[0] not in held if ours else process.parent == 1:
                daemons.append(process)
    return daemons


def other_profilers(table: Sequence[Process]) -> Check:
    """Programs that use CUPTI or the counters: two of them exclude each other."""
    left = {process.pid for process in abandoned(table)}
    running: dict[str, list[int]] = {}
    for process in sorted(table):
        kind = _PROFILERS.get(process.name)
        asked = process.argv[1:2] == ("--version",) or "--help" in process.argv  # by another check
        if kind and not asked and process.pid not in left:
            running.setdefault(kind, []).append(process.pid)
    if not running:
        return Check("other profilers", OK, "none is running")
    programs = [f"{kind} (pid {_some(pids, ', ')})" for kind, pids in sorted(running.items())]
    advice = []
    if "DCGM" in running:
        advice.append("if reports have no kernels, pause DCGM's profiling: dcgmi profile --pause")
    if set(running) - {"DCGM"}:
        advice.append("a process can have one profiler only: end the other one first")
    return Check("other profilers", WARN, "; ".join(programs), "; ".join(advice))


def _some(items: Sequence[object], between: str = " ") -> str:
    """The first four, as words of a shell."""
    shown = [shlex.quote(str(item)) for item in items[:4]]
    return between.join([*shown, "..."] if len(items) > 4 else shown)


def leftovers(table: Sequence[Process]) -> Check:
    """Daemons, folders, reports that were not collected, lists of sessions, files of nsys."""
    pids = sorted(process.pid for process in abandoned(table))
    dead = _dead_folders()
    reports = (paths.REPORT, paths.RAW)
    kept = [path for path in dead if any((path / name).is_file() for name in reports)]
    rest = [path for path in dead if path not in kept]
    memory = _memory(table)
    settings = [path for path in _FIXED.glob(_SETTINGS) if _is_mine(path, _DAY_S)]
    matching = f"-maxdepth 1 -name '{_SETTINGS}' -user $(id -u) -mtime +0"
    kinds: tuple[tuple[Sequence[object], str, str, str], ...] = (  # and what clears them
        (pids, "nsys daemon", f"(pid {_some(pids, ', ')})", f"kill {' '.join(map(str, pids))}"),
        (kept, "report", f"not yet collected, in {_some(kept)}",
         "copy each to its rank's folder in the run directory, then clusterprof collect RUN"),
        (rest, "temporary folder", "of ranks that were killed", f"rm -r {_some(rest)}"),
        (memory, "file", f"of an nsys that has ended, in {SHARED_MEMORY}", f"rm {_some(memory)}"),
        (settings, "old file", f"{_SETTINGS} of nsys in {_FIXED}",
         f"find {_FIXED} {matching} -delete"),
    )  # fmt: skip
    left = {
        f"{counted(len(items), noun)} {which}": command
        for items, noun, which, command in kinds
        if items
    }
    if not left:
        return Check("leftovers", OK, "none")
    return Check("leftovers", WARN, "; ".join(left), "; ".join(left.values()))


def _memory(table: Sequence[Process]) -> list[Path]:
    """Memory of daemons and programs that have ended; nsys' list of sessions when none runs."""
    memory = Path(SHARED_MEMORY)
    numbered = [*memory.glob("quadd-agent-instance-*"), *memory.glob("sem.nsys_sem_*")]
    pids = {str(process.pid) for process in table}
    dead = [path for path in numbered if re.split("[-_]", path.name)[-1] not in pids]
    if not any(process.name == "nsys" for process in table):
        dead += [*memory.glob("NSys-*"), *memory.glob("quadd-create-agent-*")]
    unused = []
    for path in dead:
        with contextlib.suppress(OSError):
            if processes.is_unused(str(path)):  # in a container /proc does not show who has it open
                unused.append(path)
    return sorted(unused)


def _dead_folders() -> list[Path]:
    """Folders of ours in which no process answers on a socket; without sockets after a day."""
    homes = dict.fromkeys((Path(tempfile.gettempdir()), _FIXED))
    dead = []
    for folder in (path for home in homes for path in sorted(home.glob("clusterprof-*"))):
        if _is_mine(folder) and folder.is_dir() and not folder.is_symlink():
            sockets = [path for path in folder.glob("socket*") if path.is_socket()]
            if not any(map(_answers, sockets)) if sockets else _is_mine(folder, _DAY_S):
                dead.append(folder)
    return dead


def _answers(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as asking:
            asking.setblocking(False)
            try:
                asking.connect(os.fspath(path))
            except ConnectionRefusedError:
                return False
            except OSError:  # the other kind of socket, too long a name, or too busy: it is used
                continue
    return True


def _is_mine(path: Path, least_age_s: float = -math.inf) -> bool:
    """Whether it is this user's, and has not been written to for so long."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > least_age_s
