"""Bad input for the clock: a result that names what is missing, and no bound that does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lab.tiers import long_but
from simulate import Job, middle, simulate, with_clock

from clusterprof.align.clock import UNBOUNDED_NS, Clock, align
from clusterprof.align.match import MATCHED, match
from clusterprof.errors import MergeError
from clusterprof.study import study
from clusterprof.tables import RankTables, ReportInfo, empty

MS = 1_000_000
HOUR = 3_600_000_000_000


def aligned(ranks: Sequence[RankTables]) -> Clock:
    return align(ranks, match(ranks))


SHAPES: list[dict[str, int]] = [{}, {"dp": 2, "pp": 2}, {"dp": 1, "pp": 4, "layers": 8}]


def job(**changes: object) -> list[RankTables]:
    """A simulated job's reports, which do not say on which host they were taken."""
    ranks, _ = simulate(replace(Job(steps=3), **changes))  # type: ignore[arg-type]
    return [replace(r, info=replace(r.info, host="")) for r in ranks]


def edited(tables: RankTables, **columns: pa.Array) -> RankTables:
    """The rank with some columns of its collective calls replaced."""
    calls = tables.collective_calls
    for name, values in columns.items():
        at = calls.schema.get_field_index(name)
        calls = calls.set_column(at, calls.schema.field(name), values)
    return replace(tables, collective_calls=calls)


def test_a_rank_without_collectives_is_unbounded_and_the_others_have_their_clock() -> None:
    ranks = job()
    ranks[2] = replace(ranks[2], collective_calls=empty("collective_calls"))
    clock = aligned(ranks)
    assert clock.uncertainty(2) == UNBOUNDED_NS
    assert max(clock.uncertainty(r) for r in (0, 1, 3)) < MS
    assert any("rank 2" in w for w in clock.warnings)


def test_no_collective_at_all_leaves_the_wall_clocks_and_a_warning() -> None:
    ranks = [replace(r, collective_calls=empty("collective_calls")) for r in job()]
    clock = aligned(ranks)
    assert [clock.uncertainty(r) for r in range(4)] == [0, *[UNBOUNDED_NS] * 3]
    assert clock.offset_ns.tolist() == [0] * 4
    assert any("ranks 1–3" in w for w in clock.warnings)


def test_a_rank_that_nothing_connects_keeps_its_wall_clock_though_it_has_calls() -> None:
    ranks = job()
    alone = pa.array(["0x9"] * ranks[3].collective_calls.num_rows)
    clock = aligned([*ranks[:3], edited(ranks[3], communicator=alone)])
    assert (clock.offset_ns[3], clock.drift_ppm[3]) == (0, 0.0)
    assert clock.uncertainty(3) == UNBOUNDED_NS > clock.uncertainty(2)


def test_communicators_of_one_tie_nothing() -> None:
    ranks = [
        edited(r, communicator=pa.array([f"0x{r.rank}"] * r.collective_calls.num_rows))
        for r in job()
    ]
    clock = aligned(ranks)
    assert [clock.uncertainty(r) for r in (1, 2, 3)] == [UNBOUNDED_NS] * 3


def test_windows_with_no_call_in_common_give_no_certainty() -> None:
    ranks = job(steps=8)
    whole = [r.collective_calls for r in ranks[:2]]
    ranks = [
        replace(ranks[0], collective_calls=whole[0].slice(0, 12)),
        replace(ranks[1], collective_calls=whole[1].slice(whole[1].num_rows - 12)),
    ]
    clock = aligned(ranks)
    # nothing in the times tells a wrong match of such windows from a wrong clock
    truth = abs(int(clock.offset_ns[1]))
    assert clock.uncertainty(1) == UNBOUNDED_NS or truth <= clock.uncertainty(1)


