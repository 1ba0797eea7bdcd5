"""Simulated jobs of every class, with the findings that each must have.

A case is drawn from its class and a seed alone. Every case has ranks that start 50 to 190 ms apart,
hosts of its own for each rank or two, clocks off by up to 50 ms and 50 ppm, and hosts and
GPUs that differ by some percent, a network that is slower now and then, and small stalls of
any host, because real ones have them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulate.job import COPY_BYTES, Cause, Job
from simulate.reports import simulate

MS = 1_000_000
_STRAGGLER = ("straggler.host", "straggler.gpu", "straggler.link", "straggler.unprofiled")
#: a rank whose repair saves less of a step is no straggler
_LEAST_SAVED = 0.03
#: ranks that start 190 ms apart have queued work that hides 5 ms of each of 40 steps
_LONG_STEPS = 48
#: 16 lanes of PCIe 4.0 (nvbandwidth, pinned)
_PINNED_BYTES_PER_NS = 25.0
#: what a kernel costs the host that is launched with a graph
_REPLAYED_NS = 500
#: what tracing adds to a launch, and how many times as slow it makes launch-bound programs at most;
#: what their launches take without it: bench/README.md, "What tracing costs"
_TRACED_NS, _MOST_TRACED, _LAUNCHES_NS = (4_000, 24_000), 1.8, (10_000, 50_000)
#: a host that needs so much of its GPU's step, with some noise, is not slower than its GPU
_SLACK = 0.9
#: what a healthy job of a kind has by construction
_BY_CONSTRUCTION = ("communication.exposed", "pipeline.bubble", "")


@dataclass(frozen=True)
class Case:
    """A job, the ranks that are profiled (None: all), and what is true of it.

    `codes` are the right top findings (the empty string: no finding above information), `ranks`
    which it may name (empty: any). `healthy`: no rank is a straggler.
    """

    kind: str
    seed: int
    job: Job
    codes: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    profiled: tuple[int, ...] | None = None
    healthy: bool = False

    @property
    def without(self) -> Job | None:
        """The same job without what is wrong with it; None where nothing is, or it is by design."""
        job = self.job
        made = replace(
            job, causes=evened(job), gil_ns=0, pageable=False, item_every=0, serial=False
        )
        if job.pageable:
            made = replace(made, copy_ns=int(COPY_BYTES / _PINNED_BYTES_PER_NS))
        if "host.launch_bound" in self.codes and not self.healthy:
            # as little as replaying a graph costs
            made = replace(made, launch_ns=_REPLAYED_NS, host_noise_frac=0.0)
        if job.stage_layers:
            most = max(job.stage_layers)
            even = sum(job.stage_layers) / (most * job.pp)
            made = replace(
                made, stage_layers=(most,) * job.pp, layer_ns=int(job.layer_ns * even),
                launch_ns=int(job.launch_ns * even),
            )  # fmt: skip
        return None if made == job else made

    @property
    def truth(self) -> str:
        """The truth in a few words."""
        if self.healthy:
            return "no straggler"
        who = f" rank {self.ranks[0]}" if len(self.ranks) == 1 else ""
        return f"{self.codes[0] or 'nothing'}{who}"


def right(case: Case, findings: list[Any]) -> bool:
    """Whether the top finding is true; of a healthy job, whether there is no straggler.

    What profiling has caused is no finding about the job. Of a planted straggler that would save
    nothing (its job without the cause is no faster) it is right that no rank is named.
    """
    findings = [f for f in findings if f["code"] != "profiler.perturbation"]
    loud = [f for f in findings if f["severity"] != "info"]
    if case.healthy:
        return (loud[0]["code"] if loud else "") in case.codes and not straggler_named(findings)
    if not straggler_named(findings) and set(case.codes) <= set(_STRAGGLER) and case.job:
        return saved_frac(case.job) < _LEAST_SAVED
    if not findings:
        return "" in case.codes
    top = findings[0]
    unnamed = top["rank"] is None and not top["code"].startswith("straggler.")
    ranks = {*top["ranks"]} if top["rank"] is None else {top["rank"]}
    return top["code"] in case.codes and (not case.ranks or unnamed or ranks <= {*case.ranks})


def saved_frac(job: Job) -> float:
    """What a job would truly save without its causes, as a share of its step."""
    saved, step = saved_ns(job)
    return saved / step if step else 0.0


def saved_ns(job: Job) -> tuple[float, float]:
    """What a job would truly save without its causes, simulated without, and its step (ns).

    Of causes in every step in the long run, past what queues hide.
    """
    if not job.causes:
        return 0.0, 0.0
    if all(cause.steps is None for cause in job.causes):
        job = replace(job, steps=max(job.steps, _LONG_STEPS))
    took = step_ns(job)
    return took - step_ns(replace(job, causes=evened(job))), took


def evened(job: Job) -> tuple[Cause, ...]:
    """What is left of a job's repaired causes: more work, spread over the stage's ranks."""
    size = job.dp * job.tp
    return tuple(
        replace(cause, rank=cause.rank // size * size + k, extra_ns=cause.extra_ns // size)
        for cause in job.causes if cause.kind == "gpu_more" and not job.on_host for k in range(size)
    )  # fmt: skip


@functools.lru_cache(64)
def step_ns(job: Job) -> float:
    """A simulated job's mean step, without the steps at the window's begin."""
    ranks, _ = simulate(job)
    skipped = max(1, job.steps - 8)
    ends = np.stack([np.asarray(r.steps["end_ns"].to_numpy()) for r in ranks])
    return float((ends[:, -1] - ends[:, skipped - 1]).mean()) / (job.steps - skipped)


def straggler_named(findings: list[Any]) -> bool:
    """Whether a rank is named as a straggler."""
    return any(f["code"] in _STRAGGLER and f["severity"] != "info" for f in findings)


def cases(kinds: list[str], seeds: Iterator[int] | range) -> Iterator[Case]:
    """Every kind with every seed."""
    for seed in seeds:
        for kind in kinds:
            # a stream of its own for each kind: adding one leaves the others as they are
            rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
            yield replace(KINDS[kind](_Draw(rng, kind, seed)), kind=kind, seed=seed)


class _Draw:
    """Random jobs around a rough estimate of their step."""

    def __init__(self, rng: np.random.Generator, kind: str, seed: int) -> None:
        self.rng, self.kind, self.seed = rng, kind, seed

    def part(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def job(self, shape: tuple[int, int, int], host: float, **more: Any) -> Job:
        """A job whose hosts need the part `host` of its GPUs' step."""
        dp, tp, pp = shape
        layers = int(self.one(4, 6, 8)) * pp
        kernels = int(self.rng.integers(3, 7))
        job = Job(
            dp=dp, tp=tp, pp=pp, layers=layers, kernels_per_layer=kernels,
            layer_ns=int(self.part(0.6, 1.6) * MS), steps=int(self.rng.integers(5, 9)),
            transfer_ns=int(self.part(0.08, 0.3) * MS), noise_frac=self.part(0.002, 0.02),
            host_noise_frac=self.part(0.05, 0.3), host_pace_frac=self.part(0.0, 0.05),
            tear_ns=int(self.part(50, 190) * MS), ranks_per_host=int(self.one(1, 1, 2)),
            microbatches=int(self.one(4, 8)), one_f_one_b=bool(self.one(True, False)),
            gpu_speed_frac=self.part(0.0, 0.015), network_noise_frac=self.part(0.0, 0.3),
            hiccup_steps=30, hiccup_ns=int(self.part(0.2, 1.5) * MS),
            copy_ns=int(self.part(0.2, 0.8) * MS), seed=int(self.rng.integers(1 << 30)),
        )  # fmt: skip
        job = replace(job, **more)
        job = replace(job, launch_ns=int(host * gpu_ns(job) / launches(job)))
        hosts = self.rng.integers(-50 * MS, 50 * MS, job.world)
        drifts = self.rng.uniform(-50, 50, job.world)
        at = np.arange(job.world) // job.ranks_per_host
        return replace(
            job,
            offset_ns=tuple(int(t) for t in hosts[at]),
            drift_ppm=tuple(float(d) for d in drifts[at]),
        )

    def data(self) -> tuple[int, int, int]:
        return (int(self.one(2, 4, 8, 16)), 1, 1)

    def shape(self, *choices: tuple[int, int, int]) -> tuple[int, int, int]:
        return choices[int(self.rng.integers(len(choices)))]

    def piped(self) -> tuple[int, int, int]:
        return self.shape((1, 1, 4), (2, 1, 2), (2, 1, 4), (1, 2, 2))

    def case(self, job: Job, *codes: str, ranks: tuple[int, ...] = (), **more: Any) -> Case:
        return Case(self.kind, self.seed, job, codes, ranks, **more)

    def healthy(self, job: Job) -> Case:
        return self.case(job, *_BY_CONSTRUCTION, healthy=True)

    def late(self, job: Job, kind: Any, extra: float, code: str, **more: Any) -> Case:
        """One rank loses `extra` steps of its GPU's time."""
        rank = int(self.rng.integers(job.world))
        cause = Cause(kind, rank, int(extra * gpu_ns(job)), **more)
        return self.case(replace(job, causes=(cause,)), code, ranks=(rank,))


