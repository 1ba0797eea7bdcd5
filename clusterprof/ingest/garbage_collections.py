"""Python's garbage collector, as the agent has noted it beside the step log."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import paths
from clusterprof.ingest.columns import fill, joined
from clusterprof.tables import GARBAGE, RankTables

_COLUMNS = ["begin_ns", "end_ns", "generation", "collected"]


def beside_steps(steps: Path) -> Path:
    """Return where the collections of a step log's rank are: `gc.csv` beside `steps.csv`."""
    return steps.with_name(paths.beside_steps(steps.name, paths.GARBAGE))


def with_collections(tables: RankTables, path: Path) -> RankTables:
    """Return `tables` with the collections of `path` (wall-clock ns) among the host's calls.

    Without such a file, as it is; a damaged one is left out with a warning. Whichever thread
    collects, no other one of the program runs: so it is the launching thread's call.
    """
    if not path.is_file():
        return tables
    try:
        rows = _read(path)
    except (OSError, OverflowError, ValueError, csv.Error) as error:
        said = f"{path.name} is damaged and was left out: {error}"
        return replace(tables, warnings=(*tables.warnings, said))
    names = pa.array([f"{GARBAGE} (generation {g})" for g in rows[:, 2].tolist()], pa.string())
    calls = fill(
        "host_calls",
        len(rows),
        {
            "start_ns": rows[:, 0],
            "end_ns": rows[:, 1],
            "kind": pa.array(["python"] * len(rows), pa.string()),
            "name": names,
            "thread": np.full(len(rows), _thread(tables), dtype=np.int64),
        },
    )
    return replace(tables, host_calls=joined("host_calls", [tables.host_calls, calls], "start_ns"))


def _read(path: Path) -> np.ndarray:
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    if not lines or lines[0] != _COLUMNS:
        raise ValueError(f"expected a first line of {','.join(_COLUMNS)}")
    rows = np.array([[int(value) for value in line] for line in lines[1:] if line], np.int64)
    rows = rows.reshape(-1, len(_COLUMNS))
    if bool((rows[:, 1] < rows[:, 0]).any()):
        raise ValueError("a collection ends before it begins")
    return rows


def _thread(tables: RankTables) -> int:
    """The thread that launches most, or has most calls; 0 where there is none."""
    for column in (tables.activity["launch_thread"], tables.host_calls["thread"]):
        counted = pc.value_counts(pc.drop_null(column.combine_chunks()))
        if len(counted):
            counts = counted.field("counts").to_numpy()
            return int(counted.field("values")[int(np.argmax(counts))].as_py())
    return 0
