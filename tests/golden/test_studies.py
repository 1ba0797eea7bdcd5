"""Recordings and simulated jobs: results, text, tables, and of some the page and all exports."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from contradictions import contradictions
from faces import disagreements
from simulate import simulate
from simulate.cases import KINDS, cases

from clusterprof import merge_run
from clusterprof.collect.outcomes import collect
from clusterprof.ingest import gather
from clusterprof.report import results_json
from clusterprof.results import Results
from clusterprof.run_directory import Window
from clusterprof.study import Study, study
from golden import pieces
from golden.hashes import lines
from golden.store import Golden, stored

RECORDINGS = Path(__file__).resolve().parent.parent / "data" / "recordings"
SEEDS = (7001, 7002)
#: of different kinds: a run with step logs, a pipeline under torch.profiler, one late host, a job
#: of many ranks
PAGES = {
    "recordings/pairs/late-host",
    "recordings/kineto/gloo",
    "recordings/nsys-2025.3/pipeline-imbalance",
    "simulated/late-host-synchronous-7001",
}
EXPORTED = {
    "recordings/pairs/fsdp-slow-gpu",
    "recordings/nsys-2025.3/ddp-host-straggler",
    "simulated/late-host-asynchronous-7001",
}
#: what every change is compared with; all others are in `make golden` alone
SHORT = {"recordings/nsys-2025.3/ddp", "simulated/late-host-synchronous-7001"}


def names_of_recordings(truth: str) -> list[str]:
    return [*json.loads((RECORDINGS / truth).read_text())["recordings"]]


REPORTS = {f"recordings/{name}": name for name in names_of_recordings("truth.json")}
RUNS = {f"recordings/{name}": name for name in names_of_recordings("pairs.json")}
JOBS = {
    f"simulated/{re.sub('[^a-z]+', '-', kind.lower()).strip('-')}-{seed}": (kind, seed)
    for kind in KINDS
    for seed in SEEDS
}


ALL = [
    pytest.param(name, marks=[] if name in SHORT else pytest.mark.golden)
    for name in (*REPORTS, *RUNS, *JOBS)
]


@pytest.mark.parametrize("name", ALL)
def test_a_study_is_as_it_was(
    name: str, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # so paths in results are short, and the same everywhere
    result, run = studied(name)
    assert contradictions(result.results) == []
    assert disagreements(result.results, result.collectives) == []
    results_json.check(Path(name), json.loads(results_json.dumps(result.results)), Results)
    hashes = {**pieces.of_results(result), **pieces.of_tables(result)}
    if name in PAGES | EXPORTED:
        pieces.save(result, run)
    if name in PAGES:
        hashes |= pieces.of_page(run)
    if name in EXPORTED:
        hashes |= pieces.of_exports(run, tmp_path / "exports")
    golden(name, f"{lines(hashes)}\n{pieces.of_text(result)}")


def studied(name: str) -> tuple[Study, Window]:
    """The study of a case, and the run directory in which it would be saved."""
    run = Window.at(Path("run"))
    if name in JOBS:
        kind, seed = JOBS[name]
        (case,) = cases([kind], range(seed, seed + 1))
        ranks, _ = simulate(case.job)
        profiled = case.profiled or range(case.job.world)
        return study([tables for tables in ranks if tables.rank in profiled]), run
    if name in RUNS:
        shutil.copytree(RECORDINGS / RUNS[name], run.path)
        outcomes = collect(run, run.directory.read_manifest().expected_ranks(), patience_s=0)
        return merge_run.merged(run, outcomes), run
    Path("reports").symlink_to(RECORDINGS / REPORTS[name])
    gathered = gather([Path("reports")])
    return study(gathered.ranks, gathered.missing, gathered.warnings, source="reports"), run


def test_what_is_stored_of_studies_belongs_to_a_case() -> None:
    assert stored("recordings") | stored("simulated") == {*REPORTS, *RUNS, *JOBS}