def launches(job: Job) -> int:
    """Roughly how many kernels a rank launches in a step."""
    layers = max(job.stage_layers) if job.stage_layers else job.layers // job.pp
    per_layer = 2 * job.kernels_per_layer + (2 if job.tp > 1 else 0) + (2 if job.sharded else 0)
    batches = job.microbatches if job.pp > 1 else 1
    return layers * per_layer * batches + layers + 4 * batches


def gpu_ns(job: Job) -> int:
    """Roughly a rank's kernel time in a step."""
    layers = max(job.stage_layers) if job.stage_layers else job.layers // job.pp
    return 3 * job.layer_ns * layers + 400_000 + job.copy_ns


def _healthy(shape: Callable[[_Draw], tuple[int, int, int]], **more: Any) -> Callable[..., Case]:
    def draw(d: _Draw) -> Case:
        job = d.job(shape(d), d.part(0.3, 0.75), **more)
        return d.healthy(replace(job, synchronous=bool(d.one(True, False))))

    return draw


def _varied(d: _Draw) -> Case:
    """Sequences of another length in each step and replica: any rank may be last, none for long."""
    job = d.job(d.one((4, 1, 1), (8, 1, 1), (4, 2, 1), (2, 1, 2)), d.part(0.3, 0.6))
    sync = bool(d.one(True, False))
    return d.healthy(replace(job, synchronous=sync, varied_frac=d.part(0.05, 0.25)))


