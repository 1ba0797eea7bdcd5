"""Hosts under unlike profilers: by how much one is later than another, whatever these lengthen.

A profiler lengthens what it records, each in its own way, and nothing that a host does in between.
So of two hosts at the same place of a step one is later by what its quiet time, in which nothing
begins or ends, exceeds all of the other's time there: less would be the profilers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.model.peers import Peers
from clusterprof.analysis.model.replay import Replay
from clusterprof.columns import Bools, Floats, Ints, Stretches, count_by, sums


@dataclass(frozen=True)
class Hosts:
    """The hosts' moments by their places in the steps, and what profilers may lengthen of each."""

    peers: Peers
    rank: Ints
    #: the same for moments of all ranks at the same place, and the step of each place
    place: Ints
    step: Ints
    #: of each moment's own time that which profilers may lengthen (ns)
    traced: Ints

    def later(self, own: Ints) -> Floats:
        """By how much each host is later than its middle peer, [ranks, places] (ns): or earlier."""
        _, late, early = self._compared(own)
        return np.asarray(late - early)

    def by_step(self, places: Floats) -> Floats:
        """The sums over the places of each step, [ranks, steps]."""
        return Stretches.of(self.step).sum(places)

    def in_time(self, own: Ints, ranks: Ints) -> Ints:
        """The hosts' own times where `ranks` (places) are no later than the others, step by step.

        Where one is later, by so much less as it is earlier elsewhere in the step.
        """
        quiet, late, early = self._compared(own, ranks)
        kept = np.clip(self.by_step(early) / np.maximum(self.by_step(late), 1), 0, 1)
        less = late / np.maximum(quiet, 1) * (1 - kept[:, self.step])
        spent = np.maximum(own - self.traced, 0) * np.isin(self.rank, ranks)
        return np.asarray(own - (spent * less[self.rank, self.place]).astype(np.int64))

    def _compared(self, own: Ints, ranks: Sequence[int] | Ints = ()) -> Floats:
        """How long hosts are quiet, and by how much they are later and earlier than their peers.

        [3, ranks, places] (ns). The peers are those that are not in `ranks`.
        """
        quiet, whole = (
            _at_places(self.rank, self.place, len(self.peers.circle_of), each)
            for each in (np.maximum(own - self.traced, 0), own)
        )
        usual_quiet, usual = (self.peers.usual(each, ranks) for each in (quiet, whole))
        late, early = np.maximum(quiet - usual, 0), np.maximum(usual_quiet - whole, 0)
        return np.asarray(np.nan_to_num([quiet, late, early]))


def _at_places(rank: Ints, place: Ints, ranks: int, values: Ints) -> Floats:
    """The sums of the moments' `values`, [ranks, places]; NaN for ranks that have none."""
    shape = ranks, int(place.max(initial=0)) + 1
    there = count_by(rank, ranks) > 0
    return np.where(there[:, None], sums(shape, (rank, place), values), np.nan)


def places(job: Replay, step: Ints, phase: Ints) -> tuple[Ints, Ints]:
    """Each host moment's place, a number of all ranks, and the step of each place.

    Moments are of a `step` and a `phase` (collectives launched before it). They are at the same
    place between the same two launches where all hosts have as many of these in a phase; else all
    of a phase are.
    """
    phases = int(phase.max(initial=0)) + 1
    among = step.astype(np.int64) * phases + phase
    shape = int(job.host_rank.max(initial=0)) + 1, int(among.max(initial=0)) + 1
    key = np.ravel_multi_index((job.host_rank, among), shape)
    turn = job.launched_before(key)
    count = sums(shape, (job.host_rank[job.launch_moment], among[job.launch_moment]))
    alike = (count[job.ranks] == count[job.ranks[:1]]).all(axis=0)
    pairs = np.stack([among, np.where(alike[among], turn, 0)])
    known, place = np.unique(pairs, axis=1, return_inverse=True)
    return place.reshape(-1), known[0] // phases


def as_others(job: Replay, place: Ints, unnamed: Bools, part: Ints) -> Ints:
    """Each moment's time in something of which reports of `unnamed` ranks (places) tell nothing.

    `part` is that of the others (ns): at its place a program does the same on all ranks, and an
    unnamed one no more of it than it takes there.
    """
    own, rank = job.lengths.own, job.host_rank
    named = np.setdiff1d(job.ranks, np.flatnonzero(unnamed))
    spent, whole = (_at_places(rank, place, len(unnamed), each) for each in (part, own))
    usual = np.median(spent[named], axis=0)
    share = np.minimum(usual[place] / np.maximum(whole[rank, place], 1), 1)
    return np.asarray(np.where(unnamed[rank], (own * share).astype(np.int64), part))
