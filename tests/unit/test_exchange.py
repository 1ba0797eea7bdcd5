"""An all-to-all is a group of Sends and Recvs in one kernel: one operation, and no pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from simulate import Cause, Job, simulate

from clusterprof.align.match import match
from clusterprof.study import study
from clusterprof.tables import RankTables

MS = 1_000_000
JOB = Job(dp=4, layers=4, steps=6, synchronous=True, transfer_ns=2 * MS)


def exchanging(tables: RankTables) -> RankTables:
    """The AllReduces of a rank turned into Sends to all ranks and Recvs from all, itself too."""
    calls = tables.collective_calls
    times = 8
    rows = calls.take(pa.array(np.repeat(np.arange(len(calls)), times)))
    place = np.arange(len(rows)) % times
    columns = {
        "call": pa.array(np.arange(len(rows)), pa.int32()),
        "operation": pa.array(np.where(place % 2 == 0, "Send", "Recv")).dictionary_encode(),
        "peer": pa.array(place // 2, pa.int32()),
        "group": pa.array(np.arange(len(rows)) // times, pa.int32()),
    }
    for name, values in columns.items():
        field = calls.schema.field(name)
        rows = rows.set_column(calls.schema.get_field_index(name), field, values.cast(field.type))
    return replace(tables, collective_calls=rows)


def test_each_call_is_matched_once_also_the_one_from_a_rank_to_itself() -> None:
    ranks = [exchanging(r) for r in simulate(JOB)[0]]
    table = match(ranks)
    assert table.num_rows == sum(r.collective_calls.num_rows for r in ranks)
    pairs = set(zip(table["rank"].to_pylist(), table["call"].to_pylist(), strict=True))
    assert len(pairs) == table.num_rows
    assert set(table["state"].cast(pa.string()).to_pylist()) == {"matched"}


@pytest.mark.parametrize(("lacking", "other"), [(0, 3), (3, 0)])
def test_calls_to_a_rank_whose_own_calls_the_report_lacks_are_kept(
    lacking: int, other: int
) -> None:
    """Whichever of the two has the higher number."""
    ranks = [exchanging(r) for r in simulate(JOB)[0]]
    calls = ranks[lacking].collective_calls
    left = calls.filter(pc.not_equal(calls["peer"], other))
    left = left.set_column(0, calls.schema.field(0), pa.array(range(len(left)), pa.int32()))
    ranks[lacking] = replace(ranks[lacking], collective_calls=left)
    table = match(ranks)
    assert table.num_rows == sum(r.collective_calls.num_rows for r in ranks)
    alone = table.filter(pc.equal(table["state"].cast(pa.string()), "unmatched"))
    assert set(alone["rank"].to_pylist()) == {other}
    assert alone.num_rows == calls.num_rows - left.num_rows


@pytest.mark.parametrize("kept", [4, 2])
def test_it_is_told_as_one_operation_of_an_expert_group_and_makes_no_pipeline(kept: int) -> None:
    ranks = [exchanging(r) for r in simulate(JOB)[0]][:kept]
    results = study(ranks).results
    (group,) = results["topology"]["groups"]
    assert (group["kind"], group["ranks"]) == ("expert", list(range(kept)))
    assert group["operations"] == ["AllToAll"]
    # four buckets and a small one
    assert group["calls_per_step"] == 5.0
    assert results["topology"]["stages"] == []
    found = [f for f in results["findings"] if f["code"] == "communication.exposed"]
    assert len(found) == 1
    assert [row["operation"] for row in found[0]["evidence"]] == ["AllToAll"]
    assert "5 calls per step" in found[0]["summary"]
    (entry,) = results["collectives"]["by_operation"]
    assert (entry["operation"], entry["calls_per_step"]) == ("AllToAll", 5.0)


def test_a_late_rank_is_found_behind_its_exchanges() -> None:
    late = replace(JOB, causes=(Cause("host", 2, 20 * MS),))
    results = study([exchanging(r) for r in simulate(late)[0]]).results
    assert (results["findings"][0]["code"], results["findings"][0]["rank"]) == ("straggler.host", 2)
