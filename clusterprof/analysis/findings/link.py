"""A slow link: the transfers of one group of ranks take longer than those of its siblings.

Siblings are the tensor groups of other nodes, the data groups of other places in the nodes: they
exchange the same bytes by the same operations at the same places of a step. Their transfers are
compared as hosts and GPUs are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from clusterprof.align.columns import integers
from clusterprof.analysis.findings.finding import (
    Code,
    Repair,
    Tier,
    Words,
    capture,
    job_of,
    named,
    of_saving,
)
from clusterprof.analysis.findings.straggler import beyond
from clusterprof.analysis.groups.peers import median_of_others
from clusterprof.analysis.groups.topology import topology, whole
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import call_of
from clusterprof.analysis.model.dataset import Dataset, Floats, Ints, parts
from clusterprof.analysis.model.graph import first_of
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved
from clusterprof.words import ms
from clusterprof.words import ranks as rank_list

TIER = Tier.LINKS

CODES = (
    Code(
        "straggler.link",
        "A communicator transfers more slowly than its siblings",
        "The transfers of a communicator, waiting excluded, take at least twice as long as those "
        "of its siblings: communicators of as many ranks, as far apart, that lie over the nodes "
        "in the same way. Compared are calls of the same operation, size and place in the step. "
        "Saved: its transfers take what those of the middle sibling take.",
        "Other jobs on the same switch, kernels beside a transfer, or another algorithm of NCCL "
        "slow transfers as well. What slows all siblings shows in none, and a communicator with an "
        "unprofiled member is not compared, since it may wait for that one.",
        "Compare the transports that NCCL chooses there (NCCL_DEBUG=INFO and "
        "NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET) with a sibling's, and check NVLink, PCIe and InfiniBand "
        "of these GPUs (nvidia-smi topo -m, nvidia-smi nvlink --status, ibstat).",
    ),
)


class _Transfers:
    """The collectives of communicators all of whose members are profiled, one element each.

    `call` is one number for those that are compared: of one operation, size and place in the step
    of communicators that are siblings; `took` is the transfer (ns).
    """

    def __init__(self, dataset: Dataset) -> None:
        c, replayed = dataset.collectives, job_of(dataset).job
        call = call_of(dataset, replayed)
        rows = np.unique(call[replayed.joined & (call >= 0)])
        rows = rows[whole(dataset)[rows] & (c.size[rows] > 0)]
        # the member that comes last waits for none: its own clock has nothing but the transfer
        rows = rows[np.lexsort(((c.end - c.start)[rows], c.collective[rows]))]
        of, first = np.unique(c.collective[rows], return_index=True)
        # members of an uneven exchange have unlike sizes
        most, least = (each.reduceat(c.size[rows], first) for each in (np.maximum, np.minimum))
        self.collective, rows = of[most == least], rows[first][most == least]
        self.took, self.step = (c.end - c.start)[rows].astype(float), c.step[rows]
        self.communicator = c.communicators[0][rows]
        self.shape = _shapes(dataset)[self.communicator]
        _, operation = np.unique(c.operation[rows].astype(str), return_inverse=True)
        same = np.stack([self.communicator, self.step, operation.reshape(-1), c.size[rows]])
        order = np.lexsort((integers(dataset.placed, "order")[rows], *same))
        fresh = np.r_[True, (np.diff(same[:, order], axis=1) != 0).any(axis=0)][: len(rows)]
        place = np.empty(len(rows), dtype=np.int64)
        place[order] = np.arange(len(rows)) - first_of(fresh)
        self.call = np.stack([self.step, *same[2:], place])


def _shapes(dataset: Dataset) -> Ints:
    """One number for communicators that are siblings, by the communicator's.

    Of as many ranks, equally far apart, that lie over as many nodes in the same way.
    """
    c = dataset.collectives
    codes, names = c.communicators
    kinds: list[Hashable] = [()] * len(names)
    for rows in parts(np.arange(len(codes)), codes):
        ranks = np.unique(c.rank[rows])
        hosts = [dataset.tables[dataset.place[int(rank)]].info.host for rank in ranks]
        kinds[codes[rows[0]]] = (*np.diff(ranks).tolist(), *map(hosts.index, hosts))
    known = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return np.asarray([known[kind] for kind in kinds], dtype=np.int64)


class _Siblings:
    """Communicators of one kind and their transfers, waiting excluded, [communicators, calls] (ns).

    NaN where one has no such call. `usual` is what the middle of the others takes, `step` the step
    of each call.
    """

    def __init__(self, transfers: _Transfers, rows: Ints) -> None:
        self.communicators, member = np.unique(transfers.communicator[rows], return_inverse=True)
        calls, call = np.unique(transfers.call[:, rows], axis=1, return_inverse=True)
        self.step, self.at = calls[0], (member.reshape(-1), call.reshape(-1))
        self.took = np.full((len(self.communicators), calls.shape[1]), np.nan)
        self.took[self.at] = transfers.took[rows]
        self.usual = median_of_others(self.took)

    def per_step(self, values: Floats) -> Floats:
        """The sums of each step over the calls that can be compared, [communicators, steps]."""
        compared = np.nan_to_num(values + 0 * (self.took + self.usual))
        begins = np.flatnonzero(np.diff(self.step, prepend=-1))
        return np.asarray(np.add.reduceat(compared, begins, axis=1))

    def slow(self, questions: int) -> Ints:
        """Which of them take twice as long as the middle sibling, beyond chance.

        Chance is that of so many communicators. Where more than half do, the others are quick.
        """
        took, usual = self.per_step(self.took), self.per_step(self.usual)
        slow = took.mean(axis=1) > np.maximum(usual.mean(axis=1) / limits.HALF, 0)
        if not 0 < slow.sum() <= limits.HALF * len(slow):
            return np.zeros(0, dtype=np.int64)
        excess, chance = took - usual, limits.CHANCE / questions
        margin = excess - excess[~slow].max(axis=0)
        return np.asarray(
            [k for k in np.flatnonzero(slow) if beyond(margin[k], excess[~slow], chance)],
            dtype=np.int64,
        )


def repairs(dataset: Dataset, *_: object) -> list[Repair]:
    """Propose `straggler.link`, one for each kind of communicators of which some are slow."""
    transfers = _Transfers(dataset)
    kinds = parts(np.arange(len(transfers.shape)), transfers.shape)
    siblings = [(rows, _Siblings(transfers, rows)) for rows in kinds]
    questions = sum(len(each.communicators) for _, each in siblings)
    out = []
    for rows, each in siblings:
        if len(slow := each.slow(questions)):
            mine = np.isin(each.at[0], slow)
            times = np.ones(dataset.collectives.collective.max() + 1)
            usual, took = (values[each.at][mine] for values in (each.usual, each.took))
            times[transfers.collective[rows[mine]]] = np.where(usual < took, usual / took, 1)
            out.append(_repair(dataset, _slow_link(dataset, each, slow), times))
    return out


@dataclass(frozen=True)
class _SlowLink:
    """Sibling communicators that are slow.

    `took_ns` is what each of them transfers in a step, `usual_ns` what their middle sibling does.
    """

    communicators: tuple[str, ...]
    ranks: tuple[int, ...]
    siblings: int
    took_ns: float
    usual_ns: float


def _slow_link(dataset: Dataset, siblings: _Siblings, slow: Ints) -> _SlowLink:
    c = dataset.collectives
    codes, names = c.communicators
    chosen = siblings.communicators[slow]
    took, usual = (siblings.per_step(v)[slow].mean() for v in (siblings.took, siblings.usual))
    return _SlowLink(
        tuple(names[code] for code in chosen.tolist()),
        tuple(np.unique(c.rank[np.isin(codes, chosen)]).tolist()),
        len(siblings.communicators) - len(slow),
        float(took),
        float(usual),
    )


def _repair(dataset: Dataset, slow: _SlowLink, times: Floats) -> Repair:
    """Each collective's transfer takes so many `times` as long."""
    job = job_of(dataset).job
    call = call_of(dataset, job)
    members = np.flatnonzero(job.joined & (call >= 0))
    of_member = times[dataset.collectives.collective[call[members]]]

    def as_siblings(lengths: Lengths) -> Lengths:
        run = lengths.run.copy()
        run[members] = run[members] * of_member
        return replace(lengths, run=run)

    least_ns = limits.LEAST_FRAC * dataset.step_ns
    return Repair(CODES[0], slow.ranks, as_siblings, partial(_words, dataset, slow), least_ns)


