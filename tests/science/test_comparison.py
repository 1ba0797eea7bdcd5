"""Comparing runs: what is called a change, what noise, and what is refused.

The jobs are simulated (tests/simulate), of seeds that the rules were not made on.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.tiers import long_but
from report_sample import results as sample
from simulate.cases import MS
from simulate.flight import leave, recorded
from simulate.job import Cause, Job
from simulate.reports import simulate

from clusterprof import baselines, comparison, gate, merge_run, run_directory
from clusterprof.agent.contracts import paths, states
from clusterprof.arguments import StepWindow, parse_ranks
from clusterprof.cli import baseline, compare
from clusterprof.collect import live_windows
from clusterprof.errors import ClusterprofError, MergeError, ReportError, UsageError
from clusterprof.ingest import rank_steps
from clusterprof.report import comparison_text, results_json
from clusterprof.results import Comparison, MeasuredRun
from clusterprof.study import study

#: GPUs, hosts and networks of each run differ from the next one's, as on other nodes
JOB = Job(
    dp=4, layers=4, noise_frac=0.01, host_noise_frac=0.1, host_pace_frac=0.02,
    gpu_speed_frac=0.01, network_noise_frac=0.2, hiccup_steps=30, hiccup_ns=1 * MS,
)  # fmt: skip
SLOWER = replace(
    JOB, layer_ns=int(JOB.layer_ns * 1.05), launch_ns=int(JOB.launch_ns * 1.05),
    transfer_ns=int(JOB.transfer_ns * 1.05), copy_ns=int(JOB.copy_ns * 1.05),
)  # fmt: skip
GATE = gate.parse("step>+3%", compares=True)


def of_steps(job: Job, seed: int) -> MeasuredRun:
    """A run without a profiler: its step log alone."""
    logs = recorded(replace(job, seed=seed, steps=2), past=80)
    run = blank()
    _, count, took, _ = rank_steps.stretches(logs.steps[0], {})[:, 3:]
    run["outside_ns"] = [round(ns) for ns in comparison.blocked(count, took).tolist()]
    run["outside_steps"] = len(count)
    return run


def read_ahead(pace_ms: float, seed: int, every: int = 10) -> MeasuredRun:
    """A host that launches a step in 5 ms, up to five ahead of its GPU, and reads some losses.

    Recorded so on an H200: 240 steps of 24.2 ms, the loss read in every tenth.
    """
    rng = np.random.default_rng(seed)
    host = gpu = 0.0
    done: list[float] = []
    ends = []
    for step in range(240):
        host += 5 * rng.uniform(0.9, 1.1)
        if step >= 5:
            host = max(host, done[step - 5])
        gpu = max(host, gpu) + pace_ms * rng.normal(1, 0.005)
        done.append(gpu)
        if step % every == 0:
            host = gpu
        ends.append(round(host * MS))
    took = np.diff(ends)
    made = blank()
    made["outside_ns"] = [round(ns) for ns in comparison.blocked(np.ones_like(took), took).tolist()]
    made["outside_steps"] = len(took)
    return made


@pytest.mark.parametrize("every", long_but([7, 25], [2, 10]))
def test_hosts_that_wait_every_few_steps_hide_no_change_of_five_percent(every: int) -> None:
    for seed in range(20):
        base = [read_ahead(24.2, 10 * seed + each, every) for each in range(3)]
        same, more = (read_ahead(pace, 10 * seed + 5, every) for pace in (24.2, 25.4))
        assert not comparison.fails(GATE, comparison.compare(base, [same]))
        assert comparison.fails(GATE, comparison.compare(base, [more]))


def of_window(job: Job, seed: int) -> MeasuredRun:
    """A captured run without step logs."""
    ranks, _ = simulate(replace(job, seed=seed))
    return comparison.of_results("run", study(ranks).results)


def blank() -> MeasuredRun:
    return {
        "name": "run", "clusterprof_version": "", "world_size": 4, "stages": None,
        "group_sizes": [], "devices": [], "profilers": [], "profiled": [0, 1, 2, 3],
        "program": "train.py", "outside_ns": [], "outside_steps": 0, "window": [],
        "blocking_ns": None, "findings": [],
    }  # fmt: skip


def fails(made: Comparison) -> bool:
    return comparison.fails(GATE, made)


# --- the statistics


@pytest.mark.parametrize("runs", long_but([2], [20]))
def test_a_gate_passes_noise_and_fails_a_regression_of_5_percent_in_all_runs(runs: int) -> None:
    before = [of_steps(JOB, 940_000 + run) for run in range(runs)]
    same = [of_steps(JOB, 941_000 + run) for run in range(runs)]
    slower = [of_steps(SLOWER, 942_000 + run) for run in range(runs)]
    noise = [fails(comparison.compare([a], [b])) for a, b in zip(before, same, strict=True)]
    planted = [fails(comparison.compare([a], [b])) for a, b in zip(before, slower, strict=True)]
    assert sum(noise) == 0
    assert sum(planted) == runs


def test_a_change_of_the_window_is_seen_in_the_part_that_changed_and_in_no_other() -> None:
    more = replace(JOB, copy_ns=6 * MS)
    found = comparison.compare([of_window(JOB, 943_000)], [of_window(more, 943_001)])
    assert found["steps_from"] == "window"
    changed = {each["what"]: each["direction"] for each in found["parts"]}
    assert changed["exposed copies"] == changed["step in the window"] == "longer"
    assert changed["compute"] == "none"
    whole, *parts = found["parts"]
    inner = comparison_text._INNER
    added = sum(each["change_ns"] for each in parts if each["what"] not in inner)
    assert added == pytest.approx(whole["change_ns"], abs=5)


def test_a_straggler_that_came_is_new_and_fails_by_its_code() -> None:
    late = replace(JOB, causes=(Cause("host", 2, 8 * MS),), synchronous=True)
    good = replace(JOB, synchronous=True)
    a, b = of_window(good, 944_000), of_window(late, 944_001)
    found = comparison.compare([a], [b])
    assert [(each["code"], each["ranks"], each["state"]) for each in found["findings"]] == [
        ("straggler.host", [2], "new")
    ]
    assert "New: straggler.host rank 2." in found["verdict"]
    condition = gate.parse("straggler.*>5%")
    assert comparison.fails(condition, found)
    assert not comparison.fails(condition, comparison.compare([b], [b]))
    assert not comparison.fails(condition, comparison.compare([b], [a]))


def test_a_finding_of_one_side_that_may_be_chance_is_not_said_to_be_as_before() -> None:
    late = replace(JOB, causes=(Cause("host", 2, 8 * MS),), synchronous=True)
    b = of_window(late, 944_001)
    found = comparison.compare([b], [b])
    assert comparison_text.finding_rows(found)[0][0] == "as before"
    found["findings"][0]["a_saved_ns"] = found["findings"][0]["a_alone_ns"] = 0
    first = comparison_text.finding_rows(found)[0]
    assert (first[0], first[2]) == ("within the noise", "-")


def of_finding(saved_ms: float, alone_ms: float) -> MeasuredRun:
    """A run of 100 ms steps with one finding."""
    saved, alone = round(saved_ms * MS), round(alone_ms * MS)
    return blank() | {
        "outside_ns": [100 * MS] * 8, "outside_steps": 80,
        "findings": [{
            "code": "communication.exposed", "severity": "warning", "rank": None, "ranks": [0, 1],
            "saved_ns_per_step": saved, "saved_alone_ns": alone, "saved_uncertainty_ns": MS,
            "share_of_step": saved / (100 * MS), "summary": "x",
        }],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "state"),
    [
        ((10, 10), (30, 30), "worse"),
        ((30, 40), (10, 12), "better"),
        ((10, 30), (30, 30), "same"),  # a cause before it is gone
        ((30, 30), (10, 30), "same"),  # another has come
        ((10, 30), (30, 10), "same"),
    ],
)
def test_a_finding_is_worse_where_its_repair_saves_more_alone_and_after_those_before_it(
    a: tuple[float, float], b: tuple[float, float], state: str
) -> None:
    found = comparison.compare([of_finding(*a)], [of_finding(*b)])
    assert [each["state"] for each in found["findings"]] == [state]


def test_a_comparison_says_what_a_repair_saves_alone_where_that_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = comparison.compare([of_finding(10, 10)], [of_finding(30, 40)])
    row = ["10.0 ms", "30.0 ms, 40.0 ms alone", "+20.0 ms"]
    assert comparison_text.finding_rows(found)[0][2:5] == row
    for written in (comparison_text.render(found), comparison_text.markdown(found)):
        assert "30.0 ms, 40.0 ms alone" in written
    assert comparison.fails(gate.parse("warning"), found)
    saves = "repair saves per step 30.0 ms, 40.0 ms alone (in A 10.0 ms), 20% of the step more"
    assert f"communication.exposed: {saves}" in capsys.readouterr().err


def runs_of(values: Sequence[float], error: float = 0.0) -> list[comparison.Value]:
    return [comparison.Value(each, error) for each in values]


def test_several_runs_of_a_side_measure_the_noise() -> None:
    one = comparison.change("step", runs_of([1e7]), runs_of([1.02e7]), 1e7)
    assert one["direction"] == "none"
    quiet = comparison.change("step", runs_of([1e7] * 8), runs_of([1.02e7] * 2), 1e7)
    assert quiet["direction"] == "longer"
    wild = comparison.change("step", runs_of([0.9e7, 1.1e7] * 4), runs_of([1.02e7] * 2), 1e7)
    assert wild["noise_ns"] > 4 * quiet["noise_ns"]


@pytest.mark.parametrize("times", [0.5, 1, 3, 10])
def test_the_interval_of_normal_runs_holds_the_truth_in_95_of_100_cases(times: float) -> None:
    """Also where runs differ by other than what is assumed."""
    rng = np.random.default_rng(945_000)
    held = []
    for _ in range(2000):
        a, b = (runs_of(rng.normal(1e7, times * 8e4, count)) for count in (4, 2))
        made = comparison.change("step", a, b, 1e7)
        held.append(abs(made["change_ns"]) <= made["noise_ns"])
    assert np.mean(held) > (0.87 if times == 3 else 0.935)
    assert times != 1 or np.mean(held) < 0.98


def test_correlated_blocks_tell_less_than_independent_ones() -> None:
    rng = np.random.default_rng(945_001)
    independent, walk = 1e7 + 1e5 * rng.normal(size=(2, 400, 20))
    for k in range(1, 20):
        walk[:, k] = 1e7 + 0.7 * (walk[:, k - 1] - 1e7) + (1 - 0.7**2) ** 0.5 * (walk[:, k] - 1e7)
    for blocks in (independent, walk):
        values = [comparison.of_blocks(each) for each in blocks.astype(int).tolist()]
        true = np.std([value.ns for value in values])
        stated = np.median([value.error_ns for value in values])
        assert 0.6 < stated / true < 1.5


def test_a_saved_checkpoint_is_no_slower_step() -> None:
    took = np.full(200, 10 * MS)
    stalled = took.copy()
    stalled[[50, 150]] += 2000 * MS
    one = np.ones_like(took)
    a, b = (comparison.blocked(one, each) for each in (took, stalled))
    assert len(a) == 20
    value = comparison.of_blocks([round(ns) for ns in b])
    assert value == comparison.of_blocks([round(ns) for ns in a]) == (10 * MS, 0)


def test_blocks_keep_stretches_whole_and_few_steps_are_none() -> None:
    count, took = np.array([1000, 1000, 4, 4, 4]), np.array([1000, 2000, 40, 40, 40]) * MS
    assert len(comparison.blocked(count, took)) == 0  # two stretches hold nearly all of it
    assert len(comparison.blocked(np.ones(15, np.int64), np.ones(15, np.int64))) == 0
    assert len(comparison.blocked(np.ones(16, np.int64), np.ones(16, np.int64))) == 4


#: the mean range of so many normal values, in standard deviations
_RANGE = {0: 0.0, 1: 0.0, 2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 7: 2.704}


def test_runs_are_assumed_to_differ_as_measured_programs_do(recordings: Path) -> None:
    pairs = json.loads((recordings / "pairs.json").read_text())["recordings"].values()
    ranges = [sum(_RANGE[n] for n in each["repeats"]) for each in pairs]
    spread = [
        each["saved_spread_ms"] / each["step_ms"] / of
        for each, of in zip(pairs, ranges, strict=True)
        if of
    ]
    assert statistics.median(spread) == pytest.approx(comparison._RUNS_FRAC, rel=0.15)


# --- runs, baselines, and what is refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> run_directory.Window:
    """A run of four ranks over gloo that profiled none, to be read only."""
    return made_run(tmp_path_factory.mktemp("compared") / "run", replace(JOB, seed=946_000))


def made_run(folder: Path, job: Job) -> run_directory.Window:
    made = run_directory.create(folder)
    made.directory.write_manifest(
        {"schema_version": 1, "launcher": "torchrun", "world_size": job.world, "window": [60, 64],
         "selection": parse_ranks("0")._replace(ranks=())._asdict(),
         "again": ["clusterprof", "torchrun", "{ranks}", "--", "python", "work/train.py", "--x"]}
    )  # fmt: skip
    leave(made, recorded(replace(job, on_host=True, launch_ns=10_000, first_step=80), past=80))
    merge_run.merge_run(made, [])
    return made


def test_step_logs_outside_the_window_tell_the_pace(run: run_directory.Window) -> None:
    made = comparison.measured(run.path)
    # steps 0 to 84 without the first three, the window of four, and twelve behind it
    assert made["outside_steps"] == 85 - 3 - 4 - 12
    assert (made["program"], made["world_size"], made["window"]) == ("train.py", 4, [])
    # of a later window the first one's steps are none either
    later = live_windows.order(run, StepWindow(70, 74), parse_ranks("0"), "torch")
    states.advance(str(later.rank(0)), "counted")
    steps = comparison.clean_steps(later, results_json.read(run.merged / paths.RESULTS))[1]
    shutil.rmtree(later.path)
    assert steps == 60 - 3
    found = comparison.compare([made], [made])
    assert (found["steps_from"], found["step"]["direction"]) == ("step logs", "none")
    assert found["verdict"].startswith("No change of the step beyond the noise")


def test_a_baseline_keeps_runs_to_compare_with(
    run: run_directory.Window, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = made_run(tmp_path / "slow", replace(JOB, layer_ns=2 * JOB.layer_ns, seed=946_001))
    store = ["--store", str(tmp_path / "store")]
    assert baseline.main("baseline", ["save", "main", str(run.path), *store], None) == 0
    with pytest.raises(UsageError, match="exists already"):
        baseline.main("baseline", ["save", "main", str(run.path), *store], None)
    assert baseline.main("baseline", ["save", "main", str(run.path), "--add", *store], None) == 0
    capsys.readouterr()
    assert baseline.main("baseline", ["list", *store], None) == 0
    assert capsys.readouterr().out.startswith(f"main  2 runs: {run.path}")
    line = ["main", str(slow.path), *store, "--json"]
    assert compare.main("compare", [*line, "--fail-on", "step>+3%"], None) == 1
    printed = capsys.readouterr()
    assert "--fail-on step>+3%: the step is " in printed.err
    found = json.loads(printed.out)
    results_json.check(Path("x"), found, Comparison)
    assert found["step"]["direction"] == "longer"
    assert compare.main("compare", line, None) == 0
    with pytest.raises(ReportError, match="no run, no file and no baseline 'other'"):
        compare.main("compare", ["other", *line[1:]], None)


def test_another_job_is_compared_with_a_warning_and_never_gated(
    run: run_directory.Window, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = made_run(tmp_path / "other", replace(JOB, dp=8, seed=946_002))
    assert compare.main("compare", [str(run.path), str(other.path)], None) == 0
    reason = "A has a world of 4 ranks, B a world of 8 ranks"
    assert reason in capsys.readouterr().out
    with pytest.raises(MergeError, match=reason):
        compare.main("compare", [str(run.path), str(other.path), "--fail-on", "critical"], None)


def spoilt(results: Any, what: str) -> Any:
    made = copy.deepcopy(results)
    match what:
        case "version":
            made["schema_version"] = 1
        case "missing":
            del made["steps"][0]["ranks"][0]["idle_ns"]
        case "kind":
            made["findings"][0]["ranks"] = "2"
        case "no steps":
            made["steps"] = []
        case "no ranks":
            for step in made["steps"]:
                step["ranks"] = []
        case "no time":
            for step in made["steps"]:
                step["duration_ns"] = 0
        case "centuries":
            made["steps"][1]["ranks"][0]["idle_ns"] = 2**63
    return made


@pytest.mark.parametrize(
    "what",
    ["version", "missing", "kind", "no steps", "no ranks", "no time", "centuries", "text", "empty"],
)
def test_results_edited_by_hand_are_a_named_error(what: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    text = json.dumps(spoilt(sample(), what))
    file.write_text({"text": "{", "empty": ""}.get(what, text))
    with pytest.raises((ReportError, MergeError)) as caught:
        compare.main("compare", [str(file), str(file)], None)
    assert caught.value.details


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"baseline_version": 1}', '{"baseline_version": 2, "runs": []}',
                '{"baseline_version": 2, "clusterprof_version": "", "runs": []}',
                '{"baseline_version": 2, "clusterprof_version": "", "runs": [{"name": 1}]}'],
)  # fmt: skip
def test_a_damaged_baseline_is_a_named_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "main.json").write_text(content)
    with pytest.raises(ClusterprofError, match=r"main\.json"):
        baselines.runs_named("main", tmp_path)


def test_a_run_that_was_not_merged_says_how_to_merge_it(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has not been merged") as caught:
        baselines.runs_named(str(tmp_path))
    assert f"clusterprof merge {tmp_path}" in str(caught.value)


@pytest.mark.parametrize("given", ["a" * 300, "no/such/run", "\udcff", "~no-such-user/x"])
def test_a_path_that_is_none_is_a_named_error(given: str) -> None:
    with pytest.raises(ReportError):
        baselines.runs_named(given)


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "x" * 101, "ä"])
def test_a_baseline_s_name_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        baselines.file_of(name, tmp_path)


# --- what is printed


def test_the_text_s_first_line_is_the_verdict_and_markdown_runs_nothing(
    tmp_path: Path,
) -> None:
    run = blank()
    run["name"] = "runs/<script>[x](http://y) @team | `a`"
    run["outside_ns"], run["outside_steps"] = [10 * MS] * 8, 40
    made = comparison.compare([run], [run | {"outside_ns": [11 * MS] * 8}])
    text = comparison_text.render(made)
    assert text.splitlines()[0] == "Steps are 10% longer in B: 10.0 ms to 11.0 ms (±3.1%)."
    assert max(map(len, text.splitlines())) <= 100
    narrow = comparison_text.render(made, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    row = ["waiting for a later rank", "10.0 ms", "11.0 ms", "+1.00 ms", "±5.0 ms", "in the noise"]
    _, first, second = comparison_text._table([list("aABcn-"), row], 1, 60)
    assert (first.strip(), second.split("  ")[-1].strip()) == (row[0], row[-1])
    assert {*narrow.split()} == {*text.split()}
    page = comparison_text.markdown(made)
    assert "| step | 10.0 ms | 11.0 ms | +1.00 ms |" in page
    for raw in ("<script>", "[x](", "@team", " | `"):
        assert raw not in page


def test_the_noise_that_hides_a_limit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run = blank()
    run["outside_ns"], run["outside_steps"] = [9 * MS, 10 * MS, 11 * MS, 9 * MS, 12 * MS], 20
    assert not fails(comparison.compare([run], [run]))
    assert "hides a smaller change" in capsys.readouterr().err


def test_the_page_has_the_same_and_neither_script_nor_address(
    run: run_directory.Window, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    line = [str(run.path), str(run.path), "--html", str(page)]
    assert compare.main("compare", line, None) == 0
    made = comparison.compare(*([comparison.measured(run.path)] for _ in "ab"))
    text = page.read_text()
    assert escape(made["verdict"]) in text
    assert "within the noise" in text
    assert "&#34;" not in text
    assert not re.search(r"<script|https?:|url\(|@import|src=", text)
    with pytest.raises(UsageError, match="exists already"):
        compare.main("compare", line, None)
    assert compare.main("compare", [*line, "--force"], None) == 0


@pytest.mark.parametrize(
    ("again", "program"),
    [
        ([], ""),
        (["clusterprof", "srun", "--ranks", "0"], ""),
        (["clusterprof", "srun", "--"], ""),
        (
            ["clusterprof", "srun", "--", "python", "-m", "package.train", "--lr", "1"],
            "package.train",
        ),
        (["clusterprof", "srun", "--", "python", "/home/me/train.py", "-m"], "train.py"),
        (["clusterprof", "srun", "--", "/opt/bin/train", "-m"], "train"),
    ],
)
def test_a_program_is_its_script_or_module(again: list[str], program: str) -> None:
    assert comparison._program(again) == program


def test_a_hostile_name_stays_text_on_the_page() -> None:
    hostile = blank() | {"name": "</style><script>alert(1)</script>\u202e"}
    hostile |= {"outside_ns": [10 * MS] * 8, "outside_steps": 40}
    page = comparison_text.page(comparison.compare([hostile], [hostile]))
    assert "<script" not in page
    assert page.count("</style>") == 1
    assert "\u202e" not in page
