"""What-ifs: how long a step would be if somebody's hosts, kernels or transfers took less.

A what-if is a `Lengths` for the job's `Replay`; what it saves is the step's length without it less
the step's length with it. Two views: inside the window, as recorded, and in the long run, where
the window comes again and again, so that queues cover nothing for ever. The base is the job as it
runs without the profiler, where the step logs tell its pace (`profiler_bias`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.accounts import call_of
from clusterprof.analysis.model.by_report import NEVER
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.profiler_bias import (
    MOST_SLOWER,
    Hosts,
    as_others,
    explanations,
    host_places,
)
from clusterprof.analysis.model.recorded import replay_of
from clusterprof.analysis.model.replay import EVERY, Lengths, Replay, Some
from clusterprof.analysis.model.timeline import COLLECTIVE
from clusterprof.analysis.model.topology import Peers, peers, stages, tied
from clusterprof.columns import (
    Bools,
    Floats,
    HostPlaces,
    Ints,
    ReplayRanks,
    ReplayRows,
    Small,
    StepPlaces,
    count_by,
    order_by,
    row_of,
    sum_by,
    sums,
)

Part = Literal["host", "gpu"]
PARTS: tuple[Part, ...] = ("host", "gpu")
#: nine of ten savings that were measured on GPUs are within this part of what is stated, above it
#: or below (`make truth`, recordings' pairs): GPUs that wait less clock lower, the job adapts
_MEASURED_FRAC = 1 / 8


class Undisturbed(NamedTuple):
    """How late a rank is in steps that no profiler disturbs, and what the step loses of it."""

    steps: int
    lateness_ns: int
    bound_ns: int
    #: what the step loses of a lateness, by the replay of a window, and how far that may be wrong
    share: float
    share_error: float

    @property
    def ns(self) -> float:
        """What the step loses."""
        return self.share * self.lateness_ns

    @property
    def errors_ns(self) -> tuple[float, float]:
        """How far that may be wrong by the lateness, and by the share."""
        return self.share * self.bound_ns, self.share_error * self.lateness_ns


@dataclass(eq=False)
class Saved:
    """What a what-if saves a step (ns): in the window, by steady step, and in the long run."""

    by_step_ns: Floats
    long_ns: float
    #: the step without the what-if: each of the window, and in the long run
    steps: Floats
    base_long_ns: float
    #: the lengths before the repair, and after it
    base: Lengths
    without: Lengths
    #: whose steps they are
    ranks: ReplayRanks
    #: the saving is stated for the long run (the pace without the profiler is known, or queued
    #: work hides the cause in the window), rather than for the window
    long_run: bool
    #: the pace without the profiler is known
    paced: bool
    #: what it saves where the pace without the profiler is explained in each of the other ways
    others_ns: Callable[[], list[float]]
    #: the share of each steady-state step in the long run; None: all come equally often
    shares: Floats | None = None
    #: the same repair where nothing is repaired before it; None: nothing is
    alone: Saved | None = None
    #: the cause by the looks at the running job, of which the saving is stated then
    looks: Undisturbed | None = None

    def __post_init__(self) -> None:
        savings_ns = self.by_step_ns
        #: the means over the window's steady-state steps: what it saves, and the step without it
        self.window_ns, self.base_ns = float(savings_ns.mean()), float(self.steps.mean())
        #: in which steady-state steps it saves anything, beside the one in which it saves most
        self.hit: Bools = savings_ns > limits.WARNING_FRAC * savings_ns.max(initial=0.0)
        #: the stated saving, of the pace without the profiler where that is known, and the step of
        #: which it is a part
        self.ns, self.of_ns = self.window_ns, self.base_ns
        if self.long_run:
            self.ns, self.of_ns = self.long_ns, self.base_long_ns
        #: the stated saving over that of the replay
        self.of_replay = 1.0
        if self.looks and self.ns > 0:
            stated = min(self.looks.ns, self.of_ns)
            self.of_replay, self.ns = stated / self.ns, stated
        #: whether more than the window tells how often it happens
        self.beyond_window = bool(self.paced or self.looks)
        #: what it saves where nothing is repaired before it, as `ns`
        self.alone_ns = replace(self.alone, long_run=self.long_run).ns if self.alone else self.ns
        #: the larger of both views
        self.most_ns = max(self.window_ns, self.long_ns)
        least_ns = limits.LEAST_FRAC * self.of_ns
        #: whether it is of the window, and hardly of the steps that tell the job's pace
        self.rare = self.shares is not None and self.ns < least_ns <= self.window_ns

    @cached_property
    def errors_ns(self) -> Floats:
        """By how much less, and how much more, each of four unknowns may make it, [4, 2] (95%).

        By looks, of five: how late the rank is and which share of that the step loses are in the
        place of chance. What is unknown of the replay is so of the share.
        Another explanation of the pace, what queues hide or reveal, the model, and chance
        (`docs/findings.md`). Chance is by how much those steps differ in which it happens; a known
        pace tells the mean step, and so what differs as the steps do (a control variate).
        """
        savings, steps, chance = self.by_step_ns[self.hit], self.steps[self.hit], 0.0
        if len(savings) > 1:
            if self.paced and np.ptp(steps):
                savings = savings - np.cov(savings, steps)[0, 1] / steps.var(ddof=1) * steps
            chance = 2 * float(savings.std(ddof=1)) * len(savings) ** 0.5 / len(self.by_step_ns)
        # other explanations have the long run's pace
        others = [ns - self.long_ns for ns in self.others_ns()]
        window_ns = self.window_ns if self.shares is None else float(self.shares @ self.by_step_ns)
        apart = self.long_ns - window_ns
        hidden = [-apart if self.long_run else apart] if self.paced or not self.long_run else []
        # beyond what clocks differ by nothing was wrong
        slower = (MOST_SLOWER - 1) * max(self.of_ns - self.ns, 0.0)
        unlike = self.looks.errors_ns if self.looks else (chance,)
        both = [(ns, ns) for ns in (min(abs(self.ns) * _MEASURED_FRAC, slower), *unlike)]
        replayed = np.asarray([_sides(others), _sides(hidden)]) * self.of_replay
        return np.asarray([*replayed, *both])

    def by_looks(self, looks: Undisturbed | None, other: Saved | None = None) -> Saved:
        """The same, or what `other` saves of the same cause, as looks tell of this one."""
        other = other or self
        if looks is None or self.ns <= 0:
            return other
        share = looks.share * other.ns / (self.ns / self.of_replay)
        return replace(other, looks=looks._replace(share=share))

    @property
    def certain_ns(self) -> float:
        """What it saves at least, whatever the clocks are."""
        return self.most_ns - float(np.hypot.reduce(self.errors_ns[:, 0]))


class Interval(NamedTuple):
    """From where to where a saving lies (95%, ns): what is stated is in it."""

    least_ns: float
    most_ns: float
    #: how much less, and how much more, the ranks' clocks alone may make it
    clocks_ns: tuple[float, float]


def _shortened(lengths: Ints, before: Ints, after: Ints) -> Ints:
    """Lengths as much shorter as others got; below nothing only where they were, or those are."""
    least = np.minimum(np.minimum(lengths, after), 0)
    return np.asarray(np.maximum(lengths + after - before, least))


def _partly(before: Ints, after: Ints, part: float) -> Ints:
    """Lengths that get shorter by a part of what they do; by looks a cause may be less, or more."""
    if part == 1.0:
        return after
    changed = np.rint((after - before) * part).astype(np.int64)
    return np.asarray(np.maximum(before + changed, np.minimum(after, 0)))


class WhatIfs:
    """All what-ifs of one job."""

    def __init__(self, dataset: Dataset, job: Replay) -> None:
        self.dataset, self.job = dataset, job
        #: each rank's pipeline stage; all 0 where there is no pipeline
        self.stage = np.zeros(len(dataset.ranks), dtype=np.int64)
        if pipeline := stages(dataset):
            self.stage[row_of(dataset.ranks, pipeline.ranks)] = pipeline.stage
        self.ties = tied(dataset)
        self.peers: Peers = peers(dataset, self.stage)
        #: ranks that are compared with other stages only
        self.alone = np.asarray(
            [stage not in self.stage[self.peers.others(k)] for k, stage in enumerate(self.stage)]
        )
        #: where the steps that are replayed are among those in steady state
        self.steps: StepPlaces = row_of(dataset.steady_steps, job.steps)
        self.step_of_host: StepPlaces = np.clip(job.host_step, 0, len(job.steps) - 1)
        #: activities that are no member of a collective, in the order of their launches
        whole = dataset.activities.whole_graphs[job.activity]
        work = np.flatnonzero(~job.joined & (job.kind != COLLECTIVE) & ~whole)
        work = work[order_by(job.launch_moment[work])]
        self.work: ReplayRows = work.astype(np.int32)
        step = job.host_rank * len(job.steps) + self.step_of_host
        #: how many collectives each moment's host has launched before it in its step
        self.host_phase = job.launched_before(step, job.kind == COLLECTIVE)
        moments = np.arange(len(job.host_rank), dtype=np.int32)
        #: of each part: all places that are compared, and the rank, the step and the phase of each
        self.parts: dict[Part, tuple[Small, ...]] = {
            "host": (moments, job.host_rank, self.step_of_host, self.host_phase),
            "gpu": (self.work, job.rank, job.step, self.host_phase[job.launch_moment]),
        }  # fmt: skip
        capture = dataset.capture
        usual = dataset.usual_step_ns or (capture["profiled"]["before_ns"] if capture else None)
        #: the job without the profiler, the likeliest first
        self.untraced = explanations(
            job, usual, self.named["input.stall"], np.asarray(dataset.outside_ns)
        )
        self.job, self.base = self.untraced[0].job, self.untraced[0].lengths
        pace = self.untraced[0].pace()
        #: whether the pace is that without the profiler, which steps of the window may not explain
        self.paced = usual is not None and pace <= usual * (1 + limits.LEAST_FRAC)
        #: what each step takes longer outside the window (ns) than anything recorded explains
        unseen = max((usual or 0) - pace, 0.0)
        self.unseen_ns = unseen if unseen > limits.VARIES_FRAC * (usual or 0) else 0.0
        #: each steady-state step's share of the long run; None: all come equally often
        shares = self.job.shares
        self.shares = None if shares is None else self.by_steady_step(shares)
        #: what findings repair (codes and ranks), in order
        self.repaired: tuple[tuple[str, tuple[int, ...]], ...] = ()
        #: what they save, by their codes, ranks and savings (ns)
        self.weighed: dict[tuple[str, tuple[int, ...], int], Saved] = {}

    @property
    def step_ns(self) -> float:
        """The base's step: the long run without the profiler, or the window's mean step."""
        window, long_ns = self._steps(self.base)
        # impossible times may leave none of it
        return max(long_ns if self.paced else float(window.mean()), 1.0)

    @cached_property
    def named(self) -> dict[str, Ints]:
        """How much of each host moment's own time lies in calls of each code of `NAMED`."""
        job, dataset = self.job, self.dataset
        named = host_activity.named_time(dataset, job.host_rank, *job.host_spans)
        fetched = named["input.stall"]
        fetching = sum_by(job.host_rank, fetched, len(dataset.ranks))
        profilers = np.asarray([tables.info.profiler for tables in dataset.tables])
        # one profiler records ranges and operators, the other none
        silent = ~np.isin(profilers, profilers[fetching > 0])
        if self._places and silent.any() and not silent.all():
            named["input.stall"] = as_others(job, self._places[0], silent, fetched)
        return named

    def _steps(self, lengths: Lengths, ranks: Some = EVERY) -> tuple[Floats, float]:
        """Each steady-state step of the window, and the long run's step (ns), of some ranks."""
        marks, pace = self.job.long_run(lengths)[0][ranks], self.job.pace(lengths, ranks)
        steps = np.diff(marks, axis=1).mean(axis=0)
        # a steady-state step apart from the others is taken to be as long as they are
        return self.by_steady_step(steps, steps.mean()), float(pace) + self.unseen_ns

    def by_steady_step(self, values: Floats, elsewhere: float = 0.0) -> Floats:
        """What the steps that are replayed have, [..., steps]: in each one of the steady state."""
        by_step = np.full((*values.shape[:-1], len(self.dataset.steady_steps)), elsewhere)
        by_step[..., self.steps] = values
        return by_step

    def saved(
        self, lengths: Lengths, base: Lengths | None = None, ranks: Sequence[int] = ()
    ) -> Saved:
        """What `lengths`, a repair of `ranks`, saves against `base` (else the job's own).

        The mean is of those that are tied to one of `ranks`: what the others wait for is not
        recorded, and what each of them saves would say nothing.
        """
        base, repaired = base or self.base, self.ties[np.isin(self.dataset.ranks, ranks)]
        among = np.isin(self.ties[self.job.ranks], repaired)
        rows = np.flatnonzero(among | ~among.any())
        (before, long), (after, long_after) = (self._steps(ns, rows) for ns in (base, lengths))

        def others_ns() -> list[float]:
            likeliest, *unlikelier = self.untraced
            paces = [job.pace_as_in(likeliest, base, rows) for job in unlikelier]
            after = [job.pace_as_in(likeliest, lengths, rows) for job in unlikelier]
            return [pace - pace_after for pace, pace_after in zip(paces, after, strict=True)]

        return Saved(
            before - after, long - long_after, before, long, base, lengths, rows,
            self.paced, self.paced, others_ns, self.shares,
        )  # fmt: skip

    def remaining_ns(self, repairs: Sequence[Saved], long_run: bool, ranks: Some = EVERY) -> float:
        """Some ranks' step with all of `repairs`, each as much shorter as it alone makes things."""
        own, run, woken = self.base.own, self.base.run, self.base.woken
        for before, after, part in ((s.base, s.without, s.of_replay) for s in repairs):
            own = _shortened(own, before.own, _partly(before.own, after.own, part))
            run = _shortened(run, before.run, _partly(before.run, after.run, part))
            woken = np.where(after.woken == before.woken, woken, after.woken)
        explained = any(saved.without.explained and not saved.base.explained for saved in repairs)
        lengths = replace(self.base, own=own, run=run, woken=woken, explained=explained)
        window, pace = self._steps(lengths, ranks)
        return pace if long_run else float(window.mean())

    def interval(self, saved: Saved, ranks: Sequence[int]) -> Interval:
        """Where what the repair of `ranks` saves lies: no more than the step, nor below nothing."""
        clocks_ns = self._clock_error_ns(saved, ranks)
        less, more = np.hypot.reduce([*saved.errors_ns, clocks_ns], axis=0).tolist()
        stated = min(saved.ns, saved.of_ns)
        least, most = max(stated - less, 0.0), min(stated + more, saved.of_ns)
        return Interval(min(least, stated), max(most, stated), clocks_ns)

    def _clock_error_ns(self, saved: Saved, ranks: Sequence[int]) -> tuple[float, float]:
        """How much less and more is saved at most if these ranks' clocks are off, in bounds (ns).

        Both replays again, with the clocks of `ranks` at one end of their bounds and all others'
        at the other, and the reverse: transfers alone are measured between clocks. First order: who
        came last stays, and clocks are off by the same for ever: in the long run.
        """
        job, clock, c = self.job, self.dataset.clock, self.dataset.collectives
        bound = np.asarray([clock.uncertainty(rank) for rank in self.dataset.ranks])
        # an unbounded clock leaves a whole step open, which is the most there is to be wrong about
        bound = np.minimum(bound, round(self.step_ns))
        chosen = np.isin(self.dataset.ranks, ranks)
        ahead = np.where(chosen | chosen.all(), bound, -bound)
        members = np.flatnonzero(job.joined)
        call, rank = call_of(self.dataset)[job.activity[members]], job.rank[members]
        last = row_of(self.dataset.ranks, c.last_rank[call])
        took, after = saved.base.run[members], saved.without.run[members]
        later = ahead[rank] - ahead[last]
        # members of a call end about together: none transfers for much longer than the last one
        collective, is_last = c.collective[call], c.synchronising[call] & (rank == last)
        last_took = np.full(c.collective.max(initial=0) + 1, NEVER)
        last_took[collective[is_last]] = took[is_last]
        longer = np.abs(took - last_took[collective])
        most = np.where(last_took[collective] == NEVER, np.abs(later), longer)
        later = np.clip(later, -most, most)
        if not later.any():
            return 0.0, 0.0
        errors = []
        for shift in (later, -later):
            run, without = saved.base.run.copy(), saved.without.run.copy()
            run[members] = np.maximum(took + shift, np.minimum(took, 0))
            without[members] = np.where(after == took, run[members], after)
            _, long = self._steps(replace(saved.base, run=run), saved.ranks)
            _, long_after = self._steps(replace(saved.without, run=without), saved.ranks)
            errors.append(long - long_after - saved.long_ns)
        return _sides(errors)

    def excess(self, lengths: Lengths) -> dict[Part, Floats]:
        """How much more than its middle peer each rank takes, [ranks, steps] (ns)."""
        return {part: np.maximum(self.differences(part, lengths), 0.0) for part in PARTS}

    def differences(self, part: Part, lengths: Lengths) -> Floats:
        """How much more or less than its middle peer each rank takes, [ranks, steps] (ns)."""
        job, shape = self.job, (len(self.dataset.ranks), len(self.job.steps))
        rows, rank, step, _ = self.parts[part]
        took = np.minimum(lengths.run, job.contention.freely)
        if part == "host":
            took = lengths.own - self._in_common
            if self.unlike:
                return self.by_steady_step(self.unlike.later(took))
        total = sums(shape, (rank[rows], step[rows]), took[rows])
        total[np.setdiff1d(np.arange(shape[0]), job.ranks)] = np.nan
        # a rank that is its stage's only one is compared by what each launch takes
        count = np.maximum(count_by(job.host_rank, shape[0]), 1)[:, None]
        by_launch = self.peers.differences(total / count) * count
        later = np.where(self.alone[:, None], by_launch, self.peers.differences(total))
        return self.by_steady_step(later)

    @cached_property
    def unlike(self) -> Hosts | None:
        """The hosts where several profilers lengthen their calls, each in its own way."""
        if not self._places:
            return None
        # they may lengthen all of its own time but, in each pause, what is quiet
        job, traced = self.job, self.base.own.copy()
        long = np.flatnonzero(job.lengths.own >= limits.PAUSE_NS)
        begin, end = (times[long] for times in job.host_spans)
        quiet = host_activity.quiet(self.dataset, job.host_rank[long], begin, end)
        traced[long] = np.maximum(traced[long] - quiet, 0)
        return Hosts(self.peers, job.host_rank, *self._places, traced)

    @cached_property
    def _places(self) -> tuple[HostPlaces, StepPlaces] | None:
        """Where hosts are in a step (`host_places`); None: all have one profiler."""
        if not self.dataset.unlike_profilers:
            return None
        return host_places(self.job, self.step_of_host, self.host_phase)

    @cached_property
    def _in_common(self) -> Ints:
        """Each host moment's time in what most hosts do as long (fetching, collecting, the GIL).

        In turn it makes another rank late in each step, and none of them a straggler.
        """
        job, common = self.job, np.zeros(len(self.job.host_rank), dtype=np.int64)
        share = self.base.own / np.maximum(job.lengths.own, 1)
        for named_ns in self.named.values():
            spent = np.sort(sum_by(job.host_rank, named_ns)[job.ranks])
            if spent[(len(spent) - 1) // 2] >= limits.HALF * spent[-1] > 0:
                common += (named_ns * share).astype(np.int64)
        return common

    def like_peers(self, lengths: Lengths, ranks: Sequence[int], part: Part) -> Lengths:
        """`lengths` with each of `ranks` (places) as fast as its middle peer, in one part.

        The peer is one of those not in `ranks`: the one whose step takes the middle time, with its
        own lengths, as noisy as they are. Where both do the same things in the same order, each
        thing takes what it takes the peer; else, between two collectives, the longest are cut
        until the sum is the peer's: what a rank does besides is one long thing, not many.
        """
        if part == "host":
            if self.unlike:
                return replace(lengths, own=self.unlike.in_time(lengths.own, np.asarray(ranks)))
            values, source = lengths.own.copy(), lengths.own
        else:
            # a peer's kernels as they would be without its waiting for these ranks
            freely = self.job.contention.freely
            values, source = lengths.run.copy(), np.minimum(lengths.run, freely)
        chosen, rank, step, phase = self.parts[part]
        for k in ranks:
            # of many peers only so many are compared with
            others = np.setdiff1d(self.peers.others(k), ranks)[: limits.MOST]
            rows = [chosen[rank[chosen] == q] for q in (k, *others)]
            for s in range(len(self.job.steps) if len(others) else 0):
                own, *in_step = (of_rank[step[of_rank] == s] for of_rank in rows)
                peer = sorted(in_step, key=lambda of_rank: source[of_rank].sum())[len(others) // 2]
                total = int(source[peer].sum())
                if not self.alone[k] and source[own].sum() > total:
                    values[own] = _as_long(source[own], phase[own], source[peer], phase[peer])
                elif self.alone[k] and len(peer):
                    # another stage has another number of launches: as long for each of them
                    values[own] = cut(source[own], total * len(own) // len(peer))
        return replace(lengths, own=values) if part == "host" else replace(lengths, run=values)

    def spread(self, lengths: Lengths, base: Lengths, ranks: Sequence[int]) -> Lengths:
        """`lengths`, where what kernels of `ranks` take less than in `base` their peers do as well.

        All of them take as much longer as keeps the sum: work that is moved, and not left out.
        """
        members = np.unique([*ranks, *(q for k in ranks for q in self.peers.others(k))])
        rows = self.work[np.isin(self.job.rank[self.work], members)]
        run = lengths.run.astype(float)
        run[rows] *= base.run[rows].sum() / max(lengths.run[rows].sum(), 1)
        return replace(lengths, run=run.round().astype(np.int64))


def _sides(apart: Sequence[float]) -> tuple[float, float]:
    """How far values lie below zero at most, and how far above it."""
    return -min((0.0, *apart)), max((0.0, *apart))


def _as_long(own: Ints, own_phase: Ints, peer: Ints, peer_phase: Ints) -> Ints:
    """`own` with the sums of `peer`, phase by phase; element by element where they are alike."""
    as_long: Ints = own.copy()
    for phase in np.unique(own_phase).tolist():
        rows, peers = own_phase == phase, peer[peer_phase == phase]
        as_long[rows] = peers if rows.sum() == len(peers) else cut(own[rows], int(peers.sum()))
    return as_long


def cut(values: Ints, total: int) -> Ints:
    """`values` that add up to `total`: the greatest cut down to one level, or all scaled up."""
    have = int(values.sum())
    if have <= total:
        return np.asarray(values * total // max(have, 1))
    order = np.sort(values)[::-1]
    level = (total - (have - np.cumsum(order))) // np.arange(1, len(order) + 1)
    fits = np.flatnonzero(level >= np.append(order[1:], 0))
    return np.asarray(np.minimum(values, max(int(level[fits[0]]) if len(fits) else 0, 0)))


@once
def what_ifs(dataset: Dataset) -> WhatIfs | None:
    """The job's what-ifs, once; None where it has no steady-state steps."""
    job = replay_of(dataset)
    return WhatIfs(dataset, job) if job is not None else None
