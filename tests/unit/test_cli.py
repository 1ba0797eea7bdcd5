"""What the command line does with what no one thought of."""

from __future__ import annotations

import argparse
import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import report_sample

from clusterprof import merge_run, run_directory
from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.plan import NsysPlan
from clusterprof.analysis.findings.registry import CODES
from clusterprof.arguments import StepWindow, parse_ranks, shortest
from clusterprof.cli import main, status
from clusterprof.launch import run_job, settings
from clusterprof.launch.planning import LaunchPlan
from clusterprof.results import RANKS


def fault(*_: object, **__: object) -> None:
    raise RuntimeError("not thought of")


def of_rank_0(**asked: Any) -> LaunchPlan:
    """The plan of a job whose rank 0 is profiled."""
    defaults = {"no_merge": False, "debug": False, "strict": False, "fail_on": []}
    defaults |= {"gpu_hour": None}
    return cast(
        "LaunchPlan",
        SimpleNamespace(
            arguments=argparse.Namespace(**{**defaults, **asked}),
            expected=(0,),
            job=SimpleNamespace(closed=""),
            capture=SimpleNamespace(path=None),
            for_agent=SimpleNamespace(looks_first=False, watch_s=0),
        ),
    )


def test_a_fault_while_merging_keeps_the_job_s_status_and_says_where_the_reports_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory.create(tmp_path / "run")
    states.advance(str(run.rank(0)), "captured", chosen=True)
    (run.rank(0) / "report.nsys-rep").write_bytes(b"report")
    plan = of_rank_0()
    manifest = run.directory.write_manifest({"schema_version": 1})
    monkeypatch.setattr(merge_run, "merge_run", fault)
    assert run_job.conclude(plan, run, manifest, 7) == 7
    printed = capsys.readouterr().err
    assert "not thought of" in printed
    assert str(run.path) in printed
    assert "Traceback" not in printed
    plan.arguments.strict = True
    assert run_job.conclude(plan, run, manifest, 0) == 123


def test_a_full_disk_keeps_no_verdict_from_being_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory.create(tmp_path / "run")
    states.advance(str(run.rank(0)), "captured", chosen=True)
    (run.rank(0) / "report.nsys-rep").write_bytes(b"report")
    results = report_sample.results()

    def full(*_: object, **__: object) -> None:
        with run_directory.writing(run.html, ""):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(merge_run, "merged", lambda *_: SimpleNamespace(results=results))
    monkeypatch.setattr(merge_run, "save", full)
    manifest = run.directory.write_manifest({"schema_version": 1})
    assert run_job.conclude(of_rank_0(), run, manifest, 0) == 0
    printed = capsys.readouterr()
    assert results["verdict"].split(".")[0] in printed.out
    assert f"error: {run.html} cannot be written: No space left on device" in printed.err
    last = [line.strip() for line in printed.err.splitlines()[-2:]]
    assert last[0] == f"verdict: {results['verdict']}"
    where = shortest(run.path)
    assert last[1] == f"next:    once {where} can be written: clusterprof collect {where}"


def test_a_fault_in_the_last_lines_keeps_the_job_s_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory.create(tmp_path / "run")
    manifest = run.directory.write_manifest({"schema_version": 1})
    monkeypatch.setattr(run_job.ending, "of_run", fault)
    assert run_job.conclude(of_rank_0(), run, manifest, 7, patience_s=0) == 7
    printed = capsys.readouterr().err
    assert "not thought of" in printed
    assert "ended:   with status 7" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("asked", "status"), [({}, 0), ({"strict": True}, 123), ({"fail_on": ["warning"]}, 122)]
)
@pytest.mark.parametrize("failed", [0, 3, 139])
def test_a_job_that_failed_keeps_its_status_whatever_is_asked_of_its_reports(
    asked: dict[str, Any], status: int, failed: int, tmp_path: Path
) -> None:
    run = run_directory.create(tmp_path / "run")
    states.advance(str(run.rank(0)), "lost", chosen=True)
    manifest = run.directory.write_manifest({"schema_version": 1})
    ended = run_job.conclude(of_rank_0(**asked), run, manifest, failed, patience_s=0)
    assert ended == (failed or status)


@pytest.mark.parametrize(("start_s", "finishing_s"), [(6, 8), (60, 62)])
def test_a_report_that_is_written_is_waited_for_as_long_as_nsys_may_take(
    start_s: int, finishing_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys = NsysPlan("nsys", "2022.4", None, {}, [], [], [], [], start_s)
    arguments = argparse.Namespace(hang_after=0, time_margin=0, strict=False, fail_on=[])
    job = SimpleNamespace(command=["mpirun"], launcher="mpirun")
    plan = cast(
        "LaunchPlan",
        SimpleNamespace(
            arguments=arguments, expected=(0,), job=job, environment={},
            for_agent=SimpleNamespace(nsys=nsys, looks_first=False, watch_s=0),
        ),
    )  # fmt: skip
    run = run_directory.create(tmp_path / "run")
    given: list[float] = []
    monkeypatch.setattr(
        run_job, "Foreground", lambda *_: SimpleNamespace(run=lambda: 0, end_signals=[])
    )
    monkeypatch.setattr(run_job, "unless_stalled", lambda task, _: task())
    monkeypatch.setattr(run_job, "conclude", lambda *words: given.extend(words[4:6]) or 0)
    assert (
        run_job.launch("mpirun", plan, run, run.directory.write_manifest({"schema_version": 1}))
        == 0
    )
    assert given == [3, finishing_s]


def test_a_fault_of_a_verb_is_an_error_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "verb_module", lambda verb: SimpleNamespace(main=fault))
    assert main.main(["merge", "somewhere"]) == 125
    printed = capsys.readouterr().err
    assert "not thought of" in printed
    assert "--debug" in printed
    assert "Traceback" not in printed
    assert main.main(["merge", "somewhere", "--debug"]) == 125
    assert "Traceback" in capsys.readouterr().err


