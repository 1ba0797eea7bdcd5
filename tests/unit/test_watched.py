"""From looks to who was late from when until when, and what a look changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof import watched
from clusterprof.results import ShallowResults, Suspect
from clusterprof.watched import Row

MS = 1_000_000
S = 1_000_000_000


def look(number: int, *late: Row) -> list[Row]:
    """The look at the hundred steps of 10 ms from `number` hundred on, one a second."""
    first = 100 * number
    of_look = {
        "wall_ns": (number + 1) * S, "first_step": first, "last_step": first + 99, "steps": 100,
        "step_ns": 10 * MS,
    }  # fmt: skip
    rows = [
        replace(
            row, **of_look, since_step=max(row.since_step, first),
            until_step=min(row.until_step or first + 99, first + 99),
        )
        for row in late
    ]  # fmt: skip
    return rows or [Row(**of_look)]


def row(rank: int, ms: float, *, since: int = 0, until: int = 0, delays: int = 1) -> Row:
    """A late rank; the look's own members are filled in."""
    return Row(0, 0, 0, 0, 0, rank, "node37", "dp 0", int(ms * MS), MS // 2, delays, since, until)


def test_a_rank_that_is_late_in_looks_in_a_row_is_late_once_with_the_mean_of_its_steps() -> None:
    rows = [*look(0), *look(1, row(3, 4.0, since=150)), *look(2, row(3, 8.0)), *look(3)]
    (late,) = watched.lateness(rows)
    assert (late.rank, late.since_step, late.until_step, late.looks) == (3, 150, 300, 2)
    # fifty steps by 4 ms and a hundred by 8
    assert late.lateness_ns == pytest.approx(20 / 3 * MS)
    assert late.bound_ns < MS // 2
    assert late.since_ns == 2 * S - 50 * 10 * MS
    assert "rank 3 (node37) was late by 6.67 ±0.38 ms per step (67% of it)" in late.sentence()


def test_steps_that_several_looks_have_in_common_tell_once() -> None:
    """A look of few new steps has some of those before it: nothing becomes usual by that."""
    of_look = replace(row(3, 4.0), first_step=0, steps=20, step_ns=10 * MS, since_step=15)
    rows = [
        replace(of_look, wall_ns=last * S, last_step=last, until_step=last) for last in (18, 20, 22)
    ]
    (late,) = watched.lateness(rows)
    assert (late.looks, late.steps, late.is_chronic) == (1, 8, False)
    assert MS / 2 > late.bound_ns > 0.85 * MS / 2
    rows += [replace(rows[-1], wall_ns=n * S, last_step=n, until_step=n, since_step=n - 4)
             for n in (27, 32)]  # fmt: skip
    (late,) = watched.lateness(rows)
    assert (late.looks, late.steps, late.is_chronic) == (3, 18, True)


def test_lateness_that_ends_within_a_look_ends_there_and_may_come_back() -> None:
    rows = [*look(0, row(3, 4.0, until=40)), *look(1, row(3, 4.0)), *look(2, row(5, 4.0))]
    assert [(late.rank, late.since_step, late.until_step) for late in watched.lateness(rows)] == [
        (3, 0, 41), (3, 100, 200), (5, 200, None),
    ]  # fmt: skip


def test_a_rank_that_is_late_again_and_again_is_one_suspect_with_what_it_costs_in_the_mean() -> (
    None
):
    rows = [entry for n in range(0, 300, 3)
            for entry in (*look(n, row(3, 6.0)), *look(n + 1), *look(n + 2))]  # fmt: skip
    (suspect,) = watched.over_the_run(SHALLOW, rows)["suspects"]
    assert (suspect["rank"], suspect["since_step"]) == (3, None)
    assert suspect["lateness_ns"] == pytest.approx(2 * MS, rel=0.01)


def test_a_look_says_what_it_changes_and_nothing_else() -> None:
    looks = [look(0), look(1, row(3, 4.0)), look(2, row(3, 4.0)), look(3, row(3, 4.0)),
             look(4, row(3, 4.0)), look(5), look(6, row(3, 4.0)), look(7), look(8)]  # fmt: skip
    lines_of, rows = [], list[Row]()
    for rows_of_look in looks:
        before, rows = watched.lateness(rows), [*rows, *rows_of_look]
        lines_of.append(watched.news(before, watched.lateness(rows)))
    # one look in which noise hides it says nothing
    assert [len(lines) for lines in lines_of] == [0, 1, 0, 1, 0, 0, 0, 0, 1]
    assert lines_of[3][0].endswith("; chronic")
    assert "was late" in lines_of[8][0]
    assert "until step 700" in lines_of[8][0]


def test_looks_that_do_not_tell_whether_it_delays_name_no_rank_and_go_on_with_one_that_does() -> (
    None
):
    unknown = row(3, 9.0, delays=0)
    assert watched.lateness([*look(0, unknown), *look(1, unknown)]) == []
    rows = [*look(0, unknown), *look(1, row(3, 4.0, since=150)), *look(2, unknown), *look(3)]
    (late,) = watched.lateness(rows)
    assert (late.since_step, late.until_step, late.looks) == (150, 300, 2)
    assert late.lateness_ns == 4 * MS


def test_a_rank_that_was_late_in_the_first_step_that_was_compared_was_so_from_the_start() -> None:
    first, later = (watched.lateness([*look(0, row(3, 4.0, since=since))])[0] for since in (0, 50))
    assert first.sentence().endswith("(40% of it) from the start")
    assert later.sentence().endswith("(40% of it) since step 50")
    (ended,) = watched.lateness([*look(0, row(3, 4.0, until=40))])
    assert ended.sentence().endswith("from the start, until step 41")


SHALLOW: ShallowResults = {
    "ranks": [0, 1], "missing": [], "steps": [3, 4], "step_ns": 10 * MS, "by": "durations",
    "suspects": [], "nodes": [], "groups": [], "stages": [],
}  # fmt: skip


def test_the_looks_join_what_the_window_shows() -> None:
    assert watched.over_the_run(SHALLOW, []) == SHALLOW
    joined = watched.over_the_run(SHALLOW, [*look(0), *look(1, row(3, 4.0, since=150))])
    assert joined["watch"] == {
        "looks": 2,
        "first_step": 0,
        "last_step": 199,
        "steps": 200,
        "step_ns": 10 * MS,
        "late": [{"rank": 3, "steps": 50}],
    }
    (suspect,) = joined["suspects"]
    assert (suspect["rank"], suspect["since_step"], suspect["until_step"]) == (3, 150, None)
    assert suspect["step_ns"] == 10 * MS
    assert (suspect["looked_steps"], suspect["by_pace"]) == (50, False)


@pytest.mark.parametrize(
    ("delays", "looks_of", "until"),
    [(False, 3, []), (True, 3, []), (False, 0, [None]), (True, 0, [None])],
)
def test_many_looks_overrule_the_few_steps_of_a_window(
    delays: bool, looks_of: int, until: list[int | None]
) -> None:
    late: Suspect = {
        "rank": 3, "lateness_ns": 5 * MS, "bound_ns": MS, "group": "dp", "host": None,
        "since_step": None, "until_step": None, "late_steps": None, "delays": delays, "line": None,
    }  # fmt: skip
    window: ShallowResults = {**SHALLOW, "suspects": [late], "steps": [*range(110, 120)]}
    rows = [row for number in range(looks_of) for row in look(number)]
    joined = watched.over_the_run(window, rows)
    assert [suspect["until_step"] for suspect in joined["suspects"]] == until


def test_a_rank_that_was_late_in_the_window_is_late_no_longer_than_the_looks_show() -> None:
    (late,) = watched.lateness(look(0, row(3, 4.0)))
    in_window: ShallowResults = {**SHALLOW, "steps": [10, 14], "suspects": [late.suspect(0)]}
    rows = [*look(0, row(3, 4.0, until=40)), *look(1)]
    assert [s["until_step"] for s in watched.over_the_run(in_window, rows)["suspects"]] == [40]
    # what it was at another time is another lateness
    rows = [*look(1, row(3, 4.0, since=110, until=190)), *look(2)]
    assert len(watched.over_the_run(in_window, [rows[0]])["suspects"]) == 2
    # of which looks at many more steps show nothing
    assert len(watched.over_the_run(in_window, [*look(0), *rows])["suspects"]) == 1


def test_a_lateness_begins_where_a_look_showed_it_that_did_not_tell_its_cost() -> None:
    rows = [*look(0, row(3, 4.0, since=60, delays=0)), *look(1, row(3, 4.0))]
    (late,) = watched.lateness(rows)
    assert (late.since_step, late.steps) == (60, 100)
    # not where a look between shows the rank on time, or its lateness had ended
    (late,) = watched.lateness([*rows[:1], *look(1), *look(2, row(3, 4.0))])
    assert late.since_step == 200
    (late,) = watched.lateness([*look(0, row(3, 4.0, since=10, until=60, delays=0)), rows[1]])
    assert late.since_step == 100


def test_late_steps_that_two_looks_share_count_once_wherever_the_second_ends() -> None:
    first = row(3, 4.0)
    rows = [replace(first, first_step=0, last_step=99, steps=100, since_step=50, until_step=until)
            for until in (99, 95)]  # fmt: skip
    assert watched._apart(rows) == 1
    assert watched._once(rows) == 50
    restarted = [rows[0], replace(rows[1], last_step=90, since_step=10, until_step=59)]
    assert watched._apart(restarted) == 2
    assert watched._once(restarted) == 100


def test_what_was_written_is_read_and_what_is_no_row_is_left_out(tmp_path: Path) -> None:
    path, rows = tmp_path / "watched.csv", [*look(0), *look(1, row(3, 4.0))]
    assert watched.read(path) == []
    watched.write(path, rows)
    assert watched.read(path) == rows
    path.write_text(path.read_text() + "1,2\nx,,,,,,,,,,,,\n\x00\n")
    assert watched.read(path) == rows


@pytest.mark.parametrize(
    "damage",
    [
        {"steps": 0},
        {"first_step": 300},
        {"until_step": 99},
        {"since_step": 10},
        {"wall_ns": 1 << 63},
        {"lateness_ns": -1},
        {"step_ns": 0},
        {"rank": 1 << 40},
    ],
    ids=str,
)
def test_a_row_that_no_look_can_have_is_left_out(tmp_path: Path, damage: dict[str, int]) -> None:
    path, (good,) = tmp_path / "watched.csv", look(1, row(3, 4.0))
    watched.write(path, [good, replace(good, **damage)])  # type: ignore[arg-type]
    assert watched.read(path) == [good]


def test_a_row_of_many_steps_is_counted_at_once_and_a_field_too_long_ends_the_table(
    tmp_path: Path,
) -> None:
    path, (most,) = tmp_path / "watched.csv", look(0, row(3, 4.0))
    most = replace(most, last_step=(1 << 53) - 1)
    watched.write(path, [most, replace(most, wall_ns=5, host="x" * 200_000)])
    assert watched.read(path) == [most]
    watch = watched.over_the_run(SHALLOW, [most, replace(most, first_step=50)])["watch"]
    assert watch["steps"] == 1 << 53


def test_ranks_of_one_node_are_one_line_with_the_latest_first() -> None:
    own = replace(row(40, 5.0), host="node5")
    late = [row(296, 4.0), own, row(301, 8.0), row(297, 4.0)]
    lines = watched.news([], watched.lateness(look(0, *late)))
    assert [line.split(" per step")[0] for line in lines] == [
        "rank 40 (node5) is late by 5.00 ±0.50 ms",
        "rank 301 (node37) is late by 8.00 ±0.50 ms",
    ]
    assert lines[1].endswith("; ranks 296–297 of this node are late as well")


def test_ranks_of_unknown_nodes_are_one_line_for_each_group() -> None:
    late = [replace(row(rank, 4.0), host="", group=f"tp {rank // 4}") for rank in (0, 1, 5)]
    lines = watched.news([], watched.lateness(look(0, *late)))
    assert [line.endswith("; rank 1 of group tp 0 is late as well") for line in lines] == [
        True,
        False,
    ]


def test_a_rank_that_joins_its_node_later_is_said_alone() -> None:
    rows = look(0, row(3, 4.0))
    before = watched.lateness(rows)
    (line,) = watched.news(before, watched.lateness([*rows, *look(1, row(3, 4.0), row(4, 9.0))]))
    assert line.startswith("rank 4 (node37)")
    assert "as well" not in line
