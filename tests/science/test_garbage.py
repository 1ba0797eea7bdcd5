"""The garbage collector: read beside the step log, named as a cause."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from simulate import Cause, Job, simulate

from clusterprof.analysis.findings import finding, host_bound
from clusterprof.ingest.rank_steps import beside_log, collections_of, with_collections
from clusterprof.results import Finding
from clusterprof.study import study
from clusterprof.tables import HOST_CALLS, RankTables

MS = 1_000_000
JOB = Job(synchronous=True, steps=6, host_noise_frac=0.05)


def written(folder: Path, tables: RankTables, lines: list[str]) -> RankTables:
    path = folder / f"rank{tables.rank}.gc.csv"
    path.write_text("\n".join(["begin_ns,end_ns,generation,collected", *lines, ""]))
    return with_collections(tables, path)


def asleep(tables: RankTables) -> list[str]:
    """A collection in place of each sleep that was planted."""
    rows = tables.host_calls.to_pylist()
    return [
        f"{r['start_ns']},{r['end_ns']},2,1000000" for r in rows if r["name"] == "clock_nanosleep"
    ]


def collecting(folder: Path, job: Job) -> list[RankTables]:
    """The job's ranks as they would be had they collected instead of slept."""
    out = []
    for tables in simulate(job)[0]:
        lines = asleep(tables)
        calls = tables.host_calls
        kept = [n != "clock_nanosleep" for n in calls["name"].cast("string").to_pylist()]
        bare = replace(tables, host_calls=calls.filter(kept))
        out.append(written(folder, bare, lines))
    return out


def only(findings: list[Finding], code: str) -> Finding:
    (found,) = [f for f in findings if f["code"] == code]
    return found


def test_a_rank_that_collects_is_late_for_its_collector(tmp_path: Path) -> None:
    cause = Cause("host", 2, 30 * MS, (8, 10))
    ranks = collecting(tmp_path, replace(JOB, causes=(cause,)))
    assert ranks[2].host_calls.schema == HOST_CALLS
    results = study(ranks).results
    found = only(results["findings"], "straggler.host")
    assert found["rank"] == 2
    ran = re.search(
        r"garbage collector runs \((29|30)\.\d ms, its peers 0 ms\)", results["verdict"]
    )
    assert ran, results["verdict"]
    assert "gc.disable()" in found["advice"]
    assert "gc.freeze()" in found["advice"]


def test_ranks_that_collect_by_turns_are_all_told_and_none_is_named(tmp_path: Path) -> None:
    causes = tuple(Cause("host", rank, 30 * MS, (7 + rank,)) for rank in range(4))
    results = study(collecting(tmp_path, replace(JOB, causes=causes))).results
    found = results["findings"][0]
    assert (found["code"], found["rank"]) == ("host.gc", None)
    assert found["ranks"] == [0, 1, 2, 3]
    # four of five steady-state steps
    assert found["cost_ns_per_step"] == pytest.approx(24 * MS, rel=0.15)
    assert not [f for f in results["findings"] if f["code"].startswith("straggler")]


def test_a_collector_of_one_rank_alone_is_not_said_to_run_on_one_after_another(
    tmp_path: Path,
) -> None:
    causes = (Cause("host", 2, 30 * MS),)
    dataset = study(collecting(tmp_path, replace(JOB, causes=causes))).dataset
    job = finding.job_of(dataset)
    (repair,) = [r for r in host_bound.repairs(dataset, job.base) if r.code.code == "host.gc"]
    words = repair.words(job.saved(repair.apply(job.base), ranks=repair.ranks))
    assert words.summary.startswith("Python's garbage collector, on rank 2, costs ")


@pytest.mark.parametrize(
    "content",
    ["", "step,begin_ns\n1,2\n", "begin_ns,end_ns,generation,collected\n5,x,2,1\n6,7,2,1\n",
     "begin_ns,end_ns,generation,collected\n9,5,2,1\n", "\x00\n"],
)  # fmt: skip
def test_a_damaged_list_is_left_out_with_a_warning(tmp_path: Path, content: str) -> None:
    (tables, *_), _ = simulate(Job(steps=3))
    path = tmp_path / "gc.csv"
    path.write_text(content)
    made = with_collections(tables, path)
    assert made.host_calls == tables.host_calls
    assert len(made.warnings) == len(tables.warnings) + 1
    assert str(path) in made.warnings[-1]
    assert with_collections(tables, tmp_path / "gc.9.csv") is tables


@pytest.mark.parametrize(
    ("steps", "collections"),
    [("steps.csv", "gc.csv"), ("steps.2.csv", "gc.2.csv"), ("rank0.steps.csv", "rank0.gc.csv")],
)
def test_collections_lie_beside_their_step_log(steps: str, collections: str) -> None:
    assert beside_log(Path("steps") / steps, "gc") == Path("steps") / collections


def test_a_window_captured_later_has_its_collections_beside_its_report(tmp_path: Path) -> None:
    """The step log is that of the whole run, in another folder; `--ranks auto` captures so."""
    later, first = tmp_path / "windows/2/ranks/00002", tmp_path / "ranks/00002"
    for folder in (later, first):
        folder.mkdir(parents=True)
    report, steps = later / "trace.json.gz", first / "steps.csv"
    assert collections_of(report, steps) == first / "gc.csv"
    (later / "gc.csv").touch()
    assert collections_of(report, steps) == later / "gc.csv"
