"""The four lines with which every run ends: by what the ranks left, in every way to end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import report_sample as sample

from clusterprof import run_directory
from clusterprof.agent.contracts import paths, states
from clusterprof.arguments import StepWindow, parse_ranks
from clusterprof.collect.outcomes import collect
from clusterprof.launch import ending
from clusterprof.launch.ending import Ending, RankEnd
from clusterprof.results import RANKS, Finding
from clusterprof.run_directory import Manifest, Window

S = 1_000_000_000
AGAIN = ("clusterprof", "torchrun", RANKS, "--nproc-per-node", "4", "--", "train.py")
JOB = Ending("runs/x", 0, is_read=True, steps=300, saved="4 of 4 reports in runs/x", again=AGAIN)
RAISED = RankEnd(3, "a", 9 * S, 17, at_least=False, exception="ValueError")
PEER = RankEnd(0, "a", 10 * S, 17, at_least=False, exception="RuntimeError", status=143)
TERMINATED = [RankEnd(rank, "a", 9 * S, status=143) for rank in range(4)]
UNDECIDED = (
    "rank 3 by ValueError, after 17 steps, and rank 0 on other hosts at about the same time: "
    "which was first is not known; the job's status is 1"
)
NO_OPTIMIZER = "if the program is Python that keeps PYTHONPATH, and steps without a torch optimizer"


@pytest.mark.parametrize(
    ("known", "how"),
    [
        ({}, "with status 0, after 300 steps"),
        ({"steps": 1}, "with status 0, after 1 step"),
        ({"steps": None, "status": 2}, "with status 2, before a rank trained"),
        ({"status": None},
         "how the job ended is not known: clusterprof ended before it, after 300 steps"),
        ({"is_read": False, "status": 3}, "with status 3"),
        ({"status": 1, "signals": ["SIGINT", "SIGTERM"], "ends": [RAISED]},
         "by SIGINT and SIGTERM, after 300 steps; the job's status is 1"),
        ({"status": 1, "ends": [PEER, RAISED]},
         "rank 3 first, by ValueError, after 17 steps; the job's status is 1"),
        ({"status": 1, "ends": [PEER, RankEnd(3, "a", 9 * S, 15, status=137)]},
         "rank 3 first, killed by SIGKILL, after at least 15 steps; the job's status is 1"),
        ({"status": 1, "ends": [RankEnd(3, "a", 9 * S, status=4)]},
         "rank 3 first, with status 4; the job's status is 1"),
        ({"status": 1, "ends": [RankEnd(3, "a", 9 * S)]},
         "rank 3 first, killed, or by os._exit; the job's status is 1"),
        ({"status": 143, "ends": TERMINATED},
         "ranks 0–3 killed by SIGTERM; the job's status is 143"),
        # of two hosts the clocks do not tell, of one they do
        ({"status": 1, "ends": [replace(PEER, host="b", ended_ns=9 * S + 1), RAISED]},
         UNDECIDED),
        ({"status": 1, "ends": [replace(PEER, host="b"), RAISED]},
         "rank 3 first, by ValueError, after 17 steps; the job's status is 1"),
        # a job that succeeds has its reasons
        ({"ends": [RAISED]}, "with status 0, after 300 steps"),
    ],
)  # fmt: skip
def test_how_the_job_ended_is_in_the_first_line(known: dict[str, Any], how: str) -> None:
    assert replace(JOB, **known).lines()[0] == f"ended:   {how}"


TORCHRUN = "clusterprof torchrun {}--nproc-per-node 4 -- train.py"


@pytest.mark.parametrize(
    ("known", "step"),
    [
        ({"is_merged": True, "can_merge": True, "command": "clusterprof x"}, "clusterprof x"),
        ({"is_merged": True, "can_merge": True}, "clusterprof view runs/x"),
        ({"can_merge": True, "signals": ["SIGINT"]}, "clusterprof collect runs/x"),
        ({"can_merge": True, "first_do": "once x can be written: "},
         "once x can be written: clusterprof collect runs/x"),
        # it was there: a rank trained
        ({"status": 1, "missing_script": "train.py"},
         f"once that is repaired: {TORCHRUN.format('')}"),
        ({"status": 1, "steps": None, "missing_script": "trian.py"},
         f"there is no file trian.py here; with the right name: {TORCHRUN.format('')}"),
        ({"status": 1}, f"once that is repaired: {TORCHRUN.format('')}"),
        ({"status": 1, "signals": ["SIGINT"]}, TORCHRUN.format("")),
        ({"steps": None}, f"{NO_OPTIMIZER}: {TORCHRUN.format('--step-on MODULE:FUNCTION ')}"),
        ({"steps": 8}, TORCHRUN.format("--steps 3:7 --ranks all ")),
        ({"steps": 4}, TORCHRUN.format("--steps 1:3 --ranks all ")),
        ({"steps": 3}, f"with 4 steps or more: {TORCHRUN.format('--steps 1:3 --ranks all ')}"),
        ({"steps": 12, "window": StepWindow(8, 11)}, TORCHRUN.format("--ranks all ")),
        ({"status": 1, "first_do": "once there is space in runs/x: "},
         f"once there is space in runs/x: {TORCHRUN.format('')}"),
        ({"again": ()}, "run the job again"),
    ],
)  # fmt: skip
def test_the_last_line_is_what_to_type_next(known: dict[str, Any], step: str) -> None:
    assert replace(JOB, **known).lines()[-1] == f"next:    {step}"


def test_a_verdict_is_that_of_the_look_or_there_is_a_reason_for_none() -> None:
    assert replace(JOB, verdict="Rank 2 is late.").lines()[2] == "verdict: Rank 2 is late."
    assert replace(JOB, why_none="no rank trained").lines()[2] == "verdict: none: no rank trained"


# --- by what is in the run directory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Window:
    monkeypatch.chdir(tmp_path)
    return run_directory.create(tmp_path / "run")


def manifest(run: Window, **more: object) -> Manifest:
    return run.directory.write_manifest(
        {"schema_version": 1, "selection": parse_ranks("auto")._asdict(), "window": [10, 15],
         "launcher": "torchrun", "again": AGAIN, "world_size": 4, **more}
    )  # fmt: skip


def lines(run: Window, status: int | None = 1, **known: Any) -> list[str]:
    """The four lines of a job of which nothing was merged."""
    outcomes = collect(run, None, patience_s=0)
    of_job = Ending("run", status, **known)
    return ending.of_run(run, outcomes, manifest(run), None, of_job).lines()


def test_ranks_that_ended_are_told_by_their_states(run: Window) -> None:
    for rank, facts in enumerate((
        {"state": "counted", "steps": 17, "exception": "RuntimeError", "ended_ns": 10 * S},
        {"state": "counting", "ended_ns": 11 * S, "program_status": 143},
        {"state": "counted", "steps": 17, "exception": "Value\x1bError", "ended_ns": 9 * S},
    )):  # fmt: skip
        states.advance(str(run.rank(rank)), **facts)
    (run.rank(1) / paths.STEPS).write_text("step,begin_ns,end_ns\n14,1,2\n15,2,3\n")
    (run.directory.path / paths.LOOKED).write_text("rank 2 delays the other ranks\n")
    (Path.cwd() / "train.py").touch()
    found = lines(run)
    assert found[0].startswith("ended:   rank 2 first, by Value")
    assert "\x1b" not in found[0]
    assert found[0].endswith("after 17 steps; the job's status is 1")
    assert found[1:] == [
        "saved:   the steps of 1 of 4 ranks, no flight recorder, in run",
        "verdict: rank 2 delays the other ranks",
        f"next:    once that is repaired: {TORCHRUN.format('')}",
    ]


def test_the_log_of_a_rank_that_an_exception_ended_is_whole(run: Window) -> None:
    states.advance(str(run.rank(0)), "captured", exception="KeyboardInterrupt", ended_ns=1)
    (run.rank(0) / paths.STEPS).write_text("step,begin_ns,end_ns\n13,1,2\n")
    assert lines(run)[0] == (
        "ended:   rank 0 first, by KeyboardInterrupt, after 14 steps; the job's status is 1"
    )


def test_a_rank_whose_state_is_damaged_is_left_out(run: Window) -> None:
    run.rank(0).mkdir(parents=True)
    (run.rank(0) / paths.STATE).write_text('{"state": "counted", "steps": "x", "ended_ns": []}')
    (run.directory.path / paths.LOOKED).write_bytes(b"\xff")
    assert lines(run, 3)[0] == "ended:   with status 3, before a rank trained"


def test_a_job_without_ranks_says_so_and_names_a_script_that_is_not_there(run: Window) -> None:
    assert lines(run)[1:] == [
        "saved:   nothing in run: no rank reported in",
        "verdict: none: no rank trained",
        f"next:    there is no file train.py here; with the right name: {TORCHRUN.format('')}",
    ]
    (Path.cwd() / "train.py").touch()
    assert "is the program Python" in lines(run, 0)[2]


def test_a_job_of_few_steps_is_told_which_to_choose(run: Window) -> None:
    for rank in range(4):
        why = "the program ended after 8 steps, before the window 10:15 began"
        states.advance(str(run.rank(rank)), "counted", steps=8, flight=why)
    (Path.cwd() / "train.py").touch()
    assert lines(run, 0)[2:] == [
        "verdict: none: the job made 8 steps, and the steps to look at were 10:15",
        f"next:    {TORCHRUN.format('--steps 3:7 --ranks all ')}",
    ]


@pytest.mark.parametrize(
    ("ranks", "profiler", "options"),
    [("0,1", "torch", "--ranks 0,1 --profiler torch "), ("auto", "nsys", "--profiler nsys "),
     ("auto", "none", "")],
)  # fmt: skip
def test_an_interrupted_job_is_run_again_with_the_ranks_and_profiler_that_it_had(
    run: Window, ranks: str, profiler: str, options: str
) -> None:
    content = {
        "schema_version": 1, "window": [10, 15], "again": [*AGAIN],
        "selection": parse_ranks(ranks)._asdict(), "profiler": {"name": profiler},
    }  # fmt: skip
    run.directory.write_manifest(content)
    known = replace(JOB, signals=["SIGINT"], status=130, is_merged=False)
    known = ending._by_command(known, run.directory.read_manifest())
    line = f"clusterprof torchrun {options}--nproc-per-node 4 -- train.py"
    assert known.next_step() == line


def test_the_next_command_is_of_the_finding_that_the_verdict_is_about(run: Window) -> None:
    results, own = sample.results(), sample.straggler()
    other = {**own, "code": "communication.exposed", "ranks": [0, 1], "next": "clusterprof a"}
    own["next"] = "clusterprof b"
    results["findings"] = [cast("Finding", other), own]
    sample.say(results, (own, own["summary"]))
    known = ending.Ending("runs/1", 0, is_merged=True)
    assert ending._by_results(known, results, run).command == "clusterprof b"
    results["headline"][0]["code"] = "none"
    assert ending._by_results(known, results, run).command == "clusterprof a"


def test_a_run_that_was_deleted_has_nothing(run: Window) -> None:
    content = manifest(run)
    shutil.rmtree(run.path)
    gone = ending.of_run(run, [], content, None, Ending("run", 0))
    assert gone.lines()[1] == "saved:   nothing: run was deleted while the job ran"


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["clusterprof", "run", "--", "python", "trian.py", "--model", "a.py"], "trian.py"),
        (["clusterprof", "look", "--", "srun", "-n2", "python", "-m", "pkg"], ""),
        ([], ""),
    ],
)
def test_the_script_is_the_first_of_the_program_s_words_that_is_one(
    words: list[str], script: str
) -> None:
    assert ending.missing_script(words) == script
