"""What the looks at a running job say of a straggler that its capture shows.

The capture's replay tells which share of a rank's lateness the step loses; the looks, over many
steps without a profiler, how late it is. A rank that is late in the window alone, although looks
could have shown it, is late by the profiler until something else shows it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import call_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.shallow import COMPUTED, students_t
from clusterprof.analysis.model.what_if import Saved, Undisturbed, WhatIfs
from clusterprof.columns import Floats, greatest_by
from clusterprof.results import Suspect
from clusterprof.watched import ENOUGH_STEPS

#: how often an interval may miss the truth on one side
_CHANCE = 0.025


def lateness_in_looks(
    dataset: Dataset, job: WhatIfs, rank: int, saved: Saved
) -> Undisturbed | None:
    """Return what a rank's repair saves by the looks; None where they do not tell.

    The share of its lateness that the step loses is what the repair saves over how long the
    profiled peers wait for it, both in the replay; `saved` is of this rank alone.
    """
    looked = (late for late in looked_late(dataset, rank) if "looked_steps" in late)
    late = next((late for late in looked if late["delays"]), None)
    if saved.rare or saved.ns <= 0:
        return None
    if late is None:
        return _late_for_a_time(dataset, rank, saved)
    share, unsure = 1.0, 0.0
    if not late.get("by_pace"):
        caused = lateness_ns(dataset, job, rank, saved.base)
        if caused.mean() < limits.LEAST_FRAC * dataset.step_ns:
            return None
        share = saved.ns / float(caused.mean())
        unsure = _unsure(saved.by_step_ns, caused)
    return Undisturbed(
        late.get("looked_steps", 0), late["lateness_ns"], late["bound_ns"], share, unsure
    )


def lateness_ns(dataset: Dataset, job: WhatIfs, rank: int, lengths: Lengths) -> Floats:
    """Return by how much each steady-state step's profiled peers wait for a rank at least (ns).

    As the flight recorders' lateness is computed (`model/shallow`): the longest of a step's waits
    of the peer that waits least, but for what the rank waits itself. In the replay of `lengths`.
    """
    replay, c = job.job, dataset.collectives
    begin = len(replay.host_rank)
    starts = replay.times(lengths)[begin : begin + len(replay.rank)]
    members = np.flatnonzero(replay.joined)
    call = call_of(dataset)[replay.activity[members]]
    members, call = members[c.synchronising[call]], call[c.synchronising[call]]
    place, step = replay.rank[members], replay.step[members]
    never = np.full(c.collective.max(initial=0) + 1, np.iinfo(np.int64).min)
    last = greatest_by(c.collective[call], starts[members], never)
    waited = (last[c.collective[call]] - starts[members]).astype(float)
    k = dataset.place[rank]
    with_k = np.isin(c.collective[call], c.collective[call[place == k]])
    computed = with_k & np.isin(c.operation[call].astype(str), COMPUTED)
    longest, own = np.zeros((2, len(dataset.ranks), len(replay.steps)))
    np.maximum.at(longest, (place[computed], step[computed]), waited[computed])
    np.add.at(own, (place[with_k], step[with_k]), waited[with_k])
    others = np.setdiff1d(place[computed], k)
    caused = longest[others].min(axis=0, initial=np.inf) - own[k]
    caused = np.where(np.isfinite(caused), np.maximum(caused, 0.0), 0.0)
    return job.by_steady_step(caused, float(caused.mean()))


def _unsure(saved: Floats, caused: Floats) -> float:
    """Return how far the share may be wrong, by how savings vary beside the lateness (95%).

    The variance of a ratio of means (Cochran, Sampling Techniques, 1977, section 6.4).
    """
    n, mean = saved.size, float(caused.mean())
    if n < 2:
        return 1.0
    apart = saved - saved.mean() / mean * caused
    return float(students_t(_CHANCE, n - 1) * apart.std(ddof=1) / np.sqrt(n) / mean)


class Often(NamedTuple):
    """In about how many of the steps of so many looks ranks were late."""

    late: int
    steps: int
    looks: int

    @property
    def share(self) -> float:
        """The part of the steps."""
        return min(self.late / self.steps, 1.0)


def often_late(dataset: Dataset, ranks: tuple[int, ...]) -> Often | None:
    """Return how often the looks show the one of these ranks late that is so most often.

    None where they have compared too few steps, or not all of the ranks.
    """
    shallow = dataset.shallow
    watch = shallow.get("watch") if shallow else None
    if shallow is None or watch is None or watch["steps"] < ENOUGH_STEPS:
        return None
    compared = {rank for group in shallow["groups"] for rank in group["ranks"]}
    if "late" not in watch or not compared.issuperset(ranks):
        return None
    late = max((each["steps"] for each in watch["late"] if each["rank"] in ranks), default=0)
    return Often(late, watch["steps"], watch["looks"])


def for_a_time(dataset: Dataset, ranks: tuple[int, ...]) -> Often | None:
    """Return how often these ranks are late by the looks, where that is not usually, nor never."""
    often = often_late(dataset, ranks)
    return often if often and 0 < often.share < limits.STEADY_FRAC else None


def _late_for_a_time(dataset: Dataset, rank: int, saved: Saved) -> Undisturbed | None:
    """What the window shows of a rank, as often as the looks show it late.

    Looks are no more independent of each other than they are many: how often it is late is as
    uncertain as a share of so few (a binomial one).
    """
    often = for_a_time(dataset, (rank,))
    if often is None:
        return None
    share, by_step = often.share, saved.by_step_ns
    how_often = 2 * float(np.sqrt(share * (1 - share) / often.looks)) * saved.ns
    chance = 2 * float(by_step.std(ddof=1)) / np.sqrt(by_step.size) if by_step.size > 1 else 0.0
    bound = float(np.hypot(how_often, share * chance))
    return Undisturbed(often.steps, round(share * saved.ns), round(bound), 1.0, 0.0)


def looked_late(dataset: Dataset, rank: int) -> list[Suspect]:
    """Return how flight recorders, in the window or in looks, have ended with this rank late.

    Where it became so after the window, that shows nothing of what the window has.
    """
    suspects = dataset.shallow["suspects"] if dataset.shallow else []
    late = [s for s in suspects if s["rank"] == rank and s["until_step"] is None]
    return [s for s in late if (s["since_step"] or 0) <= max(dataset.steps, default=0)]


def is_contradicted(dataset: Dataset, ranks: tuple[int, ...]) -> bool:
    """Whether looks at enough undisturbed steps show none of these ranks late, as a window does."""
    often, shallow = often_late(dataset, ranks), dataset.shallow
    suspects = shallow["suspects"] if shallow else []
    return often is not None and not often.late and all(s["rank"] not in ranks for s in suspects)
