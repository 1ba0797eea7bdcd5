"""PyTorch's flight recorder of this rank, saved around the window: every rank of the job, always.

torch notes each collective that a process enqueues, with group, sequence number, sizes and time, in
a ring of some entries. A dump of it, as torch gives it, is handed to the rank's writer after the
window's last step, between two steps. On NCCL each entry has how long the collective took as well,
from the moment on that this was switched on for its group.

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
from ..contracts.outbox import CUDA, ROCM, Outbox
from ..contracts.plan import Plan
from . import hooks, probing
from .profilers import initialised
from .steps import ended_before
from .window import Window, first_line

#: How many entries the ring has; the first one's name is known from torch 2.8 on.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
SIZES_SINCE = (2, 8)
#: Without them: 2,000 entries from here on, none before.
ON_SINCE = (2, 11)
ON = 2_000
#: An entry takes 20 µs to dump and pack (two H200s, torch 2.11); no training is to wait longer than
#: 0.4 s.
MOST = 20_000
#: torch's watchdog finds out how long NCCL's collectives took, ten times a second: of those that it
#: has not looked at the dump knows no duration.
SETTLE_S = 0.3
#: A user who has set it has chosen whether collectives are timed.
TIMING = "TORCH_NCCL_ENABLE_TIMING"
#: A backend's functions: its recorder as JSON, and as a pickle, which alone has stacks.
DUMPS = {
    "nccl": ("_dump_nccl_trace_json", "_dump_nccl_trace"),
    "gloo": ("_dump_fr_trace_json", "_dump_fr_trace"),
}
#: gzip's own format, by zlib
_GZIP = 31


class UnavailableError(Exception):
    """There is no flight recorder to be saved; the message says why, in one line."""


class Source:
    """What dumps the recorder of this process."""

    def __init__(self, backend: str, function: str, name: str, **arguments: bool) -> None:
        """`function` of torch's, and its arguments; `name`: of the file that holds its dump."""
        self.backend = backend
        self.function = function
        self.name = name
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
        window: Optional[Window], clock: bool,
    ) -> None:  # fmt: skip
        """`began_with`: the process's first environment. `window`: None where the rank has none.

        `clock`: this host's clock is read in this rank.
        """
        self.first, self.end = plan.window
        self.stacks = plan.stacks
        self.outbox = outbox
        self.began_with = began_with
        self.window = window
        self.clock = clock
        self.is_open = False
        self.was_open = False
        self.saved = False
        #: when the window's last step ended (monotonic, s); 0 while it has not
        self.ended_s = 0.0
        self.source: Optional[Source] = None
        self.members: Dict[str, Any] = {}
        self.readings: List[Dict[str, Any]] = []

    def at(self, count: int) -> int:
        """`count` steps have ended: the window begins or ends here, or its dump is due.

        Returns the count at which to come back, -1 for never.
        """
        if not self.was_open:
            self.open()
            return max(self.end, count + 1)
        if not self.ended_s:
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
            self.source = self.find()
            self.members = members()
            hooks.wrap(sys.modules["torch.distributed"], "destroy_process_group", None, self.hurry)
            if TIMING not in os.environ:
                for group in groups():
                    with contextlib.suppress(Exception):  # a backend that cannot
                        group._enable_collectives_timing()

    def close(self) -> None:
        """The window's last step has ended."""
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
            source = self.at_the_end()
            self.members = members() or self.members
            hand_over(source, source.name, self.members, self.outbox)
            self.saved = True
        except UnavailableError as why:
            self.missing(str(why))
        except Exception as error:
            self.missing("torch's flight recorder could not be read: %s" % first_line(error))

    def finish(self, count: int) -> None:
        """The program ends after `count` steps: what there is of a window that is open."""
        if self.is_open:
            if not self.ended_s:
                self.close()
            self.save()
        elif not self.was_open:
            self.missing(ended_before(count, self.first, self.end))

    def missing(self, why: str) -> None:
        """Have the rank's state say why there is no dump, if there is none."""
        if self.saved:
            return
        self.outbox.state(None, flight=why)

    def at_the_end(self) -> Source:
        """What dumps now. Raises UnavailableError.

        NCCL's entries refer to CUDA events of its process groups, which may be gone with them;
        gloo's refer to nothing.
        """
        try:
            return self.find()
        except UnavailableError:
            if self.source is None or self.source.backend != "gloo" or initialised() is not None:
                raise
            return self.source

    def can_dump(self) -> bool:
        """Whether the recorder of this process can be dumped."""
        try:
            self.find()
        except Exception:  # torch raises what it likes
            return False
        return True

    def find(self, stacks: Optional[bool] = None) -> Source:
        """What dumps the recorder of this process; UnavailableError where that is not safe.

        `stacks`: with the Python stack of each call; None for what the plan says.
        """
        stacks = self.stacks if stacks is None else stacks
        torch = sys.modules.get("torch")
        if torch is None:
            raise UnavailableError("the program has not imported torch")
        dist = initialised()
        if dist is None:
            raise UnavailableError("torch.distributed is not initialised")
        backend = backend_of(dist, torch)
        version = version_of(str(torch.__version__))
        for environ in (self.began_with, os.environ):
            check_size(environ, version, str(torch.__version__))
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UnavailableError("a CUDA graph was being captured at the window's end")
        text, binary = DUMPS[backend]
        core = torch._C._distributed_c10d
        everything = {"includeCollectives": True, "onlyActive": False}
        if hasattr(core, text) and not stacks:
            return Source(backend, text, paths.FLIGHT, **everything)
        if hasattr(core, binary):
            everything["includeStackTraces"] = stacks
            return Source(backend, binary, paths.FLIGHT_PICKLE, **everything)
        raise UnavailableError(
            "torch %s has no flight recorder for %s" % (torch.__version__, backend)
        )

    def read_clock(self, event: str) -> None:
        """What this host's clocks say at the window's ends, once on each node."""
        probing.notify(event)
        if self.clock:
            with contextlib.suppress(Exception):
                self.readings.append(clocks.reading(event))
            if event == "close":
                self.outbox.say("clock", readings=self.readings)


