"""Ranks that do not count their steps alike: one that takes warm-up steps of its own first."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from strangers import trace

from clusterprof.align.match import numbered
from clusterprof.errors import MergeError
from clusterprof.ingest import gather
from clusterprof.results import Results
from clusterprof.study import Study, study
from clusterprof.tables import RankTables

MS = 1_000_000
FIRST = 14


def window(tables: RankTables, first: int, steps: int, ahead: int = 0) -> RankTables:
    """The report of a capture from step `first` on, by a rank that counts `ahead` of that."""
    log = tables.steps
    inside = pc.and_(pc.greater_equal(log["step"], first), pc.less(log["step"], first + steps))
    log = log.filter(inside)
    begin, end = log["begin_ns"][0].as_py(), log["end_ns"][-1].as_py()

    def kept(table: pa.Table, column: str) -> pa.Table:
        times = table[column]
        chosen = pc.and_(pc.greater_equal(times, begin), pc.less(times, end))
        return table.filter(pc.fill_null(chosen, False))

    number = pa.array(log["step"].to_numpy() + ahead, pa.int64())
    return replace(
        tables,
        activity=kept(tables.activity, "launch_start_ns"),
        collective_calls=kept(tables.collective_calls, "issue_start_ns"),
        host_calls=kept(tables.host_calls, "start_ns"),
        steps=log.set_column(0, log.schema.field(0), number),
        info=replace(tables.info, begin_ns=begin, end_ns=end),
    )


def captured(steps: int, ahead: int, odd: int = 3) -> Study:
    """Four ranks, of which rank 2's host is late, and `odd` took `ahead` steps of its own first."""
    job = Job(steps=20, causes=(Cause("host", 2, 20 * MS),))
    made = [
        window(t, FIRST - ahead, steps, ahead) if t.rank == odd else window(t, FIRST, steps)
        for t in simulate(job)[0]
    ]
    return study(made)


def counted(job: Job, ahead: Sequence[int]) -> Study:
    """A job whose hosts share no name, and whose ranks count so many steps ahead of the first."""
    ranks, _ = simulate(replace(job, ranks_per_host=1, causes=(Cause("host", 2, 20 * MS),)))
    return study([window(t, 6, job.steps, by) for t, by in zip(ranks, ahead, strict=True)])


def matched(found: Study) -> set[tuple[int, ...]]:
    """The ranks that the calls of a study were matched on, together."""
    ranks: dict[int, list[int]] = {}
    for row in found.collectives.select(["collective", "rank"]).to_pylist():
        ranks.setdefault(row["collective"], []).append(row["rank"])
    return {tuple(sorted(each)) for each in ranks.values()}


def renumbered(results: Results) -> list[int]:
    """The numbers in the warning about a rank whose steps were renumbered; none without one."""
    found = [each for each in results["warnings"] if "renumbered" in each]
    assert len(found) <= 1
    return [int(number) for each in found for number in re.findall(r"\d+", each)]


#: every step of it takes as long as the others
REGULAR = Job(steps=8, noise_frac=0.0, phase_ns=300, tear_ns=0)


@pytest.mark.parametrize("odd", long_but([3], [0]))
def test_steps_are_aligned_by_the_collectives_where_ranks_count_them_otherwise(odd: int) -> None:
    results = captured(12, 6, odd).results
    worst = results["findings"][0]
    assert (worst["code"], worst["rank"]) == ("straggler.host", 2)
    # what only one of the windows holds is no evidence
    assert len(worst["steps"]) == 5
    assert max(each["uncertainty_ns"] for each in results["clock"]["ranks"]) < MS
    # the rank, by how much it is ahead, its first step and theirs, and the steps in common
    assert renumbered(results)[:5] == [odd, 6, FIRST, FIRST - 6, 6]


@pytest.mark.parametrize("odd", long_but([0], [3]))
def test_a_window_without_a_step_in_common_is_named(odd: int) -> None:
    results = captured(6, 6, odd).results
    # the last one is the rank that it has no step in common with
    assert renumbered(results) == [odd, 6, FIRST, FIRST - 6, 0 if odd else 1]
    # the others are compared with each other
    worst = results["findings"][0]
    assert (worst["code"], worst["rank"]) == ("straggler.host", 2)
    assert results["collectives"]["matched"] > 30


def test_ranks_that_count_alike_keep_their_numbers() -> None:
    results = captured(8, 0).results
    assert [each["step"] for each in results["steps"]] == list(range(FIRST, FIRST + 8))
    assert renumbered(results) == []


@pytest.mark.parametrize("ahead", [(0, 1, 2, 3), (0, 0, 0, 90)])
def test_where_clocks_agree_but_for_whole_steps_it_is_the_numbers_that_differ(
    ahead: tuple[int, ...],
) -> None:
    results = counted(REGULAR, ahead).results
    assert len([each for each in results["warnings"] if "renumbered" in each]) == (
        len({*ahead}) - 1
    )
    assert results["collectives"]["unmatched"] == 0
    assert len(results["steps"]) == 8
    worst = results["findings"][0]
    assert (worst["code"], worst["rank"]) == ("straggler.host", 2)


