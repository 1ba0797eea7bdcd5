"""Stragglers: who delays the others, by the what-if that saves most, and why.

How much shorter would a step be if a rank's host or GPU took as long as its middle peer's? Several
ranks that are late together save only together (the ranks of one node among them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from clusterprof.analysis.findings import causes, undisturbed
from clusterprof.analysis.findings.causes import beyond_lengths
from clusterprof.analysis.findings.finding import (
    Code,
    Evidence,
    Repair,
    Tier,
    Words,
    capture,
    finding_of_repair,
    job_of,
    named,
    of_saving,
    operators,
)
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset, once
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.shallow import more_often, students_t
from clusterprof.analysis.model.what_if import PARTS, Part, Saved, WhatIfs, what_ifs
from clusterprof.columns import Bools, Floats, RankPlaces, order_by, parts, sum_by
from clusterprof.hardware import Compared, Difference
from clusterprof.results import Finding
from clusterprof.words import capitalised, counted, in_some, ms, percent, ranks as rank_list

TIER = Tier.STRAGGLERS

CODES = (
    Code(
        "straggler.host",
        "A rank's host delays the other ranks",
        "One rank (or several together) launches its kernels later than its peers, so the others "
        "wait for it in collectives. Saved: that rank is as fast as its peers.",
        "Tracing slows every host a little: a rank that is late only inside the window may be on "
        "time without the profiler. Where all hosts are equally slow, the rank that resumed last "
        "after the profiler's start stays last without being slower.",
        "Look at what that host does before it launches kernels (data loading, logging, a "
        "checkpoint, a busy core, swapping) and move it off the training thread.",
    ),
    Code(
        "straggler.gpu",
        "A rank's GPU delays the other ranks",
        "One rank's kernels or copies take longer than those of its peers, or it runs more of "
        "them, so the others wait for it in collectives. Saved: it is as fast as its peers. More "
        "work is spread over all of them; what it would save to leave that work out is more: by "
        "that it delays the others.",
        "Batches of different length look alike: more work is a matter of balance, the same work "
        "done slower a matter of that GPU. Lengths may hold for a whole window: where they would "
        "explain it (an optimizer's kernels take as long as its peers') and few peers show how "
        "much they differ, no rank is named. Kernels that ran beside a collective are ignored.",
        "More work: balance samples or layers between the ranks. Slower: check clocks, "
        "temperature, throttling and other processes on that GPU (nvidia-smi -q -d "
        "PERFORMANCE,CLOCK).",
    ),
)

#: what is evidence of a host that is slow and delays no rank
_OVERLAPPED = "overlapped_ns_per_step"

Member = tuple[int, Part]
#: of each part, what ranks take more than their middle peers, [ranks, steps] (ns)
Excess = Mapping[Part, Floats]


@once
def stragglers(dataset: Dataset) -> list[tuple[Member, ...]]:
    """All stragglers, the one first that saves most; each on what those before it leave.

    Each by its host or its GPU, of several together the one first that takes longest.
    """
    job, chosen, named = job_of(dataset), list[tuple[Member, ...]](), set[Member]()
    least, lengths = limits.LEAST_FRAC * dataset.step_ns, job.base
    while len(named) < len(dataset.ranks) > 1 and len(chosen) < limits.MOST:
        # in a step that a found straggler makes long, the others are compared without that
        excess = job.excess(lengths)
        tried = {
            members: _Late(dataset, members).tried(lengths)
            for members in _suspects(job, excess, named)
            if all(_stands_out(job, excess, member, {*members, *named}) for member in members)
        }
        saves = {members: saved.most_ns for members, saved in tried.items()}
        one_by_one = {
            members: sum(max(saves.get((member,), 0.0), 0.0) for member in members)
            for members in tried if len(members) > 1
        }  # fmt: skip
        # several that save little more than one by one are named one by one
        worth = [
            members for members, ns in saves.items()
            if ns - one_by_one.get(members, 0.0) >= max(least, limits.HALF * ns)
        ]  # fmt: skip
        if not worth:
            break
        chosen.append(max(worth, key=lambda members: saves[members]))
        lengths = tried[chosen[-1]].without
        named |= set(chosen[-1])
    return chosen


def hidden_by_profilers(dataset: Dataset) -> bool:
    """Whether a host may be a straggler that cannot be told since ranks had several profilers.

    If what these may lengthen of one host took as long as its middle peer's, as much would be saved
    as a straggler is named for.
    """
    job = what_ifs(dataset)
    if job is None or job.unlike is None:
        return False
    host, own, traced = job.job.host_rank, job.base.own, job.unlike.traced
    total = sum_by(host, traced, len(dataset.ranks))
    more = np.maximum(job.peers.differences(total[:, None])[:, 0], 0.0) / np.maximum(total, 1.0)
    worst = order_by(-more)[: limits.MOST].tolist()
    less = ((k, (traced * np.where(host == k, more[k], 0.0)).astype(np.int64)) for k in worst)
    saves = (job.saved(replace(job.base, own=own - ns), None, [dataset.ranks[k]]) for k, ns in less)
    return any(saved.most_ns >= limits.WARNING_FRAC * job.step_ns for saved in saves)


def longer_batches(dataset: Dataset) -> tuple[int, float] | None:
    """The rank whose GPU takes longer than its only peer's, and by how much per step (ns).

    It is no straggler, and none is excluded, where longer batches would explain it. None where no
    such rank may cost enough to be named.
    """
    job = what_ifs(dataset)
    if job is None:
        return None
    more = job.excess(job.base)["gpu"]
    k = int(np.argmax(more.mean(axis=1)))
    others = job.peers.others(k)
    if len(others) != 1 or not beyond(more[k], more[others]):
        return None
    saved = _Late(dataset, [(k, "gpu")]).tried(job.base)
    enough = saved.most_ns >= limits.WARNING_FRAC * job.step_ns and not saved.rare
    return (dataset.ranks[k], float(more[k].mean())) if enough else None


def _suspects(job: WhatIfs, excess: Excess, named: set[Member]) -> list[tuple[Member, ...]]:
    """Who may be a straggler: each of those that take longest, and all of them together.

    Together: those that take about as long as the longest, by host, by GPU, and by either.
    """
    mean: dict[Member, float] = {
        (k, part): ns for part in PARTS for k, ns in enumerate(excess[part].mean(axis=1).tolist())
    }
    order = sorted(mean.keys() - named, key=lambda member: (-mean[member], member))
    suspects, joint = list[tuple[Member, ...]](), set[Member]()
    least_ns = limits.LEAST_FRAC * job.dataset.step_ns
    for part in PARTS:
        late = [member for member in order if member[1] == part and mean[member] >= least_ns]
        suspects += [(member,) for member in late[: limits.MOST]]
        group = [member for member in late if mean[member] >= limits.HALF * mean[late[0]]]
        # beyond half of the ranks it is the others that are early
        if len(group) <= limits.HALF * len(job.dataset.ranks):
            suspects.append(tuple(group))
            joint |= {*group}
    suspects.append(tuple(member for member in order if member in joint))
    return [*filter(None, dict.fromkeys(suspects))]


def _stands_out(job: WhatIfs, excess_of: Excess, member: Member, apart: set[Member]) -> bool:
    """Whether one takes longer than all of its peers but those in `apart`, beyond chance.

    Where the look at all ranks has shown it, the window has only to show it again. A host may pause
    so often, and its peers so seldom, as chance does not have it; a step in which a peer pauses
    tells nothing else. A GPU's batches may be of one length for many steps: it must exceed its
    peers by more than these differ, or by what no length of batches explains.
    """
    k, part = member
    excess, named_too = excess_of[part], [j for j, other in apart if other == part]
    others = np.setdiff1d(job.peers.others(k), named_too)
    if not len(others):
        return False
    looked = undisturbed.looked_late(job.dataset, job.dataset.ranks[k])
    shown_ns = [late["lateness_ns"] - late["bound_ns"] for late in looked if late["delays"]]
    margin = excess[k] - excess[others].max(axis=0)
    if shown_ns and margin.mean() >= limits.HALF * min(shown_ns):
        return True
    if part == "host":
        # by how much it and all that are not named are late where it is about as much as it ever is
        late = excess[[k, *np.setdiff1d(np.arange(len(excess)), named_too)]]
        least = max(limits.HALF * late[0].max(), limits.WARNING_FRAC * job.dataset.step_ns)
        if more_often(np.where(late >= least, late, 0.0), groups=1):
            return True
        regular = ~_paused(job, excess)[others].any(axis=0)
        # what is left are the steps in which it paused itself
        return bool(regular.mean() >= limits.HALF and _exceeds(job, excess[:, regular], k, others))
    if len(others) > 1 and _unlike_peers(job, k, others):
        return True
    if not looked:
        more_ns, excess = excess[k].mean(), beyond_lengths(job.dataset)
        if excess[k].mean() < limits.HALF * more_ns:
            return False
    return _exceeds(job, excess, k, others)


def _exceeds(job: WhatIfs, excess: Floats, k: int, others: RankPlaces) -> bool:
    """Whether one exceeds the next slowest of `others` by more in the mean than it varies from step
    to step, over the window, or over its beginning or end: a rank may be late in a part of it.
    """
    margin = excess[k] - excess[others].max(axis=0)
    runs = [slice(None), *(slice(stop) for stop in range(limits.FEW, len(margin)))]
    runs += [slice(-run.stop, None) for run in runs[1:]]
    # a job's chance is shared by all that is asked. Of equals either of two may be the later one;
    # of more it is rarer that one of them is later than all others
    chance = limits.CHANCE / (len(PARTS) * len(runs) * 2 * job.peers.apart)
    return any(beyond(margin[run], excess[others][:, run], chance) for run in runs)


def _paused(job: WhatIfs, excess: Floats) -> Bools:
    """Whose host pauses in which step: for half a step, and half of what makes its step longer."""
    durations = job.dataset.durations
    # without pauses: most steps may have one
    usual = float(np.median(durations - excess.max(axis=0)))
    return np.asarray(excess >= limits.HALF * np.maximum(usual, durations - usual))


def _unlike_peers(job: WhatIfs, k: int, others: RankPlaces) -> bool:
    """Whether a rank's GPU exceeds its peers' by more than these differ, beyond chance.

    In the mean of all steps but the highest, each rank one value.
    """
    usual_ns = job.base.run[job.work].sum() / (len(job.job.steps) * len(job.job.ranks))
    differences = np.sort(job.differences("gpu", job.base), axis=1)
    mean = differences[:, : max(differences.shape[1] - 1, 1)].mean(axis=1)
    # lengths differ by factors; a rank may have nearly none of the work
    mean = np.log1p(np.maximum(mean / usual_ns, limits.HALF - 1))
    circle = len(job.peers.others(k)) + 1
    chance = limits.CHANCE / (len(PARTS) * 2 * job.peers.apart)
    return unlike(float(mean[k]), mean[others], circle, chance)


def unlike(value: float, theirs: Floats, circle: int, chance: float = limits.CHANCE) -> bool:
    """Whether one of `circle` GPUs exceeds `theirs` so far by less than this chance.

    By Student's t of several logarithms of times, beside which GPUs differ by a hundredth. The
    others of the circle are left out as being as late: a choice of many, of which chance may make
    any. Of more than two, it seldom makes all of them late.
    """
    count = len(theirs)
    chance /= min(math.comb(circle, count), circle**2)
    by_chance = students_t(chance, count - 1) * float(theirs.std(ddof=1))
    usually = -NormalDist(0.0, limits.VARIES_FRAC).inv_cdf(chance)
    apart = math.hypot(by_chance, usually) * math.sqrt(1 + 1 / count)
    return bool(value - theirs.mean() > apart)


def beyond(values: Floats, equals: Floats, chance: float = limits.CHANCE) -> bool:
    """Whether a mean so far above zero has less than this chance, by a moderated Student's t.

    `equals`, [peers, steps], vary as the values do if it is by chance: theirs count as well, as
    much as a few steps do (Smyth, Linear models and empirical Bayes methods, 2004).
    """
    n = len(values) - 1
    if n < 1 or (mean := float(values.mean())) <= 0:
        return False
    # a single peer's excess is only what the rank's own is not
    prior = min(limits.FEW, (len(equals) - 1) * n)
    # what is left of a normal variance where all below the mean is cut off, as in an excess
    cut = 0.5 - 0.5 / math.pi
    apart = prior * float(equals.var(axis=1, ddof=1).mean()) / cut if prior else 0.0
    free = n + prior
    spread = (float(values.var()) * (n + 1) + apart) / free / (n + 1)
    return bool(mean > students_t(chance, free) * math.sqrt(spread))


@dataclass(frozen=True, eq=False)
class _Late:
    """Hosts and GPUs that delay the other ranks, of several only together; or that could."""

    dataset: Dataset
    members: Sequence[Member]

    @cached_property
    def ranks(self) -> list[int]:
        return [self.dataset.ranks[k] for k in sorted({k for k, _ in self.members})]

    @property
    def code(self) -> Code:
        return CODES[0] if self.members[0][1] == "host" or self.dataset.on_host else CODES[1]

    @cached_property
    def moved(self) -> list[int]:
        """The places of those whose GPUs have more work than their peers', which others can do."""
        gpus = [] if self.dataset.on_host else [k for k, part in self.members if part == "gpu"]
        return [k for k in gpus if causes.busy_gpu(self.dataset, k).movable]

    @cached_property
    def node(self) -> str:
        """The host whose profiled ranks are just these several, among others; else empty."""
        hosts = {tables.rank: tables.info.host for tables in self.dataset.tables}
        node = hosts[self.ranks[0]]
        ranks = [rank for rank, host in hosts.items() if host == node]
        return node if ranks == self.ranks and 1 < len(ranks) < len(hosts) else ""

    def like_peers(self, lengths: Lengths) -> Lengths:
        """`lengths` where these hosts and GPUs take as long as their middle peers'."""
        for part in PARTS:
            if places := [k for k, other in self.members if other == part]:
                lengths = job_of(self.dataset).like_peers(lengths, places, part)
        return lengths

    def repaired(self, lengths: Lengths) -> Lengths:
        """The same where their peers do a part of what work is `moved`."""
        return job_of(self.dataset).spread(self.like_peers(lengths), lengths, self.moved)

    def tried(self, lengths: Lengths) -> Saved:
        """What `like_peers` saves."""
        return job_of(self.dataset).saved(self.like_peers(lengths), lengths, self.ranks)

    def words(self, saved: Saved) -> Words:
        """The finding: who delays the others, by how much, and why."""
        # work that was queued before the window covers most of it so far
        least_ns = limits.LEAST_FRAC * self.dataset.step_ns
        hidden = saved.window_ns < (least_ns if saved.paced else saved.long_ns / 2)
        saved = replace(saved, long_run=saved.long_run or hidden)
        # by what it would save to leave the work out that their repair spreads, they delay others
        lost = replace(self.tried(saved.base), long_run=saved.long_run) if self.moved else saved
        if self.moved:
            lost = saved.by_looks(saved.looks, lost)
        texts, rows = [self._delays(lost, hidden=hidden), *self.causes()], Evidence()
        if self.node:
            texts.append(f"They are {rank_list(self.ranks, limits.FEW)} of {named(self.node)}.")
        if self.moved:
            if texts[0].endswith(")."):
                texts[0] = f"{texts[0][:-2]}; spread, it saves {ms(saved.ns)})."
            else:
                texts.append(f"The work spread over all ranks saves {ms(saved.ns)}.")
            rows.append({"rank": self.ranks[0], "left_out_saves_ns_per_step": round(lost.ns)})
        say = self.say(texts, "excess_ns_per_step", rows)
        if undisturbed.is_contradicted(self.dataset, tuple(self.ranks)):
            say = say._replace(at_most="info", confidence=limits.ASSUMED)
        costs = np.full_like(lost.by_step_ns, lost.ns) if hidden else lost.by_step_ns
        return say._replace(hidden=hidden, costs=costs)

    @cached_property
    def _shown(self) -> list[tuple[int, Part, Floats, causes.Reason]]:
        """The first of them: by how much longer than its middle peer each takes (ns), and why."""
        dataset, job = self.dataset, job_of(self.dataset)
        excess = job.excess(job.base)
        return [
            (k, part, excess[part][k], causes.late_host(dataset, k, excess[part][k])
             if part == "host" or dataset.on_host else causes.busy_gpu(dataset, k))
            for k, part in self.members[: limits.MOST]
        ]  # fmt: skip

    def say(self, texts: Sequence[str], much: str, rows: Evidence) -> Words:
        """These sentences, and what shows them: `much` is what the members' excess is called."""
        dataset, (first, _, excess, _) = self.dataset, self._shown[0]
        advice = [reason.advice or self.code.recommendation for *_, reason in self._shown]
        advice += [difference.advice for _, difference in self._hardware if difference.advice]
        both = [dataset.ranks[first], dataset.ranks[0 if first else 1]]
        closer = capture(dataset, both, *operators(dataset), "--cpu-sampling")
        steady = (excess > limits.HALF * excess.mean()).mean() >= limits.STEADY_FRAC
        return Words(
            " ".join(texts),
            [
                *({"rank": dataset.ranks[k], "part": part, much: round(float(more_ns.mean()))}
                  for k, part, more_ns, _ in self._shown),
                *rows,
                *_latest_calls(dataset, dataset.ranks[first]),
                *(row for *_, reason in self._shown for row in reason.evidence),
                *(difference.evidence for _, difference in self._hardware),
            ],
            limits.MEASURED if steady else limits.ASSUMED,
            rank=None if len(self.ranks) > 1 else self.ranks[0],
            recurrence="intermittent" if self._looked or self._for_a_time else None,
            advice=" ".join(dict.fromkeys(advice)),
            follow_up=closer if self.code is CODES[0] else "",
        )  # fmt: skip

    def causes(self) -> Iterator[str]:
        """Why they are late: each cause once, with its ranks where these have several."""
        why: dict[str, list[int]] = {}
        for k, *_, reason in self._shown:
            why.setdefault(reason.why, []).append(self.dataset.ranks[k])
        for text, ranks in why.items():
            where = f" on {rank_list(ranks, limits.FEW)}" if len(why) > 1 < len(self.ranks) else ""
            yield f"Cause{where}: {text}."
        for k, difference in self._hardware:
            whose = f"Rank {self.dataset.ranks[k]}: " if len(self.ranks) > 1 else ""
            yield f"{whose}{difference.text}." if whose else f"{capitalised(difference.text)}."
        if self._looked:
            yield f"The look at all ranks has shown it {self._looked}."

    @property
    def _for_a_time(self) -> bool:
        return undisturbed.for_a_time(self.dataset, tuple(self.ranks)) is not None

    @cached_property
    def _hardware(self) -> list[tuple[int, Difference]]:
        """What GPU or node of each differs from its peers', as its clocks and counters have it.

        More work draws more power: the clocks that it leaves a GPU are no cause, and no advice.
        """
        compared, differences = Compared(self.dataset.hardware), []
        for k, part, *_ in self._shown:
            rank = self.dataset.ranks[k]
            differences += [(k, error) for error in compared.of_errors(rank)]
            if part == "host" or self.dataset.on_host:
                differences += [(k, on_node) for on_node in compared.of_node(rank)]
            elif gpu := compared.of_gpu(rank):
                differences.append((k, gpu._replace(advice="") if k in self.moved else gpu))
        return differences

    @property
    def _looked(self) -> str:
        """In how many steps the look has shown it late; empty where not, or in all of them."""
        alone = len(self.ranks) == 1
        late = undisturbed.looked_late(self.dataset, self.ranks[0]) if alone else []
        late.sort(key=lambda suspect: suspect["lateness_ns"] - suspect["bound_ns"])
        shown = [suspect["late_steps"] for suspect in late if suspect["delays"]]
        look = self.dataset.shallow
        return in_some(shown[0], look["steps"]) if shown and look else ""

    def _delays(self, saved: Saved, *, hidden: bool) -> str:
        """Who (all of a node, if that is named) delays whom by how much."""
        dataset, several = self.dataset, len(self.ranks) > 1
        everyone = len(self.ranks) == len(dataset.ranks)
        who = rank_list(self.ranks, limits.FEW).capitalize()
        if self.node:
            who = f"All profiled ranks of {named(self.node)}"
        elif several and not everyone:
            who += " together"
        verb = "will delay" if hidden else "delay" if several else "delays"
        late = f"{who} {verb} {'each other' if everyone else 'the other ranks'}"
        if saved.rare:
            return f"{late} in the window, and hardly in the steps before it."
        if undisturbed.is_contradicted(dataset, tuple(self.ranks)):
            return (
                f"{late} in the window, and in no look without a profiler, which may be the cause."
            )
        if saved.ns <= 0:
            return f"{late} in the window, and may do so without the profiler."
        if saved.looks and (often := undisturbed.for_a_time(dataset, tuple(self.ranks))):
            much, steps = ms(saved.ns / often.share), counted(often.steps, "step")
            share = percent(saved.ns / saved.of_ns)
            late = f"without a profiler {late[0].lower()}{late[1:]} by {much}"
            return f"In about {often.late} of {steps} {late}, {share} of all time."
        if not hidden:
            return f"{late} by {of_saving(dataset, saved)}."
        most = "" if saved.window_ns < limits.LEAST_FRAC * dataset.step_ns else "most of "
        return f"{late} by {ms(saved.ns)} per step; queued work covers {most}it in the window."


