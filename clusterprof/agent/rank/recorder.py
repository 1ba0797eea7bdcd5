"""PyTorch's flight recorder of this rank, saved around the window: every rank of the job, always;
and with `--watch` again and again while the job runs.

torch notes each collective that a process enqueues, with group, sequence number, sizes and time, in
a ring of some entries. A dump of it, as torch gives it, is handed to the rank's writer after the
window's last step, between two steps. On NCCL each entry has how long the collective took as well,
from the moment on that this was switched on for its group. torch cannot switch it off again, so
that before it is seen what it will cost: see `affordable`.

A dump where the ring has no place aborts the process, and nothing tells how many places it has. So
that is concluded first, and where it is not certain nothing is called. Sources: FlightRecorder.hpp
(its constructor) and NCCLUtils.hpp in the wheels of torch 2.5 to 2.13.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..contracts import clocks, paths
from ..contracts.messages import complain
from ..contracts.outbox import CUDA, ROCM, Outbox
from ..contracts.plan import Plan
from . import hooks
from .profilers import initialised
from .steps import Counter, ended_before
from .window import Window, first_line

#: How many entries the ring has; the first one's name is known from torch 2.8 on.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
SIZES_SINCE = (2, 8)
#: Without them: 2,000 entries from here on, none before.
ON_SINCE = (2, 11)
ON = 2_000
#: An entry takes 20 µs (two H200s) to 25 µs (two H100s) to dump and pack, with torch 2.11; no
#: training is to wait longer than 0.5 s.
MOST = 20_000
#: torch's watchdog finds out how long NCCL's collectives took, ten times a second: of those that it
#: has not looked at the dump knows no duration.
SETTLE_S = 0.3
#: A user who has set it has chosen whether collectives are timed.
TIMING = "TORCH_NCCL_ENABLE_TIMING"
#: What timing a collective adds to a step (7 to 9 µs on two H100s with torch 2.11, whether the step
#: is bound by its host or by its GPU; 13 in one of 200 collectives), and which part of a step that
#: may be; a step is known by so many of them before the window.
TIMING_NS, TIMING_FRAC, MOST_NOTED = 9_000, 0.005, 8
#: A backend's functions: its recorder as JSON, and as a pickle, which alone has stacks.
DUMPS = {
    "nccl": ("_dump_nccl_trace_json", "_dump_nccl_trace"),
    "gloo": ("_dump_fr_trace_json", "_dump_fr_trace"),
}


class UnavailableError(Exception):
    """There is no flight recorder to be saved; the message says why, in one line."""


class Source:
    """What dumps the recorder of this process: a function of torch's, and its arguments."""

    def __init__(self, backend: str, function: str, **arguments: bool) -> None:
        self.backend = backend
        self.function = function
        self.arguments = arguments

    def content(self) -> bytes:
        """The dump as torch gives it. Raises UnavailableError, and what torch does."""
        dump = getattr(sys.modules["torch"]._C._distributed_c10d, self.function)
        content = dump(**self.arguments)
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes):
            raise UnavailableError("torch's %s gave no dump" % self.function)
        return content


