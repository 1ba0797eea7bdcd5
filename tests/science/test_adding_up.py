"""Accounts, operations and findings are of the same moments, each counted once."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lab.tiers import long_but
from studies import FOLDER, NAMES, SEED, Simulated

from clusterprof.collect.outcomes import collect
from clusterprof.merge_run import merge_run
from clusterprof.report import summary, whole_job
from clusterprof.report.whole_job import Job
from clusterprof.results import Results
from clusterprof.run_directory import Window
from clusterprof.study import Study

KINDS = ["healthy, tensor parallel", "pipeline bubble", "serial AllReduce", "culprit not profiled"]


@pytest.mark.parametrize("recording", long_but(NAMES[::3], NAMES))
def test_the_figures_of_a_recording_add_up(studied: Callable[[str], Study], recording: str) -> None:
    adds_up(studied(recording).results)


@pytest.mark.parametrize("recording", long_but(["kineto/gloo", *NAMES[1::5]], NAMES))
def test_no_rank_is_waited_for_longer_than_a_step(
    studied: Callable[[str], Study], recording: str
) -> None:
    made = studied(recording)
    run = summary.Summary(made.results)
    accounts = {step["step"]: step["ranks"] for step in made.results["steps"]}
    for measure in whole_job.measures(run, made.collectives, Job()):
        for step, values in zip(measure.steps.tolist(), measure.values.T, strict=True):
            longest = max(account["duration_ns"] for account in accounts[step])
            assert np.nanmax(values) <= longest * 1.01, (measure.name, step)


@pytest.mark.parametrize("seed", long_but([SEED], [0, 1]))
@pytest.mark.parametrize("job_kind", KINDS)
def test_the_figures_of_simulated_jobs_add_up(
    simulated: Callable[..., Simulated], job_kind: str, seed: int
) -> None:
    adds_up(simulated(job_kind, seed).study.results)


def test_the_figures_of_a_rank_that_may_delay_no_other_add_up(tmp_path: Path) -> None:
    run = Window.at(shutil.copytree(FOLDER / "pairs" / "late-host", tmp_path / "run"))
    results = merge_run(run, collect(run, run.expected_ranks(), patience_s=0)).results
    adds_up(results)
    [late] = [each for each in results["findings"] if each["code"] == "straggler.host"]
    assert late["saved_least_ns"] <= 0
    assert summary.saved(late)
    # each of both ranks was profiled
    assert not [each for each in results["warnings"] if "flight" in each]


def adds_up(results: Results) -> None:
    steps = summary.Summary(results).evidence_steps
    accounts = [a for s in results["steps"] if s["step"] in steps for a in s["ranks"]]
    for a in accounts:
        parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
        assert sum(a[p] for p in parts) == a["duration_ns"]  # type: ignore[literal-required]
        assert 0 <= a["exposed_wait_ns"] <= a["exposed_communication_ns"] <= a["duration_ns"]
    entries = results["collectives"]["by_operation"]
    for account, operation in [
        ("communication_ns", "communication_ns_per_step"),
        ("exposed_communication_ns", "exposed_ns_per_step"),
        ("exposed_wait_ns", "exposed_wait_ns_per_step"),
    ]:
        each = sum(a[account] for a in accounts)  # type: ignore[literal-required]
        mean = each / len(steps) / len(results["ranks"])
        # each entry is rounded to a nanosecond
        assert sum(e[operation] for e in entries) == pytest.approx(mean, abs=len(entries))  # type: ignore[literal-required]
    for e in entries:
        assert e["exposed_wait_ns_per_step"] <= e["exposed_ns_per_step"]
        assert e["exposed_ns_per_step"] <= e["communication_ns_per_step"]
    assert not re.search(r"-0\.0*[,}\]\s]", json.dumps(results)), "nothing is minus nothing"
    figures_of_findings(results)
    savings(results)
    sentences(results)


#: "16.9 ms of each 47.5 ms step (35%)", and whose step it is
_OF_EACH = re.compile(
    r"([\d.]+) ms of each ([\d.]+) ms step \(<?([\d.]+)%(?:; [\d.]+ ms alone)?\)"
    r"( under the profiler)?"
)


def sentences(results: Results) -> None:
    """Each figure is of one of both paces, and says which; no share is above the whole."""
    pace = results["pace"]
    for text in [results["verdict"], *(f["summary"] for f in results["findings"])]:
        assert not re.search(r"(?<!\w)-\d", text), text
        for part, of, share, under in _OF_EACH.findall(text):
            assert pace is not None
            step = pace["window_step_ns"] if under else pace["step_ns"]
            assert float(of) == pytest.approx(step / 1e6, rel=0.02 if not under else 0.005)
            assert float(share) == pytest.approx(100 * float(part) / float(of), abs=0.6)
            assert 0 <= float(share) <= 100
        assert "3600 s" not in text


def savings(results: Results) -> None:
    """A saving is that of its replay, which starts from the job's own step less those before it."""
    pace = results["pace"]
    saved = {(f["code"], *f["ranks"]): f["saved_ns_per_step"] for f in results["findings"]}
    for found in results["findings"]:
        entry = found["saving"]
        if entry is None:
            assert found["code"] in ("profiler.perturbation", "pipeline.bubble")
            assert found["saved_ns_per_step"] == found["share_of_step"] == 0
            continue
        assert pace is not None
        window, long = (
            entry[v]["step_ns"] - entry[v]["without_ns"] for v in ("window", "long_run")
        )  # type: ignore[literal-required]
        stated = long if entry["stated"] == "long_run" else window
        base = entry[entry["stated"]]["step_ns"]
        hidden = entry["stated"] == "long_run" and not pace["without_profiler"]
        assert found["saved_ns_per_step"] == pytest.approx(min(stated, base), abs=2)
        least, most = found["saved_least_ns"], found["saved_most_ns"]
        assert min(0, stated) - 2 <= least <= found["saved_ns_per_step"] <= most <= base + 2
        apart = max(found["saved_ns_per_step"] - least, most - found["saved_ns_per_step"])
        assert found["saved_uncertainty_ns"] == pytest.approx(apart, abs=2)
        # on processors as on GPUs, with a known pace and without
        of_model = min(stated / 8, 0.1 * entry[entry["stated"]]["without_ns"])
        assert most - stated >= min(of_model, base - stated) - 2
        assert stated - least >= min(of_model, stated) - 2
        for view in () if hidden else (window, long):
            assert least - 2 <= min(max(view, min(0, stated)), base) <= most + 2
        assert np.mean(entry["each_ns"]) == pytest.approx(window, abs=2)
        whole = base if hidden else pace["step_ns"]
        assert found["share_of_step"] * whole == pytest.approx(
            max(found["saved_ns_per_step"], 0), abs=1e-4 * whole
        )
        before = [saved.get((one["code"], *one["ranks"])) for one in entry["net_of"]]
        if None not in before and not hidden and len(saved) == len(results["findings"]):
            assert base == pytest.approx(pace["step_ns"] - sum(before), rel=0.001)  # type: ignore[arg-type]
        elif not hidden:
            assert base <= pace["step_ns"] * 1.001
        if not entry["net_of"]:
            assert found["saved_alone_ns"] == pytest.approx(stated, abs=2)
        if found["severity"] != "info":
            assert found["saved_ns_per_step"] > 0


def figures_of_findings(results: Results) -> None:
    entries = results["collectives"]["by_operation"]
    table = {(e["operation"], e["communicator"]): e for e in entries}
    durations = [s["duration_ns"] for s in results["steps"] if s["settled"]]
    calls = {
        (*g["operations"], g["communicator"]): g["calls_per_step"]
        for g in results["topology"]["groups"]
    }
    for found in results["findings"]:
        assert 0 <= found["cost_ns_per_step"] <= np.mean(durations) + 1
        if found["code"] != "communication.exposed":
            continue
        for row in found["evidence"]:
            entry = table[row["operation"], row["communicator"]]
            assert all(row[key] == entry[key] for key in entry)  # type: ignore[literal-required]
    for key in set(table) & set(calls):
        assert table[key]["calls_per_step"] == calls[key]  # type: ignore[index]
