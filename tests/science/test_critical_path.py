"""The critical path over all ranks, and the time without compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from studies import NAMES, gathered

from clusterprof.align.match import match
from clusterprof.align.placing import place
from clusterprof.analysis.model import measures
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.what_if import WhatIfs, what_ifs
from clusterprof.study import Study, dataset_of, study
from clusterprof.tables import RankTables

MS = 1_000_000


def path_of(ranks: list[RankTables]) -> tuple[Dataset, measures.Pieces, WhatIfs]:
    """A job, its critical path, and its what-ifs."""
    dataset = dataset_of(ranks)
    model = what_ifs(dataset)
    assert model is not None
    return dataset, measures.path(model.job, model.base), model


def on_ranks(dataset: Dataset, path: measures.Pieces) -> list[int]:
    """How long the path is on each rank."""
    return np.bincount(path.rank, path.length, len(dataset.ranks)).astype(int).tolist()


@pytest.mark.parametrize(
    ("kind", "what", "shape"),
    [
        ("host", measures.HOST, (2, 2, 1)),
        ("gpu_more", measures.COMPUTE, (2, 2, 1)),
        ("gpu_slow", measures.COMPUTE, (4, 1, 1)),
        pytest.param("host", measures.HOST, (4, 1, 1), marks=pytest.mark.long),
        pytest.param("gpu_more", measures.COMPUTE, (4, 1, 1), marks=pytest.mark.long),
        pytest.param("gpu_slow", measures.COMPUTE, (2, 2, 1), marks=pytest.mark.long),
    ],
)
def test_the_critical_path_runs_through_the_straggler(
    kind: str, what: int, shape: tuple[int, int, int]
) -> None:
    dp, tp, _ = shape
    causes = (Cause(kind, 2, 15 * MS),)  # type: ignore[arg-type]
    ranks, _ = simulate(Job(dp=dp, tp=tp, synchronous=True, causes=causes))
    dataset, path, model = path_of(ranks)
    # without a gap from the first step's begin to the last one's end
    ends = model.job.times(model.base)[model.job.marks]
    assert path.length.sum() == ends[:, -1].max() - ends[:, 0].max()
    assert path.length.min() >= 0
    own = on_ranks(dataset, path)
    assert own.index(max(own)) == 2
    mine = path.length[(path.rank == 2) & (path.what == what)].sum()
    assert mine >= 15 * MS * len(model.job.steps)


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-straggler"])
@pytest.mark.parametrize("part", long_but([1.1, 0.7], [0.9]))
def test_the_path_is_of_the_job_without_the_profiler(part: float, recording: str) -> None:
    ranks = gathered(recording).ranks
    usual = int(part * dataset_of(ranks).step_ns)
    ranks = [replace(r, info=replace(r.info, usual_step_ns=usual)) for r in ranks]
    _, path, model = path_of(ranks)
    # also where steps are longer outside: input is slower there
    assert model.untraced[0].overhead_ns > 0
    ends = model.job.times(model.base)[model.job.marks]
    assert path.length.sum() == ends[:, -1].max() - ends[:, 0].max()


def test_the_path_follows_the_pipeline_to_the_stage_that_caused_the_delay() -> None:
    ranks, _ = simulate(Job(pp=4, dp=1, layers=8, causes=(Cause("host", 1, 60 * MS),)))
    dataset, path, _ = path_of(ranks)
    own = on_ranks(dataset, path)
    assert own.index(max(own)) == 1


def test_the_critical_path_has_no_gap_where_waits_explain_nothing() -> None:
    # a copy that the host waits for begins just after another wait: neither explains the other
    ranks, _ = simulate(Job(item_every=1, steps=4, causes=(Cause("host", 1, 15 * MS),)))
    _, path, model = path_of([with_short_copies(tables) for tables in ranks])
    ends = model.job.times(model.base)[model.job.marks]
    assert path.length.sum() == ends[:, -1].max() - ends[:, 0].max()


def test_the_critical_path_ends_with_wrong_clocks_too() -> None:
    ranks, _ = simulate(Job(layers=3, steps=4, causes=(Cause("host", 1, 15 * MS),)))
    right = dataset_of(ranks)
    for off in (20_000, 300_000, 3 * MS, 40 * MS):
        # each rank stands before the next, and the last before the first
        false = right.clock.offset_ns + off * np.array([0, 1, -1, 2])
        clock = replace(right.clock, offset_ns=false)
        dataset = replace(right, clock=clock, placed=place(match(ranks), clock))
        found = measures.critical_path(dataset)
        assert found is None or found["step_ns"] == pytest.approx(
            sum(part["path_ns"] for part in found["parts"]), abs=5
        )


@pytest.mark.parametrize("recording", NAMES)
def test_the_parts_of_a_step_add_up_to_it(studied: Callable[[str], Study], recording: str) -> None:
    results = studied(recording).results
    path = results["critical_path"]
    assert path is not None
    whole = sum(part["path_ns"] for part in path["parts"])
    by_rank = sum(rank[f"{what}_ns"] for rank in path["ranks"] for what in measures.WHAT)  # type: ignore[literal-required]
    assert whole == pytest.approx(path["step_ns"], abs=5)
    assert by_rank == pytest.approx(path["step_ns"], abs=5 * len(path["ranks"]))
    assert 0 <= path["unexplained_ns"] <= path["parts"][-1]["path_ns"] + 1
    accounts = [a for step in results["steps"] if step["settled"] for a in step["ranks"]]
    for entry in results["compute_absent"]:
        mine = [a for a in accounts if a["rank"] == entry["rank"]]
        absent = np.mean([a["duration_ns"] - a["compute_ns"] for a in mine])
        assert entry["compute_absent_ns"] == pytest.approx(absent, abs=1)
        exposed = np.mean([a["exposed_communication_ns"] for a in mine])
        assert entry["exposed_communication_ns"] == pytest.approx(exposed, abs=1)
        parts = [entry["launch_bound_ns"], entry["blocking_ns"], entry["dependency_stalled_ns"]]
        if None not in parts:
            assert sum(parts) == pytest.approx(absent, abs=3)  # type: ignore[arg-type]
            assert 0 <= parts[1] <= entry["exposed_communication_ns"] + 1  # type: ignore[operator]
            assert min(parts) >= 0  # type: ignore[type-var]


def with_short_copies(tables: RankTables) -> RankTables:
    """Each copy's own call goes on after it; another wait has ended 8 µs before it."""
    activity, host = tables.activity.to_pylist(), tables.host_calls.to_pylist()
    for row in activity:
        if row["kind"] == "copy":
            row["launch_end_ns"] = row["end_ns"] + 20_000
            begin = row["start_ns"] - 30_000
            wait = {"start_ns": begin, "end_ns": row["start_ns"] - 8_000, "kind": "cuda"}
            host.append({**host[0], **wait, "name": "cudaStreamSynchronize"})
    calls = pa.Table.from_pylist(host, tables.host_calls.schema).sort_by("start_ns")
    return replace(
        tables, host_calls=calls, activity=pa.Table.from_pylist(activity, tables.activity.schema)
    )


def test_a_job_without_collectives_has_no_path() -> None:
    ranks, _ = simulate(Job())
    bare = [replace(r, collective_calls=r.collective_calls.slice(0, 0)) for r in ranks]
    assert study(bare).results["critical_path"] is None
