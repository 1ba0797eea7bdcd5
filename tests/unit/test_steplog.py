"""What is kept of a rank's steps: all near the window, summaries of the rest, at most 1 MB."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from lab.tiers import long_but

from clusterprof.agent.guard import long_steps, step_log
from clusterprof.agent.guard.step_log import BLOCK, MOST_BLOCKS, NEAR, StepLog
from clusterprof.ingest.rank_steps import read_log, read_pace, read_pauses

MS = 1_000_000
NOW = 1_780_000_000_000_000_000


def log_of(folder: Path, *, window: tuple[int, int] = (10, 20)) -> StepLog:
    log = StepLog(str(folder), window, NOW)
    log.claim()
    return log


def alike(count: int, each_ns: int = MS, begin: int = 0) -> list[tuple[int, int]]:
    return [(begin + i * each_ns, begin + (i + 1) * each_ns) for i in range(count)]


def size(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir())


def test_steps_near_the_window_are_kept_and_the_others_summarised(tmp_path: Path) -> None:
    log = log_of(tmp_path, window=(5000, 5010))
    log.add(0, alike(12_000))
    log.write(all_of_it=True)
    steps = read_log(tmp_path / "steps.csv")["step"].to_pylist()
    assert steps == list(range(5000 - NEAR, 5010 + NEAR))
    pace = read_pace(tmp_path / "pace.csv")
    assert pace["count"].sum() + len(steps) == 12_000
    assert pace["count"].max() == BLOCK
    assert (pace["first_step"][0], pace["begin_ns"][0]) == (0, NOW)
    after = pace["first_step"] > 5000
    assert pace["first_step"][after][0] == 5010 + NEAR
    assert set(pace["median_ns"]) == {MS}


def test_a_summary_has_quartiles_and_the_longest() -> None:
    steps, begin = [], 0
    for took in (4, 1, 3, 2, 100):
        steps.append((begin, begin + took))
        begin += took
    assert step_log.summary(7, steps) == (7, 5, 0, 110, 3, 2, 4, 100)


@pytest.mark.parametrize("each_ns", long_but([700 * MS], [2 * MS]))
def test_a_million_steps_and_more_of_any_length_take_at_most_a_megabyte(
    tmp_path: Path, each_ns: int
) -> None:
    log = log_of(tmp_path, window=(100_000, 102_000))
    minute = 60_000 * MS // each_ns
    first = 0
    while first < (400_000 if each_ns > 100 * MS else 2_000_000):
        log.add(first, alike(minute, each_ns, first * each_ns))
        log.write()
        first += minute
    log.write(all_of_it=True)
    assert size(tmp_path) <= 1_000_000
    pace = read_pace(tmp_path / "pace.csv")
    assert pace["count"].sum() + 2000 + 2 * NEAR == first
    assert (pace["longest_ns"] == each_ns).all()


def test_a_log_that_is_full_stays_so_and_shows_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "GRADE", 1 << 60)
    log = log_of(tmp_path, window=(1_000_000, 1_020_000))
    log.add(0, alike(BLOCK * 10))
    log.add(1_000_000, alike(20_000))
    log.blocks += [log.blocks[-1]] * (MOST_BLOCKS - len(log.blocks))
    log.write(all_of_it=True)
    before = size(tmp_path)
    assert 700_000 < before <= 1_000_000
    path = tmp_path / "steps.csv"
    when = path.stat().st_mtime_ns
    log.add(1_020_000, alike(5000))
    log.write(all_of_it=True)
    assert size(tmp_path) == before
    assert path.stat().st_mtime_ns > when


def test_slow_steps_are_told_once_a_minute(tmp_path: Path) -> None:
    log = log_of(tmp_path, window=(1000, 1010))
    log.add(0, alike(50, 1000 * MS))
    log.write()
    assert not (tmp_path / "pace.csv").exists()
    log.add(50, alike(10, 1000 * MS, 50_000 * MS))
    log.write()
    assert read_pace(tmp_path / "pace.csv")["count"].tolist() == [60]


def test_nothing_new_is_no_operation_and_no_update(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.add(0, alike(5))
    log.write(all_of_it=True)
    (tmp_path / "steps.csv").unlink()
    log.write(all_of_it=True)
    assert list(tmp_path.iterdir()) == []


def test_steps_that_were_lost_on_the_way_leave_the_numbers_right(tmp_path: Path) -> None:
    log = log_of(tmp_path, window=(5000, 5010))
    log.add(0, alike(10))
    log.add(20, alike(10))
    log.write(all_of_it=True)
    pace = read_pace(tmp_path / "pace.csv")
    assert (pace["first_step"].tolist(), pace["count"].tolist()) == ([0, 20], [10, 10])


def test_a_log_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "rank"
    folder.mkdir()
    log = log_of(folder)
    log.add(0, alike(3))
    folder.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        log.write()
    (tmp_path / "away").rename(folder)
    log.add(3, alike(2, MS, 3 * MS))
    log.write()
    assert read_log(folder / "steps.csv")["step"].to_pylist() == [0, 1, 2, 3, 4]


def test_two_processes_of_one_rank_have_a_log_each(tmp_path: Path) -> None:
    first, second = log_of(tmp_path), log_of(tmp_path)
    for log, count in ((first, 3), (second, 4)):
        log.add(0, alike(count))
        log.write()
    assert read_log(tmp_path / "steps.csv").num_rows == 3
    assert read_log(tmp_path / "steps.2.csv").num_rows == 4
    assert second.path("gc.csv").endswith("gc.2.csv")


def test_a_clock_that_is_told_later_moves_all_times(tmp_path: Path) -> None:
    log = log_of(tmp_path, window=(1000, 1010))
    log.add(0, alike(1000))
    log.write(all_of_it=True)
    log.anchor(NOW + 5)
    log.add(1000, alike(3, MS, 1000 * MS))
    log.write(all_of_it=True)
    assert read_log(tmp_path / "steps.csv")["begin_ns"][0].as_py() == NOW + 5 + NEAR * MS
    assert read_pace(tmp_path / "pace.csv")["begin_ns"][0] == NOW + 5


def lengths(*took: int) -> list[tuple[int, int]]:
    """Steps of so many ns, one after the other."""
    ends = list(accumulate(took))
    return [(end - of_step, end) for end, of_step in zip(ends, took, strict=True)]


def pauses_of(folder: Path, log: StepLog) -> list[list[int]]:
    """Step, length, usual step and what was made up for, of each long step that is kept."""
    log.write(all_of_it=True)
    rows = read_pauses(folder / "pauses.csv")
    columns = (rows["step"], rows["end_ns"] - rows["begin_ns"], rows["usual_ns"])
    return [list(map(int, row)) for row in zip(*columns, rows["made_up_ns"], strict=True)]


def test_a_step_that_is_far_longer_than_usual_is_kept_by_itself(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    took = [10 * MS] * 5000
    took[700] = took[3000] = 41 * MS
    took[2000] = 29 * MS  # less than three times as long
    log.add(0, lengths(*took))
    assert pauses_of(tmp_path, log) == [[700, 41 * MS, 10 * MS, 0], [3000, 41 * MS, 10 * MS, 0]]
    # they are in the blocks as before
    pace = read_pace(tmp_path / "pace.csv")
    assert pace["longest_ns"].max() == 41 * MS


def test_the_first_steps_are_judged_by_those_after_them(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.add(0, lengths(900 * MS, 80 * MS, *[10 * MS] * 30))
    assert pauses_of(tmp_path, log) == [[0, 900 * MS, 10 * MS, 0], [1, 80 * MS, 10 * MS, 0]]


def test_without_a_long_step_there_is_no_file_more(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.add(0, lengths(900 * MS, *[10 * MS] * 10))  # too few to tell
    log.add(11, alike(9, 800 * MS, 10_000 * MS))
    log.write(all_of_it=True)
    assert [path.name for path in tmp_path.iterdir()] == ["steps.csv"]


def test_what_the_steps_after_a_long_one_make_up_for_is_kept_with_it(tmp_path: Path) -> None:
    """A host ran ahead of its GPU, and waited for it when it read a value."""
    log = log_of(tmp_path)
    log.add(0, lengths(*[10 * MS] * 100, 100 * MS, *[MS] * 10, *[10 * MS] * 50))
    assert pauses_of(tmp_path, log) == [[100, 100 * MS, 10 * MS, 90 * MS]]


def test_the_next_long_step_takes_nothing_from_what_was_made_up_for_the_one_before(
    tmp_path: Path,
) -> None:
    log, once = log_of(tmp_path), [100 * MS, *[MS] * 10]
    log.add(0, lengths(*[10 * MS] * 100, *once, *once, *[10 * MS] * 50))
    assert [row[3] for row in pauses_of(tmp_path, log)] == [90 * MS, 90 * MS]


def test_steps_that_are_long_again_and_again_are_the_job_s_pattern(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.add(0, lengths(*([MS] * 9 + [91 * MS]) * 1000))
    assert len(pauses_of(tmp_path, log)) < 2 * long_steps.PATTERN


def test_of_many_long_steps_the_longer_ones_are_kept(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    # one in 25 steps of 4 times the usual, and one in 2,500 of 100 times
    pattern = ([MS] * 24 + [4 * MS]) * 99 + [MS] * 24 + [100 * MS]
    log.add(0, lengths(*pattern * 200))
    kept = pauses_of(tmp_path, log)
    assert len(kept) < long_steps.MOST
    assert sum(took == 100 * MS for _, took, _, _ in kept) == 200
    assert sum(took == 4 * MS for _, took, _, _ in kept) <= long_steps.GRADE
    assert size(tmp_path) < 1_000_000


def test_a_log_of_long_steps_is_bounded_whatever_they_are(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    begin, took = 0, []
    for number in range(200_000):
        took.append(MS << (number % 25 == 24) * (2 + number % 17))
        begin += took[-1]
    log.add(0, lengths(*took))
    assert len(pauses_of(tmp_path, log)) <= long_steps.MOST
    assert size(tmp_path) < 1_000_000
