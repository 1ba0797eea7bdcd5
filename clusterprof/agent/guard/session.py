"""One session of nsys: launched over the program, started, stopped, watched and ended.

Nothing in here waits for nsys longer than it says, and what nsys does not do is kept as a trouble.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import itertools
import math
import os
import signal
import stat
import subprocess
import tempfile
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from .. import nsys as profiler
from ..contracts import files, identity, processes
from ..contracts.outbox import Outbox
from ..contracts.plan import LOOK_NS, MB, NsysPlan
from ..contracts.states import State
from ..contracts.timing import REAL, Clock
from .report_transfer import ReportTransfer

#: nsys starting on an overloaded machine fails now and then when several start at once (about 4%
#: at eight): a lock on each node keeps their starts this far apart. One that is held longer than
#: all of a node's ranks would need is held by a process that hangs.
START_GAP_S = 0.3
LOCK_S = 5.0
#: An order to close the window is the agent's, between two steps; this long after it, ours.
ORDER_GRACE_S = 1.0
#: An `nsys stop` that fails is tried once more.
STOPS = 2
#: An nsys that has not run for so long after its program's end hangs, and one that has run for so
#: long, by the clock and by its processor time, and written nothing spins; both have longer where
#: the user lets nsys take longer.
IDLE_S = 3.0
WAITING_TICKS = 10
SPINNING_S = 4.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: A shared disk that is full may have space again.
BRING_AGAIN_S = 10.0
#: A session whose stop has not ended after so long is ended once it has so many times its limit.
STOP_S = 60.0
TOO_MUCH = 4


class Session:
    """nsys and its session for one rank, `name` on this node."""

    #: the nsys over the program, once it is launched
    child: "subprocess.Popen[bytes]"

    def __init__(
        self, name: str, nsys: NsysPlan, mode: str, transfer: ReportTransfer, most: int,
        outbox: Outbox, clock: Clock = REAL,
    ) -> None:  # fmt: skip
        """`most`: bytes that the capture may take on this node; 0 for any."""
        self.name = name
        self.nsys = nsys
        self.mode = mode
        self.transfer = transfer
        self.most = most
        self.outbox = outbox
        self.clock = clock
        self.scratch = profiler.scratch(transfer.private, nsys.version)
        # The driver's control node alone is no GPU: nsys itself makes one on machines without.
        gpus = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")
        sees_gpu = gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
        trace = nsys.trace["gpu" if sees_gpu else "cpu"]  # without one: the OS runtime
        self.values = {"output": transfer.report, "session": name, "trace": trace}
        self.files = NsysFiles(transfer.private, self.processes)
        #: what nsys did not do, in words
        self.troubles: List[str] = []
        #: how long the program waited for nsys to begin to collect, and whether it has begun
        self.starting_s = 0.0
        self.opened = False
        #: when an order to close the window was first seen; 0 for never
        self.ordered_at = 0.0
        #: when the session's size is looked at next; 0 while it is not collecting
        self.look_at = 0
        #: it had become larger than it may by the last look
        self.too_large = False
        #: each `nsys stop`, and the import of what it left: beside the training
        self.stops: List["subprocess.Popen[bytes]"] = []
        self.importing: Optional["subprocess.Popen[bytes]"] = None
        self.stopped_at = 0.0
        #: by process the CPU time of nsys (ticks) at the last look, what it has taken since it was
        #: last seen to run, and since its files last grew; when that was; their bytes
        self.ticks: Dict[int, int] = {}
        self.ran = self.spun = 0
        self.ran_at = self.wrote_at = -math.inf
        self.written = -1
        #: when a report that could not be transferred is tried again
        self.bring_at = 0.0

    def launch(self, address: str, program: List[str]) -> None:
        """Start nsys with the trampoline under it, what it prints going to the log."""
        umask = os.umask(0o077)
        os.umask(umask)
        temporary = "TMPDIR" + ("=" + os.environ["TMPDIR"] if "TMPDIR" in os.environ else "")
        trampoline = [*processes.part("trampoline"), address, oct(umask), temporary, *program]
        verb = "profile" if self.mode == "cuda" else "launch"
        # nsys ignores ranges whose names are not registered strings unless it is told not to.
        environment = {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0", **os.environ}
        identity.set_field(environment, identity.PROFILED, "%s:%s" % (self.mode, address))
        with one_at_a_time(self.clock):
            self.child = self.spawn([*self.command(verb), *trampoline], program=environment)
            self.clock.sleep(START_GAP_S)

    def note(self, trouble: str) -> None:
        """Keep for the rank's state what went wrong beside the training."""
        if trouble not in self.troubles:
            self.troubles.append(trouble)

    def end(self) -> None:
        """Leave no process of nsys behind, whatever state it is in."""
        # One that fails as the program ends was not seen to (`tend`).
        status = self.stops[-1].poll() if self.stops else 0
        if status != 0:
            ended = "did not end" if status is None else processes.ended(status)
            self.note("nsys stop %s" % ended)
            self.transfer.torn = True
        for child in (*self.helpers(), self.child):
            if child.poll() is None:
                processes.end_group(child)
        processes.end_own_nsys(self.name, clock=self.clock)

    def processes(self) -> List[int]:
        """The processes of this session's nsys that are at work."""
        return processes.of_session(self.name, children=True)

    def helpers(self) -> List["subprocess.Popen[bytes]"]:
        """The `nsys stop`s and the import that we have started and that run."""
        return [child for child in (*self.stops, self.importing) if child and child.poll() is None]

    def hangs(self, pids: List[int]) -> bool:
        """Whether nsys, with its `pids`, will do no more: it does not run, or writes nothing."""
        alive = {*pids, *(helper.pid for helper in self.helpers())}
        works = {pid: processes.work(pid) for pid in alive}
        ticks = {pid: ticks for pid, (_, ticks) in works.items()}
        worked = sum(ticks[pid] - self.ticks.get(pid, ticks[pid]) for pid in alive)
        self.ticks = ticks
        now, written, first = self.clock.now(), self.files.written(), self.written < 0
        self.ran += worked
        self.spun += worked
        if written != self.written:
            self.written, self.wrote_at, self.spun = written, now, 0
        # One that only waits looks around now and then; the disk, or what else runs on a busy node
        # (R), may keep one that works waiting.
        if first or self.ran > WAITING_TICKS or any(state in "DR" for state, _ in works.values()):
            self.ran_at, self.ran = now, 0
        spinning_s, idle_s = (limit_s + self.nsys.longer_s for limit_s in (SPINNING_S, IDLE_S))
        spins = now > self.wrote_at + spinning_s and self.spun >= spinning_s * _TICKS_PER_S
        return now > self.ran_at + idle_s or spins

    def start(self) -> Optional[str]:
        """Returns what went wrong, or None once nsys is collecting."""
        free, began = profiler.free_bytes(self.scratch), self.clock.now()
        if free < profiler.LEAST_FREE_B:
            return no_space(self.scratch, free)
        starting = self.spawn(self.command("start"))
        within_s = self.nsys.begin_s
        status = processes.status_within(starting, within_s, self.clock)
        self.starting_s = self.clock.now() - began
        if status is None:
            return "nsys start did not end within %d s" % within_s
        if status != 0:
            return "nsys start %s: %s" % (processes.ended(status), self.transfer.last_line())
        self.opened = True
        self.files.begin()
        self.look_at = self.clock.now_ns() + LOOK_NS
        self.outbox.say("watch")
        return None

    def stop(self) -> None:
        """Have nsys write its report, beside the training."""
        if self.opened and not self.stops:
            self.stopped_at = self.clock.now()
            self.stops.append(self.spawn(self.command("stop")))
        self.outbox.say("ignore")

    def obey(self) -> None:
        """Where the step does not end in which an order came to close the window, do so inside."""
        order = self.outbox.look().get("order") if self.opened and not self.stops else None
        if not order:
            return
        self.ordered_at = self.ordered_at or self.clock.now()
        if self.clock.now() > self.ordered_at + ORDER_GRACE_S:
            self.stop()
            self.outbox.state(State.FINISHING, "closed within a step: %s" % order)

    def tend(self, nice: int) -> None:
        """Stop what grows too large, make the report with this niceness, transfer it."""
        if self.look_at and self.clock.now_ns() >= self.look_at:
            self.look_at = self.clock.now_ns() + LOOK_NS
            self.limit()
        if not self.stops or self.stops[-1].poll() is None:
            return
        status = self.stops[-1].returncode
        if status != 0:
            self.transfer.torn = True
            self.note("nsys stop %s" % processes.ended(status))
            if len(self.stops) < STOPS and self.processes():
                self.stops.append(self.spawn(self.command("stop")))
        elif self.importing is None:
            self.look_at = 0
            command = self.transfer.import_command()
            if command:
                # An order to close the window means that there is little time.
                ordered = self.outbox.look().get("order")
                self.importing = self.spawn(command, nice=0 if ordered else nice)
            elif self.clock.now() >= self.bring_at and not self.outbox.look().get("brought"):
                self.bring_at = self.clock.now() + BRING_AGAIN_S
                self.outbox.say("bring")
        elif self.importing.poll() is not None:
            self.transfer.imported(self.importing.returncode)
            self.importing = None

    def limit(self) -> None:
        """A step that does not end, or a stop, must not fill the disk: else the agent stops it."""
        held, free, trouble = self.files.bytes(), profiler.free_bytes(self.scratch), ""
        too_large = 0 < 1.25 * self.most < held
        if not self.stops:
            # What was captured is written a second time when the report is made.
            if free < profiler.LEAST_FREE_B + held:
                trouble = "closed early: " + no_space(self.scratch, free)
            elif too_large and self.too_large:
                trouble = "closed inside a step: the capture had %d MB" % (held // MB)
            # The agent, which closes between two steps, learns of it at its next look.
            self.too_large = too_large
            self.outbox.say("held", size=held)
        elif free < profiler.LEAST_FREE_B // 4:
            trouble = "ended while it wrote: " + no_space(self.scratch, free)
        # A report takes memory and disk while it is made.
        elif self.clock.now() > self.stopped_at + STOP_S and 0 < TOO_MUCH * self.most < held:
            trouble = "nsys stop did not end, and the capture grew to %d MB" % (held // MB)
        if trouble:
            self.note(trouble)
        if trouble and not self.stops:
            self.stop()
        elif trouble:  # nsys is ended; its launcher stays, and knows how the program ends
            self.look_at = 0
            self.transfer.torn = True
            for pid in processes.of_session(self.name):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def command(self, verb: str) -> List[str]:
        """nsys with the plan's arguments for `verb`, {output} and its like filled in."""
        arguments: List[str] = getattr(self.nsys, verb)
        for name, value in self.values.items():  # other braces are the user's
            arguments = [argument.replace("{%s}" % name, value) for argument in arguments]
        return [self.nsys.path, *arguments]

    def spawn(
        self, command: List[str], nice: int = 0, program: Optional[Mapping[str, str]] = None
    ) -> "subprocess.Popen[bytes]":
        """Start nsys over the program, whose environment is `program`, or a helper of it."""
        # A helper is in our own folder: nsys cannot be in one whose name is no UTF-8.
        ours = program is None and os.path.isabs(command[0])
        with open(self.transfer.log, "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**(program or os.environ), "TMPDIR": self.scratch},
                cwd=self.transfer.private if ours else None,
                preexec_fn=functools.partial(os.nice, nice) if nice else None,
            )  # fmt: skip


def no_space(folder: str, free: int) -> str:
    """In words."""
    return "no space left on %s: %d MB" % (folder, free // MB)


@contextlib.contextmanager
def one_at_a_time(clock: Clock = REAL) -> Iterator[None]:
    """Hold this node's lock on starting nsys; without it where it cannot be had in time."""
    path = os.path.join(tempfile.gettempdir(), "clusterprof-%d.lock" % os.getuid())
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            held.callback(os.close, lock)
            files.check_ours(os.fstat(lock), path)  # another user may hold it for ever

            def locked() -> bool:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                return False

            clock.until(locked, LOCK_S)
        yield


# -- how large a capture has become, so that a window can be closed before it fills the disk ------


class NsysFiles:
    """What one session of nsys holds on this node by now."""

    def __init__(self, private: str, nsys_pids: Callable[[], List[int]]) -> None:
        self.private = private
        self.nsys_pids = nsys_pids
        self.pids: List[int] = []
        #: anonymous memory of each of nsys' processes when it was first looked at
        self.before: Dict[int, int] = {}

    def begin(self) -> None:
        """The session starts to collect: what its processes are now is not its records."""
        self.pids = self.nsys_pids()
        self.before = {pid: anonymous(pid) for pid in self.pids}

    def bytes(self) -> int:
        """All that it holds: files, shared memory, and how much its processes have grown.

        Files: those of `written`, and what its processes hold open for writing, deleted or not.
        Memory: since `begin`, for versions that keep records there until they stop.
        """
        if not self.pids:
            self.pids = self.nsys_pids()  # reads all of /proc: once
        open_files = itertools.chain.from_iterable(map(opened, self.pids))
        grown = [anonymous(pid) - before for pid, before in self.before.items()]
        held = taken(itertools.chain(below(self.private), open_files))
        return held + sum(max(0, growth) for growth in grown)

    def written(self) -> int:
        """Bytes below its own TMPDIR.

        There nsys streams into `nsys-report-*.qdstrm` and the program puts what it records into
        `nvidia/nsight_systems/quadd_session_*` (measured with 2022.4, 2023.4 and 2024.2).
        """
        return taken(below(self.private))


def below(folder: str) -> Iterator[str]:
    """All files of a folder."""
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names)


def opened(pid: int) -> Iterator[str]:
    """The ways in /proc to the files that a process holds open for writing."""
    for path in glob.iglob("/proc/%d/fd/*" % pid):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_mode & stat.S_IWUSR:
                yield path


def taken(paths: Iterable[str]) -> int:
    """Bytes that these files take; one that is there twice counts once."""
    held: Dict[Tuple[int, int], int] = {}
    for path in paths:
        with contextlib.suppress(OSError):  # ended, or removed meanwhile
            # One in the tree may be a link to what others share; one in /proc is always a link.
            status = os.stat(path) if path.startswith("/proc/") else os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                # Blocks: files are made larger than what is in them.
                held[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(held.values())


def anonymous(pid: int) -> int:
    """Bytes of memory that are the process's own and no file's; 0 where it is gone."""
    with contextlib.suppress(OSError, ValueError), open("/proc/%d/status" % pid, "rb") as file:
        for line in file:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
