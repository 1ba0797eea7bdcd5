"""All that the findings rest on: timelines, accounts and placed collectives, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import exchanges
from clusterprof.align.clock import Clock
from clusterprof.analysis.model.timeline import Axis, Timelines, wall_times
from clusterprof.columns import (
    Bools,
    CallRows,
    CollectiveNumbers,
    Floats,
    Ints,
    PlacedRows,
    RankNumbers,
    RankPlaces,
    StepNumbers,
    coded,
    combined,
    first_by,
    first_places,
    group_of_rows,
    integers,
    row_of,
    texts,
    where_known,
)
from clusterprof.mapped import release, trim
from clusterprof.results import CaptureCost, HardwareEntry, ShallowResults
from clusterprof.tables import GRAPH, RankTables, empty, launches_graphs

T = TypeVar("T")
P = ParamSpec("P")

#: fewer steady-state steps than this are no evidence
LEAST_STEADY = 2


def once(compute: Callable[Concatenate[Dataset, P], T]) -> Callable[Concatenate[Dataset, P], T]:
    """`compute`, which takes long, computed once for each dataset and its other arguments."""

    def known(dataset: Dataset, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (compute, args, *kwargs.items())
        if key not in dataset.known:
            dataset.known[key] = compute(dataset, *args, **kwargs)
        result: T = dataset.known[key]
        return result

    return known


class Collectives:
    """The placed table's columns as arrays, one element per collective and rank."""

    collective: CollectiveNumbers
    call: CallRows
    rank: RankNumbers
    step: StepNumbers
    last_rank: RankNumbers

    def __init__(self, table: pa.Table) -> None:
        self.collective, self.call, self.rank = (
            integers(table, name) for name in ("collective", "call", "rank")
        )
        self.step, self.last_rank = (integers(table, name, -1) for name in ("step", "last_rank"))
        self.operation = texts(table, "operation")
        names, codes = coded(table, "communicator")
        self.communicator = names[codes]
        #: each row's communicator as a number, and the names by that number
        self.communicators: tuple[Ints, list[str]] = codes, names.tolist()
        role = texts(table, "role")
        self.matched: Bools = texts(table, "state") == "matched"
        self.point_to_point: Bools = (self.operation == "Send") | (self.operation == "Recv")
        self.start, self.end, self.issue, self.aligned_start, self.lateness, self.wait = (
            integers(table, f"{name}_ns")
            for name in ("start", "end", "issue_start", "aligned_start", "lateness", "wait")
        )
        self.stream = integers(table, "stream")
        self.size = integers(table, "message_bytes", -1)
        self.has: Bools = np.asarray(pc.is_valid(table["start_ns"]).to_numpy())
        # A Broadcast, a Reduce and the like may let members leave early: the root of a small
        # Broadcast leaves at once. Those behind the last one in the ring cannot, and wait as in any
        # collective: they arrive before its arrival and end after it.
        arrival, end = (integers(table, name) for name in ("last_arrival_ns", "aligned_end_ns"))
        ends_after = pc.is_valid(table["last_arrival_ns"]).to_numpy() & (end >= arrival)
        ends_after &= np.isin(role, ("source", "sink"))
        held = np.unique(self.collective[ends_after & (self.aligned_start < arrival)])
        self.synchronising: Bools = (role == "both") | ends_after & np.isin(self.collective, held)
        #: Sends and Recvs that are an all-to-all
        self.exchange = self.point_to_point & self.has
        rows = np.flatnonzero(self.exchange)
        sends, matched = self.operation[rows] == "Send", self.matched[rows]
        self.exchange[rows] = exchanges.exchanges(
            self.rank[rows], self.kernels(rows), sends, self.collective[rows], matched
        )
        #: those by which stages of a pipeline hand each other something: beside all-to-alls what
        #: has no kernel is part of one
        between_stages = self.point_to_point & ~self.exchange & (self.has | ~self.exchange.any())
        self.between_stages: Bools = between_stages
        #: each row's operation; of an all-to-all in Sends and Recvs that
        self.label = np.where(self.exchange, "AllToAll", self.operation).astype(object)

    def kernels(self, rows: PlacedRows) -> Ints:
        """The kernel of these rows as a number: calls of one NCCL group share one."""
        return combined(self.rank[rows], self.start[rows], self.stream[rows])

    def once(self, rows: PlacedRows) -> PlacedRows:
        """`rows` with one for each kernel of an all-to-all: the one that waited longest."""
        grouped = self.exchange[rows]
        if not grouped.any():
            return rows
        of_kernels = rows[grouped]
        longest = of_kernels[first_by(self.kernels(of_kernels), -self.wait[of_kernels])]
        return np.sort(np.concatenate((rows[~grouped], longest)))


