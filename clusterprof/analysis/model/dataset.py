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
from clusterprof.analysis.model.intervals import Axis
from clusterprof.analysis.model.timeline import Devices, Timeline, codes
from clusterprof.results import CaptureCost, ShallowResults
from clusterprof.tables import RankTables, empty

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

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
        many = sends > 2
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


@dataclass(frozen=True)
class Activities:
    """All ranks' activities, one rank after the other, on the reference rank's clock (ns)."""

    #: where each rank's begin, and where the last one's end, [ranks + 1]
    first: Ints
    #: the place of the rank, and the number of the stream in its report
    rank: Ints
    stream: Ints
    start: Ints
    stop: Ints
    launch: Ints
    launch_end: Ints
    #: as in `timeline.KINDS`, and as in `names`
    kind: Ints
    name: Ints
    names: tuple[str, ...]


@dataclass(frozen=True)
class HostCalls:
    """All ranks' host calls, one rank after the other, on the reference rank's clock (ns)."""

    rank: Ints
    start: Ints
    stop: Ints
    kind: Ints
    name: Ints
    kinds: tuple[str, ...]
    names: tuple[str, ...]

    def called(self, kind: str, pattern: str) -> Bools:
        """Which calls are of a kind, with a name that a regular expression finds something in."""
        names = pa.array(self.names, pa.string())
        found = pc.match_substring_regex(names, pattern).to_numpy(zero_copy_only=False)
        fits: Bools = np.asarray(found, dtype=bool)
        of_kind = np.asarray([one == kind for one in self.kinds], dtype=bool)
        return np.asarray(of_kind[self.kind] & fits[self.name])


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
    #: the command line that starts the run again, where its manifest says it (`results.RANKS`)
    again: Sequence[str] = ()
    #: what the flight recorders of all ranks show, where they left any
    shallow: ShallowResults | None = None

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
            last_rank=ints("last_rank", -1),
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

    def aligned(self, place: Ints, time: Ints) -> Ints:
        """Times of ranks (their places) on the reference rank's clock; `time` is [n] or [m, n]."""
        ranks = np.asarray(self.ranks, dtype=np.int64)
        return self.clock.align(ranks[place], time)

    @cached_property
    def axis(self) -> Axis:
        """The axis of all ranks' times on the reference rank's clock."""
        begins = np.asarray([line.begin[0] for line in self.timelines])
        return Axis(self.aligned(np.arange(len(begins)), begins))

    @cached_property
    def devices(self) -> Devices:
        """What the devices did, each on its own wall clock."""
        return Devices(self.timelines)

    @cached_property
    def activities(self) -> Activities:
        """All ranks' activities."""
        lines = self.timelines
        rank, first = _placed([len(line.start) for line in lines])
        start, stop, launch, launch_end, kind = (
            np.concatenate([getattr(line, name) for line in lines])
            for name in ("start", "stop", "launch", "launch_end", "kind")
        )
        table = pa.concat_tables([t.activity.select(["name", "stream"]) for t in self.tables])
        start, stop, launch, launch_end = self.aligned(
            rank, np.stack([start, stop, launch, launch_end])
        )
        stream = np.asarray(table["stream"].to_numpy(), dtype=np.int64)
        name, names = codes(table["name"])
        return Activities(first, rank, stream, start, stop, launch, launch_end, kind, name, names)

    @cached_property
    def host_calls(self) -> HostCalls:
        """All ranks' host calls."""
        columns = ["start_ns", "end_ns", "kind", "name"]
        table = pa.concat_tables([t.host_calls.select(columns) for t in self.tables])
        rank, _ = _placed([t.host_calls.num_rows for t in self.tables])
        times = np.stack([table[name].to_numpy() for name in columns[:2]])
        start, stop = self.aligned(rank, times)
        (kind, kinds), (name, names) = codes(table["kind"]), codes(table["name"])
        return HostCalls(rank, start, stop, kind, name, kinds, names)

    def issued(self, name: str) -> Ints:
        """A column of `collective_calls` for each row of the placed table, -1 where unknown.

        Of lists their lengths.
        """
        return self.cached(("issued", name), lambda: self._issued(name))

    def _issued(self, name: str) -> Ints:
        c, tables = self.collectives, [t.collective_calls for t in self.tables]
        rank, _ = _placed([t.num_rows for t in tables])
        both = [t.select(["call", name]) for t in (empty("collective_calls"), *tables)]
        table = pa.concat_tables(both)
        values, call = table[name], table["call"].to_numpy()
        if pa.types.is_list(values.type):
            values = pc.list_value_length(values)
        size = int(call.max(initial=0)) + 1
        key, wanted = rank * size + call, np.searchsorted(self.ranks, c.rank) * size + c.call
        order = np.argsort(key, kind="stable")
        at = order[np.searchsorted(key[order], wanted)]
        return np.asarray(pc.fill_null(values, -1).to_numpy(), dtype=np.int64)[at]

    def line(self, rank: int) -> Timeline:
        """One rank's timeline."""
        return self.timelines[self.place[rank]]


def _placed(counts: Sequence[int]) -> tuple[Ints, Ints]:
    """The place of each row's rank, and where each rank's rows begin, by their counts."""
    return np.repeat(np.arange(len(counts)), counts), np.cumsum([0, *counts])


def calls_per_step(dataset: Dataset, rows: Ints) -> float:
    """How often a member makes the calls `rows` of the placed table in an evidence step."""
    c, steps = dataset.collectives, dataset.evidence_steps
    inside = c.once(rows[np.isin(c.step[rows], steps)])
    members = len(np.unique(c.rank[rows]))
    return round(len(inside) / max(members * len(steps), 1), 1)


def commonest(values: Sequence[T]) -> T:
    """Return the most frequent value; of several the one that came first, whatever their hashes."""
    return Counter(values).most_common(1)[0][0]
