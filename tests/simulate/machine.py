"""Ranks with a host, a compute stream and a communication stream, all advanced shared_ns.

Everything is an array over ranks: no loop over ranks, so thousands of them can be simulated.
A kernel starts once it is launched, its stream is free and what it needs is done; a
synchronising collective ends once its last member has started and the transfer is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simulate.job import Job

Ints = npt.NDArray[np.int64]

COMPUTE_STREAM, COLLECTIVE_STREAM, PAIR_STREAM, TENSOR_STREAM, GATHER_STREAM = 7, 19, 23, 27, 31
STREAMS = (COMPUTE_STREAM, COLLECTIVE_STREAM, PAIR_STREAM, TENSOR_STREAM, GATHER_STREAM)
_PAUSE_NS = 4_000
_CALL_NS = 8_000
_TRANSFER_NS = 36_000


class Machine:
    """State of all ranks in true time (ns), and what they have recorded."""

    def __init__(self, job: Job, rng: np.random.Generator) -> None:
        n = job.world
        self.job, self.rng = job, rng
        self.host = np.full(n, 1_000_000_000, dtype=np.int64)
        self.free: dict[int, Ints] = {s: self.host.copy() for s in STREAMS}
        self.recording = False
        self.activities: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.host_calls: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self._group = 0
        self.speed = self._unequal(job.gpu_speed_frac)
        self.pace = self._unequal(job.host_pace_frac)
        #: from when to when each rank's latest collectives were on its GPU, without a gap
        self.occupied = np.zeros((2, n), dtype=np.int64)

    def _unequal(self, frac: float) -> npt.NDArray[np.float64]:
        """A factor for each rank, within `frac` of 1."""
        n = self.job.world
        return 1 + frac * self.rng.uniform(-1, 1, n) if frac else np.ones(n)

    def everyone(self) -> Ints:
        """Indices of all ranks."""
        return np.arange(self.job.world)

    def busy_host(self, ranks: Ints, length: Ints | int, kind: str, name: str) -> None:
        """Let the hosts of `ranks` do something else for `length` ns."""
        begin = self.host[ranks].copy()
        self.host[ranks] += length
        keep = self.host[ranks] > begin
        self._host_call(ranks[keep], begin[keep], self.host[ranks][keep], kind, name)

    def mark(self, ranks: Ints, begin: Ints, name: str) -> None:
        """Note a range of the program that ends now."""
        self._host_call(ranks, begin, self.host[ranks].copy(), "range", name)

    def launch(
        self, ranks: Ints, length: Ints, stream: int, name: str, kind: str, **more: Any
    ) -> Ints:
        """Launch one kernel on each of `ranks`; returns when it ends."""
        begin, launched = self._launched(ranks)
        start = np.maximum(launched + _PAUSE_NS, self.free[stream][ranks] + 1_000)
        end = start + (self._beside(ranks, start, length) if kind == "compute" else length)
        self.free[stream][ranks] = end
        if self.job.on_host:
            self.host[ranks] = end
        self._activity(ranks, start, end, stream, name, kind, begin, launched, **more)
        return end

    def _beside(self, ranks: Ints, start: Ints, length: Ints) -> Ints:
        """How long kernels take, which are slower beside a collective of their rank."""
        begin, end = self.occupied[:, ranks]
        before = np.clip(begin - start, 0, length)
        times = 1 + self.job.contention_frac
        shared_ns = np.maximum(end - np.maximum(start, begin), 0)
        crowded = np.minimum(length - before, shared_ns / times)
        return np.asarray(length + (times - 1) * crowded).astype(np.int64)

    def _launched(self, ranks: Ints) -> tuple[Ints, Ints]:
        """Let the hosts launch one kernel; returns from when to when that took them."""
        job = self.job
        if job.gil_ns:
            self.busy_host(ranks, job.gil_ns, "python", "Waiting for GIL")
        begin = self.host[ranks].copy()
        cost = job.launch_ns * self.pace[ranks]
        if job.host_noise_frac:
            cost = cost * self.rng.lognormal(0.0, job.host_noise_frac, len(ranks))
        if self.recording:
            cost = cost + job.traced_ns
        self.host[ranks] += cost.astype(np.int64)
        return begin, self.host[ranks].copy()

    def collective(
        self, ranks: Ints, groups: Ints, needs: Ints, length: int, stream: int, tag: str,
        operation: str = "AllReduce", longer: Ints | int = 0,
    ) -> Ints:  # fmt: skip
        """A collective in each group of `ranks` (`groups`: number per rank); returns its ends.

        Each group's transfer takes `length`, and `longer` by so much of each rank.
        """
        begin, launched = self._launched(ranks)
        start = np.maximum.reduce([launched + _PAUSE_NS, self.free[stream][ranks] + 500, needs])
        small = length <= 2 * self.job.latency_ns
        start = start + self.rng.integers(0, 300, len(ranks))
        if self.job.network_noise_frac:
            length = int(length * (1 + self.job.network_noise_frac * self.rng.exponential()))
        last = np.zeros(int(groups.max()) + 1, dtype=np.int64)
        np.maximum.at(last, groups, start)
        spread = 400 if small else self.job.phase_ns
        end = last[groups] + length + longer + self.rng.integers(0, max(spread, 1), len(ranks))
        self.free[stream][ranks] = end
        begun, until = self.occupied[:, ranks]
        self.occupied[:, ranks] = (
            np.where(start > until + 1_000, start, begun),
            np.maximum(until, end),
        )
        self._activity(
            ranks, start, end, stream, f"ncclDevKernel_{operation}", "collective", begin, launched
        )
        size = 8192 if small else 33_554_432
        self._call(ranks, operation, groups, tag, stream, start, end, begin, launched, size)
        return end

    def send(self, senders: Ints, receivers: Ints, needs: Ints) -> Ints:
        """Send from each sender to the receiver beside it; returns when it is sent."""
        begin, launched = self._launched(senders)
        start = np.maximum.reduce(
            [launched + _PAUSE_NS, self.free[PAIR_STREAM][senders] + 500, needs]
        )
        sent = start + _TRANSFER_NS
        self.free[PAIR_STREAM][senders] = sent
        self._pair("Send", senders, receivers, start, sent, begin, launched)
        return np.asarray(sent)

    def receive(self, receivers: Ints, senders: Ints, sent: Ints) -> Ints:
        """Receive what was `sent`; returns when it is there."""
        begin, launched = self._launched(receivers)
        start = np.maximum(launched + _PAUSE_NS, self.free[PAIR_STREAM][receivers] + 500)
        received = np.maximum(sent, start + _TRANSFER_NS - 13_000) + 13_000
        self.free[PAIR_STREAM][receivers] = received
        self._pair("Recv", receivers, senders, start, received, begin, launched)
        return np.asarray(received)

    def _pair(
        self, operation: str, ranks: Ints, others: Ints, start: Ints, end: Ints, begin: Ints,
        launched: Ints,
    ) -> None:  # fmt: skip
        name = "ncclDevKernel_SendRecv"
        self._activity(ranks, start, end, PAIR_STREAM, name, "collective", begin, launched)
        whole = np.zeros(len(ranks), dtype=np.int64)
        self._call(
            ranks, operation, whole, "world", PAIR_STREAM, start, end, begin, launched,
            8_388_608, peer=others,
        )  # fmt: skip

    def wait_for_device(self, ranks: Ints, until: Ints, name: str) -> None:
        """Let the hosts wait until their device is done."""
        begin = self.host[ranks].copy()
        self.host[ranks] = np.maximum(begin + 5_000, until)
        self._host_call(ranks, begin, self.host[ranks], "cuda", name)

    def wait_for_queue(self, ranks: Ints, until: Ints) -> None:
        """Let the hosts' next launch block until the queue is no longer full."""
        begin = self.host[ranks].copy()
        self.host[ranks] = np.maximum(begin, until)
        late = self.host[ranks] - begin > 1_500_000
        self._host_call(
            ranks[late], begin[late], self.host[ranks][late], "cuda", "cudaLaunchKernel"
        )

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
            members = np.bincount(groups)[groups] if peer is None else self.job.world
            self.calls.append(
                {"rank": ranks, "operation": operation, "group": groups, "tag": tag,
                 "stream": stream, "start_ns": start, "end_ns": end, "issue_start_ns": begin,
                 "issue_end_ns": launched.copy(), "message_bytes": size, "peer": peer,
                 "communicator_size": members}
            )  # fmt: skip

    def _host_call(self, ranks: Ints, begin: Ints, end: Ints, kind: str, name: str) -> None:
        if self.recording and len(ranks):
            self.host_calls.append(
                {"rank": ranks, "start_ns": begin, "end_ns": end, "kind": kind, "name": name}
            )
