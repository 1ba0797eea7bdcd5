"""Which call of one rank is which of another: order, shifts, groups, missing calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, middle, simulate, with_clock
from studies import gathered

from clusterprof.align.clock import align
from clusterprof.align.match import MATCHED, PLACED, match
from clusterprof.align.placing import place
from clusterprof.tables import RankTables, empty


def states(table: pa.Table) -> dict[str, int]:
    counted = table["state"].cast(pa.string()).value_counts().to_pylist()
    return {entry["values"]: entry["counts"] for entry in counted}


def true_ends_agree(table: pa.Table) -> bool:
    """Members of one matched collective really are one: on one true clock they end together."""
    rows = table.filter(pa.compute.equal(table["state"].cast(pa.string()), "matched")).to_pandas()
    rows = rows[rows["role"] == "both"]
    spread = rows.groupby("collective")["end_ns"].agg(np.ptp)
    return bool((spread <= 25_000).all())


def members(rows: pd.DataFrame) -> set[tuple[int, ...]]:
    """The sets of ranks that collectives were matched over."""
    return {tuple(sorted(ranks)) for ranks in rows.groupby("collective")["rank"].agg(list)}


def without(tables: RankTables, call: int) -> RankTables:
    calls = tables.collective_calls
    return replace(
        tables, collective_calls=pa.concat_tables([calls.slice(0, call), calls.slice(call + 1)])
    )


def test_every_call_is_matched_where_all_ranks_saw_all_calls() -> None:
    ranks, _ = simulate(Job())
    table = match(ranks)
    assert table.schema == MATCHED
    assert states(table) == {"matched": sum(r.collective_calls.num_rows for r in ranks)}
    assert true_ends_agree(table)
    assert set(table["confidence"].to_pylist()) == {1.0}


def test_windows_that_begin_at_different_calls_are_shifted_and_missing_calls_named() -> None:
    ranks, _ = simulate(Job(lost_calls=(0, 3, 1, 5)))
    table = match(ranks)
    assert true_ends_agree(table)
    found = states(table)
    assert found["matched"] == 4 * 30
    reasons = {r for r in table["reason"].to_pylist() if r}
    assert {reason.partition("rank")[2].strip("s ") for reason in reasons} >= {"3", "1, 3"}


@pytest.mark.parametrize("ids", [True, False])
def test_a_shift_is_found_without_steps_by_times_alone(ids: bool) -> None:
    ranks, _ = simulate(Job(lost_calls=(4, 0, 2, 0), with_steps=False, communicator_ids=ids))
    table = match(ranks)
    assert true_ends_agree(table)
    assert states(table)["matched"] == 4 * 31


def test_a_wall_clock_an_hour_off_does_not_matter() -> None:
    hour = 3_600_000_000_000
    job = Job(lost_calls=(0, 2, 0, 1))
    straight, _ = simulate(job)
    crooked, _ = simulate(replace(job, offset_ns=(0, hour, -2 * hour, 5)))
    assert match(crooked)["collective"].equals(match(straight)["collective"])
    assert (
        match(crooked)["state"].cast(pa.string()).equals(match(straight)["state"].cast(pa.string()))
    )


def test_a_call_lost_in_the_middle_leaves_calls_unmatched_and_never_misaligns() -> None:
    ranks, _ = simulate(Job(small_calls=False))
    ranks[2] = without(ranks[2], 14)
    table = match(ranks)
    assert true_ends_agree(table)
    found = states(table)
    assert found["unmatched"] > 0
    assert found["matched"] >= 4 * 20
    reasons = [r for r in table["reason"].to_pylist() if r]
    assert len(reasons) >= found["unmatched"]
    assert all(r.endswith("rank 2") for r in reasons)


def test_tensor_and_data_groups_are_distinguished_without_ids() -> None:
    ranks, _ = simulate(Job(dp=2, tp=2, communicator_ids=False))
    table = match(ranks)
    assert states(table) == {"matched": table.num_rows}
    assert true_ends_agree(table)
    assert members(table.to_pandas()) == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert max(table["confidence"].to_pylist()) < 1.0


def test_two_communicators_over_the_same_ranks_stay_two() -> None:
    ranks, _ = simulate(Job())
    others, _ = simulate(Job(seed=3))
    both = []
    for a, b in zip(ranks, others, strict=True):
        renamed = pa.array(["0xother"] * b.collective_calls.num_rows, pa.string())
        at = b.collective_calls.schema.get_field_index("communicator")
        calls = b.collective_calls.set_column(at, "communicator", renamed)
        calls = pa.concat_tables([a.collective_calls, calls]).sort_by("issue_start_ns")
        both.append(replace(a, collective_calls=calls))
    table = match(both)
    assert states(table) == {"matched": table.num_rows}
    assert set(table["communicator"].to_pylist()) == {"0xdata0", "0xother"}
    assert true_ends_agree(table)


@pytest.mark.parametrize("ids", [True, False])
def test_sends_meet_their_receives(ids: bool) -> None:
    ranks, _ = simulate(Job(dp=2, pp=2, communicator_ids=ids))
    table = match(ranks)
    assert states(table) == {"matched": table.num_rows}
    rows = table.to_pandas()
    pairs = rows[rows["operation"].isin(["Send", "Recv"])].groupby("collective")
    for _, pair in pairs:
        assert sorted(pair["operation"]) == ["Recv", "Send"]
        send = pair[pair["operation"] == "Send"].iloc[0]
        receive = pair[pair["operation"] == "Recv"].iloc[0]
        assert receive["end_ns"] - send["start_ns"] >= 0
        assert abs(int(send["rank"]) - int(receive["rank"])) == 2


def test_of_a_subset_of_ranks_nothing_is_claimed_about_the_others() -> None:
    ranks, _ = simulate(Job(dp=2, tp=2))
    table = match([ranks[0], ranks[2]])
    rows = table.to_pandas()
    tensor = rows[rows["communicator"].str.contains("tensor")]
    assert set(tensor["state"]) == {"unmatched"}
    assert set(tensor["reason"]) == {"single member profiled"}
    data = rows[rows["communicator"].str.contains("data")]
    assert set(data["state"]) == {"matched"}
    assert members(data) == {(0, 2)}


def test_a_send_to_a_rank_without_a_report_says_so() -> None:
    ranks, _ = simulate(Job(dp=2, pp=2))
    rows = match(ranks[:3]).to_pandas()
    lonely = rows[(rows["rank"] == 1) & rows["operation"].isin(["Send", "Recv"])]
    (reason,) = set(lonely["reason"])
    assert "rank 3" in reason


def without_kernels(tables: RankTables, gone: slice) -> RankTables:
    """The rank whose capture ended before the kernels of these calls had run."""
    calls = tables.collective_calls
    for name in ("start_ns", "end_ns"):
        values = np.asarray(calls[name].to_pylist(), dtype=object)
        values[gone] = None
        at = calls.schema.get_field_index(name)
        column = pa.array(values.tolist(), pa.int64())
        calls = calls.set_column(at, calls.schema.field(name), column)
    return replace(tables, collective_calls=calls)


def test_calls_whose_kernels_the_captures_end_cut_off_shift_nothing() -> None:
    ranks, _ = simulate(Job(with_steps=False))
    count = ranks[0].collective_calls.num_rows
    ranks = [without_kernels(r, slice(count // 2 - r.rank, None)) for r in ranks]
    table = match(ranks)
    assert true_ends_agree(table)
    assert states(table)["matched"] == 4 * (count // 2 - 3)


def test_a_call_without_a_kernel_leaves_its_collective_incomplete() -> None:
    ranks, _ = simulate(Job())
    ranks[1] = without_kernels(ranks[1], slice(10, 11))
    table = match(ranks)
    assert states(table)["incomplete"] == 4
    (reason,) = {each for each in table["reason"].to_pylist() if each}
    assert "rank 1" in reason


def test_no_rank_and_no_call_give_an_empty_table() -> None:
    assert match([]).num_rows == 0
    ranks, _ = simulate(Job())
    bare = [replace(r, collective_calls=r.collective_calls.slice(0, 0)) for r in ranks]
    assert match(bare).schema == MATCHED


def test_wait_and_transfer_add_up_to_the_kernel_and_name_the_last_rank() -> None:
    ranks, _ = simulate(Job(causes=(Cause("gpu_more", 1, 8_000_000),)))
    matched = match(ranks)
    placed = place(matched, align(ranks, matched))
    assert placed.schema == PLACED
    rows = placed.to_pandas()
    assert (rows["wait_ns"] + rows["transfer_ns"] == rows["end_ns"] - rows["start_ns"]).all()
    assert (rows["wait_ns"] >= 0).all()
    settled = rows[rows["step"] >= 7]
    first = settled.groupby("step").head(4)
    assert set(first["last_rank"]) == {1}
    assert first["lateness_ns"].min() > 7_000_000


def groups(table: pa.Table) -> set[frozenset[tuple[int, int]]]:
    """Which calls (rank, call) are one, as far as they have a counterpart."""
    rows = table.select(["collective", "rank", "call", "state"]).to_pandas()
    rows = rows[rows["state"] != "unmatched"]
    return {
        frozenset(zip(each["rank"], each["call"], strict=True))
        for _, each in rows.groupby("collective")
    }


WRONG_MS = ((0, 0, 0, 0), (0, 47, -31, 12), (0, -18, 49, -50))


def blind(true: list[RankTables], offset_ms: tuple[int, ...]) -> list[RankTables]:
    """The ranks without steps, their clocks so far off."""
    at = middle(true)
    return [
        with_clock(replace(t, steps=empty("steps")), ms * 1_000_000, 0.5 * ms, at)
        for t, ms in zip(true, offset_ms, strict=False)
    ]


@pytest.mark.parametrize(
    "recording",
    long_but(
        ["nsys-2025.3/fsdp-beacons", "nsys-2025.3/pipeline-1f1b"],
        ["nsys-2025.3/ddp-host-straggler", "nsys-2025.3/pipeline-imbalance"],
    ),
)
def test_without_steps_and_with_wrong_clocks_real_calls_are_matched_all_the_same(
    recording: str,
) -> None:
    true = gathered(recording).ranks
    expected = groups(match(true))
    for offset_ms in WRONG_MS:
        assert groups(match(blind(true, offset_ms))) == expected


@pytest.mark.parametrize("recording", ["nsys-2024.2/pipeline", "kineto/gloo"])
def test_where_only_the_clocks_distinguish_calls_their_offsets_are_not_bounded_by_them(
    recording: str,
) -> None:
    true = gathered(recording).ranks
    for offset_ms in WRONG_MS:
        wrong = blind(true, offset_ms)
        clock = align(wrong, match(wrong))
        for k, rank in enumerate(clock.ranks):
            error = abs(int(clock.offset_ns[k]) - offset_ms[k] * 1_000_000)
            assert error <= clock.uncertainty(rank)


def test_steps_that_each_report_counted_for_itself_identify_no_call() -> None:
    ranks, _ = simulate(Job(lost_calls=(4, 0, 2, 0)))
    expected = groups(match(ranks))
    counted = []
    for tables in ranks:
        steps = tables.steps
        number = pa.array(np.arange(steps.num_rows) + tables.rank % 2, pa.int64())
        source = pa.array(["optimizer"] * steps.num_rows).dictionary_encode()
        for name, values in (("step", number), ("source", source)):
            at = steps.schema.get_field_index(name)
            steps = steps.set_column(at, steps.schema.field(name), values)
        counted.append(replace(tables, steps=steps))
    table = match(counted)
    assert groups(table) == expected
    assert max(table["confidence"].to_pylist()) < 1.0


def test_the_offsets_of_one_communicator_decide_another() -> None:
    job = Job(dp=2, pp=2, lost_calls=(2, 0, 0, 5), host_noise_frac=0.05)
    expected = groups(match(simulate(job)[0]))
    late = (0, 49_000_000, -37_000_000, 21_000_000)
    crooked, _ = simulate(replace(job, with_steps=False, offset_ns=late))
    table = match(crooked)
    assert groups(table) == expected
    assert 0.8 in table["confidence"].to_pylist()
