"""A simulated job as the tables that readers write, on each rank's own wall clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterprof.tables import SCHEMAS, RankTables, ReportInfo
from simulate.job import Job, Truth
from simulate.machine import Ints, Machine
from simulate.training import Training

#: a wall time like today's: 10^18 ns, where doubles no longer count nanoseconds
_EPOCH_NS = 1_790_000_000_000_000_000


def simulate(job: Job) -> tuple[list[RankTables], Truth]:
    """Run `job` and return every rank's tables, and the truth about them."""
    rng = np.random.default_rng(job.seed)
    machine = Machine(job, rng)
    training = Training(job, machine)
    for number in range(job.first_step - job.warm_steps, job.first_step):
        training.step(number)
    usual = _usual_step(training) if job.traced_ns else None
    _start_capture(job, machine, rng)
    for number in range(job.first_step, job.first_step + job.steps):
        training.step(number)
    middle = int((machine.steps[0]["begin"].min() + machine.steps[-1]["end"].max()) // 2)
    offset = job.offset_ns or (0,) * job.world
    drift = job.drift_ppm or (0.0,) * job.world
    columns = [
        _by_rank(blocks, job.world)
        for blocks in (machine.activities, machine.calls, machine.host_calls)
    ]
    tables = [
        _tables(job, machine, rank, [rows[rank] for rows in columns], offset, drift, middle, usual)
        for rank in range(job.world)
    ]
    groups = training.groups()
    return tables, Truth(job.causes, tuple(offset), tuple(drift), middle + _EPOCH_NS, groups)


def sleeps_as_ranges(tables: RankTables, ranges: Mapping[str, int]) -> RankTables:
    """A rank as a profiler without calls of the system has it: ranges where its host sleeps.

    They stand in the place of its own phases; each begins and ends so far within the sleep (ns).
    """
    calls = tables.host_calls.to_pylist()
    main = tables.activity["launch_thread"].drop_null()[0].as_py()
    made = [row for row in calls if row["name"] != "clock_nanosleep" and row["kind"] != "range"]
    for sleep in (row for row in calls if row["name"] == "clock_nanosleep"):
        for name, inset in ranges.items():
            times = {"start_ns": sleep["start_ns"] + inset, "end_ns": sleep["end_ns"] - inset}
            made.append({**sleep, "kind": "range", "name": name, "thread": main, **times})
    made.sort(key=lambda row: row["start_ns"])
    return replace(tables, host_calls=pa.Table.from_pylist(made, tables.host_calls.schema))


def _usual_step(training: Training) -> int:
    """What a step takes before the capture (ns).

    By its ends on the devices: while queues still grow, hosts begin steps faster than they end.
    """
    ends = np.stack(training.finished[training.job.ahead_steps :])
    return int(np.diff(ends, axis=0).mean())


def _start_capture(job: Job, machine: Machine, rng: np.random.Generator) -> None:
    """Drain the devices and let the hosts resume apart, as starting a capture does."""
    ready = np.maximum.reduce([machine.host, *machine.free.values()])
    machine.host[:] = ready + rng.integers(0, max(job.tear_ns, 1), job.world)
    for stream in machine.free.values():
        stream[:] = ready
    machine.recording = True


def wall_times(times: Any, offset: int, drift: float, middle: int) -> Ints:
    true = np.asarray(times, dtype=np.int64)
    slow = np.rint(drift * 1e-6 * (true - middle)).astype(np.int64)
    return np.asarray(true + offset + slow + _EPOCH_NS)


Columns = dict[str, npt.NDArray[Any]]


def _by_rank(blocks: Sequence[dict[str, Any]], world: int) -> list[Columns]:
    """Each rank's columns of all blocks: a block's one value is that of all its ranks."""
    lengths = [len(block["rank"]) for block in blocks]
    names = {name: None for block in blocks for name in block}
    columns = {name: _column([block.get(name) for block in blocks], lengths) for name in names}
    order = np.argsort(columns["rank"], kind="stable")
    ends = np.searchsorted(columns["rank"][order], np.arange(1, world))
    return [
        {name: values[mine] for name, values in columns.items()} for mine in np.split(order, ends)
    ]


def _column(values: Sequence[Any], lengths: Sequence[int]) -> npt.NDArray[Any]:
    arrays = [isinstance(value, np.ndarray) for value in values]
    if all(arrays):
        return np.concatenate(values)
    if any(arrays):
        of_blocks = zip(values, lengths, strict=True)
        return np.concatenate([np.full(length, value, object) for value, length in of_blocks])
    return np.repeat(np.array(values, object), lengths)


def _tables(
    job: Job, machine: Machine, rank: int, columns: list[Columns], offsets: Sequence[int],
    drifts: Sequence[float], middle: int, usual: int | None,
) -> RankTables:  # fmt: skip
    def walled(columns: Columns) -> Columns:
        clock = offsets[rank], drifts[rank], middle
        return {
            name: wall_times(values, *clock) if name.endswith("_ns") else values
            for name, values in columns.items()
        }

    activities, calls, host_calls = map(walled, columns)
    launched = {
        "device": rank % 8, "correlation": range(len(activities["rank"])), "launch_thread": 1,
    }  # fmt: skip
    activity = _table("activity", {**activities, **launched}, "start_ns")
    lost = job.lost_calls[rank] if job.lost_calls else 0
    calls = {name: values[lost:] for name, values in calls.items()}
    collective_calls = _table("collective_calls", _named(calls, job), "issue_start_ns")
    host = _table("host_calls", {**host_calls, "thread": 1}, "start_ns")
    chosen = {
        "step": np.array([s["step"] for s in machine.steps]),
        "begin_ns": np.array([s["begin"][rank] for s in machine.steps]),
        "end_ns": np.array([s["end"][rank] for s in machine.steps]),
    }
    if not job.with_steps:
        chosen = {name: values[:0] for name, values in chosen.items()}
    steps = _table("steps", {**walled(chosen), "source": "nvtx"}, "begin_ns")
    info = ReportInfo(
        source=Path(f"rank{rank}.sqlite"),
        profiler="simulated",
        rank=rank,
        world_size=job.world,
        local_rank=rank % job.ranks_per_host,
        host=f"node{rank // job.ranks_per_host}",
        device="simulated",
        job="simulated",
        begin_ns=min(activity["start_ns"][0].as_py(), host["start_ns"][0].as_py()),
        end_ns=int(activities["end_ns"].max()),
        backend="nccl",
        usual_step_ns=usual,
    )
    return RankTables(info, activity, collective_calls, steps, host)


def _named(calls: Columns, job: Job) -> dict[str, Any]:
    """The calls as the table has them, with what only a communicator that is known tells."""
    columns = {**calls, "group": None, "call": range(len(calls["rank"])), "source": "nvtx_name"}
    if not job.communicator_ids:
        return {**columns, **dict.fromkeys(("communicator_size", "message_bytes", "peer"))}
    of_groups = zip(calls["tag"], calls["group"], strict=True)
    names = [f"0x{tag}{group}" for tag, group in of_groups]
    return {**columns, "communicator": names, "source": "nvtx_payload"}


def _table(name: str, columns: Mapping[str, Any], order: str) -> pa.Table:
    """Columns, or one value for all, as a table of the schema `name`, sorted by `order`."""
    schema, length = SCHEMAS[name], len(columns[order])
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        encoded = pa.types.is_dictionary(field.type)
        kind = pa.string() if encoded else field.type
        one = values is None or isinstance(values, (str, int))
        plain = pa.repeat(pa.scalar(values, kind), length) if one else pa.array(values, kind)
        arrays.append(plain.dictionary_encode() if encoded else plain)
    return pa.table(arrays, schema=schema).sort_by(order)
