"""From the long steps of ranks to the pauses of the run: what is regular, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from clusterprof import pauses
from clusterprof.agent.guard.long_steps import GRADE
from clusterprof.ingest.rank_steps import steps_table
from clusterprof.ingest.recording import fill
from clusterprof.pauses import Attempt, Pause, RankLog, Timeout
from clusterprof.results import PauseEntry, PausesResults
from clusterprof.tables import RankTables, ReportInfo, empty

MS = 1_000_000
S = 1_000_000_000
NOW = 1_780_000_000 * S
#: the usual step
STEP_NS = 100 * MS
NAMES = ("step", "begin_ns", "end_ns", "usual_ns", "made_up_ns")


def log(rank: int, *long: tuple[int, float], steps: int = 2000, made_up_s: float = 0) -> RankLog:
    """A rank's log of so many steps, of which those at these numbers take so many seconds more."""
    rows, past_ns = list[tuple[int, ...]](), 0
    for step, excess_s in sorted(long):
        begin = NOW + step * STEP_NS + past_ns
        past_ns += int(excess_s * S)
        rows.append((step, begin, NOW + (step + 1) * STEP_NS + past_ns, STEP_NS,
                     int(made_up_s * S)))  # fmt: skip
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    end = NOW + steps * STEP_NS + past_ns
    return RankLog(rank, NOW, end, dict(zip(NAMES, columns, strict=True)))


def entries_of(*logs: RankLog, disturbed: Sequence[range] = ()) -> list[PauseEntry]:
    results = pauses.pauses_of([Attempt(1, logs, disturbed)], len(logs))
    return results["entries"] if results else []


def every(step: int, excess_s: float, until: int = 2000) -> list[tuple[int, float]]:
    return [(number, excess_s) for number in range(step, until, step)]


def test_a_checkpoint_is_named_by_its_steps_with_its_length_and_cost() -> None:
    (entry,) = entries_of(*(log(rank, *every(200, 4.0)) for rank in range(4)))
    assert (entry["kind"], entry["count"], entry["every_steps"]) == ("regular", 9, 200)
    assert (entry["first_step"], entry["last_step"], entry["ranks"]) == (200, 1800, [])
    assert entry["mean_ns"] == entry["least_ns"] == entry["most_ns"] == 4 * S
    # 36 s of 236, on four ranks
    assert entry["share_of_run"] == pytest.approx(36 / 236)
    assert entry["gpu_ns"] == 4 * 36 * S
    assert entry["chance"] is not None
    assert entry["chance"] < 1e-9
    assert entry["first_ns"] == NOW + 20 * S
    assert pauses.sentence(entry) == (
        "every 200 steps (a checkpoint or an evaluation): 9 pauses, mean 4.00 s, steps 200 to "
        "1800; 15% of the run, 0.04 rank hours"
    )


def test_a_checkpoint_after_a_time_is_named_by_that() -> None:
    rng, at_s, long = np.random.default_rng(1), 0.0, list[tuple[int, float]]()
    lengths = STEP_NS / S * rng.lognormal(0, 0.3, 8000)
    begins = list[int]()
    last_s = 0.0
    for step, length in enumerate(lengths):
        begins.append(int(at_s * S))
        if at_s - last_s >= 60:
            last_s = at_s
            length += 3
            long.append((step, 3.0))
        at_s += length
    table = np.array(
        [(step, NOW + begins[step], NOW + begins[step + 1], STEP_NS, 0) for step, _ in long]
    )
    rank = RankLog(0, NOW, NOW + int(at_s * S), dict(zip(NAMES, table.T, strict=True)))
    (entry,) = entries_of(rank)
    assert entry["every_steps"] is None
    assert entry["every_ns"] == pytest.approx(60 * S, rel=0.01)
    assert "every 60." in pauses.what(entry)


def test_two_series_that_meet_are_told_apart_by_their_length() -> None:
    both = dict(every(100, 1.0))
    for step, excess_s in every(500, 20.0):
        both[step] = both.get(step, 0) + excess_s
    entries = entries_of(log(0, *both.items()))
    found = [(e["every_steps"], e["count"], e["mean_ns"], e["most_ns"]) for e in entries]
    assert sorted(found, key=str) == [(100, 19, S, S), (500, 3, 20 * S, 20 * S)]


