"""After the window: what the profiler leaves behind in the process, and what is said of it."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from simulate import Job, simulate

from clusterprof import words
from clusterprof.agent.contracts import identity
from clusterprof.agent.contracts.identity import COUNTING, LENT, PLAN, Identity
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.agent.rank import hooks, profilers, rank as ranks, start
from clusterprof.analysis.findings import profiler_overhead
from clusterprof.analysis.findings.profiler_overhead import capture_cost
from clusterprof.ingest.rank_steps import steps_table
from clusterprof.report import text
from clusterprof.results import RANKS, CaptureCost, Finding, Results
from clusterprof.study import study

MS = 1_000_000
TEARDOWN, LOG_LEVEL = "TEARDOWN_CUPTI", "KINETO_LOG_LEVEL"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TEARDOWN, LOG_LEVEL):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setenv(PLAN, "/run/plan.json")


def version(cuda: str | None) -> ModuleType:
    """A torch.version."""
    made = ModuleType("torch.version")
    made.cuda = cuda  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("12.6", "1"), ("13.0", "1"), ("12.10", "1"), ("12.4", None), ("11.8", None), (None, None)],
)
def test_cupti_is_let_go_where_cuda_can_do_without_it(
    cuda: str | None, expected: str | None
) -> None:
    profilers.kineto.leaves(version(cuda))
    assert os.environ.get(TEARDOWN) == expected


def test_what_the_user_has_set_stays_his_and_his_children_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TEARDOWN, "0")
    profilers.kineto.leaves(version("13.0"))
    identity.give_back(os.environ)
    assert os.environ[TEARDOWN] == "0"


@pytest.mark.parametrize("picked", [True, False])
def test_only_a_profiled_rank_is_lent_anything(
    picked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "after_import", lambda actions: None)
    plan = Plan("", Selection("all", "all"), (2, 6), "torch")
    ranks.Rank(plan, Identity(0, 1, 0, "torchrun"), picked, None).wait_for_the_program()
    assert identity.fields(os.environ).get(LENT) == (LOG_LEVEL if picked else None)


def test_a_child_that_python_starts_or_forks_has_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lend() -> None:
        identity.lend(os.environ, LOG_LEVEL, "99")
        profilers.kineto.leaves(version("13.0"))
        assert identity.fields(os.environ).get(LENT) == f"{LOG_LEVEL}+{TEARDOWN}"

    lend()
    identity.set_field(os.environ, COUNTING, "1")  # its parent counts
    start.main()
    assert not {TEARDOWN, LOG_LEVEL, LENT} & {*os.environ, *identity.fields(os.environ)}
    lend()
    plan = Plan("", Selection("all", "all"), (2, 6), "torch")
    ranks.Rank(plan, Identity(0, 1, 0, "torchrun"), True, None).leave()
    assert not {TEARDOWN, LOG_LEVEL, LENT} & {*os.environ, *identity.fields(os.environ)}


def perturbation(before: int, after: int | None, chance: int | None) -> tuple[Finding, bool | None]:
    """The finding for a job with such steps (ms) around its window; whether they stay longer."""
    cost: CaptureCost = {
        "stall_start_ns": 1500 * MS,
        "stall_stop_ns": None,
        "profiled": {
            "before_ns": before and before * MS,
            "inside_ns": 30 * MS,
            "after_ns": after and after * MS,
            "after_uncertainty_ns": chance and chance * MS,
        },
        "unprofiled": None,
    }
    ranks, _ = simulate(Job())
    (found,) = (
        finding
        for finding in study(ranks, capture=cost).results["findings"]
        if finding["code"] == "profiler.perturbation"
    )
    return found, profiler_overhead.stay(cost["profiled"])


@pytest.mark.parametrize(
    ("before", "after", "chance", "stays"),
    [
        (20, 26, 2, True),
        (20, 26, 8, None),
        (20, 26, None, None),
        (100, 101, 2, False),
        (20, None, None, None),
    ],
)
def test_that_it_ends_with_the_window_is_said_only_where_the_steps_say_so(
    before: int, after: int | None, chance: int | None, stays: bool | None
) -> None:
    found, known = perturbation(before, after, chance)
    more = [row["more_ns_per_step_after"] for row in found["evidence"]
            if "more_ns_per_step_after" in row]  # fmt: skip
    assert more == ([6 * MS] if stays else [])
    assert ("--profiler torch" in found["advice"]) is bool(stays)
    assert known is stays


AGAIN = ("clusterprof", "torchrun", "--steps=40:50", RANKS, "--", "train.py")


def logged(
    profiler: str, before: float, after: float, *, until: int = 400, again: tuple[str, ...] = AGAIN
) -> Results:
    """The results of four ranks, rank 0 and 1 profiled in the steps 40 to 49, by their step logs.

    Steps take `before` ms, and `after` once the window is closed, each a tenth more or less.
    """
    generator = np.random.default_rng(11)
    logs = {}
    for rank in range(4):
        usual = np.full(until, before)
        usual[40:50] = 1.8 * before
        usual[50:] = after
        steps = np.rint(MS * usual * generator.uniform(0.9, 1.1, until)).astype(np.int64)
        end = np.cumsum(steps)
        logs[rank] = steps_table(np.arange(until), end - steps, end, "steplog")
    cost = capture_cost(logs, [0, 1], 40, 50, {})
    ranks, _ = simulate(Job())
    ranks = [replace(each, info=replace(each.info, profiler=profiler)) for each in ranks]
    return study(ranks, capture=cost, again=again).results


def overhead(results: Results) -> Finding:
    (found,) = (f for f in results["findings"] if f["code"] == "profiler.perturbation")
    return found


@pytest.mark.parametrize("after", [20.0, 21.6, 26.0, 36.0])
def test_how_much_longer_steps_stay_is_in_results_and_text(after: float) -> None:
    results = logged("nsys 2025.3.2", 20.0, after)
    assert results["capture"] is not None
    times = results["capture"]["profiled"]
    assert times["before_ns"] == pytest.approx(20 * MS, rel=0.05)
    assert times["after_ns"] == pytest.approx(after * MS, rel=0.01)
    page = " ".join(text.render(results).split())
    assert f"{times['before_ns'] / MS:.1f} ms before" in page
    assert f"{times['after_ns'] / MS:.1f} ms after" in page
    stays = after > 21
    found = overhead(results)
    assert ("stay" in found["summary"]) is stays
    assert ("until the job ends" in found["advice"]) is stays
    share = times["after_ns"] / times["before_ns"] - 1
    assert (f"({words.percent(share)}) longer after the window" in page) is stays


def test_the_command_for_a_run_that_leaves_no_profiler_is_whole() -> None:
    assert overhead(logged("nsys 2025.3.2", 20.0, 26.0))["next"] == (
        "clusterprof torchrun --steps=40:50 --ranks 0,1,2,3 --profiler torch -- train.py"
    )
    assert overhead(logged("nsys 2025.3.2", 20.0, 20.0))["next"] == ""
    refused = (*AGAIN[:2], "--nsys=/opt/nsys", *AGAIN[2:])  # by --profiler torch
    assert overhead(logged("nsys 2025.3.2", 20.0, 26.0, again=refused))["next"] == ""


def test_torch_s_profiler_that_stays_is_not_answered_by_torch_s_profiler() -> None:
    found = overhead(logged("torch.profiler", 20.0, 26.0))
    assert "12.6" in found["advice"]
    assert "--profiler torch" not in found["advice"] + found["next"]


def test_a_job_that_ends_too_soon_after_the_window_says_nothing_of_what_follows() -> None:
    results = logged("nsys 2025.3.2", 20.0, 26.0, until=58)
    assert results["capture"] is not None
    assert results["capture"]["profiled"]["after_ns"] is None
    found = overhead(results)
    assert "after it" not in found["summary"]
    assert "ends with the window" not in found["advice"]
