"""Ends that a copy beside them delays are told from late clocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from simulate import Job, simulate

from clusterprof.align.clock import align
from clusterprof.align.clock.concurrent_copies import DELAY_NS, delays
from clusterprof.align.match import match
from clusterprof.tables import ACTIVITY, RankTables

US = 1_000


def copying(tables: RankTables, copies: list[tuple[int, int]], direction: str) -> RankTables:
    """`tables` with these copies (begin, end, ns) beside all else that ran on the device."""
    rows = [
        {
            "start_ns": begin, "end_ns": end, "kind": "copy", "name": f"memcpy {direction}",
            "device": 0, "stream": 99, "direction": direction,
        }
        for begin, end in copies
    ]  # fmt: skip
    more = pa.Table.from_pylist(rows, schema=ACTIVITY)
    whole = pa.concat_tables([tables.activity, more]).sort_by("start_ns")
    return replace(tables, activity=whole.combine_chunks())


def first_end(tables: RankTables) -> int:
    return int(tables.collective_calls["end_ns"][0].as_py())


@pytest.mark.parametrize(
    ("begin_us", "end_us", "direction", "delayed"),
    [
        (-5, 5, "device_to_device", True),
        (-5, 5, "host_to_device", False),
        (-5, 0, "device_to_device", False),
        (-1, 5, "device_to_device", False),
        (5, 9, "device_to_device", False),
    ],
)
def test_only_a_copy_within_the_device_that_outlasts_the_end_delays_it(
    begin_us: int, end_us: int, direction: str, delayed: bool
) -> None:
    ranks, _ = simulate(Job(steps=2))
    end = first_end(ranks[1])
    copy = (end + begin_us * US, end + end_us * US)
    # a later one must not hide it, and one of another rank is none of its business
    ranks[1] = copying(ranks[1], [copy, (end + 50 * US, end + 60 * US)], direction)
    matched = match(ranks)
    found = delays(matched, ranks)
    here = np.flatnonzero(found)
    assert (found[here] == DELAY_NS).all()
    if delayed:
        first = matched.take(here[:1]).to_pylist()[0]
        assert (first["rank"], first["end_ns"]) == (1, end)
    assert bool(len(here)) == delayed


def test_a_copy_that_goes_on_is_seen_behind_a_shorter_one() -> None:
    ranks, _ = simulate(Job(steps=2))
    end = first_end(ranks[2])
    both = [(end - 90 * US, end + 90 * US), (end - 9 * US, end - 5 * US)]
    ranks[2] = copying(ranks[2], both, "device_to_device")
    assert np.count_nonzero(delays(match(ranks), ranks)) >= 1


def test_a_rank_that_copies_at_every_small_call_does_not_seem_to_have_another_clock() -> None:
    job = Job(steps=6, phase_ns=60_000)
    true, _ = simulate(job)
    calls = true[3].collective_calls
    small = np.asarray(calls["message_bytes"].to_numpy()) < 1_000_000
    ends = np.asarray(calls["end_ns"].to_numpy(), dtype=np.int64).copy()
    assert small.any()
    copies = [(int(end) - 20 * US, int(end) + 20 * US) for end in ends[small]]
    ends[small] += int(DELAY_NS)
    at = calls.schema.get_field_index("end_ns")
    late = replace(true[3], collective_calls=calls.set_column(at, "end_ns", pa.array(ends)))

    def offset(rank: RankTables) -> int:
        ranks = [replace(t, info=replace(t.info, host="")) for t in [*true[:3], rank]]
        return int(align(ranks, match(ranks)).offset_ns[3])

    seen = copying(late, copies, "device_to_device")
    assert abs(offset(seen)) < 500 < abs(offset(late))
