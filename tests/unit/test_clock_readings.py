"""Bounds on clocks from readings, probes and marks: they hold whatever the delays were."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from lab.clock import ManualClock
from lab.command import PATIENCE_S

from clusterprof import clock_probe
from clusterprof.agent.contracts import clocks, exchange, files, identity
from clusterprof.agent.contracts.exchange import (
    Answerer,
    Endpoint,
    Exchange,
    answer,
    exchanged,
    measure,
    narrowed,
)
from clusterprof.agent.contracts.identity import PLAN, Identity
from clusterprof.agent.contracts.timing import Clock
from clusterprof.agent.remote import prober
from clusterprof.align.clock import UNBOUNDED_NS, align, alignment, measured
from clusterprof.align.match import match
from clusterprof.cli import clock as clock_verb
from clusterprof.clock_probe import Bound, Measurement, drift, joined, parsed
from clusterprof.tables import SCHEMAS, RankTables, ReportInfo, empty

NOW = 1_790_000_000_000_000_000
US = 1_000


def reading(
    wall: int,
    monotonic: int,
    gap: int = 200,
    event: str = "x",
    marks: tuple[measured.Mark, ...] = (),
) -> measured.Reading:
    return measured.Reading(event, wall, monotonic, gap, marks)


def rank_tables(rank: int, host_calls: list[dict[str, Any]] | None = None) -> RankTables:
    info = ReportInfo(
        source=__import__("pathlib").Path(f"rank{rank}"), profiler="nsys 2025.3.2", rank=rank,
        world_size=4, host=f"n{rank}", begin_ns=NOW, end_ns=NOW + 10**9,
    )  # fmt: skip
    calls = (
        pa.Table.from_pylist(host_calls, schema=SCHEMAS["host_calls"])
        if host_calls
        else empty("host_calls")
    )
    return RankTables(info, empty("activity"), empty("collective_calls"), empty("steps"), calls)


# --- the host's own clock


def test_a_clock_that_only_goes_on_has_not_been_set() -> None:
    assert measured.stepped([reading(NOW, 500), reading(NOW + 10**9, 500 + 10**9 + 150)]) is None


def test_a_clock_that_was_set_between_two_readings_is_found_with_its_least_and_most() -> None:
    step = -3_000_000
    found = measured.stepped([reading(NOW, 500), reading(NOW + 10**9 + step, 500 + 10**9)])
    assert found is not None
    assert found[0] <= step <= found[1]
    assert found[1] - found[0] == 400


def test_a_rank_whose_clock_was_set_is_named_and_its_bounds_are_left_out() -> None:
    jumped = measured.RankReadings("a", (reading(NOW, 0), reading(NOW + 2_000_000, 1_000_000)))
    fine = measured.RankReadings("a", (reading(NOW, 0), reading(NOW + 1_000_000, 1_000_000)))
    assert measured.pair_bounds({0: fine, 1: jumped}) == []
    (warning,) = measured.clock_warnings({0: fine, 1: jumped})
    assert "rank 1" in warning
    assert "+1.000 ms" in warning


def test_the_agent_s_own_reading_has_the_kernel_s_state() -> None:
    now = clocks.reading("open")
    assert {"offset_ns", "maxerror_ns", "esterror_ns", "synchronised", "frequency_ppm"} == set(
        now["kernel"]
    )
    mine = measured.parsed(
        {"machine": clocks.machine(), "readings": [now, clocks.reading("close")]}
    )
    assert measured.stepped(mine.readings) is None
    assert mine.machine.endswith(socket.gethostname())
    assert mine.readings[0].wall_ns == now["wall_ns"]


@pytest.mark.parametrize("broken", [None, [], {"readings": [1, {"wall_ns": "x"}]}, "text", 3])
def test_files_that_are_not_understood_are_left_out(broken: Any) -> None:
    assert measured.parsed(broken, broken) == measured.RankReadings()


# --- marks


def marked(before: int, after: int, name: str = "clusterprof:clock:1") -> measured.Reading:
    return reading(before, 0, marks=(measured.Mark(name, before, after),))


def call(name: str, start: int, end: int) -> dict[str, Any]:
    return {"start_ns": start, "end_ns": end, "kind": "range", "name": name, "thread": 1}


@given(
    shift=st.integers(-(10**9), 10**9),
    waits=st.lists(st.tuples(*[st.integers(0, 50_000)] * 3), min_size=1, max_size=4),
)
def test_marks_bound_how_far_a_report_is_from_the_wall_clock(
    shift: int, waits: list[tuple[int, int, int]]
) -> None:
    ranges, marks = [], []
    for k, (one, two, three) in enumerate(waits):
        begin, name = NOW + k * 10**8, f"clusterprof:clock:{k}"
        marks.append(marked(begin, begin + one + two + three, name))
        ranges.append(call(name, begin + one - shift, begin + one + two - shift))
    found = measured.anchor(rank_tables(0, ranges).host_calls, marks)
    assert found is not None
    assert found[0] <= shift <= found[1]
    assert (
        found[1] - found[0] <= min(one + three for one, _, three in waits) + 2 * measured.STAMP_NS
    )


@pytest.mark.parametrize("by_s", [3_600, -3_600, 2])
def test_a_report_that_the_setting_of_the_clock_stretched_is_left_out_and_named(by_s: int) -> None:
    from clusterprof.study import study

    by, monotonic = by_s * 10**9, 5 * 10**9
    marks = [
        (measured.Mark(f"clusterprof:clock:{k}", at + 100, at + 900),)
        for k, at in enumerate((NOW, NOW + by + 10**9))
    ]
    readings = [
        reading(NOW, monotonic, event="opened", marks=marks[0]),
        reading(NOW + by + 10**9, monotonic + 10**9, event="closing", marks=marks[1]),
    ]

    def report(between: int) -> RankTables:
        calls = [call("clusterprof:clock:0", NOW + 200, NOW + 300)]
        return rank_tables(1, [*calls, call("clusterprof:clock:1", NOW + between, NOW + between)])

    # nsys: the monotonic clock's time; torch.profiler: what the wall clock made of it
    whole, folded = report(10**9 + 2_000), report(10**9 + by)
    assert measured.stretched(whole.host_calls, readings) is None
    assert measured.stretched(folded.host_calls, readings) == pytest.approx(by, abs=10**6)
    assert measured.stretched(rank_tables(1).host_calls, readings) is None
    ranks = [rank_tables(0), folded]
    written = json.loads(json.dumps([asdict(each) for each in readings]))
    known = measured.known_clocks(ranks, {1: {"clock": {"machine": "m", "readings": written}}})
    results = study(ranks, clocks=known).results
    assert [each["rank"] for each in results["ranks"]] == [0]
    (missing,) = results["missing"]
    assert missing["rank"] == 1
    assert f"{by_s:+d}.0" in missing["reason"]


def test_a_report_without_marks_or_with_marks_that_contradict_has_no_anchor() -> None:
    marks = [
        marked(NOW, NOW + 10_000),
        marked(NOW + 10**9, NOW + 10**9 + 9_000, "clusterprof:clock:2"),
    ]
    ranges = [
        call("clusterprof:clock:1", NOW + 10, NOW + 20),
        call("clusterprof:clock:2", NOW + 10**9 + 10**6, NOW + 10**9 + 10**6 + 5),
    ]
    assert measured.anchor(empty("host_calls"), marks) is None
    assert measured.anchor(rank_tables(0, [call("step 3", 1, 2)]).host_calls, marks) is None
    assert measured.anchor(rank_tables(0, ranges).host_calls, marks) is None


# --- the ping-pong

delays = st.integers(0, 3_000_000)


@given(
    offset=st.integers(-(10**12), 10**12),
    drift_ppm=st.floats(-70, 70),
    turns=st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=12),
)
def test_the_bound_of_a_ping_pong_holds_however_unequal_the_two_ways(
    offset: int, drift_ppm: float, turns: list[tuple[int, int, int]]
) -> None:
    def asker(true: int) -> int:
        return true + offset + int((true - NOW) * drift_ppm * 1e-6)

    found, now = [], NOW
    for there, thinking, back in turns:
        arrived = now + there
        left = arrived + thinking
        came = left + back
        found.append(exchanged(asker(now), arrived, left, asker(came)))
        now = came + 1_000
    bound = narrowed(found)
    truth = asker(bound.at_ns) - bound.at_ns
    assert bound.low_ns - 2 <= truth <= bound.high_ns + 2
    assert bound.high_ns - bound.low_ns <= min(e.high_ns - e.low_ns for e in found)


def test_exchanges_around_a_step_of_the_clock_are_refused() -> None:
    with pytest.raises(ValueError):
        narrowed([Exchange(NOW, -10, 10), Exchange(NOW + 1000, 5_000, 5_020)])


def test_datagrams_without_the_secret_are_not_answered(clock: ManualClock) -> None:
    server, friend = Endpoint("127.0.0.1", b"s" * 32), Endpoint("127.0.0.1", b"s" * 32)
    stranger = Endpoint("127.0.0.1", b"x" * 32)
    try:
        target = Answerer("127.0.0.1", server.socket.getsockname()[1], server.secret, "")
        answers: list[Any] = []

        def serve() -> None:
            clock.sleep(0.001)
            if server.wait(0):
                answers.append(answer(server))

        clock.beside.append(serve)
        began = clock.now()
        assert measure(stranger, target, clock) == []
        assert clock.now() - began == pytest.approx(exchange.FIRST_ANSWER_S, abs=0.15)
        assert not stranger.wait(0)
        assert len(answers) > 10
        began = clock.now()
        found = measure(friend, target, clock)
        assert clock.now() - began == pytest.approx(exchange.SECONDS, abs=0.05)
        bound = narrowed(found)
        assert bound.low_ns <= 0 <= bound.high_ns, "one host has one clock"
    finally:
        for endpoint in (server, friend, stranger):
            endpoint.close()


def test_a_rank_asks_again_where_rank_0_did_not_answer_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Answerer] = []

    def measured(endpoint: Endpoint, to: Answerer, clock: Clock) -> list[Exchange]:
        tries.append(to)
        return measure(endpoint, to, clock) if len(tries) > 1 else []

    monkeypatch.setattr(exchange, "measure", measured)
    found: list[Any] = []
    ranks = [
        threading.Thread(
            target=lambda me=me: found.append(
                clock_probe.over_udp(me, tmp_path, {"MASTER_ADDR": "127.0.0.1"}, PATIENCE_S)
            )
        )
        for me in (Identity(0, 2, None, ""), Identity(1, 2, None, ""))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(tries) == 2
    (measurement,) = filter(None, found)
    (bound,) = measurement.bounds
    assert bound.rank == 1


@pytest.mark.parametrize(("silent", "bounds"), [(2, 1), (9, 0)])
def test_a_prober_asks_a_host_again_that_does_not_answer_at_once(
    silent: int, bounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([[]] * silent + [[Exchange(NOW, -10, 10)]])
    monkeypatch.setattr(exchange, "measure", lambda endpoint, to, clock: next(answers))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        made = prober.Prober(pipe, str(tmp_path), 1, 0, 0)
        made.measure("open", Answerer("127.0.0.1", 9, b"s" * 32, ""))
    assert (len(made.bounds), len(made.notes)) == (bounds, 1 - bounds)


def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reference rank's prober that has announced itself; the name of our rank's own prober."""
    monkeypatch.setattr(exchange, "measure", lambda endpoint, to, clock: [Exchange(NOW, -10, 10)])
    monkeypatch.setenv(PLAN, "/nowhere/plan.json")
    name = f"clusterprof-{tmp_path}"[-90:]
    identity.set_field(os.environ, identity.PROBE, name)
    reference = {"address": "127.0.0.1", "port": 9, "secret": "73" * 32, "machine": "another"}
    (tmp_path / "ranks" / "00000").mkdir(parents=True)
    address = tmp_path / "ranks" / "00000" / "probe-address.json"
    files.write_json(str(address), reference, mode=0o600)
    return name