def compressed(content: bytes) -> bytes:
    """In gzip's format, fast."""
    import zlib

    packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    return packer.compress(content) + packer.flush()


def hand_over(source: Source, name: str, listed: Mapping[str, Any], outbox: Outbox) -> None:
    """Have the dump written, and the groups' ranks where it lists none. Raises as `content`."""
    if source.backend == "gloo" and listed:
        outbox.file(paths.GROUPS, compressed(json.dumps({"pg_config": listed}).encode()))
    outbox.file(name, compressed(source.content()))


def gpu() -> Dict[str, Optional[str]]:
    """What this process computes on, and the GPU's UUID if torch tells it (from 2.5 on)."""
    uses, uuid = "", None
    with contextlib.suppress(Exception):  # torch raises what it likes
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            uses = ROCM if torch.version.hip else CUDA
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            uuid = str(getattr(device, "uuid", "")) or None
    return {"uses": uses, "uuid": uuid}


def members() -> Dict[str, Any]:
    """The process groups of this rank with their ranks, in the form of a dump's `pg_config`."""
    with contextlib.suppress(Exception):  # a torch that names them otherwise
        dist = initialised()
        names = dist.distributed_c10d._world.pg_names
        ranks = dist.get_process_group_ranks
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


def version_of(text: str) -> Tuple[int, int]:
    """The release that a version certainly has all of: of 2.11.0a0 that before, 2.10."""
    release = re.match(r"(\d+)\.(\d+)(\.\d+)?(a|b|rc|\.dev)?", text)
    if release is None:
        return 0, 0
    return int(release[1]), int(release[2]) - bool(release[4])


def check_size(environ: Mapping[str, str], version: Tuple[int, int], text: str) -> None:
    """Raise UnavailableError where the recorder has no place, may have none, or has too many."""
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