class Recorder:
    """The recorder of one rank: `open` before the window's first step, `save` after its last."""

    def __init__(
        self, plan: Plan, outbox: Outbox, began_with: Mapping[str, str],
        window: Optional[Window], clock: bool, is_first: bool = False,
    ) -> None:  # fmt: skip
        """`began_with`: the process's first environment. `clock`: read this host's clock here;
        `is_first`: it is rank 0, which speaks for the run.
        """
        self.is_first = is_first
        self.first, self.end = plan.window
        self.stacks = plan.stacks
        self.outbox = outbox
        self.began_with = began_with
        self.window = window
        self.clock = clock
        self.is_open = self.was_open = self.saved = False
        #: when the window's last step ended (monotonic, s); 0 while it has not
        self.ended_s = 0.0
        self.source: Optional[Source] = None
        #: when steps before the window ended (monotonic, ns), and how many collectives each group
        #: had had then
        self.noted: List[Tuple[int, Dict[Any, int]]] = []
        self.members: Dict[str, Any] = {}
        self.readings: List[Dict[str, Any]] = []

    @property
    def due(self) -> int:
        """After how many steps to call `at` first."""
        return max(self.first - MOST_NOTED, min(self.first, 1))

    def at(self, count: int) -> int:
        """`count` steps have ended: the window is near, begins or ends here, or its dump is due.

        Returns the count at which to come back, -1 for never.
        """
        with contextlib.suppress(Exception):  # no group yet, or a backend that does not count
            if not self.was_open:
                self.noted.append((self.outbox.clock.now_ns(), counted()))
        if count < self.first:
            return count + 1
        if not self.was_open:
            self.open()
            return max(self.end, count + 1)
        self.close()
        by_nccl = self.source is not None and self.source.backend == "nccl"
        if by_nccl and self.outbox.clock.now() < self.ended_s + SETTLE_S:
            return count + 1
        self.save()
        return -1

    def open(self) -> None:
        """From now on collectives are timed, if that can be had."""
        self.is_open = self.was_open = True
        self.outbox.say("hardware", **gpu())
        if self.window is None:
            self.read_clock("open")
        with contextlib.suppress(Exception):  # it is said when the dump is due
            self.source = self.find(self.stacks)
            self.members = members()
            hooks.wrap(sys.modules["torch.distributed"], "destroy_process_group", None, self.hurry)
            if TIMING not in os.environ:
                self.time_collectives()

    def time_collectives(self) -> None:
        """Have NCCL's collectives timed from now on, of as many groups as may be; the rank's state
        says if not of all.
        """
        timed, untimed = affordable(groups(), self.noted)
        for group in timed:
            with contextlib.suppress(Exception):  # a backend that cannot
                group._enable_collectives_timing()
        if untimed and self.source is not None and self.source.backend == "nccl":
            self.outbox.state(None, untimed=untimed)
            if self.is_first:
                complain("rank 0: %s" % untimed)

    def close(self) -> None:
        """The window's last step has ended."""
        if not self.ended_s:
            self.ended_s = self.outbox.clock.now()
            self.outbox.say("hardware", **gpu())
            if self.window is None:
                self.read_clock("close")

    def hurry(self) -> None:
        """The program destroys a process group: save what may be gone with it."""
        if self.is_open:
            self.save()
            self.is_open = True

    def save(self) -> None:
        """Hand the dump to the writer, or say in the rank's state why there is none."""
        self.is_open = False
        try:
            try:
                source = self.find(self.stacks)
            except UnavailableError:
                # NCCL's entries refer to CUDA events of its process groups, which may be gone with
                # them; gloo's refer to nothing.
                if self.source is None or self.source.backend != "gloo" or initialised():
                    raise
                source = self.source
            self.members = members() or self.members
            hand_over(source, (paths.FLIGHT, paths.FLIGHT_PICKLE), self.members, self.outbox)
            self.saved = True
        except UnavailableError as why:
            self.missing(str(why))
        except Exception as error:
            self.missing("torch's flight recorder could not be read: %s" % first_line(error))

    def finish(self, count: int) -> None:
        """The program ends after `count` steps: what there is of a window that is open."""
        if self.is_open:
            self.close()
            self.save()
        elif not self.was_open:
            self.missing(ended_before(count, self.first, self.end))

    def missing(self, why: str) -> None:
        """Have the rank's state say why there is no dump, if there is none."""
        if not self.saved:
            self.outbox.state(None, flight=why)

    def can_dump(self) -> bool:
        """Whether the recorder of this process can be dumped."""
        try:
            self.find(self.stacks)
        except Exception:  # torch raises what it likes
            return False
        return True

    def find(self, stacks: bool) -> Source:
        """What dumps the recorder of this process, with the Python stack of each call if asked for.

        Raises UnavailableError where that is not safe.
        """
        torch: Any = sys.modules.get("torch")
        dist = initialised()
        if torch is None:
            raise UnavailableError("the program has not imported torch")
        if dist is None:
            raise UnavailableError("torch.distributed is not initialised")
        backend, release = backend_of(dist, torch), str(torch.__version__)
        for environ in (self.began_with, os.environ):
            check_size(environ, release)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UnavailableError("a CUDA graph was being captured at the window's end")
        text, binary = DUMPS[backend]
        core = torch._C._distributed_c10d
        everything = {"includeCollectives": True, "onlyActive": False}
        if hasattr(core, text) and not stacks:
            return Source(backend, text, **everything)
        if hasattr(core, binary):
            return Source(backend, binary, includeStackTraces=stacks, **everything)
        raise UnavailableError("torch %s has no flight recorder for %s" % (release, backend))

    def read_clock(self, event: str) -> None:
        """What this host's clocks say at the window's ends, once on each node."""
        clocks.notify_prober(event)
        if self.clock:
            with contextlib.suppress(Exception):
                self.readings.append(clocks.reading(event))
            if event == "close":
                self.outbox.say("clock", readings=self.readings)


