"""Beacons: tiny AllReduces at the window's two ends, for jobs whose collectives are all large.

The members of a tiny AllReduce end within a microsecond of each other, and so tell how their
clocks lie. Every rank of the job must take part, or those that do would wait for ever and the
training's next collective would meet a beacon. So nothing is issued on trust: the ranks agree
first, over the key-value store that torch.distributed itself uses, with a deadline.

- A rank that comes to a window's end writes there its count of steps, the number of collectives
  it has issued on the default group, the group's size and backend. One that differs from the
  first rank decides "no".
- The last rank to arrive decides "go", one whose patience ends decides "no"; whichever is written
  first stands for all (compare_set is atomic). "go" therefore means that every rank stands
  between the same two steps with the same number of collectives behind it, and none left earlier.
- What is left: a rank that dies between "go" and its beacons. That would have ended the training
  too, by the collective that comes next.

A rank that never comes (another count of steps, an interpreter without the agent) costs the
others the patience, once: after a "no" no rank tries again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from ..contracts import paths
from ..contracts.timing import REAL, Clock
from ..guard.outbox import Outbox
from .steps import Counter

#: Opening nsys' window takes a profiled rank up to 15 s, and the others wait for it here.
PATIENCE_S = 30.0
#: A message of 13 bytes is no training's: readers know a beacon by it.
MESSAGE_BYTES = 13


class Beacons:
    """One rank's beacons; `send` never raises, and never waits for longer than `PATIENCE_S`."""

    def __init__(self, number: int, world_size: Optional[int]) -> None:
        self.number = number
        self.world_size = world_size
        self.sent: List[Dict[str, Any]] = []
        self.given_up = False

    def attend(self, window: Tuple[int, int], counter: Counter) -> None:
        """Take part at the window's ends in a rank that captures nothing itself."""
        first, end = window

        def at(count: int) -> int:
            opening = count < end
            self.send("open" if opening else "close", count)
            return end if opening and not self.given_up else -1

        counter.attend(first, at)

    def send(self, event: str, count: int) -> None:
        """All ranks' beacons at one end (`open`, `close`) of the window, after step `count`."""
        if self.given_up:
            return
        entry: Dict[str, Any] = {"event": event, "step": count, "bytes": MESSAGE_BYTES}
        try:
            entry.update(self.agreed(event, count))
        except Exception as error:  # torch and its store raise what they like
            entry["reason"] = str(error).strip().split("\n")[0] or error.__class__.__name__
        self.given_up = "begin_ns" not in entry
        self.sent.append(entry)

    def write(self, outbox: Outbox) -> None:
        """Have beacons.json written to the rank's folder."""
        if self.sent:
            outbox.say("file", name=paths.BEACONS, text=json.dumps(self.sent) + "\n")

    def agreed(self, event: str, count: int) -> Dict[str, Any]:
        """Agree with all other ranks, then issue; the facts, or the reason why not."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            # Without a group there is no store to say it in: the others' patience must end.
            return {"reason": "torch.distributed is not initialised"}
        c10d = dist.distributed_c10d
        group, store = c10d._get_default_group(), c10d._get_default_store()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = "clusterprof/beacons/%s/%s" % (attempt, event)
        problem = self.unwilling(dist, group)
        facts = ""
        if problem is None:
            sequence = group._get_backend(device_of(dist))._get_sequence_number_for_group()
            facts = "%d steps, %d collectives on %d ranks of %s" % (
                count, sequence, group.size(), dist.get_backend(),
            )  # fmt: skip
        verdict = agree(store, key, group.size(), facts, problem, PATIENCE_S)
        if verdict != "go":
            return {"reason": verdict, "facts": facts}
        begin = time.time_ns()
        issue(dist, self.number)
        end = time.time_ns()
        return {"begin_ns": begin, "end_ns": end, "number": self.number, "facts": facts}

    def unwilling(self, dist: Any, group: Any) -> Optional[str]:
        """Why this rank cannot take part; None where it can."""
        if group.size() < 2:
            return "the job has one rank"
        if self.world_size not in (None, group.size()):
            sizes = group.size(), self.world_size
            return "the default group has %d of the job's %d ranks" % sizes
        if dist.get_backend() not in ("nccl", "gloo"):
            return "the backend %s has not been tried" % dist.get_backend()
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return None


def agree(
    store: Any, key: str, size: int, facts: str, problem: Optional[str], patience_s: float,
    clock: Clock = REAL,
) -> str:  # fmt: skip
    """Return "go" or, the same on every rank, why not; `problem`: why this rank cannot take part.

    `facts` are the same on all `size` ranks, or they do not agree.
    """

    def first(name: str, value: str) -> str:
        """Write `value` unless another rank was first; returns what stands there."""
        found = store.compare_set(key + name, "", value)
        return found.decode() if isinstance(found, bytes) else str(found)

    if problem is None:
        measure = first("/facts", facts)
        if measure != facts:
            problem = "the ranks differ: %s here, %s there" % (facts, measure)
    if problem is not None:
        return first("/verdict", problem)
    if store.add(key + "/arrived", 1) == size:
        return first("/verdict", "go")
    # Asked for again and again, not waited for: a waiting call would hold the store's lock, which
    # torch's own watchdogs need. Not to overrun the store with the questions of thousands of ranks:
    every_s = max(0.002, size * 20e-6)
    clock.until(lambda: store.check([key + "/verdict"]), patience_s, every_s)
    return first("/verdict", "not all ranks came to this step within %g s" % patience_s)


def device_of(dist: Any) -> Any:
    """The device whose collectives the default group carries."""
    torch: Any = sys.modules["torch"]
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def issue(dist: Any, number: int) -> None:
    """The AllReduces. On CUDA the host does not wait for them; on gloo each waits for the last."""
    torch: Any = sys.modules["torch"]
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device_of(dist))
    with torch.no_grad():
        for _ in range(number):
            # NCCL: wait() only orders the current stream after the collective.
            dist.all_reduce(message, async_op=True).wait()