def test_one_pause_of_a_series_that_took_longer_stays_in_it() -> None:
    steps = dict(every(200, 4.0))
    steps[1000] = 30.0
    (entry,) = entries_of(log(0, *steps.items()))
    assert (entry["count"], entry["least_ns"], entry["most_ns"]) == (9, 4 * S, 30 * S)
    assert entry["gpu_ns"] == (8 * 4 + 30) * S


def test_single_pauses_are_no_series_and_one_missing_does_not_end_one() -> None:
    rest = [pair for pair in every(100, 2.0) if pair[0] not in (200, 900)]
    series, single = sorted(
        entries_of(log(0, *rest, (333, 1.0), (1234, 3.0))), key=lambda entry: entry["kind"]
    )
    assert (series["every_steps"], series["count"]) == (100, 17)
    assert (single["kind"], single["count"], single["steps"]) == ("single", 2, [333, 1234])


def test_the_job_s_first_steps_are_its_start() -> None:
    (entry,) = entries_of(*(log(rank, (0, 30.0), (1, 5.0), (3, 1.0)) for rank in range(2)))
    assert (entry["kind"], entry["first_step"], entry["last_step"]) == ("start", 0, 3)
    assert entry["mean_ns"] == 36 * S
    assert pauses.what(entry) == "start: compilation and warm-up, 4 steps"


def test_a_pause_of_few_ranks_is_theirs_and_costs_them_alone() -> None:
    logs = [log(rank, *every(200, 4.0), *([(777, 2.0)] if rank == 3 else [])) for rank in range(4)]
    single = next(entry for entry in entries_of(*logs) if entry["kind"] == "single")
    assert (single["ranks"], single["gpu_ns"]) == ([3], 2 * S)
    assert pauses.what(single) == "single on rank 3"


def test_ranks_that_have_a_pause_in_neighbouring_steps_have_one() -> None:
    """The ranks that wait for it in a collective may end their step just before."""
    later = [(step + 1, length) for step, length in every(200, 4.0)]
    (entry,) = entries_of(log(0, *every(200, 4.0)), log(1, *later), log(2, *later))
    assert (entry["count"], entry["every_steps"], entry["ranks"]) == (9, 200, [])


def test_what_the_steps_after_it_make_up_for_is_no_pause() -> None:
    assert entries_of(log(0, *every(200, 4.0), made_up_s=3.9)) == []
    (entry,) = entries_of(log(0, *every(200, 4.0), made_up_s=1.0))
    assert entry["mean_ns"] == 3 * S


def test_the_steps_of_a_window_are_the_profiler_s() -> None:
    assert entries_of(log(0, (700, 3.0), (705, 2.0)), disturbed=[range(700, 707)]) == []
    (entry,) = entries_of(log(0, *every(100, 2.0)), disturbed=[range(898, 905)])
    assert (entry["count"], entry["every_steps"]) == (18, 100)
    # a pause that they hide is not one that lacks
    (hidden,) = entries_of(log(0, *every(100, 2.0, 700)), disturbed=[range(298, 305)])
    (whole,) = entries_of(log(0, *every(100, 2.0, 600)))
    assert (hidden["count"], hidden["every_steps"]) == (5, 100)
    assert hidden["chance"] is not None
    assert hidden["chance"] == pytest.approx(whole["chance"], rel=0.5)
    lacking = [pair for pair in every(100, 2.0, 700) if pair[0] != 300]
    (entry,) = entries_of(log(0, *lacking))
    assert entry["chance"] is not None
    assert entry["chance"] > 4 * hidden["chance"]


def test_a_restart_lasts_from_the_last_step_to_the_next_attempt_s_first() -> None:
    first = Attempt(1, [log(0, *every(100, 2.0, 1000), steps=1000)], [])
    begin = log(0, *every(100, 2.0), steps=2000)
    shift = 300 * S
    columns = {
        name: values + shift if name in ("begin_ns", "end_ns") else values
        for name, values in begin.pauses.items()
    }
    second = Attempt(2, [RankLog(0, NOW + shift, begin.end_ns + shift, columns)], [])
    results = pauses.pauses_of([first, second], 8)
    assert results is not None
    assert [(e["kind"], e["attempt"], e["count"]) for e in results["entries"]] == [
        ("regular", 1, 9), ("restart", 2, 1), ("regular", 2, 19),
    ]  # fmt: skip
    restart = results["entries"][1]
    assert restart["mean_ns"] == 300 * S - (1000 * STEP_NS + 18 * S)
    assert restart["gpu_ns"] == 8 * restart["mean_ns"]
    assert pauses.what(restart) == "restart after attempt 1"


