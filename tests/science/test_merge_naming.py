"""Reports of several kinds in one merge: their communicators have one name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from studies import gathered

from clusterprof.align.match import communicators, match
from clusterprof.study import Study, study
from clusterprof.tables import RankTables

MS = 1_000_000
HOUR = 3_600_000 * MS
CAUSES = (Cause("host", 2, 20 * MS),)


def renamed(tables: RankTables, name: Callable[[str], str | None]) -> RankTables:
    """A rank whose report gives its communicators other names, or none."""
    calls = tables.collective_calls
    names = [name(each) for each in calls["communicator"].to_pylist()]
    at = calls.schema.get_field_index("communicator")
    calls = calls.set_column(at, calls.schema.field(at), pa.array(names, pa.string()))
    return replace(tables, collective_calls=calls)


def no_name(name: str) -> None:
    return None


def group_name(name: str) -> str:
    return f"group {name[2:]}"


def without_kernels(tables: RankTables, since: int) -> RankTables:
    """A rank whose capture ends before the kernels of its calls from `since` on, as nsys' does."""
    calls = tables.collective_calls
    kept = pa.array(np.arange(calls.num_rows) < since)
    for name, other in (("stream", -1), ("start_ns", None), ("end_ns", None)):
        at = calls.schema.get_field_index(name)
        field = calls.schema.field(at)
        calls = calls.set_column(
            at, field, pc.if_else(kept, calls[name], pa.scalar(other, field.type))
        )
    return replace(tables, collective_calls=calls)


def partners(ranks: list[RankTables]) -> set[tuple[tuple[int, int], ...]]:
    """Which calls (rank and number) are one collective; those of one rank alone are left out."""
    table = match(ranks).select(["collective", "rank", "call", "operation"]).to_pandas()
    table = table[~table["operation"].isin(["Send", "Recv"])]
    groups = table.groupby("collective").apply(
        lambda rows: tuple(sorted(zip(rows["rank"], rows["call"], strict=True))),
        include_groups=False,
    )
    return {each for each in groups if len(each) > 1}


@pytest.mark.parametrize("other", [no_name, group_name])
@pytest.mark.parametrize(
    "job",
    [
        Job(causes=CAUSES),
        Job(dp=2, tp=2, causes=CAUSES),
        Job(dp=2, tp=4, offset_ns=tuple(HOUR * (k % 2) for k in range(8)), ranks_per_host=1),
        Job(sharded=True, causes=CAUSES, lost_calls=(0, 3, 1, 5)),
    ],
)
def test_calls_are_matched_as_if_all_reports_were_of_one_kind(
    job: Job, other: Callable[[str], str | None]
) -> None:
    ranks, _ = simulate(job)
    mixed = [renamed(r, other) if r.rank in (2, 3) else r for r in ranks]
    assert partners(mixed) == partners(ranks)


@pytest.mark.parametrize("other", [no_name, group_name])
def test_a_rank_under_nsys_goes_with_those_of_another_profiler_though_it_saw_no_last_kernels(
    other: Callable[[str], str | None],
) -> None:
    ranks, _ = simulate(Job(dp=2, causes=CAUSES[:0]))
    armed = without_kernels(ranks[0], ranks[0].collective_calls.num_rows - 5)
    mixed = [armed, renamed(ranks[1], other)]
    assert partners(mixed) == partners([armed, ranks[1]])


def ending_apart(tables: RankTables, members: list[int] | None) -> RankTables:
    """A rank whose transfers end up to 0.4 ms away from its peers', as large ones do."""
    calls = tables.collective_calls
    apart = np.random.default_rng(7).integers(0, 400_000, calls.num_rows)
    columns = {
        "end_ns": pc.add(calls["end_ns"], pa.array(apart)),
        "members": pa.array([members] * calls.num_rows, calls.schema.field("members").type),
    }
    for name, values in columns.items():
        at = calls.schema.get_field_index(name)
        calls = calls.set_column(at, calls.schema.field(at), values)
    return replace(tables, collective_calls=calls)


@pytest.mark.parametrize("listed", [True, False])
def test_large_transfers_that_end_apart_go_together_where_a_report_lists_the_members(
    listed: bool,
) -> None:
    ranks, _ = simulate(Job(dp=2, causes=CAUSES[:0]))
    other = ending_apart(renamed(ranks[1], group_name), [0, 1] if listed else None)
    assert partners([ranks[0], other]) == (partners(ranks) if listed else set())


