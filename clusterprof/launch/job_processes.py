"""The processes of a job's run: its launcher in the foreground, and ours beside it.

The launcher has our terminal, streams and signals. What uses a file system runs in a process of its
own: one that waits for a stalled file system cannot be ended, not even by SIGKILL, and we are to
end in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from clusterprof.agent.contracts import descriptors
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.console import say
from clusterprof.errors import ClusterprofError, LaunchError

#: Signals that end a launcher.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: Those that are handed on to it; the kernel delivers the others as usual.
_HANDED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)

#: A file system that has not answered for so long is stalled. A job ends at most 10 s later than
#: without us.
STALLED_S = 7.0
#: how long the task may take before the file systems are asked, and between two questions
ASK_S = 1.0

#: Called before a signal is handed on, with a function that returns whether to stop waiting;
#: returns the signals to hand on.
Before = Callable[[int, Callable[[], bool]], Sequence[int]]


class Foreground:
    """One command that has our terminal, our streams and our signals."""

    def __init__(
        self, command: Sequence[str], added: Mapping[str, str], before: Before | None = None,
        clock: Clock = REAL,
    ) -> None:  # fmt: skip
        self.command = command
        self.added = added
        self.before = before
        self.clock = clock
        #: the signals of ENDING that reached us while the command ran, in order
        self.end_signals: list[int] = []
        self._arrived: list[int] = []
        self._reader = -1

    def run(self) -> int:
        """Run it to its end; returns its status, 128 + n for signal n. Raises LaunchError."""
        with self._listening() as listen_to_all, contextlib.closing(Witness()) as witness:
            environ = {**os.environ, **self.added}
            try:
                # With every descriptor that it would have (`<(...)`, `3>log`); ours have O_CLOEXEC.
                job = subprocess.Popen(self.command, env=environ, close_fds=False)
            except OSError as error:
                raise LaunchError(f"{self.command[0]} could not be started", str(error)) from None
            descriptors.release(descriptors.inherited())
            listen_to_all()
            # What came before the launcher started has reached only us and the witness.
            self._listen(0)
            early, self._arrived = self._arrived, []
            for number in early:
                self._hand_on(number, job)
            while job.poll() is None:
                # Its end wakes us; some parents leave SIGCHLD blocked: hence the second.
                self._listen(1.0 if not self._arrived else 0)
                while self._arrived and job.poll() is None:
                    number = self._arrived.pop(0)
                    # Not where its sender has sent it to the launcher as well.
                    self._hand_on(number, None if witness.received(number) else job)
        status = job.returncode
        return status if status >= 0 else 128 - status

    def _hand_on(self, number: int, job: subprocess.Popen[bytes] | None) -> None:
        """Note a signal, and hand it on to `job`."""
        if number in ENDING:
            self.end_signals.append(number)
        if job is None:
            return

        def stop_waiting() -> bool:
            """Whether the command has ended, or another signal to end has arrived."""
            self._listen(0.1)
            return job.poll() is not None or any(sent in ENDING for sent in self._arrived)

        first, *others = self.before(number, stop_waiting) if self.before else [number]
        job.send_signal(first)
        for sent in others:
            self.clock.sleep(0.1)  # two of a kind at once would be one
            job.send_signal(sent)

    def _listen(self, seconds: float) -> None:
        """Wait for a signal, one of a child's end included."""
        if self.clock.wait([self._reader], seconds):
            numbers = os.read(self._reader, 512)
            self._arrived += [number for number in numbers if number != signal.SIGCHLD]

    @contextlib.contextmanager
    def _listening(self) -> Iterator[Callable[[], None]]:
        """Take the signals, each as a byte in a pipe.

        Yields a function to call once the launcher has started: it takes the signals that nohup
        and `&` have us ignore, which the launcher must inherit as ignored.
        """
        ignored = [number for number in _HANDED_ON if signal.getsignal(number) == signal.SIG_IGN]
        at_once = [signal.SIGCHLD, *(number for number in _HANDED_ON if number not in ignored)]
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        with contextlib.ExitStack() as taken:
            taken.callback(os.close, writer)
            taken.callback(os.close, self._reader)
            wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            taken.callback(signal.set_wakeup_fd, wakeup)
            taken.enter_context(handled(at_once, lambda *_: None))
            yield lambda: taken.enter_context(handled(ignored, lambda *_: None))


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Have `handler` called at each of these signals, and afterwards what was called before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


#: What a witness runs. Its command line holds none of our names: a `pkill -f` of one of them does
#: not reach the launcher, and must not reach the witness either.
_WITNESS = """
import os, select, signal, sys
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
for number in map(int, sys.argv[1].split(",")):
    signal.signal(number, lambda *_: None)
os.write(1, b"\\0")
while True:
    ready = select.select([0, reader], [], [])[0]
    if reader in ready:
        os.write(1, os.read(reader, 64))
    if 0 in ready and not os.read(0, 1):
        break
"""