@pytest.mark.parametrize(
    ("recorded_ns", "backends", "timeout"),
    [
        (60 * S, {"nccl"}, Timeout(60 * S, False)),
        (None, {"gloo"}, Timeout(1800 * S, True)),
        (None, {"gloo", "nccl"}, Timeout(600 * S, True)),
        (None, set(), Timeout(600 * S, True)),
    ],
)
def test_a_timeout_is_the_recorded_one_or_torch_s_own(
    recorded_ns: int | None, backends: set[str], timeout: Timeout
) -> None:
    assert pauses.timeout_of(recorded_ns, backends) == timeout


def warned(logs: Sequence[RankLog], timeout: Timeout | None) -> list[str]:
    results = pauses.pauses_of([Attempt(1, logs, [])], len(logs), timeout)
    assert results is not None
    return pauses.warnings(results)


def test_a_pause_near_the_timeout_of_a_process_group_is_warned_of() -> None:
    logs = [log(rank, (0, 500.0), *every(200, 35.0)) for rank in range(2)]
    (line,) = warned(logs, Timeout(60 * S, False))
    assert line.startswith(
        "a pause of 35.1 s (every 200 steps (a checkpoint or an evaluation)) lasts more than half "
        "of the 60.0 s after which a process group gives up (its timeout)"
    )
    assert "assumed" not in line
    (line,) = warned(logs, Timeout(60 * S, True))
    assert "assumed" in line
    assert warned(logs, Timeout(600 * S, True)) == []
    assert warned(logs, None) == []
    # one rank alone waits for none
    assert warned(logs[:1], Timeout(60 * S, False)) == []


def test_a_log_that_keeps_longer_ones_only_says_from_where_on() -> None:
    rng = np.random.default_rng(0)
    steps = np.sort(rng.choice(np.arange(100, 100_000, 3), GRADE + 10, replace=False)).tolist()
    (line,) = warned([log(0, *((step, 1.0) for step in steps), steps=100_000)], None)
    assert f"until step {steps[GRADE - 1]}" in line


def test_without_a_pause_there_is_nothing_to_tell() -> None:
    assert pauses.pauses_of([Attempt(1, [log(0)], [])], 1) is None
    assert pauses.pauses_of([Attempt(1, [], [])], 1) is None
    assert pauses.pauses_of([], 1) is None


def random_pauses(rng: np.random.Generator) -> list[Pause]:
    """Pauses at random steps and times: of all kinds of jobs, and some of them in bursts."""
    steps = int(rng.integers(200, 100_000))
    at: npt.NDArray[np.int64] = rng.integers(20, steps, int(rng.integers(2, 80)))
    if rng.random() < 0.3:  # what disturbs a job does so again soon
        at = np.concatenate([at, at + rng.geometric(1 / 30, len(at))])
    at = np.unique(at)
    at = at[np.diff(at, prepend=-9) > 1]
    lengths = (rng.lognormal(0, 1, len(at)) * S).astype(np.int64)
    begins = NOW + at * STEP_NS + np.cumsum(lengths)
    return [
        Pause(1, step, step, begin, length, STEP_NS, length + STEP_NS, (0,), of_job=True)
        for step, begin, length in zip(at.tolist(), begins.tolist(), lengths.tolist(), strict=True)
    ]


def test_pauses_at_random_are_no_series() -> None:
    """Of so many jobs one may have one by the chance that is stated."""
    jobs = (random_pauses(np.random.default_rng(seed)) for seed in range(400))
    found = [regular for job in jobs for regular, _ in pauses.series(job)]
    assert len(found) <= 1, found


def test_what_is_told_adds_up_to_all_pauses_whatever_they_are() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        at = {int(step): float(rng.exponential(3)) + 0.3 for step in rng.integers(20, 9000, 40)}
        for period, length in ((300, 2.0), (900, 7.0)):
            for step in range(period, 9000, period):
                at[step] = at.get(step, 0.0) + length * rng.lognormal(0, 0.2)
        rank = log(0, *at.items(), steps=9000)
        results: PausesResults | None = pauses.pauses_of([Attempt(1, [rank], [])], 1)
        assert results is not None
        total = sum(entry["gpu_ns"] for entry in results["entries"])
        assert total == pytest.approx(sum(at.values()) * S, rel=1e-6)
        assert sum(e["every_steps"] == 300 for e in results["entries"]) == 1, seed