class Activities:
    """What `lines`, the timelines near the evidence steps, hold, on the reference clock (ns)."""

    def __init__(self, dataset: Dataset) -> None:
        columns = ["name", "direction", "pageable"]
        lines = self.lines = dataset.timelines.near(dataset.evidence_steps)
        self._align = dataset.clock.align
        table = pa.concat_tables([tables.activity.select(columns) for tables in lines.tables])
        self.rank: RankPlaces = lines.of
        self.start, self.stop = np.empty((2, len(self.rank)), dtype=np.int64)
        # rank by rank: all at once they would be in memory several times
        for k, tables in enumerate(lines.tables):
            for times, on_wall in zip((self.start, self.stop), wall_times(tables), strict=False):
                times[lines.rows(k)] = self._align(tables.rank, on_wall)
            release()
        self.names, name = coded(table, "name")
        #: as in `timeline.KINDS`, and as in `names`
        self.kind, self.name = lines.kind, name.astype(np.int32)
        to_gpu, to_host = (
            pc.equal(table["direction"], way) for way in ("host_to_device", "device_to_host")
        )
        #: copies: to the GPU, to the host, of pageable memory
        self.to_gpu, self.to_host, self.pageable = (
            np.asarray(pc.fill_null(column, fill_value=False).to_numpy(), dtype=bool)
            for column in (to_gpu, to_host, table["pageable"])
        )
        del table
        trim()

    @property
    def whole_graphs(self) -> Bools:
        """Which are CUDA graphs recorded as wholes: they may wait for other ranks, unseen."""
        return np.asarray(self.names == GRAPH, dtype=bool)[self.name]

    def column(self, name: str, k: int = 0, until: int | None = None) -> Ints:
        """A column of integers of the activities; 0 for null.

        `k` and `until` are places of ranks, not their numbers: those from `k` to before `until`.
        """
        tables = self.lines.tables[k:until]
        values = np.concatenate([integers(of_rank.activity, name) for of_rank in tables])
        release()  # the memory of the files that the tables lie in: `values` is a copy
        return values

    @property
    def size(self) -> Ints:
        """How many bytes each one copies."""
        return self.column("size_bytes")

    def launches(self, k: int, until: int) -> tuple[Ints, Ints]:
        """When each one's launch, of ranks `k` to before `until`, began, and when it had ended."""
        times = [
            self._align(tables.rank, np.stack(wall_times(tables)[2:]))
            for tables in self.lines.tables[k:until]
        ]
        launch, end = np.concatenate(times, axis=1)
        start = self.start[self.lines.rows(k, until)]
        # one that ends after its start had ended as it began, or by that start if it is earlier
        return launch, np.where(end <= start, end, np.minimum(launch, start))


