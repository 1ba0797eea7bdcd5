"""The charts of collectives: each number is what the placed table says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import report_sample as sample

from clusterprof import words
from clusterprof.report import collective_charts as charts
from clusterprof.report.summary import Summary
from clusterprof.results import Results


def _known(results: Results, **more: Any) -> charts.Calls:
    found = charts.calls(Summary(results), sample.collectives(**more))
    assert found is not None
    return found


def _steady() -> list[dict[str, Any]]:
    return [row for row in sample.collectives().to_pylist() if row["step"] != 6]


def test_the_factors_of_bus_bandwidth_are_those_of_nccl_tests() -> None:
    assert charts.bus_factor("AllReduce", 4) == 1.5
    # of a gather each rank's bytes are one part of the whole
    assert charts.bus_factor("AllGather", 8) == 7
    assert charts.bus_factor("Broadcast", 8) == 1
    # of an all-to-all they are the whole
    assert charts.bus_factor("AllToAll", 8) == 7 / 8
    assert charts.bus_factor("Scatter", 8) is None


@pytest.mark.parametrize(("source", "times"), [("kineto", 1), ("nvtx_payload", 5)])
def test_of_ncclalltoall_the_payload_is_what_one_member_gets(source: str, times: int) -> None:
    results, table = sample.results(), sample.collectives(operation="AllToAll")
    column = pa.array([source] * table.num_rows).dictionary_encode()
    at = table.column_names.index("source")
    table = table.set_column(at, table.field(at), column.cast(table.field(at).type))
    known = charts.calls(Summary(results), table)
    assert known is not None
    found = charts.bandwidth(Summary(results), known)
    assert found is not None
    (point,) = found["points"]
    assert point["label"].startswith(f"AllToAll of 5 ranks, {words.size(times * 33_554_432)}: ")


def test_bandwidth_is_of_the_last_members_own_time_and_at_least_where_members_are_missing() -> None:
    results = sample.results()
    found = charts.bandwidth(Summary(results), _known(results))
    assert found is not None
    took: dict[int, int] = {}
    for row in _steady():
        length = row["end_ns"] - row["start_ns"]
        took[row["collective"]] = min(took.get(row["collective"], length), length)
    rate = 33_554_432 * 2 * 4 / 5 / float(np.median([*took.values()]))
    (point,) = found["points"]
    # the group has five members, of which four were profiled
    assert point["label"].startswith(f"AllReduce of 5 ranks, 33.6 MB: at least {rate:.3g} GB/s (")
    assert point["label"].endswith(", 36 calls)")
    assert found["least"]
    # gpu-07 has H200s, and all profiled members are on it
    assert [text for _, text in found["links"]] == ["NVLink of H200: 450 GB/s"]


@pytest.mark.parametrize(("device", "host"), [("NVIDIA H100 PCIe", "a"), ("NVIDIA H200", "")])
def test_a_link_is_named_where_it_is_known_only(device: str, host: str) -> None:
    results = sample.results()
    for entry in results["ranks"]:
        entry |= {"device": device, "host": host}
    found = charts.bandwidth(Summary(results), _known(results))
    assert found is not None
    assert found["links"] == []


def test_every_collective_is_in_the_spread_of_arrivals() -> None:
    results = sample.results()
    found = charts.spread(Summary(results), _known(results))
    assert found is not None
    counts = [int(bar["label"].rpartition(": ")[2].split()[0]) for bar in found["bars"]]
    assert sum(counts) == 36
    # in one of twelve rank 2 comes 20 ms after the first
    assert counts[-1] == 3
    assert found["largest"] == "20.0 ms"
    assert found["bound"] == "±17 µs"


def test_who_waits_for_whom_is_the_mean_wait_of_a_step() -> None:
    results = sample.results()
    found = charts.waits(Summary(results), _known(results))
    assert found is not None
    assert found["noun"] == "rank"
    expected = sum(
        row["wait_ns"]
        for row in _steady()
        if (row["rank"], row["last_rank"]) == (0, 2) and row["wait_ns"] > 16_720
    )
    cell = next(e for e in found["cells"] if (e["row"], e["column"]) == (0, 2))
    assert cell["label"] == f"rank 0 waits {expected / 3e6:.1f} ms per step for rank 2"
    assert found["columns"][2] == ("2", True)
    assert not [e for e in found["cells"] if e["row"] == e["column"]]


def test_of_many_ranks_hosts_wait_for_hosts() -> None:
    results = sample.results()
    one, clock = results["ranks"][0], results["clock"]["ranks"][1]
    results["ranks"] = [{**one, "rank": r, "host": f"gpu-{r // 8:02}"} for r in range(64)]
    results["clock"]["ranks"] = [{**clock, "rank": r} for r in range(64)]
    found = charts.waits(Summary(results), _known(results, ranks=64))
    assert found is not None
    assert found["noun"] == "host"
    assert [name for name, _ in found["rows"]] == [f"gpu-{host:02}" for host in range(8)]
    best = max(found["cells"], key=lambda cell: cell["share"])
    assert best["column"] == 0
    assert "for host gpu-00" in found["most"][0]


def test_without_waits_or_sizes_there_is_no_chart() -> None:
    results = sample.results()
    nothing = charts.charts(Summary(results), sample.collectives().slice(0, 0))
    assert nothing == {"bandwidth": None, "spread": None, "waits": None}
    table = sample.collectives()
    at = table.column_names.index("message_bytes")
    empty = table.set_column(at, table.field(at), pa.nulls(table.num_rows, pa.int64()))
    assert charts.charts(Summary(results), empty)["bandwidth"] is None


def test_of_hundreds_of_hosts_those_that_wait_and_are_waited_for_are_shown() -> None:
    """One host of 128 comes last: it has a column, and no empty ones hide it."""
    results = sample.results()
    one, clock = results["ranks"][0], results["clock"]["ranks"][1]
    results["ranks"] = [{**one, "rank": r, "host": f"node{r // 2}"} for r in range(256)]
    results["clock"]["ranks"] = [{**clock, "rank": r} for r in range(256)]
    known = _known(results, ranks=256)
    waits = np.where(np.asarray(known.table["last_rank"]) == 2, known.table["wait_ns"], 0)
    at = known.table.column_names.index("wait_ns")
    table = known.table.set_column(at, known.table.field(at), pa.array(waits))
    found = charts.waits(Summary(results), charts.Calls(table, known.steps))
    assert found is not None
    assert found["columns"] == [("node1", False)]
    names = [name for name, _ in found["rows"]]
    assert len(names) == 24
    assert names == sorted(names, key=lambda name: int(name.removeprefix("node")))
    assert {cell["column"] for cell in found["cells"]} == {0}
    assert found["left_out"] == 128 - len({*names, "node1"})