def _sticky(d: _Draw) -> Case:
    """Sequences whose lengths hold for several steps."""
    made = _varied(d)
    return replace(made, job=replace(made.job, varied_steps=int(d.one(3, 5, 8))))


def _traced(d: _Draw) -> tuple[Job, float]:
    """Hosts whose launches cost more inside the window: only there they are slower than GPUs.

    And the part of its GPU's step that a host needs without the profiler. Launches have their real
    length, and tracing costs what was measured (bench/README.md, "What tracing costs").
    """
    slower = d.part(1.25, _MOST_TRACED)
    low, high = (length * (slower - 1) for length in _LAUNCHES_NS)
    traced = d.part(max(low, _TRACED_NS[0]), min(high, _TRACED_NS[1]))
    host = d.part(1.1, slower * _SLACK) / slower
    job = d.job((int(d.one(2, 4, 8)), 1, 1), host, warm_steps=14, layers=4, traced_ns=int(traced))
    # as many kernels as launches of that length fill the hosts' part
    each = (host * gpu_ns(job) * (slower - 1) / traced - launches(job)) / job.layers / 2
    job = replace(job, kernels_per_layer=job.kernels_per_layer + max(round(each), 0))
    job = replace(job, launch_ns=int(host * gpu_ns(job) / launches(job)))
    return replace(job, synchronous=bool(d.one(True, False))), host


def _traced_healthy(d: _Draw) -> Case:
    return d.healthy(_traced(d)[0])


def _traced_host(d: _Draw) -> Case:
    """A late host in such a job: what it costs without the profiler is what it costs."""
    job, host = _traced(d)
    return d.late(job, "host", d.part(1.25, 2.0) - host, "straggler.host")


def _traced_gpu(d: _Draw) -> Case:
    made = d.late(_traced(d)[0], "gpu_more", d.part(0.15, 0.5), "straggler.gpu")
    # its host launches ten kernels more than the others': both parts of the rank are late
    return replace(made, codes=("straggler.gpu", "straggler.host"))


