"""`--ranks auto`: which ranks are captured once all were looked at, and how often ranks look."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lab.clock import ManualClock

from clusterprof import merge_run, run_directory
from clusterprof.agent.contracts import paths, plan as plans, states
from clusterprof.agent.contracts.identity import Identity
from clusterprof.agent.contracts.plan import NsysPlan, Plan, Selection
from clusterprof.agent.guard.step_log import StepLog
from clusterprof.arguments import StepWindow, parse_ranks
from clusterprof.cli import launch
from clusterprof.jobs import Job
from clusterprof.launch import planning, settings, watch
from clusterprof.launch.profiling import CapturePlan
from clusterprof.launch.watch import MOST, chosen
from clusterprof.merge_run import Look
from clusterprof.results import Suspect
from clusterprof.run_directory import Window

WORLD = tuple(range(16))
#: of four nodes with four ranks each
TENSOR = [tuple(range(4 * node, 4 * node + 4)) for node in range(4)]
DATA = [tuple(range(local, 16, 4)) for local in range(4)]


def suspect(rank: int) -> Suspect:
    return Suspect(
        rank=rank, lateness_ns=40_000_000, bound_ns=0, group="tp", host="n1", since_step=None,
        until_step=None, late_steps=None, delays=True, line=None,
    )  # fmt: skip


def look(*suspects: int, groups: Any = (WORLD,), stages: Any = ()) -> Look:
    late = [suspect(each) for each in suspects]
    return Look(tuple(range(16)), late, groups, stages, [], [10, 11])


def test_a_suspect_is_captured_with_one_peer_of_each_of_its_groups() -> None:
    assert chosen(look(13), [], [0]) == [13, 0]
    assert chosen(look(13, groups=[*TENSOR, *DATA]), [], [0]) == [13, 12, 1]
    # a peer is never another suspect, and rather one that is captured or armed anyhow
    assert chosen(look(13, 12, groups=[*TENSOR, *DATA]), [15], [0]) == [13, 15, 1, 12, 0]


def test_a_rank_whose_lateness_may_cost_nothing_is_not_said_to_delay_others() -> None:
    found = look(13)
    assert (
        watch.sentence(found) == "in 2 steps rank 13 delayed the other ranks, by 40.0 ms per step"
    )
    found.suspects[0]["delays"] = False
    assert watch.sentence(found) == "in 2 steps the other ranks waited 40.0 ms per step for rank 13"


def test_where_no_step_could_be_compared_no_rank_is_cleared() -> None:
    assert watch.sentence(look()) == "no rank was late in 2 steps, by their flight recorders"
    unknown = "ranks cannot be compared: no step is known of all members of a group"
    assert watch.sentence(look()._replace(steps=())) == unknown
    untimed = "ranks 0–7: 26 collectives in each step of 3.7 ms are not timed"
    why = look()._replace(steps=(), warnings=["rank 3: a damaged log", untimed])
    assert watch.sentence(why) == f"{unknown}; {untimed}"


def test_a_rank_that_is_late_in_some_steps_is_said_to_be_so_in_these() -> None:
    found = look(13)._replace(steps=[*range(10, 22)])
    found.suspects[0]["late_steps"] = [12, 15, 18, 21]
    sentence = "in 4 of 12 steps rank 13 delayed the other ranks, by 40.0 ms per step"
    assert watch.sentence(found) == sentence


def test_armed_ranks_are_captured_up_to_the_limit() -> None:
    assert chosen(look(13), [0, 4], [0]) == [13, 0, 4]
    assert len(chosen(look(13), range(16), [0])) == MOST
    assert chosen(look(13), range(16), [0])[0] == 13


def test_where_no_rank_stands_out_each_stage_has_one() -> None:
    assert chosen(look(), [], [0]) == [0, 1]
    assert chosen(look(groups=[]), [], [0, 8]) == [0, 8]
    assert chosen(look(stages=[(0, 1, 2, 3), (4, 5, 6, 7)]), [], [0, 8]) == [0, 1, 4]


def test_looks_for_an_order_are_bounded_for_the_file_server() -> None:
    assert (plans.look_s(4), plans.look_s(64)) == (0.1, 0.25)
    for size in (256, 1024, 3840):
        assert size / plans.look_s(size) <= plans.LOOKS_A_SECOND
    assert plans.look_s(100_000) == plans.look_s(None) == 60.0


ARGUMENTS = argparse.Namespace(arm=None, pp=None)

# --- the order, and those after it


class Ranks:
    """The ranks of a job of two, while it waits: `late` of their orders come too late."""

    def __init__(self, run: Window, late: int, clock: ManualClock) -> None:
        self.run = run
        self.late = late
        for rank in (0, 1):
            states.advance(str(run.rank(rank)), "counting", world_size=2, flight="none")
            log = StepLog(str(run.rank(rank)), (10, 15), clock.wall_ns() - 15 * 10**9)
            log.claim()
            log.add(0, [(each * 10**9, (each + 1) * 10**9) for each in range(15)])
            log.write(all_of_it=True)

    def go_on(self) -> None:
        """Obey what is ordered."""
        for window in self.run.directory.later_windows():
            for rank in (0, 1):
                late = rank == 1 and window.number - 2 < self.late
                state = "lost" if late else "waiting"
                states.advance(str(window.rank(rank)), state, chosen=True, late=late)


@pytest.fixture
def run(tmp_path: Path) -> Window:
    made = run_directory.create(tmp_path / "run")
    made.directory.write_manifest(
        {"schema_version": 1, "selection": parse_ranks("auto")._asdict(), "window": [10, 15],
         "world_size": 2, "began": "2026-01-02T03:04:05+00:00", "ended": None}
    )  # fmt: skip
    return made


def test_no_window_is_ordered_in_a_job_of_which_a_rank_has_failed(
    run: Window,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Ranks(run, 0, clock)
    states.advance(str(run.rank(1)), None, ended_ns=1, exception="ValueError")
    monkeypatch.setattr(merge_run, "look", lambda _: look(1)._replace(steps=[3, 4]))
    job, window = SimpleNamespace(world_size=2), StepWindow(10, 15)
    plan = SimpleNamespace(job=job, window=window, arguments=ARGUMENTS)
    watch.look_first(cast("planning.LaunchPlan", plan), run, clock)
    assert "nothing is captured, since rank 1 ended" in capsys.readouterr().err
    assert not run.directory.later_windows()
    assert "(steps up to 14)" in (run.path / paths.LOOKED).read_text()


@pytest.mark.parametrize(
    ("late", "windows", "end"),
    [
        (0, [2], "capturing ranks 0–1 in steps"),
        (1, [2, 3], "the order came too late for rank 1; capturing ranks 0–1 in steps"),
        (9, [2, 3, 4], "too late for rank 1, the last of 3: the result is that of the look"),
    ],
)
def test_an_order_that_came_too_late_is_repeated_a_few_times(
    run: Window,
    late: int,
    windows: list[int],
    end: str,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock.beside.append(Ranks(run, late, clock).go_on)
    monkeypatch.setattr(merge_run, "look", lambda _: look(1))
    plan = SimpleNamespace(
        job=SimpleNamespace(world_size=2), arguments=ARGUMENTS, window=StepWindow(10, 15)
    )
    watch.look_first(cast("planning.LaunchPlan", plan), run, clock)
    assert [each.number for each in run.directory.later_windows()] == windows
    assert end in capsys.readouterr().err.splitlines()[-1]
    steps = [each.window() for each in run.directory.later_windows()]
    assert all(one.end <= later.first for one, later in itertools.pairwise(steps))
    assert all(each.is_auto for each in run.directory.later_windows())


def test_a_look_alone_says_what_it_shows_and_orders_nothing(
    run: Window, clock: ManualClock, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    clock.plan(0.5, lambda: Ranks(run, 0, clock))
    monkeypatch.setattr(merge_run, "look", lambda _: look(1))
    plan = SimpleNamespace(job=SimpleNamespace(world_size=2), window=StepWindow(10, 15))
    watch.look_once(cast("planning.LaunchPlan", plan), run, clock)
    sentence = "in 2 steps rank 1 delayed the other ranks, by 40.0 ms per step (steps up to 14)"
    assert sentence in capsys.readouterr().err
    assert run.directory.later_windows() == []


def test_ranks_of_a_job_of_unknown_size_are_looked_for_until_they_come(
    run: Window, clock: ManualClock
) -> None:
    clock.plan(2.45, lambda: Ranks(run, 0, clock))
    plan = SimpleNamespace(job=SimpleNamespace(world_size=None))
    assert watch.wait_for_ranks(cast("planning.LaunchPlan", plan), run, clock) == 2
    assert clock.slept == pytest.approx([0.1] * 25)


def test_a_job_that_takes_long_to_start_is_looked_at_less_often(
    run: Window, clock: ManualClock
) -> None:
    clock.plan(600, lambda: Ranks(run, 0, clock))
    plan = SimpleNamespace(job=SimpleNamespace(world_size=None))
    assert watch.wait_for_ranks(cast("planning.LaunchPlan", plan), run, clock) == 2
    assert max(clock.slept) == pytest.approx(plans.LEAST_S * watch.SLOWER)


def test_ranks_that_leave_their_recorders_one_after_the_other_are_waited_for(
    run: Window, clock: ManualClock
) -> None:
    # Of a job of four on a slow machine three come 9 s apart, and the last one never.
    for rank in (1, 2, 3):
        come = partial(states.advance, str(run.rank(rank)), "counting", world_size=4, flight="none")
        clock.plan(9.0 * rank, come)
    began = clock.now()
    plan = SimpleNamespace(job=SimpleNamespace(world_size=4))
    assert watch.wait_for_ranks(cast("planning.LaunchPlan", plan), run, clock) == 4
    assert len(run.ranks()) == 3
    waited_s = clock.now() - began
    assert 27 + watch.PATIENCE_S < waited_s < 31 + watch.PATIENCE_S


def test_clocks_that_the_probers_measure_are_waited_for_as_long_as_they_may_come(
    run: Window,
) -> None:
    clock, probes = ManualClock(), [run.rank(rank) / paths.PROBE for rank in (0, 2)]
    watch.wait_for_clocks(run, {}, clock)
    assert clock.slept == []
    for path in probes:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.utime(path.parent)
        path.write_text("{}")
        os.utime(path, ns=(1, 1))
    began = clock.now()
    watch.wait_for_clocks(run, {0: 1, 2: 1}, clock)
    assert clock.now() - began == pytest.approx(watch.MEASURED_S, abs=0.6)
    for path, in_s in zip(probes, (0.2, 1.0), strict=True):
        clock.plan(in_s, lambda path=path: os.utime(path, ns=(2, 2)))
    began = clock.now()
    watch.wait_for_clocks(run, {0: 1, 2: 1}, clock)
    assert 1.0 <= clock.now() - began < 2.0


def test_a_rank_whose_nsys_has_captured_is_no_peer_of_a_later_order() -> None:
    found = watch.without(look(13, groups=DATA), {1, 5})
    assert chosen(found, [], [0]) == [13, 9]


# --- the plan

NSYS = NsysPlan("/opt/nsys", "2025.3.2", None, {"gpu": "", "cpu": ""}, [], [], [], [])
BY_NSYS = CapturePlan("nsys", "2025.3.2", "", nsys=NSYS)


def test_rank_0_and_one_of_each_stage_start_under_nsys() -> None:
    def to_arm(**changed: Any) -> Any:
        arguments = argparse.Namespace(**{**vars(ARGUMENTS), **changed})
        found = planning.to_arm(arguments, parse_ranks("auto"), BY_NSYS)
        return found and found.expected(8)

    assert to_arm() == (0,)
    assert to_arm(pp=2) == (0, 4)
    assert to_arm(arm="none") is None
    assert to_arm(arm="1,3") == (1, 3)
    assert planning.to_arm(ARGUMENTS, parse_ranks("auto"), CapturePlan("torch", "", "")) is None


def test_an_armed_rank_is_profiled_by_no_plan_until_it_is_ordered() -> None:
    plan = Plan("/run", Selection("auto", "auto"), (1, 2), "nsys", nsys=NSYS,
                armed=parse_ranks("one-per-node"))  # fmt: skip
    first, second = (Identity(rank, 8, rank % 4, "torchrun") for rank in (4, 5))
    assert plan.looks_first
    assert (plan.arms(first), plan.arms(second)) == (True, False)
    assert not plan.profiles(first)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("job", "capture"),
    [({"over_ssh": object()}, {}), ({"world_size": 1}, {}), ({}, {"window_by": "cuda"})],
)
def test_what_keeps_auto_from_a_second_window(job: dict[str, Any], capture: dict[str, Any]) -> None:
    plain = Job("srun", ("srun",), 4, "-n4", "srun")
    assert planning.cannot_look(plain, BY_NSYS) == ""
    assert planning.cannot_look(replace(plain, **job), replace(BY_NSYS, **capture))


@pytest.mark.parametrize(
    ("given", "ranks"),
    [({}, "auto"), ({"steps": "5:9"}, "auto"), ({"steps": "5:9", "ranks": "0"}, "0")],
)
def test_steps_that_are_named_move_the_look_and_do_not_change_which_ranks_are_profiled(
    given: dict[str, str], ranks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, _ in settings.SETTINGS.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    this, words = launch.parser("run"), [f"--{name}={value}" for name, value in given.items()]
    arguments = this.parse_args(words)
    settings.settle(arguments, this, words, "run")
    assert arguments.ranks == ranks