def test_a_prober_writes_what_it_measured_before_its_rank_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = announced(tmp_path, monkeypatch)
    owner, rank = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pipe.bind("\0" + name)
        clocks.notify_prober("open")
        clocks.notify_prober("close")
        prober.Prober(pipe, str(tmp_path), 1, 0, owner).ask()
    os.close(rank)
    os.close(owner)
    found = json.loads((tmp_path / "ranks" / "00001" / "probe.json").read_text())
    assert [row["when"] for row in found["bounds"]] == ["open", "close"]


def test_a_prober_measures_at_every_look_until_its_rank_ends_and_keeps_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, clock = announced(tmp_path, monkeypatch), ManualClock()
    looks = prober.MOST_LOOKS + 3
    owner, rank = os.pipe()
    for at_s, event in enumerate(["open", "close", *["look"] * looks]):
        clock.plan(at_s + 1, lambda event=event: clocks.notify_prober(event))
    clock.plan(looks + 100, lambda: os.close(rank))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pipe.bind("\0" + name)
        prober.Prober(pipe, str(tmp_path), 1, 0, owner, clock, watched=True).ask()
    os.close(owner)
    written = json.loads((tmp_path / "ranks" / "00001" / "probe.json").read_text())
    when = [row["when"] for row in written["bounds"]]
    assert when == ["open", "close", *["look"] * prober.MOST_LOOKS]
    assert len(written["readings"]) == prober.MOST_LOOKS
    assert written["notes"] == []


