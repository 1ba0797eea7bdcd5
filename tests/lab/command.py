"""Running the real command line from a test: bounded, in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lab.leftovers import MARK

#: a shell inside a job may have set these; a test must not depend on them
_FOREIGN = ("CLUSTERPROF_", "SLURM_", "NSYS_", "TORCHELASTIC_", "OMPI_", "PMI")
_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
#: of the terminal that the tests were started from; readline sets them where there is none
TERMINAL = {"COLUMNS", "LINES"}

#: after so long a command hangs, on whatever machine
PATIENCE_S = 400.0
#: where the commands of this test session put their temporary files; removed with the session
scratch: Path | None = None
#: a folder that all workers of the session have
session_folder = Path()
#: of clusterprof, in every environment that a test does not set it in
settings: dict[str, str] = {}
#: what the test that runs now has run, by its words, the last one last; each says by `str()` what
#: it printed (`lab.evidence`)
ran: dict[tuple[str, ...], Completed | Runs] = {}


@dataclass(frozen=True)
class Completed:
    """What a finished command left: its exit status and all that it printed."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"+ {shlex.join(self.argv)}\nexit status {self.returncode} after {self.seconds:.1f} s\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )

    __repr__ = __str__


class Runs(Protocol):
    """A command that may still run."""

    def goes_on(self) -> bool:
        """Whether it does."""


class StillRunning(AssertionError):
    """The command did not end within its time; its process group has been killed."""


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment without what a surrounding job or setting put there.

    `extra` is added; a value of None takes a name away.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name == MARK or not (name.startswith(_FOREIGN) or name in _RANKS | TERMINAL)
    }
    # `python`, `torchrun` and the like are those of the environment that the tests run in, whether
    # it is activated or not.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if scratch is not None:
        env["TMPDIR"] = str(scratch)
    for name, value in {**settings, **(extra or {})}.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = PATIENCE_S,
    cwd: Path | None = None,
) -> Completed:
    """Run `argv` to its end and return what it left.

    Raises:
        StillRunning: it did not end within `timeout` seconds.
    """
    words = tuple(map(str, argv))
    begin = time.monotonic()
    process = subprocess.Popen(
        words,
        env=environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    ended: BaseException | None = None
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException as error:  # noqa: BLE001 (raised again below)
        ended = error
        os.killpg(process.pid, signal.SIGKILL)
        try:
            stdout, stderr = process.communicate(timeout=5)
        except subprocess.TimeoutExpired as late:  # a grandchild in another group holds the pipe
            stdout, stderr = (_text(late.stdout), _text(late.stderr))
    done = Completed(words, process.wait(), stdout, stderr, time.monotonic() - begin)
    remember(done)
    if isinstance(ended, subprocess.TimeoutExpired):
        raise StillRunning(f"still running after {timeout:g} s, killed\n{done}") from None
    if ended is not None:  # the test's own time is up
        raise ended
    return done


def remember(done: Completed) -> None:
    """Let it be the last of what has run; one that is asked again and again counts once."""
    ran.pop(done.argv, None)
    ran[done.argv] = done


def free_port() -> int:
    """A TCP port that no one listens on, and that no other program is given before it is used.

    Below the ephemeral ports, of which tests that run beside this one take many, and above those
    of `slurm.sh` and `hosts.sh`.
    """
    for port in random.sample(range(31_100, 32_700), 200):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("0.0.0.0", port))
            return port
    raise RuntimeError("no free port")


def forget() -> None:
    """Another test begins, which may use what still runs."""
    for words, each in list(ran.items()):
        if isinstance(each, Completed) or not each.goes_on():
            del ran[words]


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else (output or "")


def clusterprof(argv: Sequence[str | Path]) -> list[str]:
    """The command line that runs clusterprof itself, as installed beside this interpreter."""
    program = Path(sys.executable).parent / "clusterprof"
    start = [str(program)] if program.exists() else [sys.executable, "-m", "clusterprof"]
    return [*start, *map(str, argv)]
