"""One session of nsys: launched over the program, started, stopped, watched and ended.

What the guard does with nsys. Nothing in here waits for nsys longer than it says, and whatever
nsys does not do is kept as a trouble, for the rank's state.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from typing import Any, Dict, Iterator, List, Optional

from .. import nsys as profiler
from ..contracts import identity, processes
from ..contracts.plan import NsysPlan
from ..contracts.states import State
from . import size

#: nsys starting on an overloaded machine fails now and then when several start at once (about 4%
#: at eight): a lock on each node keeps their starts this far apart. One that is held longer than
#: all of a node's ranks would need is held by a process that hangs.
START_GAP_S = 0.3
LOCK_S = 5.0

#: The agent waits for nsys' start between two steps: a hanging one must not hang the training.
START_TIMEOUT_S = 6

#: An order to close the window is the agent's, between two steps; this long after it, ours.
ORDER_GRACE_S = 1.0

#: An `nsys stop` that fails is tried once more.
STOPS = 2

#: An nsys that has not run for so long after its program's end hangs, and one that has run for so
#: long and written nothing spins.
IDLE_S = 3.0
WAITING_TICKS = 10
SPINNING_S = 4.0

#: A shared disk that is full may have space again.
BRING_AGAIN_S = 10.0

#: A session whose stop has not ended after so long is ended once it has so many times its limit.
STOP_S = 60.0
TOO_MUCH = 4


class Session:
    """nsys and its session for one rank, `name` on this node."""

    def __init__(
        self, name: str, nsys: NsysPlan, mode: str, home: Any, most: int, outbox: Any
    ) -> None:
        self.name = name
        self.nsys = nsys
        self.mode = mode
        self.home = home
        #: bytes that the capture may take on this node; 0 for any
        self.most = most
        self.scratch = profiler.scratch(home.private, nsys.version)
        self.values = {
            "output": home.report,
            "session": name,
            "trace": nsys.trace["gpu" if sees_a_gpu() else "cpu"],
        }
        self.files = size.NsysFiles(home.private, self.processes)
        self.child: Optional[subprocess.Popen[bytes]] = None
        #: what nsys did not do, in words
        self.troubles: List[str] = []
        #: how long the program waited for nsys to begin to collect
        self.starting_s = 0.0
        #: nsys has begun to collect
        self.opened = False
        self.outbox = outbox
        #: when an order to close the window was first seen (see `orders`); 0 for never
        self.ordered_at = 0.0
        #: when the session's size is looked at next; 0 while it is not collecting
        self.look_at = 0
        #: each `nsys stop`, and the import of what it left: beside the training
        self.stops: List[subprocess.Popen[bytes]] = []
        self.importing: Optional[subprocess.Popen[bytes]] = None
        self.stopped_at = 0.0
        #: CPU time and bytes of nsys when they last grew, and when that was (see `hangs`)
        self.taken, self.written = -WAITING_TICKS - 1, -1
        self.ran_at = self.wrote_at = 0.0
        #: when a report that could not be taken home is tried again
        self.bring_at = 0.0

    # -- its start and its end ---------------------------------------------------------------

    def launch(self, address: str, program: List[str]) -> None:
        """Start nsys with the trampoline under it, its own words going to the log."""
        umask = os.umask(0o077)
        os.umask(umask)
        verb = "profile" if self.mode == "cuda" else "launch"
        command = [
            *self.command(verb),
            *(*processes.part("trampoline"), address),
            *(oct(umask), given("TMPDIR"), *program),
        ]
        environment = self.environment()
        environment[identity.PROFILED] = "%s:%s" % (self.mode, address)
        # nsys ignores ranges whose names are not registered strings unless it is told not to.
        environment.setdefault("NSYS_NVTX_PROFILER_REGISTER_ONLY", "0")
        with one_at_a_time(), open(self.home.log, "ab") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
            time.sleep(START_GAP_S)

    def end(self) -> None:
        """Leave no process of nsys behind, whatever state it is in."""
        if self.stops and self.stops[-1].poll() is None:
            self.troubles.append("nsys stop did not end")
            self.home.torn = True
        children = [*self.stops, self.child, self.importing]
        for child in children:
            if child is not None and child.poll() is None:
                processes.end_group(child)
        processes.end_own_nsys(self.name)

    def processes(self) -> List[int]:
        """The processes of this session's nsys that are at work."""
        return processes.of_session(self.name, children=True)

    def at_work(self, pids: List[int]) -> bool:
        """Whether anything of `pids` (see `processes`) could still write the report.

        A killed nsys leaves its daemon, which writes the report when the program ends; without
        the daemon `nsys stop` has no process to wait for.
        """
        if self.importing is not None and not self.home.import_ended:
            return True  # it may have ended since we looked: its report is not named yet
        asking = {each.pid for each in self.stops}
        return any(pid not in asking for pid in pids)

    def helping(self) -> bool:
        """Whether an `nsys stop` or an import that we have started is running."""
        return any(each and each.poll() is None for each in (*self.stops, self.importing))

    def hangs(self, pids: List[int]) -> bool:
        """Whether nsys, with its `pids`, will do no more: it does not run, or writes nothing."""
        helpers = [each for each in (*self.stops, self.importing) if each and each.poll() is None]
        works = [processes.work(pid) for pid in (*pids, *(each.pid for each in helpers))]
        now, taken = time.monotonic(), sum(ticks for _, ticks in works)
        written = self.files.parts()["files"]
        if written != self.written:
            self.written, self.wrote_at = written, now
        # One that only waits looks around now and then; the disk may keep one that works waiting.
        if taken > self.taken + WAITING_TICKS or any(at == "D" for at, _ in works):
            self.taken, self.ran_at = taken, now
        return now > self.ran_at + IDLE_S or now > self.wrote_at + SPINNING_S

    # -- its window --------------------------------------------------------------------------

    def start(self) -> Optional[str]:
        """Returns what went wrong, or None once nsys is collecting."""
        free = profiler.free_bytes(self.scratch)
        if free < profiler.LEAST_FREE_B:
            return no_space(self.scratch, free)
        began = time.monotonic()
        starting = self.spawn(self.command("start"))
        try:
            status = starting.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            processes.end_group(starting)
            return "nsys start did not end within %d s" % START_TIMEOUT_S
        finally:
            self.starting_s = time.monotonic() - began
        if status != 0:
            return "nsys start %s: %s" % (processes.ended(status), self.home.last_words())
        self.opened = True
        self.files.begin()
        self.look_at = time.monotonic_ns() + size.EVERY_NS
        self.outbox.say("watch")
        return None

    def stop(self) -> None:
        """Have nsys write its report, beside the training."""
        if self.opened and not self.stops:
            self.stopped_at = time.monotonic()
            self.stops.append(self.spawn(self.command("stop")))
        self.outbox.say("ignore")

    def order(self) -> str:
        """Why the window is to be closed now; "" where it is not."""
        reason: str = self.outbox.look().get("order") or ""
        if reason and not self.ordered_at:
            self.ordered_at = time.monotonic()
        return reason

    def obey(self) -> None:
        """Where the step does not end in which the order came, its window ends inside it."""
        if not self.opened or self.stops or not self.order():
            return
        if time.monotonic() > self.ordered_at + ORDER_GRACE_S:
            self.stop()
            self.outbox.state(State.FINISHING, "closed within a step: %s" % self.order())

    def tend(self) -> None:
        """While the training goes on: stop what grows too large, make the report, take it home.

        What is home early is safe from whatever ends the job later.
        """
        if self.look_at and time.monotonic_ns() >= self.look_at:
            self.look_at = time.monotonic_ns() + size.EVERY_NS
            self.limit()
        if not self.stops or self.stops[-1].poll() is None:
            return
        status = self.stops[-1].returncode
        if status != 0:
            self.try_again(status)
        elif self.importing is None:
            self.look_at = 0
            command = self.home.import_command()
            if command:
                # An order means that there is little time.
                self.importing = self.spawn(command, nice=0 if self.order() else 10)
                self.home.import_tried = True
                self.home.import_trouble = "nsys' importer did not end in time"
            else:
                self.bring()
        elif self.home.import_ended:
            self.bring()
        elif self.importing.poll() is not None:
            self.home.imported(self.importing.returncode)

    def bring(self) -> None:
        """Take the report home, if it is not there; what fails is tried again now and then."""
        now = time.monotonic()
        if self.outbox.look().get("brought") or now < self.bring_at:
            return
        self.bring_at = now + BRING_AGAIN_S
        self.outbox.say("bring")

    def try_again(self, status: int) -> None:
        """`nsys stop` has failed: once more, then it is left to the program's end."""
        trouble = "nsys stop %s" % processes.ended(status)
        self.home.torn = True
        if trouble not in self.troubles:
            self.troubles.append(trouble)
        if len(self.stops) < STOPS and self.processes():
            self.stops.append(self.spawn(self.command("stop")))

    def limit(self) -> None:
        """The agent closes a window that has become too large, but between two steps only: a
        step that does not end, or a stop that does not, must not fill the disk meanwhile.
        """
        held = self.files.bytes()
        free = profiler.free_bytes(self.scratch)
        # What was captured is written a second time when the report is made.
        if not self.stops and free < profiler.LEAST_FREE_B + held:
            self.troubles.append("closed early: " + no_space(self.scratch, free))
            self.stop()
        elif not self.stops and 0 < 1.25 * self.most < held:
            self.troubles.append("closed inside a step: the capture had %d MB" % (held // size.MB))
            self.stop()
        elif self.stops and self.useless(held, free):
            self.look_at = 0
            self.abandon()

    def useless(self, held: int, free: int) -> bool:
        """Whether a stop that does not end lets the capture go on until the disk is full."""
        if free < profiler.LEAST_FREE_B // 4:
            self.troubles.append("ended while it wrote: " + no_space(self.scratch, free))
            return True
        # A report takes memory and disk while it is made.
        hangs = time.monotonic() > self.stopped_at + STOP_S
        if hangs and 0 < TOO_MUCH * self.most < held:
            self.troubles.append("nsys stop did not end, and the capture grew to %d MB"
                                 % (held // size.MB))  # fmt: skip
            return True
        return False

    def abandon(self) -> None:
        """End nsys under a program that goes on; its launcher stays, and knows how that ends."""
        self.home.torn = True
        for pid in processes.of_session(self.name):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    # -- nsys' own command lines -------------------------------------------------------------

    def command(self, verb: str) -> List[str]:
        """nsys with the plan's arguments for `verb`, on our session."""
        return [self.nsys.path, *filled(getattr(self.nsys, verb), self.values)]

    def environment(self) -> Dict[str, str]:
        """Ours, with a TMPDIR of the session's own."""
        return dict(os.environ, TMPDIR=self.scratch)

    def spawn(self, command: List[str], nice: int = 0) -> "subprocess.Popen[bytes]":
        """Start a helper of nsys with its words going to the log.

        In our own folder: nsys cannot be in one whose name is no UTF-8, and the program's may be.
        """
        folder = self.home.private if os.path.isabs(command[0]) else None
        with open(self.home.log, "ab") as log:
            return subprocess.Popen(
                command if not nice else ["nice", "-n", str(nice), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=self.environment(), cwd=folder,
            )  # fmt: skip


def filled(arguments: List[str], values: Dict[str, str]) -> List[str]:
    """The plan's arguments with {output} and its like filled in; other braces are the user's."""
    for name, value in values.items():
        arguments = [argument.replace("{%s}" % name, value) for argument in arguments]
    return arguments


def given(name: str) -> str:
    """NAME=VALUE as it is in our environment, NAME alone where it is not there."""
    return "%s=%s" % (name, os.environ[name]) if name in os.environ else name


def no_space(folder: str, free: int) -> str:
    """In words."""
    return "no space left on %s: %d MB" % (folder, free // size.MB)


def sees_a_gpu() -> bool:
    """Whether this rank can use a GPU: nsys traces CUDA then, else the OS runtime."""
    import glob

    # The driver's control node alone is no GPU: nsys itself makes one on machines without.
    devices = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")
    return bool(devices) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold this node's lock on starting nsys; without it where it cannot be had in time."""
    import fcntl

    path = os.path.join(tempfile.gettempdir(), "clusterprof-%d.lock" % os.getuid())
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    deadline = time.monotonic() + LOCK_S
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.02)
        yield
    finally:
        os.close(lock)