def test_a_prober_measures_at_the_next_look_what_it_could_not_at_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference rank's host is not reached, the disk is full."""
    name, clock = announced(tmp_path, monkeypatch), ManualClock()
    answers = iter([[]] * prober.TRIES + [[Exchange(NOW, -10, 10)]])
    monkeypatch.setattr(exchange, "measure", lambda endpoint, to, clock: next(answers))
    (tmp_path / "ranks" / "00001").touch()
    owner, rank = os.pipe()
    clock.plan(1, lambda: clocks.notify_prober("look"))
    clock.plan(2, (tmp_path / "ranks" / "00001").unlink)
    clock.plan(3, lambda: clocks.notify_prober("look"))
    clock.plan(4, lambda: os.close(rank))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pipe.bind("\0" + name)
        prober.Prober(pipe, str(tmp_path), 1, 0, owner, clock, watched=True).ask()
    os.close(owner)
    written = json.loads((tmp_path / "ranks" / "00001" / "probe.json").read_text())
    assert len(written["bounds"]) == 1
    assert len(written["readings"]) == 2
    assert written["notes"] == ["rank 0's host did not answer at a look (UDP 127.0.0.1:9)"]


# --- measurements around a span of time

SECOND = 10**9


def look_at(seconds: float, low: int, high: int) -> dict[str, Any]:
    return {
        "machine": "b", "other_machine": "a", "when": "look",
        "at_ns": NOW + round(seconds * SECOND), "low_ns": low, "high_ns": high,
    }  # fmt: skip


