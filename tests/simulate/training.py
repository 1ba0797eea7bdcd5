"""One training step after the other, on a `Machine`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulate.job import COPY_BYTES, Job
from simulate.machine import (
    COLLECTIVE_STREAM,
    COMPUTE_STREAM,
    GATHER_STREAM,
    TENSOR_STREAM,
    Ints,
    Machine,
)

#: how long the optimizer's kernel takes
OPTIMIZER_NS = 400_000


class _Turn(NamedTuple):
    """One microbatch's forward (`F`) or backward (`B`) through one part of the model.

    Part k lies on stage k modulo the number of stages: a part is a chunk of a stage.
    """

    kind: str
    part: int
    batch: int


class Training:
    """Data, tensor and pipeline parallel training, sharded or not."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        rank = np.arange(job.world)
        self.stage = rank // (job.dp * job.tp)
        self.data_group = self.stage * job.tp + rank % job.tp
        self.tensor_group = rank // job.tp
        self.finished: list[Ints] = []
        #: how much longer than usual the step's sequences are, by rank
        self.varied = np.ones(job.world)
        #: layers of one chunk: without interleaving all that a rank has
        self.layers = np.asarray(job.stage_layers or (job.layers // job.pp,) * job.pp)[self.stage]
        self.layers = np.maximum(self.layers // job.chunks, 1)

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Which ranks form which group; a pipeline's in the order of its stages."""
        job, rank = self.job, np.arange(self.job.world)
        of = {"data": self.data_group}
        if job.tp > 1:
            of["tensor"] = self.tensor_group
        if job.pp > 1:
            of["pipeline"] = rank % (job.dp * job.tp)
        return {
            f"{kind}{g}": tuple(np.flatnonzero(number == g).tolist())
            for kind, number in of.items()
            for g in np.unique(number)
        }

    def step(self, number: int) -> None:
        """Run one step on all ranks."""
        job, machine = self.job, self.machine
        everyone = machine.everyone()
        if len(self.finished) >= job.ahead_steps:
            machine.wait_for_queue(everyone, self.finished[-job.ahead_steps])
        begin = machine.host.copy()
        if job.varied_frac and number % job.varied_steps == 0:
            # a replica's tensor groups compute the same sequences, and so do all its stages
            replica = np.arange(job.world) // job.tp % job.dp
            self.varied = machine.rng.lognormal(0.0, job.varied_frac, job.dp)[replica]
        self._input(number)
        self._planted_kernels(number)
        if job.pp > 1:
            done = self._pipeline(number)
        else:
            self._layers(everyone, number, 1.0, forward=True)
            if job.item_every and number % job.item_every == 0:
                self._item(everyone)
            done = self._backward(everyone, number, 1.0)
        self._optimizer(number, done)
        if machine.recording:
            machine.steps.append({"step": number, "begin": begin, "end": machine.host.copy()})

    def _input(self, number: int) -> None:
        job, machine = self.job, self.machine
        everyone = machine.everyone()
        begin = machine.host.copy()
        for cause in job.causes:
            if cause.kind == "input" and cause.at(number):
                machine.host[cause.rank] += cause.at(number)
        length = np.full(job.world, job.copy_ns)
        end = machine.launch(
            everyone, length, COMPUTE_STREAM, "Memcpy HtoD", "copy",
            direction="host_to_device", pageable=job.pageable, size_bytes=COPY_BYTES,
        )  # fmt: skip
        if job.pageable:
            machine.wait_for_device(everyone, end, "cudaMemcpyAsync")
        machine.mark(everyone, begin, "data")
        if job.hiccup_steps:
            # the same ones in the job without its causes
            draw = np.random.default_rng([job.seed, number % (1 << 32)]).random(job.world)
            hit = np.flatnonzero(draw < 1 / job.hiccup_steps)
            machine.busy_host(hit, job.hiccup_ns, "os", "futex")
        for cause in job.causes:
            if cause.kind == "host" and cause.at(number):
                late = np.array([cause.rank])
                machine.busy_host(late, cause.at(number), "os", "clock_nanosleep")

    def _planted_kernels(self, number: int) -> None:
        for cause in self.job.causes:
            if cause.kind == "gpu_more" and cause.at(number):
                at = np.array([cause.rank])
                for _ in range(10):
                    length = np.array([cause.at(number) // 10])
                    self.machine.launch(at, length, COMPUTE_STREAM, "gemm_planted", "compute")

    def _item(self, ranks: Ints) -> None:
        machine = self.machine
        length = np.full(len(ranks), 2_000)
        end = machine.launch(
            ranks, length, COMPUTE_STREAM, "Memcpy DtoH", "copy", size_bytes=4,
            direction="device_to_host", pageable=True,
        )  # fmt: skip
        machine.wait_for_device(ranks, end + 3_000, "cudaStreamSynchronize")

    def _length(self, ranks: Ints, number: int, part: float) -> Ints:
        """Kernel lengths with noise, and longer where a slow GPU is planted."""
        job = self.job
        each = self.machine.speed[ranks] * part * job.layer_ns / job.kernels_per_layer
        each *= self.varied[ranks]
        each *= 1 + job.noise_frac * self.machine.rng.standard_normal(len(ranks)).clip(-3, 3)
        each *= self._slower(number)[ranks]
        return each.astype(np.int64)

    def _slower(self, number: int) -> npt.NDArray[np.float64]:
        """How many times as long all kernels of each rank take, where a slow GPU is planted."""
        out = np.ones(self.job.world)
        for cause in self.job.causes:
            if cause.kind == "gpu_slow" and cause.at(number):
                # forward, backward (twice as long), optimizer and the step as a whole
                layers = 3 * self.job.layer_ns * float(self.layers[cause.rank]) * self.job.chunks
                out[cause.rank] *= 1 + cause.at(number) / (layers + OPTIMIZER_NS)
        return out

    def _layer(self, ranks: Ints, number: int, part: float, name: str) -> Ints:
        end = np.zeros(len(ranks), dtype=np.int64)
        for k in range(self.job.kernels_per_layer):
            length = self._length(ranks, number, part)
            end = self.machine.launch(ranks, length, COMPUTE_STREAM, f"{name}_{k}", "compute")
        if self.job.experts_frac:
            end = self._experts(ranks, number, part, end)
        return end

    def _experts(self, ranks: Ints, number: int, part: float, end: Ints) -> Ints:
        """Send each token to its expert, which some get more of than others, and back again."""
        machine, free = self.machine, self.machine.free[COMPUTE_STREAM]
        tokens = machine.rng.lognormal(0.0, self.job.experts_frac, len(ranks))
        for length in ((tokens * self._length(ranks, number, part)).astype(np.int64), None):
            done = machine.collective(
                ranks, self.data_group[ranks], end + 500, self.job.transfer_ns // 2,
                TENSOR_STREAM, "expert", "AllToAll",
            )  # fmt: skip
            free[ranks] = np.maximum(free[ranks], done)
            if length is not None:
                end = machine.launch(ranks, length, COMPUTE_STREAM, "expert", "compute")
        return done

    def _layers(self, ranks: Ints, number: int, part: float, *, forward: bool) -> None:
        """A forward: each layer, with an AllReduce of its tensor group behind it."""
        machine = self.machine
        for layer in range(int(self.layers[ranks].max())):
            here = ranks[self.layers[ranks] > layer]
            self._gather(here)
            end = self._layer(here, number, part, "forward" if forward else "backward")
            if self.job.tp > 1:
                done = machine.collective(
                    here, self.tensor_group[here], end + 500, self.job.transfer_ns // 2,
                    TENSOR_STREAM, "tensor", longer=self._longer(here, number, part),
                )  # fmt: skip
                free = machine.free[COMPUTE_STREAM]
                free[here] = np.maximum(free[here], done)

    def _longer(self, ranks: Ints, number: int, part: float) -> Ints:
        """By how much a layer's transfer is longer than usual, in `part` of a forward (ns)."""
        job, longer = self.job, np.zeros(len(ranks), dtype=np.int64)
        for cause in job.causes:
            if cause.kind == "link":
                mine = self.tensor_group[ranks] == self.tensor_group[cause.rank]
                layers = float(self.layers[cause.rank]) * job.chunks
                longer[mine] += int(cause.at(number) * part / layers)
        return longer

    def _gather(self, ranks: Ints) -> None:
        """Sharded: this layer's parameters, for which its kernels wait."""
        if self.job.sharded:
            machine = self.machine
            done = machine.collective(
                ranks, self.data_group[ranks], np.zeros(len(ranks), dtype=np.int64),
                self.job.transfer_ns, GATHER_STREAM, "data", "AllGather",
            )  # fmt: skip
            free = machine.free[COMPUTE_STREAM]
            free[ranks] = np.maximum(free[ranks], done)

    def _backward(self, ranks: Ints, number: int, part: float) -> Ints:
        """The backward with a bucket's reduction behind each layer, overlapped unless serial."""
        job, machine = self.job, self.machine
        done = machine.free[COMPUTE_STREAM].copy()
        reduced: list[tuple[Ints, Ints]] = []
        operation = "ReduceScatter" if job.sharded else "AllReduce"
        for layer in range(int(self.layers[ranks].max())):
            here = ranks[self.layers[ranks] > layer]
            self._gather(here)
            end = self._layer(here, number, 2 * part, "backward")
            reduced.append((here, end))
            if not job.serial:
                done[here] = machine.collective(
                    here, self.data_group[here], end + 500, job.transfer_ns, COLLECTIVE_STREAM,
                    "data", operation,
                )  # fmt: skip
        for here, _ in reduced if job.serial else []:
            need = machine.free[COMPUTE_STREAM][here] + 500
            done[here] = machine.collective(
                here, self.data_group[here], need, job.transfer_ns, COLLECTIVE_STREAM, "data"
            )
        if job.small_calls:
            need = machine.free[COMPUTE_STREAM][ranks] + 500
            done[ranks] = machine.collective(
                ranks, self.data_group[ranks], need, job.latency_ns, COLLECTIVE_STREAM, "data"
            )
        return np.asarray(done)

    def _pipeline(self, number: int) -> Ints:
        """All stages' forwards and backwards, each in its stage's own order."""
        job = self.job
        pending = [self._order(s) for s in range(job.pp)]
        done: Ints = self.machine.free[COMPUTE_STREAM].copy()
        sent: dict[_Turn, Ints] = {}
        while any(pending):
            for s, order in enumerate(pending):
                while order and self._ready(order[0], sent):
                    self._microbatch(number, s, order.pop(0), sent, done)
        return done

    def _order(self, stage: int) -> list[_Turn]:
        """One stage's forwards and backwards; interleaved as in Narayanan et al. 2021."""
        job, last = self.job, self.job.pp - 1
        count = job.microbatches * job.chunks
        if job.chunks > 1:
            ahead = min(2 * (last - stage) + (job.chunks - 1) * job.pp, count)
        else:
            ahead = min(last - stage, count) if job.one_f_one_b else count
        order = [self._turn("F", stage, k) for k in range(ahead)]
        for k in range(ahead, count):
            order += [self._turn("F", stage, k), self._turn("B", stage, k - ahead)]
        return order + [self._turn("B", stage, k) for k in range(count - ahead, count)]

    def _turn(self, kind: str, stage: int, k: int) -> _Turn:
        """The k-th forward or backward of a stage: pp microbatches of a chunk, then the next."""
        pp, chunks = self.job.pp, self.job.chunks
        if chunks == 1:
            return _Turn(kind, stage, k)
        chunk = k % (pp * chunks) // pp
        batch = k // (pp * chunks) * pp + k % pp
        where = chunk if kind == "F" else chunks - 1 - chunk
        return _Turn(kind, where * pp + stage, batch)

    def _ready(self, turn: _Turn, sent: dict[_Turn, Ints]) -> bool:
        first = 0 if turn.kind == "F" else self.job.pp * self.job.chunks - 1
        return turn.part == first or turn in sent

    def _microbatch(
        self, number: int, stage: int, turn: _Turn, sent: dict[_Turn, Ints], done: Ints
    ) -> None:
        """Receive, compute, and send on: activations forward, gradients backward."""
        job, machine = self.job, self.machine
        here = np.flatnonzero(self.stage == stage)
        forward, size, part = turn.kind == "F", job.dp * job.tp, 1.0 / job.microbatches
        onward = 1 if forward else -1
        compute = machine.free[COMPUTE_STREAM]
        if turn in sent:
            got = machine.receive(here, (here - onward * size) % job.world, sent[turn])
            compute[here] = np.maximum(compute[here], got)
        if not forward and turn.batch == job.microbatches - 1:
            done[here] = self._backward(here, number, part)[here]
        else:
            self._layers(here, number, part if forward else 2 * part, forward=forward)
        to = turn.part + onward
        if 0 <= to < job.pp * job.chunks:
            there = (here + onward * size) % job.world
            sent[_Turn(turn.kind, to, turn.batch)] = machine.send(here, there, compute[here] + 500)

    def _optimizer(self, number: int, done: Ints) -> None:
        machine = self.machine
        everyone = machine.everyone()
        free = machine.free[COMPUTE_STREAM]
        free[:] = np.maximum(free, done)
        length = (OPTIMIZER_NS * self._slower(number)).astype(np.int64)
        end = machine.launch(everyone, length, COMPUTE_STREAM, "multi_tensor_adam", "compute")
        self.finished.append(end)
        if self.job.synchronous:
            machine.wait_for_device(everyone, end, "cudaStreamSynchronize")
