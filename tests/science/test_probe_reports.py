"""Clocks that were measured, for reports that no agent was beside: by the names of their hosts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from simulate import Job, simulate

from clusterprof import clock_probe
from clusterprof.agent.contracts import paths
from clusterprof.align.clock import UNBOUNDED_NS, Clock, align, alignment
from clusterprof.align.clock.measured import ANCHOR_NS, STAMP_NS, known_clocks, parsed
from clusterprof.align.match import match
from clusterprof.cli import merge
from clusterprof.clock_probe import Bound, Measurement, of_reports
from clusterprof.errors import MergeError, ReportError, UsageError
from clusterprof.run_directory import Window
from clusterprof.study import study
from clusterprof.tables import RankTables

MS = 1_000_000
HOUR = 3_600_000 * MS
OFFSETS = (0, 0, 7_400_000 * MS, 7_400_000 * MS)


def on_hosts(*hosts: str, offsets: Sequence[int] = OFFSETS) -> list[RankTables]:
    """A job's ranks on these hosts, whose collectives tie no rank to another."""
    ranks, _ = simulate(Job(offset_ns=tuple(offsets), tear_ns=0))
    alone = []
    for rank, host in zip(ranks, hosts, strict=True):
        calls = rank.collective_calls
        own = pa.array([f"0xown{rank.rank}"] * calls.num_rows)
        at = calls.schema.get_field_index("communicator")
        calls = calls.set_column(at, calls.schema.field(at), own)
        alone.append(replace(rank, info=replace(rank.info, host=host), collective_calls=calls))
    return alone


def measured(*hosts: str, offset: int = 0, at: int = 0, half: int = 20_000) -> Measurement:
    """Each host's clock against the first's: all of them `offset` ahead."""
    bounds = tuple(
        Bound(
            k, 0, f"boot{k} {host}", f"boot0 {hosts[0]}", at, offset - half, offset + half, 9, 400
        )
        for k, host in enumerate(hosts[1:], 1)
    )
    return Measurement(bounds, "UDP")


def clock(ranks: Sequence[RankTables], found: Measurement) -> Clock:
    files, _ = of_reports(ranks, found)
    return align(ranks, match(ranks), known_clocks(ranks, files, found.as_json()).bounds)


def test_hosts_that_no_collective_connects_are_put_on_one_clock_with_the_measurement_s_bound() -> (
    None
):
    ranks = on_hosts("a", "a", "b", "b")
    at = ranks[0].info.begin_ns
    found = clock(ranks, measured("a", "b", offset=OFFSETS[2], at=at))
    # what is not known of two reports' ties to their hosts' clocks, and the measurement's half
    bound = 2 * (ANCHOR_NS + STAMP_NS) + 20_000
    for rank in (1, 2, 3):
        assert abs(int(found.offset_ns[rank]) - OFFSETS[rank]) <= found.uncertainty(rank)
        assert found.uncertainty(rank) <= 2 * bound
    assert found.method == alignment.BY_PROBE


def test_a_measurement_of_an_hour_before_says_as_little_as_150_ppm_leave() -> None:
    ranks = on_hosts("a", "a", "b", "b")
    at = ranks[0].info.begin_ns
    early = clock(ranks, measured("a", "b", offset=OFFSETS[2], at=at - HOUR))
    assert 400 * MS < early.uncertainty(2) < 700 * MS


def test_a_report_s_host_may_be_called_with_its_domain_or_without() -> None:
    ranks = on_hosts("a.cluster.example", "a.cluster.example", "b", "b")
    files, silent = of_reports(ranks, measured("a", "b.cluster.example"))
    machines = [files[rank]["clock"]["machine"] for rank in range(4)]
    assert machines == ["boot0 a", "boot0 a", "boot1 b.cluster.example", "boot1 b.cluster.example"]
    assert silent == []


def test_a_host_that_was_not_measured_is_named_with_its_reports_and_those_that_were() -> None:
    ranks = on_hosts("a", "a", "b", "c")
    with pytest.raises(MergeError, match="host c ") as caught:
        of_reports(ranks, measured("a", "b"))
    reports, measured_hosts, how = caught.value.details
    assert str(ranks[3].info.source) in reports
    assert measured_hosts.endswith(": a, b")
    assert "clusterprof clock --output" in how


def test_a_short_name_that_two_hosts_have_names_neither() -> None:
    with pytest.raises(MergeError, match="host b "):
        of_reports(on_hosts("a", "a", "b", "b"), measured("a", "b.one", "b.two"))


def test_a_host_that_was_started_anew_between_the_measurements_is_refused() -> None:
    found = measured("a", "b")
    (bound,) = found.bounds
    again = replace(found, bounds=(bound, replace(bound, machine="boot9 b")))
    with pytest.raises(MergeError, match=r"host b .* 2 machines"):
        of_reports(on_hosts("a", "a", "b", "b"), again)


