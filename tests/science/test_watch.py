"""What one look at all ranks of a running job shows, and what is said of many."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lab.clock import ManualClock
from simulate import Cause, Job
from simulate.flight import leave, measured, recorded

from clusterprof import merge_run, run_directory, watched, words
from clusterprof.agent.contracts import paths, states
from clusterprof.agent.contracts.timing import REAL
from clusterprof.analysis.model import shallow
from clusterprof.arguments import parse_ranks
from clusterprof.cli import capture
from clusterprof.collect import live_windows
from clusterprof.collect.outcomes import is_looked_at
from clusterprof.launch import watch
from clusterprof.run_directory import Window
from clusterprof.watched import Row

MS = 1_000_000
JOB = Job(dp=16, ranks_per_host=16, steps=75, first_step=100, synchronous=True, host_noise_frac=0.1)
#: rank 5's host loses 5% of each step from step 150 on
LATE = replace(JOB, causes=(Cause("host", 5, 1_100_000, tuple(range(150, 200))),))
HEALTHY = {
    "one that waits for its GPU": JOB,
    "one that runs ahead": replace(JOB, synchronous=False),
    "batches of unlike lengths": replace(JOB, varied_frac=0.2),
    "hosts and GPUs that differ": replace(
        JOB, host_noise_frac=0.3, host_pace_frac=0.1, gpu_speed_frac=0.02
    ),
    "on processors": replace(JOB, on_host=True),
}


def run_of(folder: Path, job: Job) -> Window:
    run = run_directory.create(folder / "run")
    run.directory.write_manifest({"schema_version": 1, "window": [10, 15]})
    leave(run, recorded(job, durations=not job.on_host), watched=True)
    return run


def test_a_rank_that_turns_slow_by_a_twentieth_of_a_step_is_named_with_the_step(
    tmp_path: Path,
) -> None:
    (row,) = watch.look(run_of(tmp_path, LATE), 1)
    assert (row.rank, row.since_step, row.delays, row.until_step) == (5, 150, 1, 174)
    # what noise of the hosts hides of it is not lost
    assert row.lateness_ns == pytest.approx(1.0 * MS, rel=0.15)
    assert row.bound_ns < 0.1 * MS


def test_what_a_lateness_of_hosts_that_run_ahead_delays_is_how_much_longer_steps_are(
    tmp_path: Path,
) -> None:
    """By the recorders alone it may be a lead that is carried on and delays nothing."""
    ahead = replace(JOB, steps=110, synchronous=False, ahead_steps=2, launch_ns=1_100_000)
    cause = Cause("host", 5, 8 * MS, tuple(range(150, 210)))
    plain, late = (recorded(job) for job in (ahead, replace(ahead, causes=(cause,))))
    more_ns = took(late.steps[0], 150, 210) - took(plain.steps[0], 150, 210)
    run = run_directory.create(tmp_path / "run")
    run.directory.write_manifest({"schema_version": 1, "window": [10, 15]})
    leave(run, late, watched=True)
    (row,) = watch.look(run, 1)
    assert (row.rank, row.delays) == (5, watched.BY_PACE)
    assert row.since_step == pytest.approx(150, abs=2)
    assert row.lateness_ns == pytest.approx(more_ns, abs=row.bound_ns)
    assert row.lateness_ns == pytest.approx(more_ns, rel=0.05)
    # where a look begins with it, the steps of the look before tell
    (row,) = watch.look(run, 2, [Row(1, 100, row.since_step - 1, 50, MS)])
    assert (row.rank, row.delays, row.since_step) == (5, watched.BY_PACE, row.first_step)
    assert row.lateness_ns == pytest.approx(more_ns, abs=row.bound_ns)
    # of a rank that was late before, they do not: those before its lateness do, where they are kept
    before = [replace(row, wall_ns=1, first_step=100, last_step=149, until_step=149)]
    assert watch.look(run, 2, before)[0].delays == 0
    usual = {5: shallow.step_lengths(late.steps, range(101, 149)), 6: np.zeros(9)}
    (row,) = watch.look(run, 2, before, usual)
    assert (row.rank, row.delays, usual.keys()) == (5, watched.BY_PACE, {5})
    assert row.lateness_ns == pytest.approx(more_ns, abs=row.bound_ns)


@pytest.mark.parametrize(("pace_ms", "stated_ms"), [(7.4, 7.4), (8.6, 9.0), (12.0, 9.0)])
def test_a_wait_costs_no_more_than_steps_became_longer(
    monkeypatch: pytest.MonkeyPatch, pace_ms: float, stated_ms: float
) -> None:
    """Two H100s: the others waited 9.03 ms for a rank, and steps took 27.2 ms after 19.8."""
    longer = round(pace_ms * MS), MS // 4
    monkeypatch.setattr(shallow, "lengthened", lambda *_: longer)
    late = Row(1, 700, 900, 200, 27 * MS, 1, "", "0", 9 * MS, MS // 2, 1, 770, 900)
    row = watch._with_cost(late, {}, [], {})
    assert row.lateness_ns == stated_ms * MS
    assert row.delays == (watched.BY_PACE if stated_ms == pace_ms else 1)


def took(log: pa.Table, first: int, end: int) -> float:
    """The mean of some steps of a log (ns)."""
    rows = [row for row in log.to_pylist() if first <= row["step"] < end]
    return float(np.mean([row["end_ns"] - row["begin_ns"] for row in rows]))


def test_a_result_without_the_window_s_recorders_has_all_looks(tmp_path: Path) -> None:
    run = run_of(tmp_path, LATE)
    members = {"schema_version": 1, "window": [10, 15], "selection": parse_ranks("auto")._asdict(),
               "profiler": {"name": "none"}, "began": "2026-01-02T03:04:05+00:00"}  # fmt: skip
    run.directory.write_manifest(members)
    rows = [row for wall_ns in (1, 2) for row in watch.look(run, wall_ns)]
    # steps have become longer since, and what it lost then is a share of those
    rows = [*rows, replace(rows[-1], wall_ns=3, first_step=175, last_step=199, rank=-1,
                           step_ns=2 * rows[-1].step_ns)]  # fmt: skip
    watched.write(watched.path_of(run.path), rows)
    assert is_looked_at(run)
    results = merge_run.merged(run, []).results
    assert results["shallow"] is not None
    assert results["shallow"]["watch"]["looks"] == 3
    (found,) = [f for f in results["findings"] if f["code"] == "straggler.shallow"]
    assert found["ranks"] == [5]
    (late,) = watched.lateness(rows)
    share = f"({words.percent(late.lateness_ns / late.step_ns)}"
    assert share in late.sentence()
    assert share in found["summary"]


@pytest.mark.parametrize(("profiler", "steps"), [("none", 75), ("torch", 68)])
def test_the_steps_of_a_window_in_which_no_rank_is_profiled_are_compared(
    profiler: str, steps: int, tmp_path: Path
) -> None:
    """Where one is, the two in which its stop shows are left out with them."""
    run = run_of(tmp_path, LATE)
    run.directory.write_manifest(
        {"schema_version": 1, "window": [110, 115], "profiler": {"name": profiler},
         "selection": parse_ranks("0")._asdict()}
    )  # fmt: skip
    assert watch.look(run, 1)[0].steps == steps


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_job_s_ranks_delay_each_other_by_nothing(kind: str, tmp_path: Path) -> None:
    rows = watch.look(run_of(tmp_path, HEALTHY[kind]), 1)
    assert rows
    assert not [row for row in rows if row.delays]
    assert watched.lateness(rows) == []


def test_steps_that_were_looked_at_before_are_compared_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, JOB)
    (every,) = watch.look(run, 1)
    assert (every.first_step, every.last_step) == (100, 174)
    (new,) = watch.look(run, 1, [Row(0, 90, 110, 20, MS)])
    assert (new.first_step, new.last_step) == (111, 174)
    # of too few new ones the ones before are taken too
    (few,) = watch.look(run, 1, [Row(0, 90, 170, 80, MS)])
    assert (few.first_step, few.last_step) == (175 - watch.LEAST, 174)
    # a job that was started again counts from zero
    (again,) = watch.look(run, 1, [Row(0, 8_900, 9_000, 100, MS)])
    assert again.last_step == 174


def test_a_late_rank_is_waited_for_and_captured_with_a_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_windows, "is_silent", lambda run: False)
    run, clock = run_of(tmp_path, LATE), ManualClock()
    leave(run, recorded(LATE))
    table, (row,) = watched.path_of(run.path), watch.look(run, 1)
    clock.plan(60, lambda: watched.write(table, [row]))
    late = capture.comes_late(run, 0.03, 600, clock)
    assert [rank.rank for rank in late] == [5]
    assert "rank 5 (node0) is late by " in capsys.readouterr().err
    assert capture.with_peers(run, late).ranks == (5, 0)
    # none is so late when the job ends
    manifest = {"schema_version": 1, "window": [10, 15], "ended": "2026-01-02T03:05:05+00:00"}
    run.directory.write_manifest(manifest)
    assert capture.comes_late(run, 0.5, 600, clock) == []


def test_hosts_whose_clocks_are_not_known_are_not_compared_by_them(tmp_path: Path) -> None:
    """As far from a window as they have drifted: that no rank is late would be a claim."""
    apart = replace(LATE, ranks_per_host=2)
    assert watch.look(run_of(tmp_path / "gloo", replace(apart, on_host=True)), 1) == []
    # durations need no clock; whether a lead is carried on is then told by the pace
    (row,) = watch.look(run_of(tmp_path / "nccl", apart), 1)
    assert (row.rank, row.since_step, row.delays) == (5, 150, watched.BY_PACE)


#: on processors, each node's clock is off and gains on the others'
APART = replace(
    LATE, dp=8, ranks_per_host=2, on_host=True, offset_ns=(0, 0, 7, 7, -900 * MS, -900 * MS, 5, 5),
    drift_ppm=(0.0, 0.0, 20.0, 20.0, -35.0, -35.0, 4.0, 4.0),
)  # fmt: skip


def left_with(folder: Path, seconds: dict[int, tuple[float, ...]], **changed: int) -> Window:
    """A run whose nodes' clocks were measured at looks so many seconds from the steps' middle, by
    their first ranks; `changed` of what rank 4's prober read.
    """
    made = recorded(APART, durations=False)
    run = run_directory.create(folder / "run")
    run.directory.write_manifest({"schema_version": 1, "window": [10, 15]})
    leave(run, made, watched=True)
    for rank, at in seconds.items():
        document = measured(made, rank, at, **(changed if rank == 4 else {}))
        (run.rank(rank) / paths.PROBE).write_text(json.dumps(document))
    return run


def test_clocks_that_drift_apart_are_those_of_the_measurements_around_a_look(
    tmp_path: Path,
) -> None:
    times = -1_200.0, -600.0, 1.0
    (row,) = watch.look(left_with(tmp_path, dict.fromkeys((2, 4, 6), times)), 1)
    assert (row.rank, row.since_step, row.delays) == (5, 150, 1)
    assert row.lateness_ns == pytest.approx(1.0 * MS, abs=row.bound_ns)
    assert row.bound_ns < 0.4 * MS


def test_clocks_measured_long_before_a_look_or_by_a_prober_that_was_lost_tell_nothing(
    tmp_path: Path,
) -> None:
    times = -1_200.0, -600.0, 1.0
    before = left_with(tmp_path / "before", dict.fromkeys((2, 4, 6), times[:2]))
    assert watch.look(before, 1) == []
    lost = left_with(tmp_path / "lost", {2: times, 4: times[:2], 6: times})
    assert watch.look(lost, 1) == []


def test_a_clock_that_was_set_between_two_looks_tells_nothing(tmp_path: Path) -> None:
    """By no more than clocks may drift apart in that time: its own readings show it."""
    at = dict.fromkeys((2, 4, 6), (-1_200.0, -600.0, 1.0))
    assert watch.look(left_with(tmp_path, at, wall_ns=40 * MS), 1) == []


def test_dumps_that_are_damaged_make_no_row(tmp_path: Path) -> None:
    run = run_of(tmp_path, replace(JOB, steps=8))
    for rank in run.ranks():
        (run.rank(rank) / paths.WATCH).write_bytes(b"no dump")
    assert watch.look(run, 1) == []


def test_what_the_watch_shows_is_written_for_prometheus(tmp_path: Path) -> None:
    run = run_of(tmp_path, LATE)
    text = watch.gauges(run, watch.look(run, REAL.wall_ns()))
    assert 'clusterprof_rank_lateness_seconds{run="run",rank="5",host="node0"} 0.00' in text
    assert 'clusterprof_look_last_step{run="run"} 174' in text
    assert 'clusterprof_hanging_ranks{run="run"} 0' in text


def test_a_file_that_cannot_be_written_hides_no_rank_that_is_late_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, LATE)
    monkeypatch.setattr("clusterprof.priority.step_aside", lambda: None)

    class Job(ManualClock):
        """In each of its sleeps all ranks save their recorders; it ends at the sixth."""

        sleeps = 0

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self.sleeps += 1
            for rank in run.ranks():
                os.utime(run.rank(rank) / paths.WATCH, ns=(self.sleeps, self.sleeps))
            if self.sleeps == 6:
                raise EOFError

    with pytest.raises(EOFError):
        watch.watch_lateness(run, 600, tmp_path / "none" / "metrics.prom", Job(), shows=True)
    text = capsys.readouterr().err
    # the command that captures it stands below each look
    assert text.count("--ranks late --wait\n") == 2
    assert "rank 5 (node0) is late by " in text
    assert text.count("metrics.prom cannot be written: No such file or directory") == 1
    assert len(watched.read(watched.path_of(run.directory.path))) == 2


def test_ranks_that_hang_are_written_for_prometheus_though_they_save_no_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, metrics = run_of(tmp_path, LATE), tmp_path / "metrics.prom"
    monkeypatch.setattr("clusterprof.priority.step_aside", lambda: None)
    hangs = {"step": 175, "since_ns": 1, "until_ns": None, "line": None, "no_dump": None}

    class Job(ManualClock):
        """All ranks hang once they have been looked at, for a while."""

        sleeps = 0

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            self.sleeps += metrics.exists()
            if self.sleeps == 1:
                for rank in run.ranks():
                    states.advance(str(run.rank(rank)), None, hangs=hangs)
            if metrics.exists() and 'hanging_ranks{run="run"} 16' in metrics.read_text():
                raise EOFError
            assert self.sleeps < 1_000

    with pytest.raises(EOFError):
        watch.watch_lateness(run, 600, metrics, Job())
    assert 'clusterprof_hanging_ranks{run="run"} 16' in metrics.read_text()
    assert 'clusterprof_look_last_step{run="run"} 174' in metrics.read_text()


def test_why_no_rank_saves_its_recorder_is_said_once_while_the_job_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_directory.create(tmp_path / "run")
    monkeypatch.setattr("clusterprof.priority.step_aside", lambda: None)
    for rank in range(4):
        states.advance(str(run.rank(rank)), "counting", flight="it is off")

    class Job(ManualClock):
        """Ends after an hour."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if sum(self.slept) > 3600:
                raise EOFError

    with pytest.raises(EOFError):
        watch.watch_lateness(run, 600, None, Job(), shows=True)
    text = capsys.readouterr().err
    assert text == "clusterprof: who is late cannot be determined so far: rank 0: it is off\n"