def _stalled_once(d: _Draw) -> Case:
    """A late host; another rank, profiled or not, that stalls once, in a step of the window."""
    job = d.job((int(d.one(4, 8)), 1, 1), d.part(0.3, 0.6), synchronous=True, warm_steps=14)
    job = replace(job, steps=int(d.one(6, 7, 8)), traced_ns=int(d.part(*_TRACED_NS)))
    made = d.late(job, "host", d.part(0.2, 0.8), "straggler.host")
    other = int(d.one(*(r for r in range(job.world) if r not in made.ranks)))
    step = job.first_step + int(d.rng.integers(1, job.steps))
    stall = Cause("host", other, int(d.part(3, 12) * gpu_ns(job)), (step,))
    kept = (*made.ranks, *(r for r in (0, 1, 2) if r not in made.ranks and r != other))
    profiled = tuple(sorted({*kept[:3], *((other,) if d.one(True, False) else ())}))
    return replace(made, job=replace(made.job, causes=(*made.job.causes, stall)), profiled=profiled)


def _patterned_input(d: _Draw) -> Case:
    """Input that is late in one step of a few, of which the window has more than its share."""
    after = int(d.one(3, 4))
    job = d.job(d.data(), d.part(0.3, 0.6), synchronous=True, steps=after + 2, warm_steps=6 * after)
    long = tuple(job.first_step + 1 + k * after for k in range(-6, 2))
    causes = tuple(
        Cause("input", r, int(d.part(1.9, 2.1) * gpu_ns(job)), long) for r in range(job.world)
    )
    job = replace(job, causes=causes, traced_ns=int(d.part(*_TRACED_NS)))
    return d.case(job, "input.stall")


def _sync_host(d: _Draw) -> Case:
    job = d.job(d.data(), d.part(0.3, 0.6), synchronous=True)
    return d.late(job, "host", d.part(0.12, 0.8), "straggler.host")


def _async_host(d: _Draw) -> Case:
    """Slower than its GPU: at the latest when the queue has drained it delays all ranks."""
    host = d.part(0.3, 0.6)
    job = d.job(d.data(), host)
    return d.late(job, "host", d.part(1.25, 2.0) - host, "straggler.host")


def _hidden_host(d: _Draw) -> Case:
    """Slower than the others, but not than its GPU: no rank ever waits for it."""
    host = d.part(0.3, 0.5)
    made = d.late(d.job(d.data(), host), "host", d.part(0.7, 0.85) - host, "straggler.host")
    return replace(made, codes=_BY_CONSTRUCTION, ranks=(), healthy=True)


def _gpu(kind: str) -> Callable[[_Draw], Case]:
    def draw(d: _Draw) -> Case:
        return d.late(
            d.job(d.data(), d.part(0.3, 0.7)), kind, d.part(0.08, 0.5), "straggler.gpu"
        )  # fmt: skip

    return draw


def _now_and_then(d: _Draw) -> Case:
    job = d.job(d.data(), d.part(0.3, 0.6), synchronous=True, steps=8)
    count = int(d.one(1, 2, 3))
    chosen = 7 + d.rng.permutation(7)[:count]
    steps = tuple(sorted(int(s) for s in chosen))
    made = d.late(job, "host", d.part(0.6, 2.0), "straggler.host", steps=steps)
    # of any host that pauses once or twice chance tells no more than that it did
    return replace(made, codes=("straggler.host", "host.busy"))


def _every_second(d: _Draw) -> Case:
    """A host that pauses in every second step, as no chance has it."""
    job = d.job((int(d.one(4, 8)), 1, 1), d.part(0.3, 0.6), synchronous=True, steps=10)
    return d.late(job, "host", d.part(0.7, 2.0), "straggler.host", steps=(7, 9, 11, 13, 15))


def _long_pauses(d: _Draw) -> Case:
    """Any host pauses for most of a step, once or twice in all: none of them is slower."""
    job = d.job((int(d.one(4, 8)), 1, 1), d.part(0.3, 0.6), synchronous=True, steps=9)
    causes = tuple(
        Cause("host", int(d.rng.integers(job.world)), int(d.part(0.6, 1.5) * gpu_ns(job)), (step,))
        for step in (7 + d.rng.permutation(8)[: int(d.one(1, 2))]).tolist()
    )
    made = d.healthy(replace(job, causes=causes))
    return replace(made, codes=(*made.codes, "host.busy"))


def _slow_node(d: _Draw) -> Case:
    """All GPUs of a node are slow, and the node is one tensor group."""
    tp = int(d.one(2, 4))
    job = d.job((2, tp, 1), d.part(0.3, 0.6), synchronous=True, ranks_per_host=tp)
    ranks = tuple(range(tp, 2 * tp))
    extra = int(d.part(0.15, 0.5) * gpu_ns(job))
    causes = tuple(Cause("gpu_slow", rank, extra) for rank in ranks)
    return d.case(replace(job, causes=causes), "straggler.gpu", ranks=ranks)