@pytest.mark.parametrize("hours", [1, -1, 24])
def test_a_wall_clock_hours_off_is_put_right(hours: int) -> None:
    ranks = job()
    at = middle(ranks)
    ranks[1] = with_clock(ranks[1], hours * HOUR, 20.0, at)
    clock = aligned(ranks)
    assert abs(int(clock.offset_ns[1]) - hours * HOUR) <= clock.uncertainty(1) < MS
    assert max(clock.uncertainty(r) for r in (2, 3)) < MS


@pytest.mark.parametrize("ppm", [3_000.0, -20_000.0])
def test_a_drift_beyond_reason_costs_that_rank_its_clock_and_no_other(ppm: float) -> None:
    ranks = job(steps=12, synchronous=True)
    ranks[2] = with_clock(ranks[2], 0, ppm, middle(ranks))
    clock = aligned(ranks)
    assert clock.uncertainty(2) == UNBOUNDED_NS
    assert max(clock.uncertainty(r) for r in (1, 3)) < MS
    assert any("rank 2" in w for w in clock.warnings)


def test_a_reference_whose_clock_jumps_is_left_out_and_another_takes_its_place() -> None:
    ranks = job(steps=6)
    calls = ranks[0].collective_calls
    late = np.arange(calls.num_rows) >= calls.num_rows // 2

    def jumped(name: str) -> pa.Array:
        return pa.array(calls[name].to_numpy() + late * 40 * MS, pa.int64())

    ranks[0] = edited(ranks[0], start_ns=jumped("start_ns"), end_ns=jumped("end_ns"))
    clock = aligned(ranks)
    assert clock.reference_rank == 1
    assert clock.uncertainty(0) == UNBOUNDED_NS
    assert max(clock.uncertainty(r) for r in (1, 2, 3)) < MS
    assert "rank 0" in clock.warnings[0]


def test_the_same_rank_twice_is_refused_with_both_files_named() -> None:
    ranks = job()
    again = replace(ranks[1], info=replace(ranks[1].info, source=Path("other.sqlite")))
    with pytest.raises(MergeError, match=r"rank 1\b") as caught:
        study([*ranks, again])
    for each in (ranks[1], again):
        assert str(each.info.source) in str(caught.value)


def test_calls_that_end_before_they_start_are_not_believed() -> None:
    ranks = job()
    calls = ranks[1].collective_calls
    ends = calls["end_ns"].to_numpy().copy()
    ends[3] = calls["start_ns"][3].as_py() - 5 * MS
    ranks[1] = edited(ranks[1], end_ns=pa.array(ends))
    clock = aligned(ranks)
    assert abs(int(clock.offset_ns[1])) <= clock.uncertainty(1) < MS


@pytest.mark.parametrize(
    "case",
    long_but([({}, 50), ({"dp": 2, "pp": 2}, -50)], itertools.product(SHAPES, (-200, -50, 50))),
)
def test_calls_that_are_decades_off_are_left_out_and_named(
    case: tuple[dict[str, int], int],
) -> None:
    shape, years = case
    rng = np.random.default_rng(abs(years))
    true = job(**shape, small_calls=bool(years > 0))
    for moved in (1, 2, 7, 15, 28, 54):
        ranks = list(true)
        for rank in rng.permutation(4)[: rng.choice([1, 4])].tolist():
            calls = ranks[rank].collective_calls
            some = rng.permutation(calls.num_rows)[: min(moved, calls.num_rows - 1)]
            times = {}
            for name in ("start_ns", "end_ns", "issue_start_ns", "issue_end_ns"):
                values = calls[name].to_numpy().copy()
                values[some] += years * 365 * 24 * HOUR
                times[name] = pa.array(values)
            ranks[rank] = edited(ranks[rank], **times)
        clock = aligned(ranks)
        assert any("broken time stamps" in warning for warning in clock.warnings)
        assert (np.abs(clock.offset_ns) <= clock.uncertainty_ns).all() or moved > 7


