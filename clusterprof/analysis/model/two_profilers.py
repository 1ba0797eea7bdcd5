"""Hosts under unlike profilers: by how much one is later than another, whatever these lengthen.

A profiler lengthens what it records, each in its own way, and nothing that a host does in between.
So of two hosts at the same place of a step one is later by what its quiet time, in which nothing
begins or ends, exceeds all of the other's time there: less would be the profilers'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.groups.peers import Peers
from clusterprof.analysis.model import host_activity, limits
from clusterprof.analysis.model.dataset import Bools, Dataset, Floats, Ints
from clusterprof.analysis.model.graph import first_of, running_sum
from clusterprof.analysis.model.replay import Replay


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
        quiet, whole = self._sums(own)
        usual_quiet, usual = (each - self.peers.differences(each) for each in (quiet, whole))
        return np.asarray(np.maximum(quiet - usual, 0) - np.maximum(usual_quiet - whole, 0))

    def by_step(self, places: Floats) -> Floats:
        """The sums over the places of each step, [ranks, steps]."""
        first = np.flatnonzero(np.diff(self.step, prepend=-1))
        return np.asarray(np.add.reduceat(places, first, axis=1))

    def in_time(self, own: Ints, ranks: Ints) -> Ints:
        """The hosts' own times where `ranks` (places) are no later than the others, step by step.

        Where one is later, by so much less as it is earlier elsewhere in the step.
        """
        quiet, whole = self._sums(own)
        others = np.setdiff1d(np.arange(len(quiet)), ranks)
        out = own.copy()
        for k in ranks.tolist():
            peers = np.intersect1d(self.peers.others(k), others)
            if not len(peers):
                continue
            later = np.maximum(quiet[k] - np.nanmedian(whole[peers], axis=0), 0)
            earlier = np.maximum(np.nanmedian(quiet[peers], axis=0) - whole[k], 0)
            late, early = self.by_step(np.stack([later, earlier]))
            kept = np.clip(early / np.maximum(late, 1), 0, 1)
            less = later / np.maximum(quiet[k], 1) * (1 - kept[self.step])
            mine = np.flatnonzero(self.rank == k)
            spent = np.maximum(own[mine] - self.traced[mine], 0)
            out[mine] -= (spent * less[self.place[mine]]).astype(np.int64)
        return np.asarray(out)

    def _sums(self, own: Ints) -> tuple[Floats, Floats]:
        """What each host spends at each place, quiet and in all, [ranks, places] (ns)."""
        count, quiet = len(self.peers.of), own - np.minimum(self.traced, own)
        there = np.bincount(self.rank, minlength=count) > 0
        quiet_ns, whole_ns = (
            np.where(there[:, None], _at_places(self.rank, self.place, count, each), np.nan)
            for each in (quiet, own)
        )
        return quiet_ns, whole_ns


def _at_places(rank: Ints, place: Ints, ranks: int, values: Ints) -> Floats:
    """The sums of the moments' `values`, [ranks, places]."""
    count = int(place.max(initial=0)) + 1
    key = rank.astype(np.int64) * count + place
    sums = np.bincount(key, values, ranks * count).reshape(ranks, count)
    return np.asarray(sums, dtype=float)


def places(job: Replay, step: Ints, phase: Ints) -> tuple[Ints, Ints]:
    """Each host moment's place, a number of all ranks, and the step of each place.

    Moments are of a `step` and a `phase` (collectives launched before it). They are at the same
    place between the same two launches where all hosts have as many of these in a phase; else all
    of a phase are.
    """
    phases = int(phase.max(initial=0)) + 1
    among = step.astype(np.int64) * phases + phase
    shape = int(job.host_rank.max(initial=0)) + 1, int(among.max(initial=0)) + 1
    key = job.host_rank * np.int64(shape[1]) + among
    launches = np.zeros(len(key), dtype=np.int64)
    launches[job.launch_moment] = 1
    at = running_sum(launches, first_of(np.diff(key, prepend=-1) != 0)) - launches
    count = np.bincount(key, launches, shape[0] * shape[1]).reshape(shape)
    alike = (count[job.ranks] == count[job.ranks[:1]]).all(axis=0)
    known, place = np.unique(
        np.stack([among, np.where(alike[among], at, 0)]), axis=1, return_inverse=True
    )
    return place.reshape(-1), known[0] // phases


def may_lengthen(dataset: Dataset, job: Replay, own: Ints) -> Ints:
    """How much of each host moment's `own` time (ns) profilers may lengthen, each in its own way.

    All of it but, in each pause, what is quiet.
    """
    begin, end = job.host_spans
    long = np.flatnonzero(job.lengths.own >= limits.PAUSE_NS)
    traced: Ints = own.copy()
    quiet = host_activity.quiet(dataset, job.host_rank[long], begin[long], end[long])
    traced[long] = np.maximum(traced[long] - quiet, 0)
    return traced


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