class Witness:
    """A process next to the launcher that shows whether a signal went to the whole process group.

    A terminal signals the group, `kill` mostly one process, and a signal does not say which. The
    launcher must get it once: torchrun leaves its workers behind at a second SIGTERM while it ends
    them, srun and mpirun kill at a second SIGINT. What reaches the witness has reached the
    launcher as well. The witness always ends with us.
    """

    #: seconds between the signal to one process of a group and to the next
    WITHIN_S = 0.2
    #: seconds in which two are one signal: `timeout` signals its child and then the group
    ONE_S = 0.5
    READY_S = 2.0

    def __init__(self, clock: Clock = REAL) -> None:
        self._clock = clock
        self._received_at: dict[int, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        numbers = ",".join(str(int(number)) for number in _HANDED_ON)
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WITNESS, numbers], bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._read(self.READY_S)

    def close(self) -> None:
        """End it."""
        if self._process is None:
            return
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def received(self, number: int) -> bool:
        """Whether this signal, which has just reached us, was sent to the whole group."""
        deadline = self._clock.now() + self.WITHIN_S
        while self._clock.now() - self._received_at.get(number, -1e9) >= self.ONE_S:
            left = deadline - self._clock.now()
            if left <= 0 or not self._read(left):
                break
        else:
            return True
        # On a machine that stalls it may not run yet: then the kernel holds the signal for it.
        with contextlib.suppress(OSError, ValueError, IndexError):
            if self._process is not None:
                status = Path(f"/proc/{self._process.pid}/status").read_text()
                pending = int(status.partition("\nShdPnd:")[2].split()[0], 16)
                return bool(pending >> (number - 1) & 1)
        return False

    def _read(self, seconds: float) -> bool:
        """Read the signals that it reports within `seconds`; whether there were any."""
        if self._process is None or self._process.stdout is None:
            return False
        pipe = self._process.stdout
        if not self._clock.wait([pipe], seconds):
            return False
        numbers = os.read(pipe.fileno(), 64)
        self._received_at.update(dict.fromkeys(numbers, self._clock.now()))
        return bool(numbers)


# -- processes of ours ---------------------------------------------------------------------------


def unless_stalled(task: Callable[[], int], folder: Path, clock: Clock = REAL) -> int | None:
    """The status that `task` returns; None where `folder` or TMPDIR stalls meanwhile.

    The task runs and prints in a process of its own, which ends with us.
    """

    def ask() -> int:
        # Setting a folder's times is a harmless write; reads may still work on a stalled one.
        for asked_folder in (folder, Path(tempfile.gettempdir())):
            with contextlib.suppress(OSError):
                os.utime(asked_folder)
        return 0

    doing = Apart(task, clock)
    while not doing.ends_within(ASK_S):
        asking = Apart(ask, clock)
        until = clock.now() + STALLED_S
        while not (asking.ends_within(0.05) or doing.ends_within(0.05)):
            if clock.now() > until:
                return None
    return doing.status


class Apart:
    """A function in a forked process."""

    def __init__(self, task: Callable[[], int], clock: Clock = REAL) -> None:
        self.clock = clock
        self.status: int | None = None
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            status = 125
            try:
                pr_set_pdeathsig = 1
                ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
                status = task()
                sys.stdout.flush()
            except KeyboardInterrupt:
                status = 130
            except BaseException:  # noqa: BLE001 - nothing above may run twice
                traceback.print_exc()
            finally:
                os._exit(status)

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends within `seconds`."""
        return self.clock.until(self.ended, seconds, 0.01)

    def ended(self) -> bool:
        """Whether it has."""
        if self.status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def end(self, patience_s: float = 0.0) -> None:
        """End it, unless it ends by itself in so long; one that a file system holds may stay."""
        if not self.ends_within(patience_s):
            os.kill(self._pid, signal.SIGKILL)
            self.ends_within(ASK_S)


def beside_job(task: Callable[[], None], otherwise: str) -> Apart:
    """A task in a process of its own, until it returns or, the job having ended, is ended.

    It reads the run directory, whose file system may stall: we are to end when the job has ended.
    `otherwise`: what there is not where the task fails; it is printed with the reason.
    """

    def beside() -> int:
        for number in _HANDED_ON:
            signal.signal(number, signal.SIG_IGN)  # those are the job's
        descriptors.release(descriptors.inherited())
        try:
            task()
        except Exception as error:  # noqa: BLE001 - the job goes on
            expected = isinstance(error, (ClusterprofError, OSError))
            reason = (str(error) if expected else "") or repr(error)  # some errors have no words
            say(f"{otherwise}: {reason.splitlines()[0]}")
        return 0

    return Apart(beside)
