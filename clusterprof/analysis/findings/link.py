"""A slow link: the transfers of one group of ranks take longer than those of its siblings.

Siblings are the tensor groups of other nodes, the data groups of other places in the nodes: they
exchange the same bytes by the same operations at the same places of a step. Their transfers are
compared as hosts and GPUs are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

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
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.accounts import call_of
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.topology import median_of_others, topology, whole
from clusterprof.analysis.model.what_if import Saved
from clusterprof.columns import (
    Bools,
    Floats,
    Ints,
    PlacedRows,
    Stretches,
    begins,
    combined,
    first_of,
    integers,
    order_by,
    parts,
    rows_by,
)
from clusterprof.words import ms, ranks as rank_list

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


class _Siblings:
    """Communicators of one kind and their transfers, waiting excluded, [communicators, calls] (ns).

    `rows` are the rows of the placed table that tell these, `call` the calls that are compared: of
    one step, operation, size and place in the step. NaN where a communicator has no such call.
    `usual` is what the middle of the others takes.
    """

    def __init__(self, dataset: Dataset, rows: PlacedRows, call: Ints) -> None:
        c, self.rows = dataset.collectives, rows
        self.communicators, member = np.unique(c.communicators[0][rows], return_inverse=True)
        calls, first, column = np.unique(call, return_index=True, return_inverse=True)
        self._steps, self.cell = Stretches.of(c.step[rows[first]]), (member, column)
        self.took = np.full((len(self.communicators), len(calls)), np.nan)
        self.took[self.cell] = (c.end - c.start)[rows]
        self.usual = median_of_others(self.took)

    def per_step(self, values: Floats) -> Floats:
        """The sums of each step over the calls that can be compared, [communicators, steps]."""
        compared = np.nan_to_num(values + 0 * (self.took + self.usual))
        return self._steps.sum(compared)

    def slow(self, questions: int) -> Bools:
        """Which of them take twice as long as the middle sibling, beyond chance.

        Chance is that of so many communicators. Where more than half do, the others are quick.
        """
        took, usual = self.per_step(self.took), self.per_step(self.usual)
        slow = took.mean(axis=1) > np.maximum(usual.mean(axis=1) / limits.HALF, 0)
        if not 0 < slow.sum() <= limits.HALF * len(slow):
            return np.zeros_like(slow)
        excess, chance = took - usual, limits.CHANCE / questions
        margins = excess - excess[~slow].max(axis=0)
        late = [beyond(margin, excess[~slow], chance) for margin in margins]
        return np.asarray(slow & late, dtype=bool)


def repairs(dataset: Dataset, *_: object) -> list[Repair]:
    """Propose `straggler.link`, one for each kind of communicators of which some are slow.

    Siblings are as many ranks, equally far apart, that lie over as many nodes in the same way.
    """
    c, replayed = dataset.collectives, job_of(dataset).job
    # of communicators all of whose members are profiled, each collective's last member: it waits
    # for none, so that its own clock has nothing but the transfer
    row = call_of(dataset)[replayed.activity]
    rows = np.unique(row[replayed.joined & (row >= 0)])
    rows = rows[whole(dataset)[rows] & (c.size[rows] > 0)]
    rows = rows[order_by(c.collective[rows], (c.end - c.start)[rows])]
    calls, size = Stretches.of(c.collective[rows]), c.size[rows]
    # members of an uneven exchange have unlike sizes
    rows = rows[calls.first][calls.greatest(size) == calls.least(size)]
    codes, names = c.communicators
    shapes = np.full(len(names), "", dtype=object)
    for code, members in rows_by(codes).items():
        ranks = np.unique(c.rank[members]).tolist()
        hosts = [dataset.tables[dataset.place[rank]].info.host for rank in ranks]
        shapes[code] = f"{np.diff(ranks).tolist()} {[*map(hosts.index, hosts)]}"
    communicator, place = codes[rows], np.empty(len(rows), dtype=np.int64)
    operation = np.unique(c.operation[rows].astype(str), return_inverse=True)[1]
    alike = combined(c.step[rows], operation, c.size[rows])
    repeated = combined(communicator, alike)
    order = order_by(repeated, integers(dataset.placed, "order")[rows])
    place[order] = np.arange(len(rows)) - first_of(begins(repeated[order]))
    call = combined(alike, place)
    kinds = parts(np.arange(len(rows)), shapes[communicator])
    siblings = [_Siblings(dataset, rows[kind], call[kind]) for kind in kinds]
    questions = sum(len(kind.communicators) for kind in siblings)
    slow = [(kind, kind.slow(questions)) for kind in siblings]
    return [_repair(dataset, kind, some) for kind, some in slow if some.any()]


def _repair(dataset: Dataset, siblings: _Siblings, slow: Bools) -> Repair:
    """Transfers of the slow ones take what those of the middle sibling take, if that is less."""
    c, job = dataset.collectives, job_of(dataset).job
    late, times = slow[siblings.cell[0]], np.ones(c.collective.max() + 1)
    usual, took = (values[siblings.cell][late] for values in (siblings.usual, siblings.took))
    times[c.collective[siblings.rows[late]]] = np.where(usual < took, usual / took, 1)
    call = call_of(dataset)[job.activity]
    factor = np.where(job.joined & (call >= 0), times[c.collective[call]], 1)
    slow_rows = np.isin(c.communicators[0], siblings.communicators[slow])
    ranks = tuple(np.unique(c.rank[slow_rows]).tolist())
    return Repair(
        CODES[0],
        ranks,
        lambda lengths: replace(lengths, run=(lengths.run * factor).astype(np.int64)),
        partial(_words, dataset, ranks, siblings, slow),
    )


def _words(
    dataset: Dataset, ranks: tuple[int, ...], siblings: _Siblings, slow: Bools, saved: Saved
) -> Words:
    took, usual = (siblings.per_step(v)[slow].mean() for v in (siblings.took, siblings.usual))
    others, names = int((~slow).sum()), dataset.collectives.communicators[1]
    chosen = [names[code] for code in siblings.communicators[slow].tolist()]
    kinds = {group["communicator"]: group["kind"] for group in topology(dataset)["groups"]}
    kind = f"{kinds.get(chosen[0], 'unknown')} communicator".removeprefix("unknown ")
    they = f"{len(chosen)} {kind}s transfer each" if len(chosen) > 1 else f"{kind} transfers"
    hosts = {dataset.tables[dataset.place[rank]].info.host for rank in ranks}
    node = f" All are on {named(*hosts)}." if len(hosts) == 1 and all(hosts) else ""
    # where ranks compute on processors they exchange over the network alone
    network = "Compare the network interface that is used there (GLOO_SOCKET_IFNAME), its load and "
    network += "its errors (ip -s link) with a sibling's."
    middle = "its sibling" if others == 1 else f"the middle one of {others} siblings"
    return Words(
        summary=f"Transfers of {rank_list(ranks, limits.FEW)} take "
        f"{took / max(usual, 1):.3g} times as long as in sibling groups: "
        f"{of_saving(dataset, saved)}. "
        f"Their {they} {ms(took)} per step; {middle} {ms(usual)}.{node}",
        evidence=[
            {
                "communicator": name, "transfer_ns_per_step": round(took),
                "siblings": others, "sibling_transfer_ns_per_step": round(usual),
            }
            for name in chosen[: limits.MOST]
        ],
        confidence=limits.MEASURED if all(hosts) else limits.ASSUMED,
        advice=network if dataset.on_host else "",
        follow_up=capture(dataset, ranks[: limits.MOST]),
    )  # fmt: skip
