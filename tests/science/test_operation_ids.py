"""Calls that the profiler itself gives an id: matched by it, and by their order where it errs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from simulate import Job, simulate

from clusterprof.align.match import contradicted, match
from clusterprof.study import study
from clusterprof.tables import RankTables

JOBS = [Job(), Job(dp=2, tp=2), Job(dp=2, pp=2)]


def changed(tables: RankTables, column: str, values: list[object]) -> RankTables:
    calls = tables.collective_calls
    at = calls.schema.get_field_index(column)
    field = calls.schema.field(at)
    new = calls.set_column(at, field, pa.array(values, pa.string()).cast(field.type)
                           if column == "operation" else pa.array(values, field.type))  # fmt: skip
    return replace(tables, collective_calls=new)


def ids(tables: RankTables) -> list[object]:
    return list(tables.collective_calls["operation_id"].to_pylist())


def named(job: Job) -> list[RankTables]:
    """The ranks of a job, each call with an id that is the same on all members, far from 0."""
    ranks, _ = simulate(job)
    rows = match(ranks).to_pandas()
    assert set(rows["state"]) == {"matched"}
    of = {(r, c): k for r, c, k in zip(rows["rank"], rows["call"], rows["collective"], strict=True)}
    return [
        changed(t, "operation_id", [(1 << 61) + 97 * int(of[t.rank, c]) for c in
                                    t.collective_calls["call"].to_pylist()])
        for t in ranks
    ]  # fmt: skip


def without(tables: RankTables, gone: list[int]) -> RankTables:
    calls = tables.collective_calls
    kept = np.setdiff1d(np.arange(calls.num_rows), gone)
    return replace(tables, collective_calls=calls.take(pa.array(kept)))


def matched_groups(table: pa.Table) -> set[frozenset[tuple[int, int]]]:
    """Which calls (rank, call) of several ranks were matched with each other."""
    groups: dict[int, set[tuple[int, int]]] = {}
    for row in table.to_pylist():
        if row["state"] != "unmatched":
            groups.setdefault(row["collective"], set()).add((row["rank"], row["call"]))
    return {frozenset(group) for group in groups.values()}


def true_groups(ranks: list[RankTables]) -> set[frozenset[tuple[int, int]]]:
    groups: dict[object, set[tuple[int, int]]] = {}
    for t in ranks:
        for call, key in zip(t.collective_calls["call"].to_pylist(), ids(t), strict=True):
            groups.setdefault(key, set()).add((t.rank, call))
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def certain(table: pa.Table) -> bool:
    rows = table.to_pandas()
    return bool((rows["confidence"][rows["state"] == "matched"] == 1.0).all())


@pytest.mark.parametrize("job", JOBS, ids=["data", "tensor", "pipeline"])
def test_ids_match_what_the_order_matches(job: Job) -> None:
    ranks = named(job)
    table = match(ranks)
    assert matched_groups(table) == true_groups(ranks) == matched_groups(match(simulate(job)[0]))
    assert certain(table)
    assert contradicted(table) == {}


@pytest.mark.parametrize("job", JOBS, ids=["data", "tensor", "pipeline"])
def test_windows_without_steps_that_begin_anywhere_are_matched_with_certainty(job: Job) -> None:
    ranks = [without(t, list(range(3 * k))) for k, t in enumerate(named(job))]
    bare = [replace(t, steps=t.steps.slice(0, 0)) for t in ranks]
    table = match(bare)
    assert matched_groups(table) == true_groups(bare)
    assert certain(table)


@pytest.mark.parametrize("job", JOBS, ids=["data", "tensor", "pipeline"])
def test_calls_lost_on_the_way_leave_all_others_matched(job: Job) -> None:
    ranks = named(job)
    ranks[1], ranks[2] = without(ranks[1], [9, 22]), without(ranks[2], [14, 15])
    table = match(ranks)
    assert matched_groups(table) == true_groups(ranks)
    assert certain(table)
    if job == Job():
        bare = [changed(t, "operation_id", [None] * len(ids(t))) for t in ranks]
        assert len(matched_groups(match(bare))) < len(true_groups(ranks))


def test_one_call_lost_here_and_the_next_there_are_not_taken_for_one_another() -> None:
    # both windows are equally long around the two: by order they would stand side by side
    ranks = named(Job(dp=2))
    ranks = [without(ranks[0], [14]), without(ranks[1], [15])]
    assert matched_groups(match(ranks)) == true_groups(ranks)


def test_calls_that_lay_before_the_range_have_no_ids_and_go_by_their_order() -> None:
    ranks = named(Job())
    mixed = [changed(t, "operation_id", [None] * 5 + ids(t)[5:]) for t in ranks]
    assert matched_groups(match(mixed)) == true_groups(ranks)
    # where calls were lost as well, only those with an id are matched
    mixed[1] = without(mixed[1], [12])
    table = match(mixed)
    expected = {g for g in true_groups(ranks) if all(call >= 5 for _, call in g)}
    assert matched_groups(table) == {g - {(1, 12)} for g in expected}
    assert {row["call"] for row in table.to_pylist() if row["state"] == "unmatched"} == set(
        range(5)
    )


def test_a_rank_without_ids_goes_by_its_order() -> None:
    ranks = named(Job())
    expected = true_groups(ranks)
    ranks[2] = changed(ranks[2], "operation_id", [None] * len(ids(ranks[2])))
    assert matched_groups(match(ranks)) == expected


def test_ids_of_two_profilers_are_not_compared() -> None:
    ranks = named(Job())
    expected = true_groups(ranks)
    kineto = changed(ranks[3], "operation_id", [k + 1 for k in range(len(ids(ranks[3])))])
    source = pa.array(["kineto"] * kineto.collective_calls.num_rows).dictionary_encode()
    at = kineto.collective_calls.schema.get_field_index("source")
    calls = kineto.collective_calls.set_column(at, "source", source)
    table = match([*ranks[:3], replace(kineto, collective_calls=calls)])
    assert matched_groups(table) == expected
    assert contradicted(table) == {}


def twice(t: RankTables) -> RankTables:
    return changed(t, "operation_id", [ids(t)[4], *ids(t)[1:]])


def two_operations(t: RankTables) -> RankTables:
    operations = t.collective_calls["operation"].to_pylist()
    sizes = t.collective_calls["message_bytes"].to_pylist()
    other = next(k for k in range(1, len(sizes)) if sizes[k] != sizes[0])
    assert operations[other]
    new = ids(t)
    new[0], new[other] = new[other], new[0]
    return changed(t, "operation_id", new)


def restarted(t: RankTables) -> RankTables:
    """Every id is that of the call before: the times contradict it, or the sizes do."""
    return changed(t, "operation_id", [0, *ids(t)[:-1]])


@pytest.mark.parametrize("spoil", [twice, two_operations, restarted])
def test_contradictory_ids_are_a_warning_and_the_order_decides(
    spoil: Callable[[RankTables], RankTables],
) -> None:
    ranks = named(Job())
    expected = matched_groups(match(simulate(Job())[0]))
    ranks[2] = spoil(ranks[2])
    table = match(ranks)
    assert matched_groups(table) == expected
    assert list(contradicted(table)) == ["0xdata0"]
    assert [w for w in study(ranks).results["warnings"] if "0xdata0" in w]


def test_contradictory_ids_of_sends_are_a_warning_too() -> None:
    ranks = named(Job(dp=2, pp=2))
    expected = matched_groups(match(simulate(Job(dp=2, pp=2))[0]))
    operations = ranks[0].collective_calls["operation"].to_pylist()
    first, second = [k for k, each in enumerate(operations) if each == "Send"][:2]
    new = ids(ranks[0])
    new[second] = new[first]
    ranks[0] = changed(ranks[0], "operation_id", new)
    table = match(ranks)
    assert matched_groups(table) == expected
    assert len(contradicted(table)) == 1
