"""Ranks that do not count their steps alike: one that takes warm-up steps of its own first."""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate

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


def renumbered(results: Results) -> list[int]:
    """The numbers in the warning about a rank whose steps were renumbered; none without one."""
    found = [each for each in results["warnings"] if "renumbered" in each]
    assert len(found) <= 1
    return [int(number) for each in found for number in re.findall(r"\d+", each)]


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
    assert renumbered(results) == [odd, 6, FIRST, FIRST - 6]
    # the others are compared with each other
    worst = results["findings"][0]
    assert (worst["code"], worst["rank"]) == ("straggler.host", 2)
    assert results["collectives"]["matched"] > 30


def test_ranks_that_count_alike_keep_their_numbers() -> None:
    results = captured(8, 0).results
    assert [each["step"] for each in results["steps"]] == list(range(FIRST, FIRST + 8))
    assert renumbered(results) == []