@given(
    offset=st.integers(-(10**9), 10**9),
    ppm=st.floats(-100, 100),
    wander=st.floats(-0.5, 0.5),
    errors=st.lists(st.tuples(delays, delays), min_size=1, max_size=5),
    within=st.tuples(st.floats(-0.5, 4.5), st.floats(0.001, 1.0)),
)
def test_between_measurements_the_clocks_are_within_what_follows_from_them(
    offset: int, ppm: float, wander: float, errors: list[tuple[int, int]],
    within: tuple[float, float],
) -> None:  # fmt: skip
    """The rate is another one in every other interval of 600 s, by what it may change."""
    every_s = 600.0

    def truth(seconds: float) -> float:
        changed = sum(
            wander * (1 if k % 2 else -1) * min(max(seconds - k * every_s, 0.0), every_s)
            for k in range(-1, 8)
        )
        return offset + ppm * 1e3 * seconds + changed * 1e3

    rows = [
        look_at(
            k * every_s, int(truth(k * every_s)) - below - 1, int(truth(k * every_s)) + above + 1
        )
        for k, (below, above) in enumerate(errors)
    ]
    begin, length = within[0] * every_s, within[1] * every_s
    first, last = measured.interpolated(
        rows, NOW + round(begin * SECOND), NOW + round((begin + length) * SECOND)
    )
    for part in np.linspace(0, 1, 11).tolist():
        line_low, line_high = (
            first[name] + part * (last[name] - first[name]) for name in ("low_ns", "high_ns")
        )
        assert line_low - 2 <= truth(begin + part * length) <= line_high + 2


