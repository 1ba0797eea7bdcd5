"""Programs that need torch, run without each loading it: `programs/warm.py` as tests see it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab import command
from lab.command import Completed, StillRunning

PROGRAM = Path(__file__).resolve().parent / "programs" / "warm.py"
RANKS = PROGRAM.with_name("warm_ranks.py")


class Warm:
    """Runs Python programs in forks of a process that has torch already."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self._address = address

    def launcher(self, ranks: int) -> list[str]:
        """The command that starts the program behind it as so many ranks; 0: as it stands."""
        return [str(RANKS), self._address, str(ranks), str(command.free_port())]

    def torchrun(self, folder: Path) -> str:
        """A PATH whose torchrun, which is put into `folder`, is the real one in such a fork."""
        torchrun = Path(sys.executable).with_name("torchrun")
        words = shlex.join([*self.launcher(0), str(torchrun)])
        folder.mkdir()
        (folder / "torchrun").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / "torchrun").chmod(0o755)
        return os.pathsep.join([str(folder), command.environment()["PATH"]])

    def _answer(self, seconds: float) -> list[int]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return []
        return list(json.loads(self._process.stdout.readline()))

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        timeout: float = command.PATIENCE_S,
    ) -> Completed:
        """As `lab.command.run`, of a line that begins with this interpreter.

        Raises:
            StillRunning: it did not end within `timeout` seconds.
        """
        (done,) = self.run_together([(argv, env)], timeout=timeout)
        return done

    def run_together(
        self,
        programs: Sequence[tuple[Sequence[str | Path], Mapping[str, str | None] | None]],
        *,
        timeout: float = command.PATIENCE_S,
    ) -> list[Completed]:
        """The same of several at the same time, each with an environment of its own."""
        assert self._process.stdin is not None
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            requests = [
                {
                    "argv": list(map(str, argv[1:])), "env": command.environment(env),
                    "cwd": str(Path.cwd()), "stdout": f"{folder}/{number}.stdout",
                    "stderr": f"{folder}/{number}.stderr",
                }
                for number, (argv, env) in enumerate(programs)
            ]  # fmt: skip
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
            started = self._answer(command.PATIENCE_S)
            statuses = self._answer(timeout)
            late = not statuses
            if late:
                for pid in started:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                statuses = self._answer(command.PATIENCE_S)
            done = [
                Completed(
                    tuple(map(str, argv)), status, _text(request["stdout"]),
                    _text(request["stderr"]), time.monotonic() - began,
                )
                for (argv, _), request, status in zip(programs, requests, statuses, strict=True)
            ]  # fmt: skip
        command.ran.update(((*each.argv, str(number)), each) for number, each in enumerate(done))
        if late:
            raise StillRunning(f"still running after {timeout:g} s, killed\n{done}")
        return done


def _text(path: object) -> str:
    return Path(str(path)).read_text(errors="replace") if Path(str(path)).exists() else ""


@contextlib.contextmanager
def warm() -> Iterator[Warm]:
    """One such process, for as long as the context."""
    folder = tempfile.mkdtemp(dir=command.scratch)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, PROGRAM, str(listener.fileno())], env=command.environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            pass_fds=[listener.fileno()], start_new_session=True,
        )  # fmt: skip
    try:
        yield Warm(process, f"{folder}/socket")
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(command.PATIENCE_S)
