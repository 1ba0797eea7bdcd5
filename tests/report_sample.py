"""Results and placed collectives as a study of four ranks gives them, built from arithmetic.

Rank 2's host is 20 ms late in every step, so it idles and the others wait; batches are
copied from pageable memory; step 6 is disturbed by the start of the capture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.match import PLACED
from clusterprof.results import (
    Finding,
    PathPart,
    PauseEntry,
    PauseKind,
    RankAccount,
    Results,
    StepEntry,
    What,
)

MS = 1_000_000
BEGIN = 1_700_000_000_000_000_000
COMMUNICATOR = "0x55e1a2b3c4d5e6f7"
STEP_NS = 61 * MS
CALLS_PER_STEP = 12


def account(rank: int, late: bool, stretch: float = 1.0) -> RankAccount:
    duration = int(STEP_NS * stretch)
    compute, copies, transfer = 30 * MS, 6 * MS, 4 * MS + rank * 1000
    wait = 0 if late else 20 * MS + rank * 20_000
    return {
        "rank": rank,
        "duration_ns": duration,
        "compute_ns": compute,
        "exposed_communication_ns": wait + transfer,
        "exposed_copy_ns": copies,
        "idle_ns": duration - compute - copies - wait - transfer,
        "communication_ns": wait + transfer + 9 * MS,
        "exposed_wait_ns": wait,
    }


def straggler() -> Finding:
    return {
        "code": "straggler.host",
        "severity": "critical",
        "rank": 2,
        "ranks": [2],
        "steps": [7, 8, 9],
        "recurrence": "persistent",
        "cost_ns_per_step": 20_312_345,
        "share_of_step": 0.2901,
        "saved_ns_per_step": 17_870_000,
        "saved_alone_ns": 17_870_000,
        "saved_least_ns": 16_740_000,
        "saved_most_ns": 19_000_000,
        "saved_uncertainty_ns": 1_130_000,
        "saving": {
            "window": {"step_ns": 61_600_000, "without_ns": 43_730_000},
            "long_run": {"step_ns": 61_600_000, "without_ns": 42_600_000},
            "stated": "window",
            "each_ns": [17_900_000, 17_800_000, 17_910_000],
            "clocks_ns": 20_000,
            "net_of": [],
        },
        "confidence": 0.97,
        "summary": "Rank 2 arrives last in 35 of 36 collectives; its GPU is idle for 21 ms "
        "before the forward, so its host is late and the three others wait for it.",
        "evidence": [
            *(
                {
                    "rank": 2,
                    "step": 7 + number,
                    "time_ns": BEGIN + int(STEP_NS * (3.1 + number)) + 33 * MS,
                    "communicator": COMMUNICATOR,
                    "late_ns": 20_100_000,
                    "what": "last at AllReduce, 20.1 ms after the second-to-last",
                }
                for number in range(3)
            ),
            {
                "rank": 2,
                "step": 7,
                "idle_ns": 20_000_000,
                "host": {"name": "clock_nanosleep", "kind": "os", "duration_ns": 20_110_000},
                "what": "its GPU is idle for 20.0 ms",
            },
        ],
        "advice": "Look at what rank 2's host does between the optimizer and the forward: "
        "data loading, logging, a busy core or another process on gpu-07.",
        "next": "clusterprof torchrun --ranks 2 --steps 6:10 --nsys-arg=--sample=process-tree "
        "-- train.py",
    }


def pageable() -> Finding:
    return {
        "code": "input.pageable_copy",
        "severity": "warning",
        "rank": None,
        "ranks": [0, 1, 2, 3],
        "steps": [7, 8, 9],
        "recurrence": "persistent",
        "cost_ns_per_step": 6_012_000,
        "share_of_step": 0.0479,
        "saved_ns_per_step": 2_950_000,
        "saved_alone_ns": 2_950_000,
        "saved_least_ns": 2_740_000,
        "saved_most_ns": 3_160_000,
        "saved_uncertainty_ns": 210_000,
        "saving": {
            "window": {"step_ns": 43_730_000, "without_ns": 40_780_000},
            "long_run": {"step_ns": 42_600_000, "without_ns": 39_440_000},
            "stated": "window",
            "each_ns": [2_940_000, 2_960_000, 2_950_000],
            "clocks_ns": 20_000,
            "net_of": [{"code": "straggler.host", "ranks": [2]}],
        },
        "confidence": 0.9,
        "summary": "Every rank copies 33.6 MB a step from pageable memory and computes nothing "
        "meanwhile.",
        "evidence": [{"copied_bytes": 33_554_432, "pageable": True, "exposed_ns": 6_012_000}],
        "advice": "Set pin_memory=True in the DataLoader and copy with non_blocking=True.",
        "next": "clusterprof compare runs/before runs/after",
    }


def path_part(what: What, path_ns: int, mean_ns: int) -> PathPart:
    lost = 0 if what == "idle" else 4 * max(path_ns - mean_ns, 0)
    return {"what": what, "path_ns": path_ns, "mean_ns": mean_ns, "imbalance_gpu_ns": lost}


def steps(late: int | None) -> list[StepEntry]:
    made: list[StepEntry] = []
    for number in range(4):
        stretch = 3.1 if number == 0 else 1.0 + 0.01 * number
        begin = BEGIN + int(STEP_NS * (0 if number == 0 else 2.1 + number))
        made.append(
            {
                "step": 6 + number,
                "settled": number > 0,
                "begin_ns": begin,
                "duration_ns": int(STEP_NS * stretch),
                "ranks": [account(rank, rank == late, stretch) for rank in range(4)],
            }
        )
    return made


def results(*, host: str = "gpu-07", operation: str = "AllReduce") -> Results:
    """A study with a straggler, a second finding, a missing report and a warning."""
    return {
        "schema_version": 3,
        "clusterprof_version": "0.1.0",
        "ranks": [
            {
                "rank": rank,
                "host": host,
                "source": f"ranks/{rank:05d}/report.nsys-rep",
                "profiler": "nsys 2025.3.2",
                "world_size": 5,
                "device": "NVIDIA H200",
                "versions": {"driver": "580.159.04"},
            }
            for rank in range(4)
        ],
        "missing": [{"rank": 4, "source": "ranks/00004", "reason": "wrote no report"}],
        "clock": {
            "reference_rank": 0,
            "middle_ns": BEGIN + 100 * MS,
            "method": "ends of the latency-bound collectives",
            "ranks": [
                {
                    "rank": rank,
                    "offset_ns": rank * 350,
                    "drift_ppm": 0.01 * rank,
                    "uncertainty_ns": 0 if rank == 0 else 8_000 + rank * 120,
                }
                for rank in range(4)
            ],
            "assumed": [],
        },
        "steps": steps(late=2),
        "collectives": {
            "matched": 46,
            "incomplete": 1,
            "unmatched": 2,
            "by_operation": [
                {
                    "operation": operation,
                    "communicator": COMMUNICATOR,
                    "ranks": [0, 1, 2, 3],
                    "calls_per_step": 12.0,
                    "bytes_per_step": 33_554_432,
                    "communication_ns_per_step": 39 * MS,
                    "exposed_ns_per_step": 24 * MS,
                    "exposed_wait_ns_per_step": 18 * MS,
                },
                {
                    "operation": "Broadcast",
                    "communicator": COMMUNICATOR,
                    "ranks": [0, 1, 2, 3],
                    "calls_per_step": 1.0,
                    "bytes_per_step": 8,
                    "communication_ns_per_step": 400_000,
                    "exposed_ns_per_step": 120_000,
                    "exposed_wait_ns_per_step": 0,
                },
            ],
        },
        "topology": {
            "groups": [
                {
                    "kind": "data",
                    "communicator": COMMUNICATOR,
                    "description": "mesh_dp",
                    "ranks": [0, 1, 2, 3],
                    "size": 5,
                    "operations": [operation, "Broadcast"],
                    "calls_per_step": 12.0,
                    "confidence": 0.9,
                    "why": f"{operation} 9 times per step, from 30% of its compute on",
                }
            ],
            "stages": [],
            "stage_count": None,
        },
        "what_if": {
            "S": 1.312,
            "ideal_step_ns": 47 * MS,
            "S_t": [
                {"what": "host", "slowdown": 1.305},
                {"what": "compute", "slowdown": 1.004},
                {"what": operation, "slowdown": 1.001},
            ],
            "S_w": [{"rank": rank, "slowdown": 1.3 if rank == 2 else 1.002} for rank in range(4)],
            "M_W": 0.981,
            "M_S": None,
            "left_out": "",
        },
        "critical_path": {
            "steps": [7, 8, 9],
            "step_ns": 61_600_000,
            "without_profiler": False,
            "parts": [
                path_part("host", 34_100_000, 19_000_000),
                path_part("compute", 20_300_000, 25_000_000),
                path_part("communication", 900_000, 3_000_000),
                path_part("copy", 6_000_000, 6_000_000),
                path_part("idle", 300_000, 0),
            ],
            "ranks": [
                {
                    "rank": 2,
                    "host_ns": 34_100_000,
                    "compute_ns": 20_300_000,
                    "communication_ns": 900_000,
                    "copy_ns": 6_000_000,
                    "idle_ns": 300_000,
                }
            ],
            "unexplained_ns": 120_000,
        },
        "compute_absent": [
            {
                "rank": rank,
                "compute_absent_ns": 36 * MS,
                "communication_ns": 33 * MS,
                "exposed_communication_ns": 24 * MS,
                "launch_bound_ns": 21 * MS if rank == 2 else 1 * MS,
                "blocking_ns": 8 * MS if rank == 2 else 28 * MS,
                "dependency_stalled_ns": 7 * MS,
            }
            for rank in range(4)
        ],
        "findings": [straggler(), pageable()],
        "combined": {
            "view": "window",
            "findings": [
                {"code": "straggler.host", "ranks": [2]},
                {"code": "input.pageable_copy", "ranks": [0, 1, 2, 3]},
            ],
            "remaining_ns": [61_600_000, 43_730_000, 60_100_000, 40_780_000],
        },
        "headline": [
            {
                "code": "none",
                "ranks": [],
                "text": "Rank 2 delays the other ranks by 17.9 ms of each 61.6 ms step (29%).",
            }
        ],
        "verdict": "Rank 2 delays the other ranks by 17.9 ms of each 61.6 ms step (29%).",
        "pace": {
            "step_ns": 61_600_000,
            "without_profiler": False,
            "window_step_ns": 61_600_000,
        },
        "shallow": {
            "ranks": [0, 1, 2, 3, 4, 5, 6],
            "missing": [{"rank": 7, "source": "", "reason": "left no dump"}],
            "steps": [7, 8, 9, 10],
            "step_ns": STEP_NS,
            "by": "durations",
            "suspects": [
                {
                    "rank": 2,
                    "lateness_ns": 17 * MS,
                    "bound_ns": MS,
                    "group": "mesh_dp 1",
                    "host": "node0",
                    "since_step": 7,
                    "until_step": None,
                    "late_steps": None,
                    "delays": True,
                    "line": "train.py:9 main",
                },
                {
                    "rank": 6,
                    "lateness_ns": 2 * MS,
                    "bound_ns": MS,
                    "group": "mesh_dp 1",
                    "host": None,
                    "since_step": None,
                    "until_step": None,
                    "late_steps": None,
                    "delays": False,
                    "line": None,
                },
            ],
            "nodes": [],
            "groups": [
                {"name": "0", "description": "default_pg", "ranks": [*range(8)]},
                {"name": "1", "description": "mesh_dp", "ranks": [0, 2, 4, 6]},
            ],
            "stages": [],
        },
        "capture": {
            "stall_start_ns": 1_150_000_000,
            "stall_stop_ns": 62_000_000,
            "profiled": {
                "before_ns": 24_400_000,
                "inside_ns": 24_900_000,
                "after_ns": None,
                "after_uncertainty_ns": None,
            },
            "unprofiled": {
                "before_ns": 24_300_000,
                "inside_ns": 24_800_000,
                "after_ns": 24_300_000,
                "after_uncertainty_ns": 200_000,
            },
        },
        "warnings": ["rank 1: nsys said «CUPTI buffers were dropped» once, before the window"],
    }


def healthy() -> Results:
    """The same job without the straggler and without findings."""
    made = results()
    made["findings"] = []
    made["combined"] = None
    made["missing"] = []
    made["shallow"] = None
    made["warnings"] = []
    say(made, (None, "No stragglers: 4 ranks, 3 steady-state steps."))
    made["steps"] = steps(late=None)
    for step in made["steps"]:
        for entry in step["ranks"]:
            entry["idle_ns"] += entry["exposed_wait_ns"] - 9_000
            entry["exposed_communication_ns"] -= entry["exposed_wait_ns"] - 9_000
            entry["exposed_wait_ns"] = 9_000
    return made


def collectives(
    *,
    operation: str = "AllReduce",
    ranks: int = 4,
    calls_per_step: int = CALLS_PER_STEP,
    late: int | None = 2,
) -> pa.Table:
    """Placed collectives of `steps()`: long form, one row per collective and rank."""
    noise = np.random.default_rng(7)
    count = 4 * calls_per_step
    begins = np.array([step["begin_ns"] for step in steps(late)])
    number = np.arange(count)
    step, inside = number // calls_per_step, number % calls_per_step
    spacing = 26 * MS // calls_per_step
    issue = begins[step] + 31 * MS + inside * spacing
    arrival = issue[:, None] + noise.integers(0, 150_000, (count, ranks))
    if late is not None:
        arrival[inside == 0] -= 18 * MS
        arrival[inside == 0, late] += 20 * MS
    last = arrival.max(axis=1)
    end = last[:, None] + min(1_200_000, spacing // 2) + noise.integers(0, 9_000, (count, ranks))
    each = np.repeat(number, ranks)
    rows = count * ranks
    ordered = np.sort(arrival, axis=1)
    lateness = ordered[:, -1] - ordered[:, -min(ranks, 2)]
    columns = {
        "collective": each,
        "communicator": [COMMUNICATOR] * rows,
        "operation": [operation] * rows,
        "order": each,
        "rank": np.tile(np.arange(ranks), count),
        "call": each,
        "state": ["matched"] * rows,
        "reason": [None] * rows,
        "confidence": np.full(rows, 0.99),
        "role": ["both"] * rows,
        "stream": np.full(rows, 20),
        "message_bytes": np.full(rows, 33_554_432),
        "step": np.repeat(6 + step, ranks),
        "group": [None] * rows,
        "issue_start_ns": np.repeat(issue, ranks),
        "start_ns": arrival.ravel(),
        "end_ns": end.ravel(),
        "source": ["nvtx_payload"] * rows,
        "aligned_start_ns": arrival.ravel(),
        "aligned_end_ns": end.ravel(),
        "last_arrival_ns": np.repeat(last, ranks),
        "last_rank": np.repeat(arrival.argmax(axis=1), ranks),
        "lateness_ns": np.repeat(lateness, ranks),
        "wait_ns": (last[:, None] - arrival).ravel(),
        "transfer_ns": (end - last[:, None]).ravel(),
    }
    return pa.table(
        [pa.array(columns[field.name]).cast(field.type) for field in PLACED], schema=PLACED
    )


def without_match(table: pa.Table, collective: int) -> pa.Table:
    """The table with one collective whose last arrival is not known."""
    here = pc.equal(table["collective"], collective)
    for name in ("last_arrival_ns", "last_rank", "lateness_ns", "wait_ns", "transfer_ns"):
        table = _set(table, name, pc.if_else(here, None, table[name]))
    state = pc.if_else(here, "incomplete", table["state"].cast(pa.string()))
    return _set(table, "state", state.cast(PLACED.field("state").type))


def _set(table: pa.Table, name: str, values: pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), table.field(name), values)


def say(results: Results, *sentences: tuple[Finding | None, str]) -> None:
    """Give `results` a verdict of these sentences, each of a finding or of none."""
    results["headline"] = [
        {"code": found["code"] if found else "none", "ranks": found["ranks"] if found else [],
         "text": text}
        for found, text in sentences
    ]  # fmt: skip
    results["verdict"] = " ".join(text for _, text in sentences)


def pause(kind: PauseKind, **members: Any) -> PauseEntry:
    """A series of eleven checkpoints, or what `members` make of it."""
    entry: PauseEntry = {
        "kind": kind, "attempt": 1, "ranks": [], "count": 11, "every_steps": 500, "every_ns": None,
        "chance": 1e-9, "mean_ns": 41_000 * MS, "least_ns": 40_000 * MS, "most_ns": 43_000 * MS,
        "longest_step_ns": 43_060 * MS, "usual_step_ns": STEP_NS, "first_step": 500,
        "last_step": 5500, "first_ns": BEGIN, "last_ns": BEGIN + 5000 * STEP_NS,
        "steps": list(range(500, 6000, 500)), "gpu_ns": 5 * 11 * 41_000 * MS,
        "share_of_run": 0.0311, "name": "",
    }  # fmt: skip
    return {**entry, **members}  # type: ignore[typeddict-item]


def paused() -> Results:
    """The same results of a run with a start, checkpoints, and a restart."""
    start: dict[str, Any] = {
        "count": 1, "every_steps": None, "chance": None, "first_step": 0, "last_step": 2,
        "steps": [0],
    }  # fmt: skip
    entries = [
        pause("start", **start),
        pause("regular"),
        pause("restart", **(start | {"attempt": 2, "last_step": 0})),
    ]
    made = results()
    made["pauses"] = {
        "run_ns": 14_500_000 * MS, "world_size": 5, "timeout_ns": 600_000 * MS,
        "timeout_assumed": True, "longer_only_from": None, "entries": entries,
    }  # fmt: skip
    return made
