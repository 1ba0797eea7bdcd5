"""Why a rank is late: what its host spends more time in than its peers' hosts, and how much."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
from simulate import Cause, Job, simulate
from simulate.cases import cases
from studies import SEED, found_in, simulated_job

from clusterprof.results import Finding
from clusterprof.study import Study
from clusterprof.tables import RankTables

MS = 1_000_000
#: all ranks fetch for longer than one of them sleeps
FETCHING = tuple(Cause("input", rank, 20 * MS) for rank in range(4))
JOB = Job(synchronous=True, steps=6, causes=(*FETCHING, Cause("host", 2, 12 * MS)))


def late(ranks: list[RankTables]) -> Finding:
    top = next(f for f in found_in(ranks) if f["code"] == "straggler.host")
    assert top["ranks"] == [2]
    return top


@pytest.mark.parametrize(
    ("recording", "name"),
    [
        ("kineto/gloo", "between 'Optimizer.step#SGD.step' and 'Optimizer.zero_grad#SGD…'"),
        ("kineto/gloo-slow-loader", "in 'enumerate(DataLoader)#_SingleProcessDat…'"),
        ("kineto/gloo-heavy-compute", "in 'aten::mm'"),
    ],
)
def test_a_cause_on_processors_is_what_takes_longer_than_on_other_ranks(
    studied: Callable[[str], Study], recording: str, name: str
) -> None:
    top = studied(recording).results["findings"][0]
    assert (top["code"], top["ranks"]) == ("straggler.host", [1])
    named = re.search(rf"{re.escape(name)} \((\S+) ms, its peers (\S+) ms\)", top["summary"])
    assert named, top["summary"]
    assert float(named[1]) > 30 > 2 > float(named[2])


def test_a_cause_is_what_a_host_does_longer_than_its_peers_and_not_what_it_does_longest() -> None:
    found = late(simulate(JOB)[0])
    assert (
        "Cause: its host blocks in clock_nanosleep (12.0 ms, its peers 0 ms)." in found["summary"]
    )
    rows = [row for row in found["evidence"] if "peers_ns" in row]
    assert {row["step"] for row in rows} == set(found["steps"])
    assert {(row["host"]["name"], row["peers_ns"]) for row in rows} == {("clock_nanosleep", 0)}


def test_waiting_for_the_device_is_no_part_of_a_cause() -> None:
    """One range around all that a step does: its peers are in it as long, as they wait there."""
    found = late([with_ranges(tables, 1) for tables in simulate(JOB)[0]])
    named = re.search(r"is in 'part 0' \((\S+) ms, its peers (\S+) ms\)", found["summary"])
    assert named, found["summary"]
    assert float(named[1]) - float(named[2]) == pytest.approx(12, abs=1)


@pytest.mark.parametrize(("parts", "is_named"), [(2, True), (3, False)])
def test_what_explains_less_than_half_is_no_cause(parts: int, is_named: bool) -> None:
    """A sleep of 12 ms in ranges: of two one is a little longer than the other."""
    found = late([with_sleep_in(tables, parts) for tables in simulate(JOB)[0]])
    assert ("is in 'part 0'" in found["summary"]) is is_named
    assert ("Cause: cannot be determined: no call, range" in found["summary"]) is not is_named


def with_ranges(tables: RankTables, parts: int) -> RankTables:
    """The rank with a range around each of its steps, and no other call."""
    steps = tables.steps.to_pylist()
    return with_calls(
        tables, [("part 0", row["begin_ns"] + 1, row["end_ns"] - 1) for row in steps], keep=False
    )


def with_sleep_in(tables: RankTables, parts: int) -> RankTables:
    """The rank with so many ranges, one after the other, where it sleeps."""
    rows = [row for row in tables.host_calls.to_pylist() if row["name"] == "clock_nanosleep"]
    named = []
    for row in rows:
        begin, length = row["start_ns"], row["end_ns"] - row["start_ns"]
        ends = [int(length * (0.04 + (k + 1) / (parts + 0.04 * parts))) for k in range(parts - 1)]
        times = [0, *ends, length]
        named += [
            (f"part {k}", begin + low, begin + high)
            for k, (low, high) in enumerate(pairwise(times))
        ]
    return with_calls(tables, named, keep=True)


def with_calls(tables: RankTables, ranges: list[tuple[str, int, int]], *, keep: bool) -> RankTables:
    """The rank with these ranges; of its other calls those of CUDA alone, and its own ranges."""
    main = tables.activity["launch_thread"].drop_null()[0].as_py()
    rows = [
        row for row in tables.host_calls.to_pylist()
        if row["kind"] == "cuda" or (keep and row["kind"] == "range")
    ]  # fmt: skip
    rows += [
        {"start_ns": begin, "end_ns": end, "kind": "range", "name": name, "thread": main,
         "correlation": None}
        for name, begin, end in ranges
    ]  # fmt: skip
    rows.sort(key=lambda row: row["start_ns"])
    return replace(tables, host_calls=pa.Table.from_pylist(rows, tables.host_calls.schema))


@pytest.mark.parametrize(("every", "often"), [(1, "once per step"), (2, "3 times in 6 steps")])
def test_hosts_that_read_a_value_do_so_once_per_step_or_in_some_steps(
    every: int, often: str
) -> None:
    (case,) = cases([".item() each step"], range(SEED, SEED + 1))
    found = found_in(simulated_job(replace(case.job, item_every=every)))
    (sync,) = [f for f in found if f["code"] == "host.sync"]
    assert sync["summary"].startswith(f"Hosts wait for their GPU {often}, for a value")
