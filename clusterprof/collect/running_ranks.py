"""Ranks that were not started under clusterprof: which run on this host, and dumps of theirs.

NCCL's watchdog (PyTorch 2.2 and later) makes a named pipe for each rank where
`TORCH_NCCL_DEBUG_INFO_PIPE_FILE` says so, and dumps its flight recorder, by a thread of its own,
some seconds after something was written to it. It writes the dump in place, over the one before.
Nothing else is asked of such a rank, and nothing here waits for one beyond a limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterprof.agent.contracts import files
from clusterprof.agent.contracts.identity import identify, is_starter
from clusterprof.agent.contracts.timing import REAL, Clock

PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
#: the newer name first, which torch takes first as well
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
TIMING = "TORCH_NCCL_ENABLE_TIMING"

#: bytes; an environment is smaller on most machines (a quarter of the stack's limit)
_MOST_ENVIRONMENT = 4 << 20
#: 64 MB hold fifteen times what a recorder keeps (`ingest.flight.dump_file`)
_MOST_DUMP = 64 << 20
_POLL_S = 0.5
_PIPE = re.compile(r"(\d{1,9})\.pipe")
_NUMBER = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class RunningRank:
    """A training process of this user, by its environment, of which nothing else is kept."""

    pid: int
    rank: int
    world_size: int | None
    launcher: str
    #: where its pipe and its dump are as seen from here; None without a pipe
    pipe: Path | None
    dump: Path
    #: the beginnings of both names, which the ranks of one job have in common
    prefixes: tuple[str, str]
    #: how many calls its recorder keeps by its environment; None: torch's own default
    calls: int | None
    #: whether NCCL measures durations
    timed: bool


def running_ranks(proc: Path = Path("/proc")) -> list[RunningRank]:
    """This user's processes with a rank, by rank and process id.

    What starts ranks is none, nor is a process whose parent is the same rank (a DataLoader worker).
    """
    by_pid = {}
    for folder in proc.iterdir():
        # we may be a task of srun ourselves
        if folder.name.isdecimal() and folder.name != str(os.getpid()):
            with contextlib.suppress(OSError, ValueError):  # it has ended, or is another user's
                rank = _running_rank(folder)
                if rank is not None:
                    by_pid[rank.pid] = rank, _parent(folder)
    ranks = [
        rank
        for rank, parent in by_pid.values()
        if parent not in by_pid or by_pid[parent][0].rank != rank.rank
    ]
    return sorted(ranks, key=lambda rank: (rank.rank, rank.pid))


def _running_rank(folder: Path) -> RunningRank | None:
    """The rank whose process this is; None for another process. Raises OSError, ValueError."""
    if folder.stat().st_uid != os.geteuid():
        return None
    pairs = _texts(folder / "environ")
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    me, line = identify(environ), _texts(folder / "cmdline")
    program = (folder / "exe").readlink().name  # its command line may say anything
    if me is None or not program.startswith("python") or is_starter(line):
        return None
    size = next((environ[name] for name in SIZES if name in environ), "")
    prefix = environ.get(PIPES, "")
    return RunningRank(
        int(folder.name), me.rank, me.world_size, me.source,
        pipe=_from_here(folder, f"{prefix}{me.rank}.pipe") if prefix else None,
        dump=_from_here(folder, f"{dumps_of(environ)}{me.rank}"),
        prefixes=(prefix, dumps_of(environ)),
        calls=int(size) if _NUMBER.fullmatch(size) else None,
        timed=environ.get(TIMING, "").lower() in ("1", "true", "yes", "y", "on"),
    )  # fmt: skip


def _texts(file: Path) -> list[str]:
    """The texts in a file of /proc, each of which a zero ends. Raises OSError."""
    content = files.content(str(file), _MOST_ENVIRONMENT)
    return [os.fsdecode(text) for text in content.split(b"\0")[:-1]]


def _parent(folder: Path) -> int:
    """A process's parent: it stands behind the name in parentheses. Raises OSError, ValueError."""
    content = files.content(str(folder / "stat"), _MOST_ENVIRONMENT)
    return int(content.rpartition(b")")[2].split()[1])


def dumps_of(environ: Mapping[str, str]) -> str:
    """What the names of the dumps begin with, by a rank's environment, as torch 2.8 has it."""
    given = next((environ[name] for name in DUMPS if environ.get(name)), None)
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"  # noqa: S108
    return given or f"{cache}/torch/comm_lib_trace_rank_"


def _from_here(folder: Path, name: str) -> Path:
    """A process's file as it is seen from here: in a container's own file system through /proc."""
    if not name.startswith("/"):
        return folder / "cwd" / name
    with contextlib.suppress(OSError):
        if not (folder / "root").samefile("/"):
            return folder / "root" / name.lstrip("/")
    return Path(name)