def with_broadcasts(tables: RankTables) -> RankTables:
    """A rank of which every fifth call is a Broadcast, which ends on rank 1 long before."""
    calls = tables.collective_calls
    chosen = pa.array(np.arange(calls.num_rows) % 5 == 0)
    early = {"start_ns": 8 * MS, "end_ns": 8 * MS} if tables.rank == 1 else {}
    operation = pc.if_else(chosen, "Broadcast", calls["operation"].cast(pa.string()))
    columns = {
        name: pc.subtract(calls[name], pc.if_else(chosen, by, 0)) for name, by in early.items()
    }
    for name, values in {
        "operation": operation.combine_chunks().dictionary_encode(),
        **columns,
    }.items():
        at = calls.schema.get_field_index(name)
        calls = calls.set_column(
            at, calls.schema.field(at), values.cast(calls.schema.field(at).type)
        )
    return replace(tables, collective_calls=calls)


def test_broadcasts_which_need_not_end_together_hide_no_communicator() -> None:
    ranks = [with_broadcasts(r) for r in simulate(Job(dp=2, causes=CAUSES[:0]))[0]]
    assert partners([ranks[0], renamed(ranks[1], group_name)]) == partners(ranks)


def test_the_names_of_most_ranks_are_those_of_all() -> None:
    ranks, _ = simulate(Job())
    mixed = [r if r.rank == 0 else renamed(r, group_name) for r in ranks]
    names = set(match(mixed)["communicator"].to_pylist())
    assert all(name.startswith("group ") for name in names)


def test_a_match_whose_names_had_to_be_inferred_has_less_confidence() -> None:
    ranks, _ = simulate(Job())
    mixed = [*ranks[:3], renamed(ranks[3], no_name)]
    assert max(match(mixed)["confidence"].to_pylist()) < 1.0
    assert set(match(ranks)["confidence"].to_pylist()) == {1.0}


def test_calls_that_go_together_with_no_others_keep_their_name() -> None:
    ranks, _ = simulate(Job())
    others, _ = simulate(Job(seed=3, dp=4, layers=3, serial=True))
    mixed = [*ranks[:3], renamed(others[3], group_name)]
    table = match(mixed).to_pandas()
    mine = table[table["rank"] == 3]
    assert all(name.startswith("group ") for name in mine["communicator"])
    assert set(mine["state"]) == {"unmatched"}


def test_too_many_communicators_to_compare_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communicators, "_MOST_COMPARISONS", 0)
    ranks, _ = simulate(Job())
    mixed = [*ranks[:3], renamed(ranks[3], no_name)]
    found = partners(mixed)
    assert found
    assert all(rank != 3 for each in found for rank, _ in each)


@pytest.mark.parametrize("recording", ["nsys-2025.3/fsdp-long"])
@pytest.mark.parametrize("other", [no_name, group_name])
def test_a_communicator_of_two_streams_is_taken_whole_or_not_at_all(
    other: Callable[[str], str | None], recording: str
) -> None:
    # AllGather and ReduceScatter, whose ends lie farther apart on the rank that is last.
    ranks = gathered(recording).ranks
    for late in (2, 3):
        mixed = [renamed(r, other) if r.rank == late else r for r in ranks]
        assert partners(mixed) == partners(ranks)


@pytest.mark.parametrize("recording", ["nsys-2025.3/pipeline-imbalance"])
@pytest.mark.parametrize(
    "strangers",
    long_but(
        [((2,), no_name)],
        [((1, 3), group_name), ((2,), group_name), ((1, 3), no_name)],
    ),
)
def test_sends_are_paired_by_time_where_their_communicator_has_two_names(
    studied: Callable[[str], Study],
    strangers: tuple[tuple[int, ...], Callable[[str], str | None]],
    recording: str,
) -> None:
    numbers, other = strangers
    ranks = gathered(recording).ranks
    mixed = [renamed(r, other) if r.rank in numbers else r for r in ranks]
    found, expected = study(mixed).results, studied(recording).results
    # by time fewer sends match, so that less is sure: a finding that may save nothing is no verdict
    top, its = found["findings"][0], expected["findings"][0]
    assert (top["code"], top["ranks"]) == (its["code"], its["ranks"])
    above_nothing = top["saved_uncertainty_ns"] < top["saved_ns_per_step"]
    assert (found["verdict"] == expected["verdict"]) == above_nothing


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-straggler"])
@pytest.mark.parametrize(
    ("rank", "other"),
    [
        (0, no_name),
        (2, group_name),
        pytest.param(0, group_name, marks=pytest.mark.long),
        pytest.param(2, no_name, marks=pytest.mark.long),
    ],
)
def test_the_late_rank_is_named_whatever_profiler_recorded_it(
    rank: int, other: Callable[[str], str | None], recording: str
) -> None:
    ranks = gathered(recording).ranks
    mixed = [renamed(r, other) if r.rank == rank else r for r in ranks]
    results = study(mixed).results
    assert (results["findings"][0]["code"], results["findings"][0]["rank"]) == ("straggler.host", 2)
    assert results["verdict"].lower().startswith("rank 2 ")
    assert results["collectives"]["unmatched"] == 0
    bounds = [each["uncertainty_ns"] for each in results["clock"]["ranks"]]
    assert np.max(bounds) < MS