def _words(dataset: Dataset, one: _SlowLink, saved: Saved) -> Words:
    kinds = {each["communicator"]: each["kind"] for each in topology(dataset)["groups"]}
    kind = kinds.get(one.communicators[0], "unknown")
    what, number = f"{kind} " * (kind != "unknown") + "communicator", len(one.communicators)
    they = f"{number} {what}s transfer each" if number > 1 else f"{what} transfers"
    hosts = {dataset.tables[dataset.place[rank]].info.host for rank in one.ranks}
    node = f" All are on {named(*hosts)}." if len(hosts) == 1 and all(hosts) else ""
    middle = "its sibling" if one.siblings == 1 else f"the middle one of {one.siblings} siblings"
    times = f"{one.took_ns / max(one.usual_ns, 1):.3g} times"
    return Words(
        confidence=limits.MEASURED if all(hosts) else limits.ASSUMED,
        summary=f"Transfers of {rank_list(one.ranks, limits.FEW)} take {times} as long as in "
        f"sibling groups: {of_saving(dataset, saved)}. "
        f"Their {they} {ms(one.took_ns)} per step; {middle} {ms(one.usual_ns)}.{node}",
        evidence=[
            {
                "communicator": name, "transfer_ns_per_step": round(one.took_ns),
                "siblings": one.siblings, "sibling_transfer_ns_per_step": round(one.usual_ns),
            }
            for name in one.communicators[: limits.MOST]
        ],
        follow_up=capture(dataset, one.ranks[: limits.MOST]),
    )  # fmt: skip
