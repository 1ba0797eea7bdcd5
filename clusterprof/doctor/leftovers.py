"""What runs that were killed have left on this host, and the command that clears it."""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from clusterprof.agent.contracts.processes import is_unused
from clusterprof.doctor.check import OK, WARN, Check
from clusterprof.doctor.other_profilers import Process, abandoned, pids_text
from clusterprof.doctor.places import SHARED_MEMORY

_DAY_S = 86400.0
_RAW = ("report.nsys-rep", "report.qdstrm")
#: Where nsys puts some files whatever TMPDIR says.
_FIXED = Path("/tmp")  # noqa: S108


def leftovers(processes: Sequence[Process]) -> Check:
    """Daemons, folders, reports that did not come home, lists of sessions, files of nsys."""
    looks = (_daemons(processes), *_folders(), _sessions(processes), _settings())
    seen = [each for each in looks if each]
    if not seen:
        return Check("leftovers", OK, "none")
    return Check(
        "leftovers",
        WARN,
        "; ".join(found for found, _ in seen),
        "; ".join(todo for _, todo in seen),
    )


#: What was found, and what to do about it.
Found = tuple[str, str]


def _daemons(processes: Sequence[Process]) -> Found | None:
    pids = [each.pid for each in abandoned(processes)]
    if not pids:
        return None
    return f"{len(pids)} nsys daemons (pid {pids_text(pids)})", f"kill {' '.join(map(str, pids))}"


def _folders() -> list[Found]:
    """Private folders of ranks whose guard is gone: with a report that found no space, or not."""
    dead = [path for path in _ours() if _is_dead(path)]
    kept = [path for path in dead if any((path / name).is_file() for name in _RAW)]
    rest = [path for path in dead if path not in kept]
    found = []
    if kept:
        found.append((
            f"{len(kept)} reports that did not come home, in {_some(kept)}",
            "copy each to its rank's folder in the run directory, then clusterprof collect RUN",
        ))  # fmt: skip
    if rest:
        found.append((f"{len(rest)} folders of ranks that were killed", f"rm -r {_some(rest)}"))
    return found


def _sessions(processes: Sequence[Process]) -> Found | None:
    """Memory of daemons and programs that are gone; nsys' list of sessions when none runs."""
    shared = Path(SHARED_MEMORY)
    numbered = [*shared.glob("quadd-agent-instance-*"), *shared.glob("sem.nsys_sem_*")]
    pids = {each.pid for each in processes}
    dead = [path for path in numbered if _number(path) not in pids]
    if not any(each.name == "nsys" for each in processes):
        dead += [*shared.glob("NSys-*"), *shared.glob("quadd-create-agent-*")]
    mine = sorted(path for path in dead if _is_unused(path))
    if not mine:
        return None
    return f"{len(mine)} files of an nsys that is gone, in {shared}", f"rm {_some(mine)}"


def _number(path: Path) -> int:
    digits = path.name.replace("_", "-").rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _settings() -> Found | None:
    """Settings that nsys writes for each program and never removes."""
    old = [path for path in _FIXED.glob("injection_config_*") if _is_mine(path) and _is_old(path)]
    if not old:
        return None
    return f"{len(old)} old files injection_config_* of nsys in {_FIXED}", (
        f"find {_FIXED} -maxdepth 1 -name 'injection_config_*' -user $(id -u) -mtime +0 -delete"
    )


def _ours() -> list[Path]:
    """Our own temporary folders, and no other user's."""
    places = dict.fromkeys((Path(tempfile.gettempdir()), _FIXED))
    return [
        path
        for place in places
        for path in sorted(place.glob("clusterprof-*"))
        if path.is_dir() and not path.is_symlink() and _is_mine(path)
    ]


def _is_dead(folder: Path) -> bool:
    """Whether nobody answers on the sockets in it; a folder without is dead after a day."""
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
            except BlockingIOError:  # somebody is there, and busy
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