def _slow_link(d: _Draw) -> Case:
    """The transfers of one tensor group take many times as long as those of the others."""
    job = d.job(d.one((2, 2, 1), (4, 2, 1), (2, 4, 1)), d.part(0.3, 0.6))
    job = replace(job, synchronous=bool(d.one(True, False)))
    made = d.late(job, "link", d.part(0.12, 0.5), "straggler.link")
    first = made.ranks[0] // job.tp * job.tp
    return replace(made, ranks=tuple(range(first, first + job.tp)))


def _contention(d: _Draw) -> Case:
    """Kernels are slower beside a collective: those of the ranks that wait, more than others'."""
    job = d.job(d.data(), d.part(0.3, 0.6), contention_frac=d.part(0.1, 0.4))
    kind = str(d.one("gpu_slow", "gpu_slow", "gpu_more", "host"))
    code = "straggler.host" if kind == "host" else "straggler.gpu"
    return d.late(replace(job, synchronous=kind == "host"), kind, d.part(0.15, 0.5), code)


def _launch_bound(d: _Draw) -> Case:
    job = d.job(d.data(), 1.0, layer_ns=int(d.part(12_000, 25_000)), layers=24)
    job = replace(job, launch_ns=int(d.part(25_000, 60_000)), copy_ns=20_000, latency_ns=8_000)
    job = replace(job, transfer_ns=15_000, synchronous=bool(d.one(True, False)))
    return d.case(job, "host.launch_bound")


def _slow_hosts(d: _Draw) -> Case:
    return d.case(d.job(d.data(), d.part(1.3, 2.0), synchronous=True), "host.launch_bound")


def _jittery_hosts(d: _Draw) -> Case:
    """Hosts that need about as long as their GPUs, each paused now and then: no straggler.

    None is slower than the others: in a host-bound job one that needs 4% more for every
    launch costs 4%. So seldom that hardly ever one host pauses in most of the window's steps:
    that one would be a straggler indeed.
    """
    job = d.job(d.data(), d.part(0.8, 1.3), steps=int(d.one(8, 12)))
    pause = int(d.part(0.05, 0.3) * gpu_ns(job))
    made = d.healthy(
        replace(job, host_pace_frac=0.0, hiccup_steps=int(d.one(4, 6, 8)), hiccup_ns=pause)
    )
    return replace(made, codes=(*made.codes, "host.launch_bound", "host.busy"))


def _staggered_slow_hosts(d: _Draw) -> Case:
    """All hosts slower than their GPUs and none of them waiting for its device.

    The one that resumed last after the profiler's start stays behind the others' queues for the
    whole window: it is last at every collective and no slower than the others. Either is right:
    host-bound, or its name.
    """
    job = d.job(d.data(), d.part(1.3, 2.0))
    return d.case(job, "host.launch_bound", "straggler.host")


def _input_bound(d: _Draw) -> Case:
    host = d.part(0.3, 0.5)
    job = d.job(d.data(), host, synchronous=bool(d.one(True, False)))
    extra = d.part(1.3, 2.2) - host
    causes = tuple(
        Cause("input", r, int(extra * d.part(0.95, 1.05) * gpu_ns(job))) for r in range(job.world)
    )
    return d.case(replace(job, causes=causes), "input.stall")


def _one_input_bound(d: _Draw) -> Case:
    job = d.job(d.data(), d.part(0.3, 0.6), synchronous=True)
    return d.late(job, "input", d.part(0.15, 0.8), "straggler.host")


def _item(d: _Draw) -> Case:
    job = d.job(d.data(), d.part(0.4, 0.8), item_every=1, transfer_ns=100_000)
    return d.case(job, "host.sync")


def _serial(d: _Draw) -> Case:
    job = d.job(d.data(), d.part(0.3, 0.6), serial=True)
    return d.case(replace(job, transfer_ns=int(0.3 * job.layer_ns)), "communication.exposed")


def _bubble(d: _Draw) -> Case:
    """A bubble at its schedule's ideal is information, beyond it a finding; no straggler."""
    return d.healthy(d.job(d.piped(), d.part(0.3, 0.7), transfer_ns=40_000))


