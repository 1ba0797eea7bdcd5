"""All that the findings rest on: timelines, accounts and placed collectives, as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.clock import Clock
from clusterprof.analysis.model.timeline import Timeline
from clusterprof.results import CaptureCost
from clusterprof.tables import RankTables

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: so many Sends in one kernel are an all-to-all
_MANY_SENDS = 3
#: fewer steady-state steps than this are no evidence
LEAST_STEADY = 2


@dataclass(frozen=True)
class Collectives:
    """The placed table's columns as arrays, one element per collective and rank."""

    collective: Ints
    call: Ints
    rank: Ints
    step: Ints
    operation: npt.NDArray[np.object_]
    communicator: npt.NDArray[np.object_]
    matched: Bools
    synchronising: Bools
    point_to_point: Bools
    start: Ints
    end: Ints
    issue: Ints
    aligned_start: Ints
    last_arrival: Ints
    last_rank: Ints
    lateness: Ints
    wait: Ints
    transfer: Ints
    size: Ints
    has: Bools

    @cached_property
    def communicators(self) -> tuple[Ints, list[str]]:
        """Each row's communicator as a number, and the names by that number."""
        encoded = pa.array(self.communicator, pa.string()).dictionary_encode()
        codes = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), dtype=np.int64)
        return codes, encoded.dictionary.to_pylist()

    def of(self, rank: int) -> Ints:
        """All rows of one rank."""
        order, ranks = self.by_rank
        low, high = np.searchsorted(ranks, [rank, rank + 1])
        return np.sort(order[low:high])

    def each_rank(self, rows: Ints) -> list[tuple[int, Ints]]:
        """`rows` by rank, in one pass over them."""
        return [(int(self.rank[part[0]]), part) for part in parts(rows, self.rank[rows])]

    @cached_property
    def kernel(self) -> Ints:
        """Each row's kernel as a number: calls of one NCCL group share one."""
        _, number = np.unique(np.stack([self.rank, self.start]), axis=1, return_inverse=True)
        return np.asarray(number.reshape(-1), dtype=np.int64)

    @cached_property
    def exchange(self) -> Bools:
        """Sends and Recvs that are an all-to-all: one kernel sends to many, or to itself too.

        A pipeline's stage sends to two at most, the ones before and behind it.
        """
        out = np.zeros(len(self.rank), dtype=bool)
        if not self.point_to_point.any():
            return out
        rows = np.flatnonzero(self.point_to_point & self.has)
        sends = np.bincount(self.kernel[rows], self.operation[rows] == "Send", len(self.rank))
        many = sends >= _MANY_SENDS
        pairs = rows[self.matched[rows]]
        pairs = pairs[np.argsort(self.collective[pairs], kind="stable")]
        same = (self.collective[pairs][1:] == self.collective[pairs][:-1]) & (
            self.rank[pairs][1:] == self.rank[pairs][:-1]
        )
        many[self.kernel[pairs[1:][same]]] = True
        out[rows] = many[self.kernel[rows]]
        return out

    def once(self, rows: Ints) -> Ints:
        """`rows` with one for each kernel of an all-to-all: the one that waited longest."""
        mine = self.exchange[rows]
        if not mine.any():
            return rows
        grouped = rows[mine]
        order = grouped[np.lexsort((-self.wait[grouped], self.kernel[grouped]))]
        _, first = np.unique(self.kernel[order], return_index=True)
        return np.sort(np.r_[rows[~mine], order[first]])

    @cached_property
    def label(self) -> npt.NDArray[np.object_]:
        """Each row's operation; of an all-to-all in Sends and Recvs that."""
        return np.where(self.exchange, "AllToAll", self.operation).astype(object)

    @cached_property
    def by_collective(self) -> tuple[Ints, Ints]:
        """All rows by collective, and the collective of each in that order."""
        order = np.argsort(self.collective, kind="stable")
        return order, self.collective[order]

    @cached_property
    def by_rank(self) -> tuple[Ints, Ints]:
        """All rows by rank, and the rank of each in that order."""
        order = np.argsort(self.rank, kind="stable")
        return order, self.rank[order]


