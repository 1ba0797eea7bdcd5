"""Ranks with a host, a compute stream and a communication stream, all advanced together.

Everything is an array over ranks: no loop over ranks, so thousands of them can be simulated.
A kernel starts once it is launched, its stream is free and what it needs is done; a
synchronising collective ends once its last member has started and the transfer is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterprof.simulate.job import Job

Ints = npt.NDArray[np.int64]

COMPUTE_STREAM, COLLECTIVE_STREAM, PAIR_STREAM, TENSOR_STREAM = 7, 19, 23, 27
_PAUSE_NS = 4_000
_CALL_NS = 8_000


class Machine:
    """State of all ranks in true time (ns), and what they have recorded."""

    def __init__(self, job: Job, rng: np.random.Generator) -> None:
        n = job.world
        self.job, self.rng = job, rng
        self.host = np.full(n, 1_000_000_000, dtype=np.int64)
        self.free: dict[int, Ints] = {
            s: self.host.copy()
            for s in (COMPUTE_STREAM, COLLECTIVE_STREAM, PAIR_STREAM, TENSOR_STREAM)
        }
        self.recording = False
        self.activities: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.host_calls: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self._group = 0

    def everyone(self) -> Ints:
        """Indices of all ranks."""
        return np.arange(self.job.world)

    def busy_host(self, ranks: Ints, length: Ints | int, kind: str, name: str) -> None:
        """Let the hosts of `ranks` do something else for `length` ns."""
        begin = self.host[ranks].copy()
        self.host[ranks] += length
        keep = self.host[ranks] > begin
        self._host_call(ranks[keep], begin[keep], self.host[ranks][keep], kind, name)

    def launch(
        self, ranks: Ints, length: Ints, stream: int, name: str, kind: str, **more: Any
    ) -> Ints:
        """Launch one kernel on each of `ranks`; returns when it ends."""
        begin = self.host[ranks].copy()
        self.host[ranks] += self.job.launch_ns
        launched = self.host[ranks]
        start = np.maximum(launched + _PAUSE_NS, self.free[stream][ranks] + 1_000)
        end = start + length
        self.free[stream][ranks] = end
        self._activity(ranks, start, end, stream, name, kind, begin, launched, **more)
        return end

    def collective(
        self, ranks: Ints, groups: Ints, needs: Ints, length: int, stream: int, tag: str
    ) -> Ints:
        """An AllReduce in each group of `ranks` (`groups`: number per rank); returns its ends."""
        begin = self.host[ranks].copy()
        self.host[ranks] += self.job.launch_ns
        launched = self.host[ranks].copy()
        start = np.maximum.reduce([launched + _PAUSE_NS, self.free[stream][ranks] + 500, needs])
        start = start + self.rng.integers(0, 300, len(ranks))
        last = np.zeros(int(groups.max()) + 1, dtype=np.int64)
        np.maximum.at(last, groups, start)
        small = length <= 2 * self.job.latency_ns
        spread = 400 if small else self.job.phase_ns
        end = last[groups] + length + self.rng.integers(0, max(spread, 1), len(ranks))
        self.free[stream][ranks] = end
        self._activity(
            ranks, start, end, stream, "ncclDevKernel_AllReduce", "collective", begin, launched
        )
        size = 8192 if small else 33_554_432
        self._call(ranks, "AllReduce", groups, tag, stream, start, end, begin, launched, size)
        return end

    def transfer(self, senders: Ints, receivers: Ints, needs: Ints) -> Ints:
        """Send from each sender to the receiver beside it; returns when it is received."""
        length = 36_000
        begin, out = self.host[senders].copy(), PAIR_STREAM
        self.host[senders] += self.job.launch_ns
        sent_from = np.maximum.reduce(
            [self.host[senders] + _PAUSE_NS, self.free[out][senders] + 500, needs]
        )
        sent = sent_from + length
        self.free[out][senders] = sent
        arrived = self.host[receivers].copy()
        self.host[receivers] += self.job.launch_ns
        waiting = np.maximum(self.host[receivers] + _PAUSE_NS, self.free[out][receivers] + 500)
        received = np.maximum(sent, waiting + length - 13_000) + 13_000
        self.free[out][receivers] = received
        name = "ncclDevKernel_SendRecv"
        self._activity(senders, sent_from, sent, out, name, "collective", begin, self.host[senders])
        self._activity(
            receivers, waiting, received, out, name, "collective", arrived, self.host[receivers]
        )
        whole = np.zeros(len(senders), dtype=np.int64)
        self._call(
            senders, "Send", whole, "world", out, sent_from, sent, begin, self.host[senders],
            8_388_608, peer=receivers,
        )  # fmt: skip
        self._call(
            receivers, "Recv", whole, "world", out, waiting, received, arrived,
            self.host[receivers], 8_388_608, peer=senders,
        )  # fmt: skip
        return np.asarray(received)

    def wait_for_device(self, ranks: Ints, until: Ints, name: str) -> None:
        """Let the hosts wait until their device is done."""
        begin = self.host[ranks].copy()
        self.host[ranks] = np.maximum(begin + 5_000, until)
        self._host_call(ranks, begin, self.host[ranks], "cuda", name)

    def _activity(
        self, ranks: Ints, start: Ints, end: Ints, stream: int, name: str, kind: str,
        begin: Ints, launched: Ints, **more: Any,
    ) -> None:  # fmt: skip
        if self.recording:
            self.activities.append(
                {"rank": ranks, "start_ns": start, "end_ns": end, "stream": stream, "name": name,
                 "kind": kind, "launch_end_ns": launched.copy(), **more,
                 "launch_start_ns": launched - np.minimum(launched - begin, _CALL_NS)}
            )  # fmt: skip
            # the call itself is short; what comes before it is the host's own work
            call = launched - np.minimum(launched - begin, _CALL_NS)
            self._host_call(ranks, call, launched.copy(), "cuda", "cudaLaunchKernel")

    def _call(
        self, ranks: Ints, operation: str, groups: Ints, tag: str, stream: int, start: Ints,
        end: Ints, begin: Ints, launched: Ints, size: int, peer: Sequence[int] | Ints | None = None,
    ) -> None:  # fmt: skip
        if self.recording:
            self._group += 1
            self.calls.append(
                {"rank": ranks, "operation": operation, "group": groups, "tag": tag,
                 "stream": stream, "start_ns": start, "end_ns": end, "issue_start_ns": begin,
                 "issue_end_ns": launched.copy(), "size": size, "peer": peer}
            )  # fmt: skip

    def _host_call(self, ranks: Ints, begin: Ints, end: Ints, kind: str, name: str) -> None:
        if self.recording and len(ranks):
            self.host_calls.append(
                {"rank": ranks, "start_ns": begin, "end_ns": end, "kind": kind, "name": name}
            )