def _latest_calls(dataset: Dataset, rank: int) -> Evidence:
    """The collective of each of some steady-state steps at which a rank was latest, as evidence."""
    c = dataset.collectives
    last = (c.rank == rank) & (c.last_rank == rank) & c.synchronising
    calls = np.flatnonzero(last & np.isin(c.step, dataset.steady_steps))
    latest = [call[np.argmax(c.lateness[call])] for call in parts(calls, c.step[calls])]
    return [
        {"rank": rank, "step": int(c.step[call]), "time_ns": int(c.aligned_start[call]),
         "operation": str(c.operation[call]), "communicator": str(c.communicator[call]),
         "late_ns": int(c.lateness[call])}
        for call in latest[: limits.MOST]
    ]  # fmt: skip


def repairs(dataset: Dataset, *_: object) -> list[Repair]:
    """Propose `straggler.host` and `straggler.gpu`, each found on what those before it leave."""
    return [
        Repair(late.code, tuple(late.ranks), late.repaired, late.words, least=-math.inf, turn=turn)
        for turn, members in enumerate(stragglers(dataset))
        for late in [_Late(dataset, members)]
    ]


def find(dataset: Dataset, _found: Sequence[Finding] = ()) -> list[Finding]:
    """Return the rank whose host is much slower than its peers', though it delays no other rank."""
    job = job_of(dataset)
    excess = job.excess(job.base)
    more_ns = excess["host"].mean(axis=1)
    slowest: Member = (int(np.argmax(more_ns)), "host")
    enough = more_ns.max() >= limits.CRITICAL_FRAC * dataset.step_ns and not stragglers(dataset)
    if not enough or not _stands_out(job, excess, slowest, {slowest}):
        return []
    late = _Late(dataset, [slowest])
    first = f"Rank {late.ranks[0]}'s host takes {ms(float(more_ns.max()))} longer per step than "
    texts = [f"{first}its peers', but delays no other rank.", *late.causes()]
    words = late.say(texts, _OVERLAPPED, [])
    words = words._replace(at_most="info", confidence=limits.ASSUMED)
    return [finding_of_repair(dataset, CODES[0], late.ranks, words, late.tried(job.base))]


def delays(findings: Sequence[Finding]) -> list[Finding]:
    """Return the stragglers that delay other ranks: no compute of theirs covers the lateness."""
    stragglers = [f for f in findings if f["code"].startswith("straggler.")]
    return [f for f in stragglers if not any(_OVERLAPPED in row for row in f["evidence"])]