def test_empty_messages_bound_no_clock() -> None:
    ranks = job()
    nothing = pa.array([0] * ranks[0].collective_calls.num_rows, pa.int64())
    clock = aligned([edited(r, message_bytes=nothing) for r in ranks])
    assert [clock.uncertainty(r) for r in (1, 2, 3)] == [UNBOUNDED_NS] * 3


@pytest.mark.parametrize("late_ms", [0, 7])
def test_calls_as_regular_as_a_clocks_ticks_bound_nothing_without_steps(late_ms: int) -> None:
    """Which tick of one rank is which of another only the wall clocks could tell."""
    ranks = []
    for tables in job()[:2]:
        count = tables.collective_calls.num_rows
        start = 1_790_000_000_000_000_000 + np.arange(count) * 5 * MS + tables.rank * late_ms * MS
        same = {name: pa.array([4_096] * count, pa.int64()) for name in ("message_bytes",)}
        times = {"issue_start_ns": start - 9, "start_ns": start, "end_ns": start + 30_000}
        ticks = edited(tables, **same, **{name: pa.array(v) for name, v in times.items()})
        ranks.append(replace(ticks, steps=empty("steps")))
    clock = aligned(ranks)
    assert clock.uncertainty(1) == UNBOUNDED_NS
    assert clock.offset_ns[1] == 0
    assert "rank 1" in clock.warnings[0]
    # ranks of one host are still taken to read one clock
    for hosts, same_clock in ((("h0", "h0"), (0, 1)), (("h0", "h1"), (0,)), (("", ""), ())):
        named = [replace(r, info=replace(r.info, host=hosts[r.rank])) for r in ranks]
        assert aligned(named).same_clock == same_clock


@pytest.mark.parametrize("count", long_but([64], [1_000]))
def test_many_ranks_are_aligned_within_their_bounds(count: int) -> None:
    ranks, matched, offset = _many(count, 200)
    clock = align(ranks, matched)
    error = np.abs(clock.offset_ns - (offset - offset[0]))
    assert (error <= clock.uncertainty_ns).all()
    assert error.max() < 2_000


def _many(count: int, calls: int) -> tuple[list[RankTables], pa.Table, np.ndarray]:
    """One communicator of `count` ranks, matched already."""
    rng = np.random.default_rng(0)
    base = 1_790_000_000_000_000_000
    offset = rng.integers(-50 * MS, 50 * MS, count)
    start = base + np.arange(calls)[:, None] * 2 * MS + rng.integers(0, MS // 2, (calls, count))
    transfer = np.where(rng.random(calls) < 0.7, 200_000, 12_000)[:, None]
    end = start.max(axis=1, keepdims=True) + transfer + rng.integers(0, 400, (calls, count))
    rows = calls * count
    values = {
        "collective": np.repeat(np.arange(calls), count),
        "rank": np.tile(np.arange(count), calls),
        "start_ns": (start + offset).ravel(),
        "end_ns": (end + offset).ravel(),
        "message_bytes": np.repeat(transfer.ravel(), count),
        "confidence": np.ones(rows),
    }
    words = {"communicator": "0x1", "operation": "AllReduce", "state": "matched", "role": "both"}
    words["source"] = "nvtx_payload"
    columns = []
    for field in MATCHED:
        if field.name in values:
            columns.append(pa.array(values[field.name]).cast(field.type))
        elif field.name in words:
            columns.append(pa.array([words[field.name]] * rows).cast(field.type))
        elif field.nullable:
            columns.append(pa.nulls(rows, field.type))
        else:
            columns.append(pa.array(np.zeros(rows), pa.float64()).cast(field.type))
    ranks = []
    for rank in range(count):
        info = ReportInfo(Path("r"), "simulated", rank, begin_ns=base, end_ns=base + calls * MS)
        tables = [empty(n) for n in ("activity", "collective_calls", "steps", "host_calls")]
        ranks.append(RankTables(info, *tables))
    return ranks, pa.table(columns, schema=MATCHED), offset
