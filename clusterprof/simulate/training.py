"""One training step after the other, on a `Machine`."""

from __future__ import annotations

import numpy as np

from clusterprof.simulate.job import Job
from clusterprof.simulate.machine import (
    COLLECTIVE_STREAM,
    COMPUTE_STREAM,
    TENSOR_STREAM,
    Ints,
    Machine,
)


class Training:
    """Data, tensor and pipeline parallel training: all forwards, then all backwards."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        rank = np.arange(job.world)
        self.stage = rank // (job.dp * job.tp)
        self.data_group = self.stage * job.tp + rank % job.tp
        self.tensor_group = rank // job.tp
        self.layers = np.asarray(job.stage_layers or (job.layers // job.pp,) * job.pp)[self.stage]

    def step(self, number: int) -> None:
        """Run one step on all ranks."""
        job, machine = self.job, self.machine
        everyone = machine.everyone()
        begin = machine.host.copy()
        self._input(number)
        self._planted_kernels(number)
        if job.pp > 1:
            done = self._pipeline(number)
        else:
            self._layers(everyone, number, 1.0, forward=True)
            done = self._backward(everyone, number, 1.0)
        self._optimizer(done)
        if machine.recording:
            machine.steps.append({"step": number, "begin": begin, "end": machine.host.copy()})

    def _input(self, number: int) -> None:
        job, machine = self.job, self.machine
        everyone = machine.everyone()
        begin = machine.host.copy()
        for cause in job.causes:
            if cause.kind == "host" and cause.at(number):
                late = np.array([cause.rank])
                machine.busy_host(late, cause.at(number), "os", "clock_nanosleep")
        length = np.full(job.world, job.copy_ns)
        end = machine.launch(
            everyone, length, COMPUTE_STREAM, "Memcpy HtoD", "copy",
            pageable=job.pageable, size=33_554_432,
        )  # fmt: skip
        if job.pageable:
            machine.wait_for_device(everyone, end, "cudaMemcpyAsync")
        machine._host_call(everyone, begin, machine.host.copy(), "range", "data")

    def _planted_kernels(self, number: int) -> None:
        for cause in self.job.causes:
            if cause.kind == "gpu_more" and cause.at(number):
                at = np.array([cause.rank])
                for _ in range(10):
                    length = np.array([cause.at(number) // 10])
                    self.machine.launch(at, length, COMPUTE_STREAM, "gemm_planted", "compute")

    def _length(self, ranks: Ints, number: int, part: float) -> Ints:
        """Kernel lengths with noise, and longer where a slow GPU is planted."""
        job = self.job
        each = np.full(len(ranks), part * job.layer_ns / job.kernels_per_layer)
        each *= 1 + job.noise_frac * self.machine.rng.standard_normal(len(ranks)).clip(-3, 3)
        for cause in job.causes:
            if cause.kind == "gpu_slow" and cause.at(number):
                # forward, backward (twice as long) and the step as a whole
                usual = 3 * job.layer_ns * float(self.layers[cause.rank])
                each[ranks == cause.rank] *= 1 + cause.at(number) / usual
        return each.astype(np.int64)

    def _layer(self, ranks: Ints, number: int, part: float, name: str) -> Ints:
        end = np.zeros(len(ranks), dtype=np.int64)
        for k in range(self.job.kernels_per_layer):
            length = self._length(ranks, number, part)
            end = self.machine.launch(ranks, length, COMPUTE_STREAM, f"{name}_{k}", "compute")
        return end

    def _layers(self, ranks: Ints, number: int, part: float, *, forward: bool) -> None:
        """A forward: each layer, with an AllReduce of its tensor group behind it."""
        machine = self.machine
        for layer in range(int(self.layers[ranks].max())):
            here = ranks[self.layers[ranks] > layer]
            end = self._layer(here, number, part, "forward" if forward else "backward")
            if self.job.tp > 1:
                done = machine.collective(
                    here, self.tensor_group[here], end + 500, self.job.transfer_ns // 2,
                    TENSOR_STREAM, "tensor",
                )  # fmt: skip
                free = machine.free[COMPUTE_STREAM]
                free[here] = np.maximum(free[here], done)

    def _backward(self, ranks: Ints, number: int, part: float) -> Ints:
        """The backward with a bucket's AllReduce behind each layer, overlapped."""
        job, machine = self.job, self.machine
        done = machine.free[COMPUTE_STREAM].copy()
        for layer in range(int(self.layers[ranks].max())):
            here = ranks[self.layers[ranks] > layer]
            end = self._layer(here, number, 2 * part, "backward")
            done[here] = machine.collective(
                here, self.data_group[here], end + 500, job.transfer_ns, COLLECTIVE_STREAM, "data"
            )
        if job.small_calls:
            need = machine.free[COMPUTE_STREAM][ranks] + 500
            done[ranks] = machine.collective(
                ranks, self.data_group[ranks], need, job.latency_ns, COLLECTIVE_STREAM, "data"
            )
        return np.asarray(done)

    def _pipeline(self, number: int) -> Ints:
        job, machine = self.job, self.machine
        part = 1.0 / job.microbatches
        per_stage = job.dp * job.tp
        of = [np.flatnonzero(self.stage == s) for s in range(job.pp)]
        compute = machine.free[COMPUTE_STREAM]
        for _ in range(job.microbatches):
            for s in range(job.pp):
                if s:
                    before = of[s] - per_stage
                    got = machine.transfer(before, of[s], compute[before] + 500)
                    compute[of[s]] = np.maximum(compute[of[s]], got)
                self._layers(of[s], number, part, forward=True)
        done = compute.copy()
        for m in range(job.microbatches):
            for s in reversed(range(job.pp)):
                if s < job.pp - 1:
                    behind = of[s] + per_stage
                    got = machine.transfer(behind, of[s], compute[behind] + 500)
                    compute[of[s]] = np.maximum(compute[of[s]], got)
                if m < job.microbatches - 1:
                    self._layers(of[s], number, 2 * part, forward=False)
                else:
                    done[of[s]] = self._backward(of[s], number, part)[of[s]]
        return np.asarray(done)

    def _optimizer(self, done: Ints) -> None:
        machine = self.machine
        everyone = machine.everyone()
        free = machine.free[COMPUTE_STREAM]
        free[:] = np.maximum(free, done)
        length = np.full(self.job.world, 400_000)
        end = machine.launch(everyone, length, COMPUTE_STREAM, "multi_tensor_adam", "compute")
        if self.job.synchronous:
            machine.wait_for_device(everyone, end, "cudaStreamSynchronize")