def _held(table: pa.Table, role: npt.NDArray[np.object_]) -> Bools:
    """Rows of Broadcasts, Reduces and the like that waited for the last arrival, or are it.

    Such a call may let members leave early: the root of a small Broadcast leaves at once. Those
    behind the last one in the ring cannot, and wait as in any collective: they arrive before
    its arrival and end after it.
    """
    out = np.zeros(len(role), dtype=bool)
    valid = np.asarray(pc.is_valid(table["last_arrival_ns"]).to_numpy())
    rows = np.flatnonzero(np.isin(role, ("source", "sink")) & valid)
    if not len(rows):
        return out
    start, end, arrival = (table[name].to_numpy()[rows] for name in _HELD_BY)
    _, of = np.unique(table["collective"].to_numpy()[rows], return_inverse=True)
    held = np.zeros(int(of.max()) + 1, dtype=bool)
    np.logical_or.at(held, of, (start < arrival) & (end >= arrival))
    out[rows] = held[of] & (end >= arrival)
    return out


def connected(nodes: Ints, one: Ints, other: Ints) -> Ints:
    """For each of `nodes` (ascending) the least place of any that edges `one`-`other` lead to."""
    label = np.arange(len(nodes))
    one, other = np.searchsorted(nodes, one), np.searchsorted(nodes, other)
    while True:
        least, lower = np.minimum(label[one], label[other]), label.copy()
        np.minimum.at(lower, one, least)
        np.minimum.at(lower, other, least)
        if (lower == label).all():
            return label
        label = lower


def parts(rows: Ints, keys: npt.NDArray[Any]) -> list[Ints]:
    """`rows` in parts of equal `keys`, the parts in the order of their first rows."""
    if not len(rows):
        return []
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    of = of.reshape(-1)
    order = np.argsort(of, kind="stable")
    split = np.split(rows[order], np.cumsum(np.bincount(of))[:-1])
    return [split[k] for k in np.argsort(first, kind="stable")]


#: when a member of a call arrives and ends, and when the last one arrives
_HELD_BY = ("aligned_start_ns", "aligned_end_ns", "last_arrival_ns")