@pytest.mark.parametrize("communicator_ids", [True, False])
def test_a_rank_that_counts_by_twos_is_counted_by_ones(*, communicator_ids: bool) -> None:
    job = replace(REGULAR, communicator_ids=communicator_ids, causes=(Cause("host", 2, 20 * MS),))
    ranks, _ = simulate(job)
    ranks[3] = _numbered(ranks[3], range(12, 28, 2))
    found = study(ranks)
    assert found.results["collectives"]["unmatched"] == 0
    assert calls_apart(found) == 0
    assert (found.results["findings"][0]["code"], found.results["findings"][0]["rank"]) == (
        "straggler.host", 2,
    )  # fmt: skip
    (warning,) = (each for each in found.results["warnings"] if "go up by 2" in each)
    assert warning.startswith("rank 3: ")


def test_steps_with_as_many_calls_as_the_others_have_are_steps_however_long_they_seem() -> None:
    ranks, _ = simulate(REGULAR)
    ranks[3] = _stretched(ranks[3], 2.2)
    counted = numbered(ranks)[3]
    assert counted.steps.num_rows == ranks[3].steps.num_rows > 0
    assert not any("times as long" in each for each in counted.warnings)


def _stretched(tables: RankTables, times: float) -> RankTables:
    """A rank whose clock was set while it was recorded: what it has takes so many times as long."""
    first = tables.steps["begin_ns"][0].as_py()
    changed = {}
    for name in ("steps", "collective_calls"):
        table = getattr(tables, name)
        for column in filter(lambda each: each.endswith("_ns"), table.column_names):
            since = pc.multiply(pc.subtract(table[column], first).cast(pa.float64()), times)
            field = table.schema.field(column)
            moved = pc.add(pc.round(since).cast(pa.int64()), first).cast(field.type)
            table = table.set_column(table.schema.get_field_index(column), field, moved)
        changed[name] = table
    return replace(tables, **changed)


@pytest.mark.parametrize("communicator_ids", [True, False])
def test_steps_that_are_twice_as_long_as_those_of_the_others_are_no_steps(
    *, communicator_ids: bool
) -> None:
    job = replace(REGULAR, communicator_ids=communicator_ids, causes=(Cause("host", 2, 20 * MS),))
    ranks, _ = simulate(job)
    ranks[3] = _numbered(_every_second(ranks[3]), range(6, 10))
    found = study(ranks)
    # by the numbers every other step's calls would be matched with those of another step
    assert calls_apart(found) == 0
    (warning,) = (each for each in found.results["warnings"] if "2 times as long" in each)
    assert warning.startswith("rank 3: ")
    assert {each["rank"] for each in found.results["findings"]} <= {2, None}


def _numbered(tables: RankTables, numbers: Sequence[int]) -> RankTables:
    """The rank with these numbers of its steps."""
    at = tables.steps.schema.get_field_index("step")
    column = pa.array(numbers, pa.int64())
    return replace(
        tables, steps=tables.steps.set_column(at, tables.steps.schema.field("step"), column)
    )


def _every_second(tables: RankTables) -> RankTables:
    """The rank with one step where it has two."""
    rows = tables.steps.to_pylist()
    pairs = [
        {**one, "end_ns": two["end_ns"]} for one, two in zip(rows[::2], rows[1::2], strict=True)
    ]
    return replace(tables, steps=pa.Table.from_pylist(pairs, tables.steps.schema))


def calls_apart(found: Study) -> int:
    """How many collectives are matched of calls that are not one and the same.

    Each rank of a simulated job makes the same calls, numbered alike.
    """
    calls: dict[int, set[int]] = {}
    for row in found.collectives.select(["collective", "call"]).to_pylist():
        calls.setdefault(row["collective"], set()).add(row["call"])
    return sum(len(each) > 1 for each in calls.values())


@pytest.mark.parametrize("seconds", [0.062, 3456.789])
def test_a_clock_that_is_off_by_no_whole_steps_is_no_other_count(seconds: float) -> None:
    job = replace(REGULAR, offset_ns=(0, 0, 0, round(seconds * 1e9)))
    results = counted(job, (0, 0, 0, 0)).results
    assert renumbered(results) == []
    assert results["collectives"]["unmatched"] == 0
    doubted = [each for each in results["warnings"] if "may count otherwise" in each]
    # so far off no clock of theirs would hide other numbers
    assert len(doubted) == (seconds < 1)