def test_every_finding_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted(CODES)
    assert main.main(["explain", "Straggler.Host"]) == 0
    # in lines as wide as the terminal
    shown, code = " ".join(capsys.readouterr().out.split()), CODES["straggler.host"]
    for part in (code.title, code.meaning, code.when_wrong, code.recommendation):
        assert part in shown


def test_an_unknown_code_is_refused_with_those_near_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "straggler.hots"]) == 2
    refusal = capsys.readouterr().err
    assert "straggler.host" in refusal
    assert "clusterprof explain" in refusal


def test_the_next_run_gets_what_this_one_was_given_by_options_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[LaunchPlan] = []
    monkeypatch.setattr(run_job, "run", lambda *plan: plans.append(plan[0]))
    for variable, _ in settings.SETTINGS.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CLUSTERPROF_STEPS", "20:25")
    monkeypatch.setenv("CLUSTERPROF_PROFILER", "torch")
    monkeypatch.setenv("CLUSTERPROF_RUN_DIR", "/runs/x")
    options = ["--ranks", "auto", "--stacks", "--hang-after", "9", "--nproc-per-node", "4"]
    main.main(["torchrun", *options, "--", "train.py", "--profiler", "own"])
    (plan,) = plans
    # What the next run decides anew is left out: its ranks, profiler and folder.
    assert plan.again == (
        "clusterprof", "torchrun", "--steps=20:25", "--stacks", "--hang-after=9", RANKS,
        "--nproc-per-node", "4", "--", "train.py", "--profiler", "own",
    )  # fmt: skip


def test_status_of_ranks_that_all_came_equally_far_gives_one_number(tmp_path: Path) -> None:
    run = run_directory.create(tmp_path / "run")
    run.directory.write_manifest(
        {"schema_version": 1, "began": "2026-01-02T03:04:05+00:00", "world_size": 2,
         "ended": "2026-01-02T03:05:05+00:00", "exit_status": 0, "window": [10, 15],
         "selection": parse_ranks("0")._replace(ranks=())._asdict()}
    )  # fmt: skip
    (headline, none) = status.render(status.look(run), everyone=False).splitlines()
    assert ("yet" in none, "status 0" in headline) == (False, True)
    for rank, steps in ((0, 200), (1, 200)):
        states.advance(str(run.rank(rank)), "counted", steps=steps)
    (_, counts) = status.render(status.look(run), everyone=False).splitlines()
    assert counts == "2 ranks: 2 counted, 200 steps"
    states.advance(str(run.rank(1)), "counted", steps=90)
    (_, counts) = status.render(status.look(run), everyone=False).splitlines()
    assert counts.split(",")[1].split() == ["90", "to", "200", "steps"]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_status_is_as_wide_as_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.chdir(tmp_path)
    reason = "nsys ended before the window began, as its disk was full: see the rank's log"
    ranks = [
        status.RankStatus(rank, True, "no report", 7, "gpu-node-0007", 3.0, reason * (rank == 1))
        for rank in range(3)
    ]
    others = [replace(ranks[0], rank=rank, chosen=False) for rank in range(3, 9)]
    window = StepWindow(10, 15)
    now = status.Status(
        Path("runs/x"), "2026-01-02T03:04:05+00:00", None, None, window, ranks + others,
        [status.WindowStatus(2, "40:45", "0,8", "torch", {0: "lost"}, {0: reason}, False, False)],
    )  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = status.render(now, everyone=False)
    assert max(map(len, shown.splitlines())) <= columns
    assert " ".join(shown.split()).count(reason) == 2
    assert ("gpu-node-0007" in shown) == (columns > 60)
    monkeypatch.delenv("COLUMNS")
    assert len(status.render(now, everyone=False).splitlines()) == 8


def test_help_has_the_verbs_in_four_groups_each_once() -> None:
    page = main.parser().format_help()
    headings = [line for line in page.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[2:] == ["run a job:", "look at a run:", "share and compare:", "set up:"]
    groups = main.grouped()
    assert sorted(verb for names in groups.values() for verb in names) == sorted({*main.verbs()})
    # to start a program, and to list what was run
    assert "run" in groups["run a job"]
    assert "runs" in groups["look at a run"]
