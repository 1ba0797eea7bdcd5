"""The flight recorders and step logs that a simulated job leaves, of all its ranks."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from clusterprof.agent.contracts import paths, states
from clusterprof.align.clock.measured import RankReadings, Reading
from clusterprof.ingest.flight.all_dumps import Flight
from clusterprof.ingest.flight.dump import ENTRIES, Group
from clusterprof.run_directory import Window
from clusterprof.tables import STEPS
from simulate.job import Job
from simulate.machine import Machine
from simulate.reports import wall_times
from simulate.training import Training

_TORCH_NAMES = {
    "AllReduce": "all_reduce", "AllGather": "_all_gather_base", "Barrier": "barrier",
    "ReduceScatter": "_reduce_scatter_base", "AllToAll": "all_to_all", "Broadcast": "broadcast",
}  # fmt: skip
#: what a probe leaves open of a node's clock
_PROBED_NS = 100_000


@dataclass(frozen=True)
class Recorded:
    """What a job's agents leave of all its ranks."""

    flight: Flight
    #: of each rank its step log, on its own wall clock
    steps: dict[int, pa.Table]
    readings: dict[int, RankReadings]
    #: what was measured of the nodes' clocks, as in clock_probe.json
    probe: dict[str, Any]
    #: of each rank how far its clock is off (ns), by how much it gains (ppm), and since when (ns)
    clocks: tuple[Sequence[int], Sequence[float], int]