def _imbalance(d: _Draw) -> Case:
    dp, tp, pp = shape = d.piped()
    usual, heavy = int(d.one(3, 4)), int(d.rng.integers(pp))
    stage_layers = tuple(usual + (d.one(3, 5) if s == heavy else 0) for s in range(pp))
    job = d.job(shape, d.part(0.3, 0.7), stage_layers=stage_layers, microbatches=8)
    job = replace(job, transfer_ns=40_000)
    ranks = tuple(range(heavy * dp * tp, (heavy + 1) * dp * tp))
    return d.case(job, "pipeline.imbalance", ranks=ranks)


def _tensor(d: _Draw) -> Case:
    job = d.job(d.one((2, 2, 1), (2, 4, 1), (4, 2, 1)), d.part(0.3, 0.6), synchronous=True)
    kind = str(d.one("host", "gpu_slow", "gpu_more"))
    code = "straggler.host" if kind == "host" else "straggler.gpu"
    return d.late(job, kind, d.part(0.15, 0.6), code)


def _late_in_pipeline(d: _Draw) -> Case:
    job = d.job(d.one((2, 1, 2), (2, 1, 4), (1, 1, 4)), d.part(0.3, 0.6), synchronous=True)
    return d.late(job, "host", d.part(0.6, 1.5), "straggler.host")


def _unprofiled(d: _Draw) -> Case:
    job = d.job((int(d.one(4, 8)), 1, 1), d.part(0.3, 0.6), synchronous=True, steps=8)
    made = d.late(job, "host", d.part(0.3, 0.8), "straggler.host")
    others = [r for r in range(job.world) if r != made.ranks[0]]
    kept = tuple(sorted(int(r) for r in d.rng.permutation(others)[: d.one(2, 3)]))
    return replace(made, codes=("straggler.unprofiled",), ranks=(), profiled=kept)


def _subset(d: _Draw) -> Case:
    made = _sync_host(d)
    others = [r for r in range(made.job.world) if r != made.ranks[0]]
    kept = [made.ranks[0], *d.rng.permutation(others)[: max(1, len(others) // 2)]]
    return replace(made, profiled=tuple(sorted(int(r) for r in kept)))


def _gil(d: _Draw) -> Case:
    job = d.job(d.data(), d.part(0.3, 0.5))
    return d.case(
        replace(job, gil_ns=int(d.part(1.2, 2.0) * gpu_ns(job) / launches(job))), "host.gil"
    )


def _pageable(d: _Draw) -> Case:
    job = d.job(d.data(), d.part(0.3, 0.6), pageable=True)
    return d.case(replace(job, copy_ns=int(d.part(3, 8) * MS)), "input.pageable_copy")


#: the classes; each a function from a draw to a case
KINDS: dict[str, Callable[[_Draw], Case]] = {
    "healthy, data parallel": _healthy(_Draw.data),
    "healthy, tensor parallel": _healthy(lambda d: d.shape((2, 2, 1), (2, 4, 1))),
    "healthy, pipeline": _healthy(_Draw.piped),
    "healthy, sharded": _healthy(_Draw.data, sharded=True),
    "late host, synchronous": _sync_host,
    "late host, asynchronous": _async_host,
    "slow host with slack": _hidden_host,
    "GPU with more work": _gpu("gpu_more"),
    "slow GPU": _gpu("gpu_slow"),
    "late host now and then": _now_and_then,
    "launch bound": _launch_bound,
    "all hosts slow, in step": _slow_hosts,
    "all hosts slow, torn": _staggered_slow_hosts,
    "healthy, hosts that jitter": _jittery_hosts,
    "input, all ranks": _input_bound,
    "input, one rank": _one_input_bound,
    ".item() each step": _item,
    "serial AllReduce": _serial,
    "pipeline bubble": _bubble,
    "pipeline imbalance": _imbalance,
    "late in tensor groups": _tensor,
    "late in a pipeline": _late_in_pipeline,
    "culprit not profiled": _unprofiled,
    "subset with the culprit": _subset,
    "interpreter lock": _gil,
    "pageable copies": _pageable,
    "healthy, varying lengths": _varied,
    "healthy, slowed by tracing": _traced_healthy,
    "late host, slowed by tracing": _traced_host,
    "GPU with more work, tracing": _traced_gpu,
    "late host, and one stall": _stalled_once,
    "input, every few steps": _patterned_input,
    "late host, every second step": _every_second,
    "healthy, long pauses": _long_pauses,
    "healthy, lengths that hold": _sticky,
    "slow node in tensor groups": _slow_node,
    "slow link": _slow_link,
    "contention": _contention,
}
