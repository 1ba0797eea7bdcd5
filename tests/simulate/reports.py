"""A simulated job as the tables that readers write, on each rank's own wall clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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


Rows = list[dict[str, Any]]


def _by_rank(blocks: Sequence[dict[str, Any]], world: int) -> list[Rows]:
    """Each rank's rows of all blocks: arrays over ranks become its own values."""
    out: list[Rows] = [[] for _ in range(world)]
    for block in blocks:
        names = list(block)
        length = len(block["rank"])
        columns = [
            v.tolist() if isinstance(v, np.ndarray) else [v] * length for v in block.values()
        ]
        for values in zip(*columns, strict=True):
            row = dict(zip(names, values, strict=True))
            out[row["rank"]].append(row)
    return out


def _tables(
    job: Job, machine: Machine, rank: int, columns: list[Rows], offsets: Sequence[int],
    drifts: Sequence[float], middle: int, usual: int | None,
) -> RankTables:  # fmt: skip
    offset, drift = offsets[rank], drifts[rank]

    def wall(rows: Rows, name: str) -> list[int]:
        return list(wall_times([r[name] for r in rows], offset, drift, middle).tolist())

    activities, calls, host_calls = columns
    calls = calls[job.lost_calls[rank] if job.lost_calls else 0 :]
    copies = [r["kind"] == "copy" for r in activities]
    activity = _table(
        "activity",
        {
            **{n: wall(activities, n) for n in ("start_ns", "end_ns")},
            **{n: wall(activities, n) for n in ("launch_start_ns", "launch_end_ns")},
            "kind": [r["kind"] for r in activities],
            "name": [r["name"] for r in activities],
            "device": [rank % 8] * len(activities),
            "stream": [r["stream"] for r in activities],
            "correlation": list(range(len(activities))),
            "launch_thread": [1] * len(activities),
            "size_bytes": [r.get("size") for r in activities],
            "direction": [
                r.get("direction", "host_to_device") if c else None
                for r, c in zip(activities, copies, strict=True)
            ],
            "pageable": [r.get("pageable") for r in activities],
        },
        "start_ns",
    )
    ids = job.communicator_ids
    collective_calls = _table(
        "collective_calls",
        {
            "call": list(range(len(calls))),
            "operation": [r["operation"] for r in calls],
            "communicator": [f"0x{r['tag']}{r['group']}" if ids else None for r in calls],
            "communicator_size": [r["members"] if ids else None for r in calls],
            "stream": [r["stream"] for r in calls],
            "message_bytes": [r["size"] if ids else None for r in calls],
            "peer": [int(r["peer"]) if ids and r["peer"] is not None else None for r in calls],
            **{n: wall(calls, n) for n in ("issue_start_ns", "issue_end_ns", "start_ns", "end_ns")},
            "source": ["nvtx_payload" if ids else "nvtx_name"] * len(calls),
        },
        "issue_start_ns",
    )
    host = _table(
        "host_calls",
        {
            "start_ns": wall(host_calls, "start_ns"),
            "end_ns": wall(host_calls, "end_ns"),
            "kind": [r["kind"] for r in host_calls],
            "name": [r["name"] for r in host_calls],
            "thread": [1] * len(host_calls),
        },
        "start_ns",
    )
    chosen = machine.steps if job.with_steps else []
    steps = _table(
        "steps",
        {
            "step": [s["step"] for s in chosen],
            "begin_ns": wall_times(
                [s["begin"][rank] for s in chosen], offset, drift, middle
            ).tolist(),
            "end_ns": wall_times([s["end"][rank] for s in chosen], offset, drift, middle).tolist(),
            "source": ["nvtx"] * len(chosen),
        },
        "begin_ns",
    )
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
        end_ns=max(activity["end_ns"].to_pylist()),
        backend="nccl",
        usual_step_ns=usual,
    )
    return RankTables(info, activity, collective_calls, steps, host)


def _table(name: str, columns: dict[str, list[Any]], order: str) -> pa.Table:
    """Columns as a table of the schema `name`, absent ones null, sorted by `order`."""
    schema = SCHEMAS[name]
    length = len(next(iter(columns.values())))
    arrays = []
    for field in schema:
        values = columns.get(field.name, [None] * length)
        encoded = pa.types.is_dictionary(field.type)
        plain = pa.array(values, pa.string() if encoded else field.type)
        arrays.append(plain.dictionary_encode() if encoded else plain)
    return pa.table(arrays, schema=schema).sort_by(order)
