"""Programs run without each loading what it needs: `programs/warm.py` as tests see it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from clusterprof import launchers
from lab import command
from lab.command import Completed, StillRunning

PROGRAM = Path(__file__).resolve().parent / "programs" / "warm.py"
RANKS = PROGRAM.with_name("warm_ranks.py")
#: modules to load
TORCH = ("torch", "torch._dynamo", "torch.distributed", "torch.distributed.run")
CLUSTERPROF = ("all_of_clusterprof",)
#: what an interpreter looks at when it starts, and clusterprof when it is loaded; a fork looks at
#: PYTHONPATH as well
_AT_START = ("PYTHON", "LANG", "LC_", "TZ", launchers.VARIABLE)


class Warm:
    """Runs Python programs in forks of a process that has loaded what they need."""

    def __init__(self, requests: TextIO, answers: TextIO, address: str) -> None:
        self._requests = requests
        self._answers = answers
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
        if not select.select([self._answers], [], [], seconds)[0]:
            return []
        return list(json.loads(self._answers.readline()))

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

    def clusterprof(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str | None] | None = None,
        timeout: float = command.PATIENCE_S,
        cwd: Path | None = None,
    ) -> Completed:
        """The real command line in such a fork, as `lab.command.run` would run it.

        Raises:
            StillRunning: it did not end within `timeout` seconds.
        """
        words = command.clusterprof(argv)
        at_start = any(name.startswith(_AT_START) for name in {*(env or {})} - {"PYTHONPATH"})
        if at_start or words[0] == sys.executable:  # a fork runs a script and no module
            return command.run(words, env=env, timeout=timeout, cwd=cwd)
        began = time.monotonic()
        pipes = [_Pipe(), _Pipe()]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(timeout)
            asking.connect(self._address)
            _ask(asking, [words, str(cwd or Path.cwd()), [command.environment(env)], []], pipes)
            status, late = -signal.SIGKILL, True  # what ends with this connection
            with contextlib.suppress(TimeoutError):
                (status,), late = json.loads(asking.recv(1 << 16)), False
        for each in pipes:
            each.join(5 if late else timeout)
        done = Completed(
            tuple(words), status, *(each.text for each in pipes), time.monotonic() - began
        )
        command.remember(done)
        if late:
            raise StillRunning(f"still running after {timeout:g} s, killed\n{done}")
        return done

    def run_together(
        self,
        programs: Sequence[tuple[Sequence[str | Path], Mapping[str, str | None] | None]],
        *,
        timeout: float = command.PATIENCE_S,
    ) -> list[Completed]:
        """The same of several at the same time, each with an environment of its own."""
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
            self._requests.write(json.dumps(requests) + "\n")
            self._requests.flush()
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


class _Pipe(threading.Thread):
    """A pipe of which all is read that is written to its `end`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._read, self.end = os.pipe()
        self.text = ""

    def run(self) -> None:
        with open(self._read, errors="replace") as file:
            self.text = file.read()


def _ask(asking: socket.socket, what: object, pipes: Sequence[_Pipe]) -> None:
    """Have a program started whose streams are an empty one and these."""
    streams = [os.open(os.devnull, os.O_RDONLY), *(each.end for each in pipes)]
    socket.send_fds(asking, [json.dumps(what).encode()], streams)
    for stream in streams:
        os.close(stream)
    for each in pipes:
        each.start()


def _text(path: object) -> str:
    return Path(str(path)).read_text(errors="replace") if Path(str(path)).exists() else ""


@contextlib.contextmanager
def warm(modules: Sequence[str]) -> Iterator[Warm]:
    """One such process, for as long as the context.

    It is a fork of one that the tests of all workers share, as far as that is still there.
    """
    address = f"{tempfile.mkdtemp(dir=command.scratch)}/socket"
    (its_stdin, requests), (answers, its_stdout) = os.pipe(), os.pipe()
    with contextlib.ExitStack() as ending:
        with _listening(address) as listener, (command.session_folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            origin = str(command.session_folder / modules[0])
            descriptors = [its_stdin, its_stdout, listener.fileno()]
            if not _forks(origin, descriptors):
                Path(origin).unlink(missing_ok=True)
                ending.enter_context(_loaded(origin, modules))
                assert _forks(origin, descriptors)
        for descriptor in (its_stdin, its_stdout):
            os.close(descriptor)
        with open(answers) as answered:
            with open(requests, "w") as requested:
                yield Warm(requested, answered, address)
            select.select([answered], [], [], command.PATIENCE_S)  # its end


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    return listener


def _forks(address: str, descriptors: Sequence[int]) -> bool:
    """Have the process that listens there, if there is one, fork one with these descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(command.PATIENCE_S)
        try:
            asking.connect(address)
            socket.send_fds(asking, [b"1"], descriptors)
            return asking.recv(1) != b""
        except (FileNotFoundError, ConnectionError):
            return False


@contextlib.contextmanager
def _loaded(address: str, modules: Sequence[str]) -> Iterator[None]:
    """A process that has loaded them, and listens there, for as long as the context."""
    with _listening(address) as listener:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, str(listener.fileno()), *modules],
            env=command.environment({"PYTEST_CURRENT_TEST": None}),  # it is of no test
            # Python's own streams have to be of pipes, as those of the programs are.
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()], start_new_session=True,
        )  # fmt: skip
    with process:
        yield
