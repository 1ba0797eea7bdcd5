"""An all-to-all is a group of Sends and Recvs in one kernel: one operation, and no pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from simulate import Cause, Job, simulate

from clusterprof import words
from clusterprof.align.match import match
from clusterprof.report import collective_charts, whole_job
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job as Known
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


def test_what_waits_for_whom_is_the_same_in_one_call_and_in_sends_and_receives() -> None:
    """Each kernel waits once, however many calls it has; its bytes are those of all of them."""
    job = replace(JOB, causes=(Cause("host", 2, 8 * MS),), small_calls=False)
    ranks, _ = simulate(job)
    one, several = study(ranks), study([exchanging(each) for each in ranks])
    charts = [
        collective_charts.charts(Summary(each.results), each.collectives) for each in (one, several)
    ]
    shares = [
        {(cell["row"], cell["column"]): cell["share"] for cell in (each["waits"] or {})["cells"]}
        for each in charts
    ]
    assert shares[0].keys() == shares[1].keys()
    assert shares[1] == pytest.approx(shares[0], abs=0.02)
    highs = [float((each["waits"] or {})["high"].removesuffix(" ms")) for each in charts]
    assert highs[1] == pytest.approx(highs[0], rel=0.02)
    caused = [
        whole_job.measures(Summary(each.results), each.collectives, Known())
        for each in (one, several)
    ]
    assert caused[1][0].values == pytest.approx(caused[0][0].values, rel=0.02, abs=MS / 10)
    size = ranks[0].collective_calls["message_bytes"][0].as_py()
    (point,) = (charts[1]["bandwidth"] or {})["points"]
    (before,) = (charts[0]["bandwidth"] or {})["points"]
    assert point["label"].startswith(f"AllToAll of 4 ranks, {words.size(4 * size)}: ")
    rates = [float(each["label"].split(": ")[1].split(" GB/s")[0]) for each in (point, before)]
    # four times the bytes in the same time; the factors are 3/4 and 2·3/4
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.02)