def test_numbers_of_which_nothing_tells_whether_they_are_the_same_are_named() -> None:
    found = counted(replace(REGULAR, offset_ns=(0, 0, 0, 9 * MS)), (0, 0, 0, 90))
    warnings = [each for each in found.results["warnings"] if "its steps are numbered" in each]
    assert [re.findall(r"\d+", each) for each in warnings] == [["3", "96", "103", "0", "6", "13"]]
    assert matched(found) == {(0, 1, 2), (3,)}


@pytest.mark.parametrize("steps", [True, False])
def test_windows_that_do_not_overlap_are_named_with_their_times(
    tmp_path: Path, steps: bool
) -> None:
    ranks, _ = simulate(replace(REGULAR, steps=20, causes=(Cause("host", 2, 20 * MS),)))
    for tables in ranks:
        shown = window(tables, 20 if tables.rank == 3 else 8, 6)
        trace(shown, tmp_path, arguments="kernel", steps=steps)
    gathered = gather([tmp_path])
    found = study(gathered.ranks, gathered.missing, gathered.warnings)
    (warning,) = (each for each in found.results["warnings"] if "does not overlap" in each)
    assert warning.startswith("the window of rank 3 (2026-")
    assert warning.count(" UTC)") == 2
    assert matched(found) == {(0, 1, 2), (3,)}
    if steps:
        worst = found.results["findings"][0]
        assert (worst["code"], worst["rank"]) == ("straggler.host", 2)


def in_cycles(folder: Path, *, one_file: bool) -> Path:
    """Traces of two cycles of a schedule, of six steps from 6 and from 30 on."""
    job = Job(steps=30, launch_ns=40_000, causes=(Cause("host", 2, 30 * MS),))
    for tables in simulate(job)[0]:
        cycles = [
            json.loads(trace(window(tables, first, 6), folder, arguments="kernel").read_text())
            for first in (6, 30)
        ]
        (folder / f"rank{tables.rank}.json").unlink()
        if one_file:
            first, second = (each["traceEvents"] for each in cycles)
            cycles = [cycles[0] | {"traceEvents": first + second}]
        for number, content in enumerate(cycles):
            (folder / f"worker{tables.rank}.{number}.pt.trace.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("one_file", [False, True])
def test_of_the_cycles_of_a_schedule_the_last_is_merged(tmp_path: Path, one_file: bool) -> None:
    found = gather([in_cycles(tmp_path, one_file=one_file)])
    results = study(found.ranks, found.missing, found.warnings).results
    assert [each["step"] for each in results["steps"]] == list(range(30, 36))
    assert max(each["duration_ns"] for each in results["steps"] if each["settled"]) < 100 * MS
    worst = results["findings"][0]
    assert (worst["code"], worst["rank"]) == ("straggler.host", 2)
    (warning,) = (each for each in results["warnings"] if "2 windows" in each)
    assert "merged are steps 30 to 35" in warning
    assert "left out steps 6 to 11" in warning


def test_a_cycle_that_was_cut_short_gives_way_to_a_whole_one(tmp_path: Path) -> None:
    in_cycles(tmp_path, one_file=False)
    short = tmp_path / "worker3.1.pt.trace.json"
    content = json.loads(short.read_text())
    steps = [each for each in content["traceEvents"] if "Step#" in each["name"]]
    content["traceEvents"] = [e for e in content["traceEvents"] if e not in steps[3:]]
    short.write_text(json.dumps(content))
    found = gather([tmp_path])
    assert {each.steps["step"][0].as_py() for each in found.ranks} == {6}


@pytest.mark.parametrize("one_file", [False, True])
def test_of_cycles_of_which_a_rank_lacks_one_that_of_all_ranks_is_merged(
    tmp_path: Path, one_file: bool
) -> None:
    in_cycles(tmp_path, one_file=one_file)
    for rank in (0, 1, 2):
        if one_file:
            job = Job(steps=30, launch_ns=40_000, causes=(Cause("host", 2, 30 * MS),))
            (tmp_path / f"worker{rank}.0.pt.trace.json").unlink()
            trace(window(simulate(job)[0][rank], 6, 6), tmp_path, arguments="kernel")
        else:
            (tmp_path / f"worker{rank}.1.pt.trace.json").unlink()
    found = gather([tmp_path])
    assert [each.rank for each in found.ranks] == [0, 1, 2, 3]
    assert {each.steps["step"][0].as_py() for each in found.ranks} == {6}
    (warning,) = (each for each in found.warnings if "2 windows" in each)
    assert warning.startswith("rank 3 ")
    worst = study(found.ranks).results["findings"][0]
    assert (worst["code"], worst["rank"]) == ("straggler.host", 2)


def test_a_report_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    in_cycles(tmp_path, one_file=False)
    twice = tmp_path / "worker3.1.pt.trace.json"
    (tmp_path / "worker3.2.pt.trace.json").write_bytes(twice.read_bytes())
    with pytest.raises(MergeError, match="has two reports"):
        gather([tmp_path])