@dataclass(frozen=True)
class Dataset:
    """Everything of one study. `steady_steps` are the steps that count as evidence, in order."""

    tables: Sequence[RankTables]
    timelines: Sequence[Timeline]
    accounts: pa.Table
    placed: pa.Table
    clock: Clock
    steady_steps: tuple[int, ...]
    source: str
    #: what profiling cost by the step logs of all ranks, where there are any
    capture: CaptureCost | None = None
    #: what started the run, where its manifest says so
    launcher: str | None = None

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Results that take long to compute, by name (and place of the rank)."""
        return {}

    def cached(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What `compute` returns, computed once for each `key`."""
        if key not in self.known:
            self.known[key] = compute()
        result: T = self.known[key]
        return result

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks with a report, ascending."""
        return tuple(line.rank for line in self.timelines)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """All steps of any rank, ascending."""
        return tuple(int(s) for s in np.unique(self.accounts["step"].to_numpy()))

    @property
    def evidence_steps(self) -> tuple[int, ...]:
        """The steps that tables are of: those in steady state, where there are none all."""
        return self.steady_steps or self.steps

    @cached_property
    def world_size(self) -> int | None:
        """The job's world size, where all reports that state one agree."""
        sizes = {t.info.world_size for t in self.tables if t.info.world_size}
        return sizes.pop() if len(sizes) == 1 else None

    def account(self, name: str) -> Floats:
        """A column of the accounts, [ranks, steady-state steps]; NaN where a rank lacks one."""
        rank, step, values = (self.accounts[c].to_numpy() for c in ("rank", "step", name))
        known = np.isin(step, self.steady_steps)
        rows = np.searchsorted(self.ranks, rank[known])
        out = np.full((len(self.ranks), len(self.steady_steps)), np.nan)
        out[rows, np.searchsorted(self.steady_steps, step[known])] = values[known]
        return out

    @cached_property
    def step_ns(self) -> float:
        """The steady-state steps' mean duration, each step's being the median over ranks (ns).

        A mean, as every cost is, so that a share is a ratio of sums also where steps differ.
        """
        each = self.durations
        return float(each.mean()) if len(each) else 0.0

    @cached_property
    def usual_step_ns(self) -> int | None:
        """What a step took before the window, by the step logs: the median over ranks."""
        usual = [t.info.usual_step_ns for t in self.tables if t.info.usual_step_ns]
        return int(np.median(usual)) if usual else None

    @cached_property
    def durations(self) -> Floats:
        """Each steady-state step's duration: the median over ranks (ns)."""
        durations = self.account("duration_ns")
        if not durations.size or np.isnan(durations).all():
            return np.zeros(0)
        return np.asarray(np.nanmedian(durations, axis=0))

    @cached_property
    def collectives(self) -> Collectives:
        """The placed table as arrays."""
        table = self.placed

        def ints(name: str, missing: int = 0) -> Ints:
            column = pc.fill_null(table[name], pa.scalar(missing, table.schema.field(name).type))
            return np.asarray(column.to_numpy(), dtype=np.int64)

        def strings(name: str) -> npt.NDArray[np.object_]:
            values = table[name].cast(pa.string()).to_pylist()
            return np.asarray(values, dtype=object)

        operation, role = strings("operation"), strings("role")
        return Collectives(
            collective=ints("collective"), call=ints("call"), rank=ints("rank"),
            step=ints("step", -1), operation=operation, communicator=strings("communicator"),
            matched=strings("state") == "matched",
            synchronising=(role == "both") | _held(table, role),
            point_to_point=(operation == "Send") | (operation == "Recv"),
            start=ints("start_ns"), end=ints("end_ns"), issue=ints("issue_start_ns"),
            aligned_start=ints("aligned_start_ns"),
            last_arrival=ints("last_arrival_ns"), last_rank=ints("last_rank", -1),
            lateness=ints("lateness_ns"), wait=ints("wait_ns"), transfer=ints("transfer_ns"),
            size=ints("message_bytes", -1),
            has=np.asarray(pc.is_valid(table["start_ns"]).to_numpy()),
        )  # fmt: skip

    @cached_property
    def pipelined(self) -> bool:
        """Whether ranks send each other activations: then ranks wait by construction."""
        c = self.collectives
        return bool((c.point_to_point & ~c.exchange & (c.has | ~c.has.any())).any())

    @cached_property
    def on_host(self) -> bool:
        """Whether all ranks compute on their processors: there is no GPU."""
        return bool(self.timelines) and all(line.on_host for line in self.timelines)

    @cached_property
    def place(self) -> dict[int, int]:
        """Where each rank stands among all ranks with a report."""
        return {rank: k for k, rank in enumerate(self.ranks)}

    def issued(self, rank: int, rows: Ints, *columns: str) -> pa.Table:
        """Columns of a rank's `collective_calls` for each of `rows` (its) of the placed table."""
        table = self.tables[self.place[rank]].collective_calls
        call = table["call"].to_numpy()
        order = np.argsort(call, kind="stable")
        at = order[np.searchsorted(call[order], self.collectives.call[rows])]
        return table.select(columns).take(pa.array(at))

    def line(self, rank: int) -> Timeline:
        """One rank's timeline."""
        return self.timelines[self.place[rank]]


def calls_per_step(dataset: Dataset, rows: Ints) -> float:
    """How often a member makes the calls `rows` of the placed table in an evidence step."""
    c, steps = dataset.collectives, dataset.evidence_steps
    inside = c.once(rows[np.isin(c.step[rows], steps)])
    members = len(np.unique(c.rank[rows]))
    return round(len(inside) / max(members * len(steps), 1), 1)


def commonest(values: Sequence[T]) -> T:
    """Return the most frequent value; of several the one that came first, whatever their hashes."""
    return Counter(values).most_common(1)[0][0]