def recorded(job: Job, *, past: int = 0, durations: bool = True) -> Recorded:
    """Run `job`, `past` steps of it before the window; with `durations` as NCCL has them there."""
    machine = Machine(job, np.random.default_rng(job.seed))
    training = Training(job, machine)
    first = job.first_step - past
    for number in range(first - job.warm_steps, first):
        training.step(number)
    machine.recording = True
    opened = 0
    for number in range(first, job.first_step + job.steps):
        if number == job.first_step:
            opened = len(machine.calls)
        training.step(number)
    middle = int((machine.steps[0]["begin"].min() + machine.steps[-1]["end"].max()) // 2)
    clocks = job.offset_ns or (0,) * job.world, job.drift_ppm or (0.0,) * job.world, middle
    steps = {rank: _log(machine, rank, clocks) for rank in range(job.world)}
    blocks = list(enumerate(machine.calls))
    flight = _flight(job, blocks, opened if durations else len(blocks), clocks)
    return Recorded(flight, steps, *_clocks(job, clocks), clocks)


def measured(made: Recorded, rank: int, seconds: Sequence[float], **changed: int) -> dict[str, Any]:
    """What a prober beside this rank has written of looks at such times, from the steps' middle on.

    `changed` is added to what it read (ns): `wall_ns`, as of a clock that was set.
    """
    times = [made.clocks[2] + round(each * 1e9) for each in seconds]
    machine = made.readings[rank].machine
    bounds: list[dict[str, Any]] = []
    readings: list[dict[str, Any]] = []
    for at in times:
        own, other = (int(_wall(at, r, made.clocks)) for r in (rank, 0))
        readings.append(
            {"event": "look", "wall_ns": own + changed.get("wall_ns", 0) * (at == times[-1]),
             "monotonic_ns": own, "gap_ns": 1_000}
        )  # fmt: skip
        bounds.append(
            {"rank": rank, "other": 0, "machine": f"boot {machine}", "other_machine": "boot node0",
             "at_ns": other, "low_ns": own - other - _PROBED_NS // 2,
             "high_ns": own - other + _PROBED_NS // 3, "round_trip_ns": _PROBED_NS,
             "exchanges": 400, "when": "look"}
        )  # fmt: skip
    return {"schema_version": 1, "bounds": bounds, "notes": [], "readings": readings}


def _wall(times: Any, rank: int, clocks: Any) -> Any:
    offset, drift, middle = clocks
    return wall_times(times, offset[rank], drift[rank], middle)


def _log(machine: Machine, rank: int, clocks: Any) -> pa.Table:
    rows = machine.steps
    # each begins where the one before it ends, a wait for the queue between them included
    times = [*(each["begin"][rank] for each in rows), rows[-1]["end"][rank]]
    wall = _wall(times, rank, clocks)
    columns = {
        "step": [each["step"] for each in rows],
        "begin_ns": wall[:-1],
        "end_ns": wall[1:],
        "source": ["steplog"] * len(rows),
    }
    return pa.table(columns).cast(STEPS)


def _flight(job: Job, blocks: list[tuple[int, dict[str, Any]]], timed: int, clocks: Any) -> Flight:
    """All calls as one table; those from `timed` on have durations."""
    members: dict[tuple[str, int], tuple[int, ...]] = {}
    columns: dict[str, list[Any]] = {name: [] for name in ("rank", "group", "enqueue", "time")}
    names: list[Any] = []
    for place, call in blocks:
        rank, group = call["rank"], call["group"]
        columns["rank"].append(rank)
        columns["enqueue"].append(call["issue_start_ns"])
        length = call["end_ns"] - call["start_ns"]
        columns["time"].append(length if place >= timed else np.full(rank.size, -1))
        peers = call["peer"] if call["peer"] is not None else np.full(rank.size, -1)
        for one, number, peer in zip(rank.tolist(), group.tolist(), peers, strict=True):
            tag = (call["tag"], number)
            members.setdefault(tag, ())
            if one not in members[tag]:
                members[tag] = (*members[tag], one)
            names.append((tag, call["operation"], int(peer), call["message_bytes"]))
    keys = {tag: place for place, tag in enumerate(members)}
    rank = np.concatenate(columns["rank"])
    enqueue, time = np.concatenate(columns["enqueue"]), np.concatenate(columns["time"])
    order = np.lexsort((np.arange(rank.size), rank))
    group = np.array([keys[tag] for tag, *_ in names])[order]
    rank, enqueue, time = rank[order], enqueue[order], time[order]
    kind = [names[k] for k in order]
    wall = np.empty(rank.size, np.int64)
    record, sequence = np.empty(rank.size, np.int64), np.empty(rank.size, np.int64)
    p2p = np.array([peer >= 0 for _, _, peer, _ in kind])
    for one in range(job.world):
        mine = np.flatnonzero(rank == one)
        wall[mine] = _wall(enqueue[mine], one, clocks)
        record[mine] = np.arange(mine.size)
        lane = group[mine] * 2 + p2p[mine]
        for each in np.unique(lane):
            here = mine[lane == each]
            sequence[here] = np.arange(here.size) + 1
    size = rank.size
    listed = [tuple(sorted(ranks)) for ranks in members.values()]
    operations = [operation for _, operation, _, _ in kind]
    table = {
        "rank": rank, "group": group, "restarts": np.zeros(size), "sequence": sequence,
        "part": np.zeros(size), "p2p": p2p, "record": record, "operation": operations,
        "peer": pa.array([p if p >= 0 else None for _, _, p, _ in kind], pa.int32()),
        **dict.fromkeys((f.name for f in ENTRIES if f.name[:3] in ("inp", "out")), [""] * size),
        "bytes": [each for *_, each in kind], "enqueue_ns": wall,
        "finished": [True] * size,
        "duration_ns": pa.array(time, mask=time < 0), "timeout_ns": pa.nulls(size, pa.int64()),
        "frame": pa.nulls(size, pa.string()),
    }  # fmt: skip
    arrays = [
        pa.array(table[f.name], pa.string()).dictionary_encode()
        if pa.types.is_dictionary(f.type)
        else pa.array(table[f.name]).cast(f.type)
        for f in ENTRIES
    ]
    groups = tuple(
        Group(str(place), tag, ranks, len(ranks), complete=True)
        for place, ((tag, _), ranks) in enumerate(zip(members, listed, strict=True))
    )
    ranks = tuple(range(job.world))
    backends = frozenset({"gloo" if job.on_host else "nccl"})
    return Flight(pa.table(arrays, schema=ENTRIES), groups, ranks, job.world, [], [], backends)


def _clocks(job: Job, clocks: Any) -> tuple[dict[int, RankReadings], dict[str, Any]]:
    """What was read of each node's clock, and measured against the first node's."""
    middle = clocks[2]
    readings: dict[int, RankReadings] = {}
    bounds: list[Mapping[str, Any]] = []
    for rank in range(job.world):
        node = rank // job.ranks_per_host
        at = int(_wall(middle, rank, clocks))
        reading = Reading("close", at, middle, 1_000)
        alone = rank % job.ranks_per_host == 0
        readings[rank] = RankReadings(f"node{node}", (reading,) if alone else ())
        if alone and node:
            apart = int(_wall(middle, rank, clocks)) - int(_wall(middle, 0, clocks))
            bounds.append(
                {"machine": f"node{node}", "other_machine": "node0",
                 "at_ns": int(_wall(middle, 0, clocks)),
                 "low_ns": apart - _PROBED_NS, "high_ns": apart + _PROBED_NS // 2}
            )  # fmt: skip
    return readings, {"bounds": bounds}


def leave(run: Window, made: Recorded, entries: int = 0, *, watched: bool = False) -> None:
    """Leave in a run's folder what the ranks' agents would: dumps, step logs, states.

    `watched`: as they do again and again while the job runs.

    With `entries` the steps are repeated until each rank has so many calls, the times and numbers
    going on, and the last ones are kept, as a full recorder does.
    """
    flight = made.flight
    backend = "gloo" if "gloo" in flight.backends else "nccl"
    names = [(each.name, each.description) for each in flight.groups]
    config = {
        name: {"name": name, "desc": text, "ranks": str([*(each.ranks or ())])}
        for (name, text), each in zip(names, flight.groups, strict=True)
    }
    starts = np.searchsorted(np.asarray(flight.entries["rank"]), [*flight.ranks, flight.world_size])
    for rank, begin, end in zip(flight.ranks, starts[:-1], starts[1:], strict=True):
        folder = run.rank(rank)
        machine = made.readings[rank].machine
        states.advance(str(folder), "counted", machine=f"boot {machine}", host=machine)
        rows, log = flight.entries.slice(begin, end - begin).to_pylist(), made.steps[rank]
        times = -(-max(entries, 1) // max(len(rows), 1))
        step, begins, ends = (np.asarray(log[name]) for name in ("step", "begin_ns", "end_ns"))
        span = int(ends[-1] - begins[0])
        lanes = Counter((row["group"], row["p2p"]) for row in rows)
        texts = [
            _text(row, backend, names[row["group"]], flight.groups[row["group"]]) for row in rows
        ]
        called = [
            text
            % (
                row["record"] + turn * len(rows),
                *_numbers(row, turn * lanes[row["group"], row["p2p"]]),
                row["enqueue_ns"] + turn * span,
            )
            for turn in range(times)
            for row, text in zip(rows, texts, strict=True)
        ]
        own = {
            name: config[name]
            for (name, _), each in zip(names, flight.groups, strict=True)
            if rank in (each.ranks or ())
        }
        begin_of = orjson.dumps({"version": "2.10", "pg_config": own})[:-1] + b',"entries":['
        content = begin_of + b",".join(called[-entries:]) + b"]}"
        dump, log_name = (
            (paths.WATCH, paths.WATCH_STEPS) if watched else (paths.FLIGHT, paths.STEPS)
        )
        (folder / dump).write_bytes(gzip.compress(content, 6))
        lines = [
            f"{number + turn * step.size},{first + turn * span},{last + turn * span}"
            for turn in range(times)
            for number, first, last in zip(
                step.tolist(), begins.tolist(), ends.tolist(), strict=True
            )
        ]
        (folder / log_name).write_text("\n".join(["step,begin_ns,end_ns", *lines, ""]))


def _text(row: Mapping[str, Any], backend: str, names: tuple[str, str], group: Group) -> bytes:
    """An entry as JSON, but for its record, its two numbers and its time."""
    ms = {} if row["duration_ns"] is None else {"duration_ms": row["duration_ns"] / 1e6}
    entry = {
        "record_id": "%d", "pg_id": row["group"], "process_group": names,
        "collective_seq_id": "%d", "p2p_seq_id": "%d", "op_id": 1,
        "profiling_name": f"{backend}:{_called(row, group)}", "time_created_ns": "%d", **ms,
        "input_sizes": [[row["bytes"]]], "input_dtypes": ["Byte"],
        "output_sizes": [[row["bytes"]]], "output_dtypes": ["Byte"],
        "state": "completed", "retired": True, "is_p2p": row["p2p"],
        "timeout_ms": 600_000, "thread_id": "140237186507072", "thread_name": "python3",
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
    }  # fmt: skip
    return orjson.dumps(entry).replace(b'"%d"', b"%d")


def _numbers(row: Mapping[str, Any], more: int) -> tuple[int, int]:
    """The number of the group's collectives, and of its sends and receives."""
    number = row["sequence"] + more
    return (0, number) if row["p2p"] else (number, 0)


def _called(row: Mapping[str, Any], group: Group) -> str:
    """What torch calls an operation."""
    if row["operation"] in ("Send", "Recv"):
        arrow = "->" if row["operation"] == "Send" else "<-"
        own = (group.ranks or ()).index(row["rank"])
        return f"{row['operation'].lower()} {own}{arrow}{row['peer']}"
    return _TORCH_NAMES[row["operation"]]