@dataclass(eq=False)
class Dataset:
    """Everything of one study. `steady_steps` are the steps that count as evidence, in order."""

    tables: Sequence[RankTables]
    timelines: Timelines
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
    #: the lengths of the steps that no profiler disturbed (ns), where many are known
    outside_ns: Sequence[float] = ()
    #: what GPUs and nodes said of themselves, by rank, where they were sampled
    hardware: Sequence[HardwareEntry] = ()
    #: what functions that are computed `once` have returned, by function and arguments
    known: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        #: all ranks with a report, ascending, and where each stands among them
        self.ranks: tuple[int, ...] = tuple(t.rank for t in self.tables)
        self.place = {rank: k for k, rank in enumerate(self.ranks)}
        #: all steps of any rank, ascending; and those that tables are of: in steady state, where
        #: there are none all
        self.steps: tuple[int, ...] = tuple(np.unique(self.accounts["step"].to_numpy()).tolist())
        self.evidence_steps = self.steady_steps or self.steps
        #: the job's world size, where all reports that state one agree
        sizes = {t.info.world_size for t in self.tables if t.info.world_size}
        self.world_size: int | None = sizes.pop() if len(sizes) == 1 else None
        #: what a step took before the window, by the step logs: the median over ranks
        usual = [t.info.usual_step_ns for t in self.tables if t.info.usual_step_ns]
        self.usual_step_ns = int(np.median(usual)) if usual else None
        #: whether all ranks compute on their processors: there is no GPU
        self.on_host = bool(self.tables) and bool(self.timelines.on_host.all())

    def account(self, name: str) -> Floats:
        """A column of the accounts, [ranks, steady-state steps]; NaN where a rank lacks one."""
        rank, step, values = (self.accounts[c].to_numpy() for c in ("rank", "step", name))
        steady = np.isin(step, self.steady_steps)
        by_step = np.full((len(self.ranks), len(self.steady_steps)), np.nan)
        cells = row_of(self.ranks, rank[steady]), row_of(self.steady_steps, step[steady])
        by_step[cells] = values[steady]
        return by_step

    @cached_property
    def step_ns(self) -> float:
        """The steady-state steps' mean duration, each step's being the median over ranks (ns)."""
        # a mean, as every cost is, so that a share is a ratio of sums also where steps differ
        return float(self.durations.mean()) if len(self.durations) else 0.0

    @cached_property
    def durations(self) -> Floats:
        """Each steady-state step's duration: the median over ranks (ns)."""
        return np.asarray(np.nanmedian(self.account("duration_ns"), axis=0))

    @cached_property
    def collectives(self) -> Collectives:
        """The placed table as arrays."""
        return Collectives(self.placed)

    @cached_property
    def pipelined(self) -> bool:
        """Whether ranks send each other activations: then ranks wait by construction."""
        return bool(self.collectives.between_stages.any())

    def profilers(self, places: Sequence[int]) -> set[str]:
        """What traced these ranks (their places)."""
        return {self.tables[place].info.profiler.partition(" ")[0] for place in places}

    @property
    def unlike_profilers(self) -> bool:
        """Whether several profilers have recorded the ranks, each in its own way."""
        return len(self.profilers(range(len(self.ranks)))) > 1

    def aligned(self, place: RankPlaces, time: Ints) -> Ints:
        """Times of ranks on the reference rank's clock; `time` is [n] or [m, n]."""
        ranks = np.asarray(self.ranks, dtype=np.int64)
        return self.clock.align(ranks[place], time)

    @cached_property
    def axis(self) -> Axis:
        """The axis of all ranks' times on the reference rank's clock."""
        begins = self.timelines.axis.origin
        return Axis(self.aligned(np.arange(len(begins)), begins))

    @cached_property
    def activities(self) -> Activities:
        """The activities that the evidence steps show."""
        return Activities(self)

    @cached_property
    def launches_graphs(self) -> bool:
        """Whether a rank launches CUDA graphs: what is in them nsys records if it is asked to."""
        return any(launches_graphs(each.host_calls) for each in self.tables)

    @once
    def issued(self, name: str) -> Ints:
        """A column of `collective_calls` (of lists their lengths) for each placed row, or -1."""
        c, tables = self.collectives, [t.collective_calls for t in self.tables]
        rank = group_of_rows([t.num_rows for t in tables])
        table = pa.concat_tables([empty("collective_calls"), *tables]).select(["call", name])
        values, call = table[name], table["call"].to_numpy()
        if pa.types.is_list(values.type):
            values = pc.list_value_length(values)
        size = int(call.max(initial=0)) + 1
        key, wanted = rank * size + call, row_of(self.ranks, c.rank) * size + c.call
        numbers: Ints = pc.fill_null(values, -1).to_numpy().astype(np.int64)
        return where_known(numbers, first_places(key, wanted), -1)


def calls_per_step(dataset: Dataset, rows: PlacedRows) -> float:
    """How often a member makes the calls `rows` of the placed table in an evidence step."""
    c, steps = dataset.collectives, dataset.evidence_steps
    inside = c.once(rows[np.isin(c.step[rows], steps)])
    return round(len(inside) / max(len(np.unique(c.rank[rows])) * len(steps), 1), 1)