def captured(rank: int, first: int, *calls: tuple[str, int, float, float]) -> RankTables:
    """The report of five steps from `first` on, the third of which lasts 4 s more; of calls the
    name, the step, when in it they begin and how long they last (s).
    """
    numbers = np.arange(first, first + 5)
    ends = NOW + np.cumsum([STEP_NS, STEP_NS, STEP_NS + 4 * S, STEP_NS, STEP_NS])
    begins = np.append(NOW, ends[:-1])
    rows = [
        (
            int(begins[step - first] + at_s * S),
            int(begins[step - first] + (at_s + took_s) * S),
            name,
        )
        for name, step, at_s, took_s in calls
    ]
    starts, until, names = zip(*rows, strict=True) if rows else ((), (), ())
    columns = {
        "start_ns": np.array(starts, np.int64), "end_ns": np.array(until, np.int64),
        "kind": "range", "name": pa.array(names, pa.string()),
        "thread": np.ones(len(rows), np.int64),
    }  # fmt: skip
    info = ReportInfo(source=Path("x"), profiler="nsys", rank=rank)
    return RankTables(
        info, empty("activity"), empty("collective_calls"),
        steps_table(numbers, begins, ends, "steplog"), fill("host_calls", len(rows), columns),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "calls", "name"),
    [
        (398, [("train", 400, 0.0, 4.1), ("save_checkpoint", 400, 0.1, 3.9)], "save_checkpoint"),
        (398, [("evaluate", 400, 0.1, 3.0), ("save", 400, 3.2, 0.5)], "evaluate"),
        (398, [("garbage collection (generation 2)", 400, 0.0, 3.9)],
         "garbage collection (generation 2)"),
        # what a rank waits in is no cause, nor is what is short or in another step
        (398, [("DistributedDataParallel.forward", 400, 0.1, 3.9)], ""),
        (398, [("save_checkpoint", 400, 0.1, 1.0)], ""),
        (398, [("save_checkpoint", 399, 0.0, 0.05)], ""),
        (398, [], ""),
        # the step that lasts long is none of the series
        (450, [("save_checkpoint", 452, 0.1, 3.9)], ""),
    ],
)  # fmt: skip
def test_a_series_has_the_name_that_a_capture_of_one_of_its_pauses_has(
    first: int, calls: list[tuple[str, int, float, float]], name: str
) -> None:
    logs = [log(rank, *every(200, 4.0)) for rank in range(2)]
    window = Attempt(1, logs, [range(first, first + 7)])
    results = pauses.pauses_of([window], 2)
    ranks = [captured(1, first), captured(0, first, *calls)]
    with_names = pauses.named(results, ranks, attempt=1)
    assert with_names is not None
    (entry,) = with_names["entries"]
    assert entry["name"] == name
    if name:
        assert f"every 200 steps ({name})" in pauses.sentence(entry)
    # of another attempt the window tells nothing, and without a run there is nothing to name
    assert pauses.named(results, ranks, attempt=2) == results
    assert pauses.named(None, ranks, attempt=1) is None


def test_rows_that_no_log_of_ours_has_are_left_out() -> None:
    far, farthest = 1 << 61, (1 << 53) - 1
    table = np.array(
        [(-4, 5, 9, 1, 0), (100, 0, far, 1, 0), (200, -far, 9, 1, 0), (300, 5, 9, 0, 0),
         (400, 5, 9, 1, -far), (far, NOW, NOW + 9 * S, S, 0), (farthest, NOW, NOW + 9 * S, S, 0)]
    )  # fmt: skip
    rank = RankLog(0, NOW, NOW + 100 * S, dict(zip(NAMES, table.T, strict=True)))
    (entry,) = entries_of(rank)
    assert (entry["kind"], entry["steps"]) == ("single", [farthest])


def test_rows_that_cannot_be_are_no_pauses() -> None:
    begin = np.array([5, 6, 6, 7, -9]) * S
    step = np.array([50, 60, 60, 70, 40])
    end = begin + np.array([1, 1, 1, 4_000_000, 1]) * S
    rows = {"step": step, "begin_ns": begin, "end_ns": end}
    kept = pauses.possible(rows, 100 * S)
    assert kept["step"].tolist() == [50, 60]