def test_a_report_without_a_host_costs_that_rank_its_clock_and_no_other() -> None:
    ranks = on_hosts("a", "", "b", "b")
    found = measured("a", "b", offset=OFFSETS[2], at=ranks[0].info.begin_ns)
    files, silent = of_reports(ranks, found)
    assert sorted(files) == [0, 2, 3]
    assert silent[0].startswith("rank 1: ")
    assert [clock(ranks, found).uncertainty(rank) >= UNBOUNDED_NS for rank in range(4)] == [
        False, True, False, False,
    ]  # fmt: skip


def test_a_rank_whose_host_s_clock_was_set_inside_the_run_is_named_in_the_results() -> None:
    ranks, _ = simulate(Job())
    now = ranks[1].info.begin_ns
    readings = [
        {"event": "open", "wall_ns": now, "monotonic_ns": 0, "gap_ns": 100},
        {"event": "close", "wall_ns": now + 1_000 * MS, "monotonic_ns": 997 * MS, "gap_ns": 100},
    ]
    clocks = known_clocks(ranks, {1: {"clock": {"machine": "boot n1", "readings": readings}}})
    warnings = study(ranks, clocks=clocks).results["warnings"]
    (warning,) = [each for each in warnings if "+3.000 ms" in each]
    assert warning.startswith("rank 1: ")


@pytest.mark.parametrize("set_by", [0, 3 * MS])
def test_a_clock_that_was_set_after_the_first_window_is_seen_in_a_later_one(
    tmp_path: Path, set_by: int
) -> None:
    run, ranks = Window.at(tmp_path), on_hosts("a", "a", "b", "b")[1:3]
    later = Window.at(tmp_path / paths.WINDOWS / "2")
    begin, boot = ranks[0].info.begin_ns, 5_000 * MS
    for rank, name, more in ((1, "boot0 a", 0), (2, "boot1 b", set_by)):
        for window, at in ((run, begin - 1_000 * MS), (later, begin)):
            (folder := window.rank(rank)).mkdir(parents=True)
            wall = at + OFFSETS[rank] + (more if window is later else 0)
            now = {"wall_ns": wall, "monotonic_ns": at - begin + boot, "gap_ns": 100}
            written = {"machine": name, "clock": {"event": "start", **now}}
            (folder / paths.STATE).write_text(json.dumps(written))
    probe = measured("a", "b", offset=OFFSETS[2], at=begin - 1_000 * MS)
    probe.write(run.rank(2) / paths.PROBE)

    found = clock_probe.measured_so_far(later)
    assert found is not None
    known = known_clocks(ranks, clock_probe.of_run(later, [1, 2]), found.as_json())
    assert [each.source for each in known.bounds] == ([] if set_by else ["probe"])
    assert [warning[:6] for warning in known.warnings] == (["rank 2"] if set_by else [])


def test_of_another_machine_no_clock_is_compared() -> None:
    """A launcher that starts its ranks over may do so on other nodes."""
    now = {"wall_ns": 9 * HOUR, "monotonic_ns": 8 * HOUR, "gap_ns": 9}
    there = {"machine": "boot0 a", "clock": {**now, "monotonic_ns": 0}}
    for before in (there, {**there, "machine": ""}, 3):
        earlier = [{"clock": None, "state": before}]
        mine = parsed(None, {"machine": "boot1 b", "clock": now}, before=earlier)
        assert [each.monotonic_ns for each in mine.readings] == [8 * HOUR]


def test_a_file_that_is_no_measurement_stops_the_merge(tmp_path: Path, recordings: Path) -> None:
    odd = tmp_path / "clock.json"
    odd.write_text("[]")
    reports = str(recordings / "nsys-2025.3" / "ddp")
    with pytest.raises(ReportError, match=str(odd)):
        merge.main("merge", [reports, "--clock", str(odd)], None)


def test_a_run_directory_has_measurements_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=str(tmp_path)) as caught:
        merge.main("merge", [str(tmp_path), "--clock", "clock.json"], None)
    assert "clock_probe.json" in caught.value.details[0]


def test_a_look_at_a_job_that_runs_leaves_its_probers_what_they_meet_by(tmp_path: Path) -> None:
    run = Window.at(tmp_path)
    run.rank(1).mkdir(parents=True)
    found = measured("gpu-01", "gpu-02")
    found.write(run.rank(1) / paths.PROBE)
    (address := run.rank(1) / paths.PROBE_ADDRESS).touch()
    (met := tmp_path / paths.PROBED).mkdir()
    known = clock_probe.measured_so_far(run)
    assert known is not None
    assert known.bounds == found.bounds
    assert (address.exists(), met.exists()) == (True, True)
    assert not (tmp_path / paths.CLOCK_PROBE).exists()
    assert clock_probe.gathered(run) == known
    assert (address.exists(), met.exists()) == (False, False)
    assert (tmp_path / paths.CLOCK_PROBE).exists()