def pipes_of(prefix: str) -> dict[int, Path]:
    """The named pipes with a rank in their name behind the prefix, by rank. Raises OSError."""
    return dict(sorted(_numbered(prefix, _PIPE)))


def dumps_at(prefix: str) -> dict[int, Path]:
    """The files whose name is the prefix and a rank, by rank. Raises OSError."""
    return dict(sorted(_numbered(prefix, _NUMBER)))


def _numbered(prefix: str, form: re.Pattern[str]) -> Iterable[tuple[int, Path]]:
    folder, begin = os.path.split(prefix)
    for entry in Path(folder or ".").iterdir():
        match = form.fullmatch(entry.name[len(begin) :])
        if match and entry.name.startswith(begin):
            yield int(re.split(r"\D", match[0])[0]), entry


def ask(pipe: Path) -> str | None:
    """Write to a rank's pipe that it dump its recorder; returns why that cannot be, if it cannot.

    Nothing is waited for: neither a reader nor that a full pipe is read.
    """
    try:
        if not stat.S_ISFIFO(os.lstat(pipe).st_mode):
            return f"{pipe} is no named pipe"
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return f"no process here reads {pipe}: its rank has ended, or runs on another host"
        return f"{pipe}: {error.strerror}"
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return f"{pipe} is no named pipe"
        os.write(descriptor, b"1")
    except BlockingIOError:
        return None  # it is full of requests, and one will do
    except OSError as error:
        return f"{pipe}: {error.strerror}"
    finally:
        os.close(descriptor)
    return None


def gather(
    pipes: Mapping[int, Path],
    dumps: Mapping[int, Path],
    folder: Path,
    wait_s: float,
    clock: Clock = REAL,
) -> dict[int, str]:
    """Have ranks dump their recorders, and copy each new dump to `folder`; returns, by rank, why
    there is none. Waits for `wait_s` at most. Raises OSError where `folder` cannot be written.
    """
    before = {rank: _state(dumps[rank]) for rank in pipes}
    why = {rank: reason for rank, pipe in pipes.items() if (reason := ask(pipe)) is not None}
    asked = {rank: before[rank] for rank in pipes if rank not in why}
    for rank in _copy_whole(asked, dumps, folder, wait_s, clock):
        why[rank] = _copy_late(dumps[rank], folder, rank, asked[rank], wait_s)
    return {rank: reason for rank, reason in why.items() if reason}


def _copy_whole(
    before: Mapping[int, object],
    dumps: Mapping[int, Path],
    folder: Path,
    wait_s: float,
    clock: Clock,
) -> list[int]:
    """Copy each new dump as soon as it is whole; returns the ranks of which none was in time.

    `before`: the states of the dumps that there were. Raises OSError.
    """
    waiting = [*before]
    last: dict[int, object] = {}
    deadline = clock.now() + wait_s
    while waiting and clock.now() < deadline:
        clock.sleep(_POLL_S)
        now = {rank: _state(dumps[rank]) for rank in waiting}
        for rank, state in now.items():
            # torch writes in place: what has not changed for a while and ends as it should is whole
            is_still = state not in (None, before[rank]) and state == last.get(rank)
            if is_still and copy(dumps[rank], folder, rank, whole=True) is None:
                waiting.remove(rank)
        last = dict(now)
    return waiting


def _copy_late(dump: Path, folder: Path, rank: int, before: object, wait_s: float) -> str:
    """Copy a dump that came at the last moment, if it is whole; returns why not, or nothing.

    `before`: the state of the dump that there was. Raises OSError.
    """
    if _state(dump) in (None, before):
        return f"no new dump at {dump} within {wait_s:.0f} s"
    reason = copy(dump, folder, rank, whole=True)
    return f"after {wait_s:.0f} s {reason}" if reason else ""


def _state(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written; None where it cannot be seen."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def copy(dump: Path, folder: Path, rank: int, *, whole: bool = False) -> str | None:
    """Copy a dump to `folder`; returns why not, if it cannot be read. Raises OSError.

    `whole`: what does not end as a pickle or JSON ends is not copied.
    """
    try:
        content = files.content(str(dump), _MOST_DUMP, links=True)
    except OSError as error:
        return f"{dump}: {error.strerror}"
    if not content.strip():
        return f"{dump} is empty"
    if whole and content.rstrip()[-1:] not in (b".", b"}"):
        return f"{dump} is cut short"
    files.write(str(folder / f"rank_{rank}"), content, 0o600)
    return None