def test_measurements_that_no_rate_goes_with_tell_nothing() -> None:
    """A clock that a daemon slewed by 5 ms between the last two."""
    rows = [look_at(600 * k, 0, 100_000) for k in range(3)]
    rows.append(look_at(1_800, 5_000_000, 5_100_000))
    assert measured.interpolated(rows[:3], NOW + SECOND, NOW + 2 * SECOND)
    assert measured.interpolated(rows, NOW + SECOND, NOW + 2 * SECOND) == []


def test_of_many_measurements_those_around_a_span_are_taken() -> None:
    rows = [look_at(600 * k, 0, 1_000) for k in range(10)]
    rows += [look_at(2_450, 0, 1_000), {"at_ns": "x"}, look_at(2_400, 5, 4)]
    spans = {"a": (NOW + 2_500 * SECOND, NOW + 2_990 * SECOND), "b": (0, 1)}
    near = measured.nearest({"bounds": rows}, spans)
    assert [(row["at_ns"] - NOW) // SECOND for row in near] == [2_400, 2_450, 3_000, 3_600]
    assert measured.nearest({"bounds": rows}, {"b": (0, 1)}) == []
    assert measured.nearest(None, spans) == []


# --- measurements


def bound(at: int, low: int, high: int, rank: int = 1) -> Bound:
    return Bound(rank, 0, f"boot n{rank}", "boot n0", at, low, high, high - low, 10)


@given(
    ppm=st.floats(-100, 100),
    offset=st.integers(-(10**9), 10**9),
    errors=st.lists(st.tuples(delays, delays), min_size=2, max_size=5),
)
def test_two_measurements_bound_the_drift(
    ppm: float, offset: int, errors: list[tuple[int, int]]
) -> None:
    rows = []
    for k, (below, above) in enumerate(errors):
        at = NOW + k * 60 * 10**9
        truth = offset + round(k * 60e9 * ppm * 1e-6)
        rows.append(bound(at, truth - below - 1, truth + above + 1))
    found = drift(rows)
    assert found is not None
    assert found.low_ppm - 1e-6 <= ppm <= found.high_ppm + 1e-6


def test_a_drift_is_shown_as_wide_as_it_is() -> None:
    # 10 µs gained in 10 s, each end known to ±5 µs: 1 ppm, by as much more or less
    rows = [bound(NOW, -5_000, 5_000), bound(NOW + 10**10, 5_000, 15_000)]
    (_, row, _) = clock_verb.shown(Measurement(tuple(rows), "UDP")).splitlines()
    assert row.endswith("+1.000 ±1.000 ppm")
    assert "+10.0 µs" in row
    assert "±5.0 µs" in row


def test_one_measurement_shows_no_drift_and_a_step_between_two_is_no_drift() -> None:
    assert drift([bound(NOW, -5, 5)]) is None
    three = [bound(NOW, -5, 5), bound(NOW + 10**9, 10**6, 10**6 + 9), bound(NOW + 2 * 10**9, -5, 5)]
    assert drift(three) is None


def test_a_document_with_bad_rows_keeps_the_good_ones_with_a_note() -> None:
    good = vars(bound(NOW, -5, 5))
    upside_down = {**good, "low_ns": 9}
    found = parsed({"schema_version": 1, "method": "UDP", "bounds": [good, upside_down, 7, {}]})
    assert [each.high_ns for each in found.bounds] == [5]
    assert len(found.notes) == 3
    again = parsed(json.loads(json.dumps(joined([found, found]).as_json())))
    assert len(again.bounds) == 2


# --- all of it in the clock


def evidence(probe: bool, offset: int) -> list[measured.PairBound]:
    two = {
        rank: measured.RankReadings(f"m{rank}", (reading(NOW, 0),), anchor=(-2 * US, 2 * US))
        for rank in range(3)
    }
    rows = [
        {"machine": "m1", "other_machine": "m0", "at_ns": NOW + k * 10**9,
         "low_ns": offset - 10 * US, "high_ns": offset + 30 * US}
        for k in range(2)
    ]  # fmt: skip
    return measured.pair_bounds(two, {"bounds": rows if probe else []})


@pytest.mark.parametrize("offset", [0, 3_600_000_000_000, -7_654_321])
def test_ranks_without_a_common_collective_are_bounded_by_a_probe(offset: int) -> None:
    ranks = [rank_tables(rank) for rank in range(3)]
    clock = align(ranks, match(ranks), evidence(True, offset))
    assert clock.reference_rank == 0
    assert clock.uncertainty(1) < 250 * US
    assert abs(int(clock.offset_ns[1]) - (offset + 10 * US)) < 2 * US
    assert clock.uncertainty(2) == UNBOUNDED_NS
    assert int(clock.offset_ns[2]) == 0
    assert clock.method == alignment.BY_PROBE
    without = align(ranks, match(ranks), evidence(False, offset))
    assert without.uncertainty(1) == UNBOUNDED_NS


def without_marks(probed: set[int]) -> list[measured.PairBound]:
    """Three machines, `probed` of them measured against the first; only report 0 has marks."""
    readings = {
        rank: measured.RankReadings(
            f"m{rank}", (reading(NOW, 0),), anchor=(-2 * US, 2 * US) if rank == 0 else None
        )
        for rank in range(3)
    }
    rows = [
        {"machine": f"m{rank}", "other_machine": "m0", "at_ns": NOW, "low_ns": 0, "high_ns": US}
        for rank in sorted(probed)
    ]
    return measured.pair_bounds(readings, {"bounds": rows})


def test_a_bound_that_rests_on_an_assumption_is_named_in_the_results() -> None:
    ranks = [rank_tables(rank) for rank in range(3)]
    clock = align(ranks, match(ranks), without_marks({1}))
    assert clock.assumed == (1,)
    assert measured.ANCHOR_NS < clock.uncertainty(1) < 2 * measured.ANCHOR_NS
    assert clock.entry()["assumed"] == [1]
    assert any("rank 1" in warning and "200 µs" in warning for warning in clock.warnings)
    assert clock.uncertainty(2) == UNBOUNDED_NS


def test_an_assumption_never_shortens_a_bound_that_is_proven() -> None:
    from simulate import Job, simulate

    ranks, _ = simulate(Job(dp=3))
    matched = match(ranks)
    plain, assuming = align(ranks, matched), align(ranks, matched, without_marks({1, 2}))
    assert assuming.assumed == ()
    assert assuming.uncertainty_ns.tolist() == plain.uncertainty_ns.tolist()
    assert assuming.warnings == plain.warnings


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**7), st.integers(0, 10**6))
def test_a_bound_as_a_block_says_exactly_the_bound(low: int, width: int, base: int) -> None:
    one = measured.PairBound(5, 3, NOW, low, low + width, "probe")
    start = np.array([NOW - base, NOW + base], dtype=np.int64)
    (block,) = measured.as_blocks([one], [3, 5], start)
    assert block.members == (1, 0)
    shift = int(start[0] - start[1])  # of the offset, from the ranks' own origins of time
    upper, lower = block.end[0, 0] - block.start[0, 1], block.start[0, 0] - block.end[0, 1]
    assert upper - shift in (low + width, low + width + 1)
    assert lower - shift in (low, low - 1)


def test_the_agent_and_the_alignment_mean_the_same_marks() -> None:
    assert clocks.MARK == measured.MARK


def test_a_bound_s_uncertainty_reaches_from_its_middle_to_both_ends() -> None:
    bound = Bound(1, 0, "a", "b", NOW, low_ns=-10, high_ns=31, round_trip_ns=41,
                  exchanges=1)  # fmt: skip
    assert (bound.offset_ns, bound.uncertainty_ns) == (10, 21)