def compressed(content: bytes) -> bytes:
    """In gzip's format, fast."""
    import zlib

    packer = zlib.compressobj(1, zlib.DEFLATED, 31)  # 31: with gzip's header
    return packer.compress(content) + packer.flush()


def hand_over(
    source: Source, names: Tuple[str, str], listed: Mapping[str, Any], outbox: Outbox
) -> None:
    """Have the dump written, and the groups' ranks where it lists none. Raises as `content`.

    `names`: of a file with the recorder's JSON, and with its pickle.
    """
    if source.backend == "gloo" and listed:
        outbox.file(paths.GROUPS, compressed(json.dumps({"pg_config": listed}).encode()))
    name = names[DUMPS[source.backend].index(source.function)]
    outbox.file(name, compressed(source.content()))


def gpu() -> Dict[str, Optional[str]]:
    """What this process computes on, the GPU's UUID if torch tells it (from 2.5 on), and of one of
    AMD's, which HIP may number otherwise than the kernel does, its PCI address (from 2.9 on).
    """
    uses, uuid, pci = "", None, None
    with contextlib.suppress(Exception):  # torch raises what it likes
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            uses = ROCM if torch.version.hip else CUDA
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            uuid = str(getattr(device, "uuid", "")) or None
            if uses == ROCM and hasattr(device, "pci_bus_id"):
                address = device.pci_domain_id, device.pci_bus_id, device.pci_device_id
                pci = "%04x:%02x:%02x.0" % address
    return {"uses": uses, "uuid": uuid, **({"pci": pci} if pci else {})}


def counted() -> Dict[Any, int]:
    """How many collectives each group has had; sends and receives are not among them."""
    return {group: group._get_sequence_number_for_group() for group in groups()}


