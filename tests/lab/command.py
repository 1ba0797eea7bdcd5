"""Running the real command line from a test: bounded, in a process group of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.leftovers import MARK

#: a shell inside a job may have set these; a test must not depend on them
_FOREIGN = ("CLUSTERPROF_", "SLURM_", "NSYS_", "TORCHELASTIC_", "OMPI_", "PMI")
_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

#: where the commands of this test session put their temporary files; removed with the session
scratch: Path | None = None


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


class StillRunning(AssertionError):
    """The command did not end within its time; its process group has been killed."""


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment without what a surrounding job or setting put there.

    `extra` is added; a value of None takes a name away.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name == MARK or not (name.startswith(_FOREIGN) or name in _RANKS)
    }
    # `python`, `torchrun` and the like are those of the environment that the tests run in, whether
    # it is activated or not.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    if scratch is not None:
        env["TMPDIR"] = str(scratch)
    for name, value in (extra or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 60.0,
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
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            stdout, stderr = process.communicate(timeout=5)
        except subprocess.TimeoutExpired as late:  # a grandchild in another group holds the pipe
            stdout, stderr = (_text(late.stdout), _text(late.stderr))
        done = Completed(words, process.wait(), stdout, stderr, time.monotonic() - begin)
        raise StillRunning(f"still running after {timeout:g} s, killed\n{done}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Completed(words, process.returncode, stdout, stderr, time.monotonic() - begin)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else (output or "")


def clusterprof(argv: Sequence[str | Path]) -> list[str]:
    """The command line that runs clusterprof itself, as installed beside this interpreter."""
    program = Path(sys.executable).parent / "clusterprof"
    start = [str(program)] if program.exists() else [sys.executable, "-m", "clusterprof"]
    return [*start, *map(str, argv)]