def affordable(every: List[Any], noted: List[Tuple[int, Dict[Any, int]]]) -> Tuple[List[Any], str]:
    """Those groups whose collectives can be timed for `TIMING_FRAC` of a step, with few first; and
    what is to be said of the others, "" where there are none.

    `noted`: see `Recorder`. Of fewer than two steps the cost is not known: all are timed.
    """
    if len(noted) < 3:
        return every, ""
    times = [at_ns for at_ns, _ in noted]
    lengths = sorted(times[k] - times[k - 1] for k in range(1, len(times)))
    step_ns, steps = max(lengths[len(lengths) // 2], 1), len(lengths)
    first, last = noted[0][1], noted[-1][1]
    calls = {group: (last[group] - first.get(group, 0)) / steps for group in last}
    left, timed = TIMING_FRAC * step_ns / TIMING_NS, []  # type: float, List[Any]
    ordered = sorted(every, key=lambda group: calls.get(group, 0.0))
    for group in ordered:
        left -= calls.get(group, 0.0)
        if left < 0:
            break
        timed.append(group)
    untimed = sum(calls[group] for group in ordered[len(timed) :])
    why = ("%.0f collectives in each step of %.1f ms are not timed, which might take %.1f%% of it: "
           "%s=1 times them")  # fmt: skip
    part = 100 * TIMING_NS * untimed / step_ns
    return timed, why % (untimed, step_ns / 1e6, part, TIMING) if untimed else ""


def members() -> Dict[str, Any]:
    """The process groups of this rank with their ranks, in the form of a dump's `pg_config`."""
    with contextlib.suppress(Exception):  # a torch that names them otherwise
        dist = initialised()
        names, ranks = dist.distributed_c10d._world.pg_names, dist.get_process_group_ranks
        return {str(names[group]): {"ranks": ranks(group)} for group in groups()}
    return {}


def groups() -> List[Any]:
    """All process groups that this rank is in."""
    return list(sys.modules["torch.distributed"].distributed_c10d._world.pg_map)


def backend_of(dist: Any, torch: Any) -> str:
    """The backend whose recorder has the training's collectives. Raises UnavailableError."""
    used = {str(dist.get_backend_config(group)) for group in groups()}
    recorded = [name for name in DUMPS if any(name in backend for backend in used)]
    if "nccl" in recorded and "gloo" in recorded and not torch.cuda.is_initialized():
        recorded.remove("nccl")
    if not recorded:
        raise UnavailableError("the backend %s has no flight recorder" % ", ".join(sorted(used)))
    return recorded[0]


def check_size(environ: Mapping[str, str], text: str) -> None:
    """Raise UnavailableError where the recorder has no place, may have none, or has too many;
    `text`: torch's version, of which 2.11.0a0 certainly has all of 2.10 alone.
    """
    release = re.match(r"(\d+)\.(\d+)(\.\d+)?(a|b|rc|\.dev)?", text)
    version = (int(release[1]), int(release[2]) - bool(release[4])) if release else (0, 0)
    given = [name for name in SIZES[version < SIZES_SINCE :] if name in environ]
    for name in given:
        try:
            size = int(environ[name])
        except ValueError:
            size = 0
        if size < 1:
            why = "%s=%.20s switches the flight recorder off"
            raise UnavailableError(why % (name, environ[name]))
        if size > MOST:
            why = "%s=%d is more than the %d entries that a training can wait for"
            raise UnavailableError(why % (name, size, MOST))
    if not given and version < ON_SINCE:
        why = "torch %s has its flight recorder off: %s=%d switches it on"
        raise UnavailableError(why % (text, SIZES[1], ON))


class Watching:
    """`--watch`: the rank's recorder, saved again and again; `at` is called between two steps.

    All ranks save it at their first step after the same times of the wall clock, so that the dumps
    hold the same steps. It costs a dump of the ring: 25 µs an entry, 0.5 s at most.
    """

    def __init__(
        self, every_s: int, recorders: List[Recorder], outbox: Outbox, counter: Counter
    ) -> None:
        """`recorders`: of each window of the rank, the first one's at least."""
        self.every_ns = every_s * 1_000_000_000
        self.recorders = recorders
        self.outbox = outbox
        self.counter = counter
        #: when it is saved next (wall clock, ns); 0 before the first call
        self.due_ns = 0
        #: the count at the last call, and when that was (monotonic, ns)
        self.before = (0, 0)

    def at(self, count: int) -> int:
        """A step has just ended: save what is due; returns when to come back."""
        clock = self.outbox.clock
        wall_ns, now_ns = clock.wall_ns(), clock.now_ns()
        # a window of a profiler is compared by its own dump
        is_open = any(recorder.is_open for recorder in self.recorders)
        if self.due_ns and self.due_ns <= wall_ns and not is_open:
            # Why there is none is said of the window's dump; there may be one by the next time:
            # a program may join its process group late, or leave it for another one.
            with contextlib.suppress(Exception):
                self.save()
        # always within the next `every_ns`: the clock may have been set
        self.due_ns = (wall_ns // self.every_ns + 1) * self.every_ns
        counted, at_ns = self.before
        self.before = count, now_ns
        step_ns = max((now_ns - at_ns) // max(count - counted, 1), 1)
        # Half the way, as steps may take longer from now on: the last calls are one step apart.
        return count + max(1, (self.due_ns - wall_ns) // step_ns // 2)

    def save(self) -> None:
        """Hand over the dump and the latest steps. Raises UnavailableError, and what torch does."""
        source = self.recorders[0].find(stacks=False)
        clocks.notify_prober(clocks.LOOK)
        self.counter.flush()
        hand_over(source, (paths.WATCH, paths.WATCH_PICKLE), members(), self.outbox)
        self.outbox.say("latest_steps")
        self.outbox.say("hardware", **gpu())
