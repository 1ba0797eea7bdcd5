"""Calls of several ranks' flight recorders are matched, and what hangs has its rank and call."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from seeds import content as seed, trace

from clusterprof.align.match.flight_calls import FlightCalls, match
from clusterprof.analysis.model.hang import Cause, Diagnosis, diagnose
from clusterprof.cli import merge
from clusterprof.errors import UsageError
from clusterprof.ingest import find_sources
from clusterprof.ingest.flight.all_dumps import find_dumps, join, read_dumps
from clusterprof.ingest.flight.dump import FlightDump, read_dump
from clusterprof.results import HangEntry

DATA = Path(__file__).resolve().parents[1] / "data/flight"
GUILTY = 5
#: scenario -> what hangs, and where all ranks but the guilty one wait: group's name and number
GLOO = {
    "skip": (Cause.OTHER_OPERATION, ("0", 7)),
    "other": (Cause.OTHER_OPERATION, ("0", 7)),
    "size": (Cause.OTHER_SIZE, ("0", 7)),
    "send": (Cause.NEVER_JOINED, ("0", 7)),  # gloo records no send
    "sleep": (Cause.NEVER_JOINED, ("3", 3)),
    "died": (Cause.NO_DUMP, ("0", 7)),
    "tensor": (Cause.OTHER_OPERATION, ("3", 3)),
}
NCCL = {
    "skip": (Cause.OTHER_OPERATION, 1, 10),
    "other": (Cause.OTHER_OPERATION, 1, 10),
    "size": (Cause.OTHER_SIZE, 1, 10),
    "dtype": (Cause.OTHER_TYPE, 1, 10),
    "sleep": (Cause.NEVER_JOINED, 1, 10),
    "watchdog": (Cause.NEVER_JOINED, 1, 10),
    "recv": (Cause.NO_SEND, 0, 7),
    "send": (Cause.NO_RECEIVE, 1, 7),
}


def dumps(scenario: str, ranks: Iterable[int]) -> list[FlightDump]:
    found = {path: read_dump(path) for path, _ in find_dumps(DATA / "gloo" / scenario)}
    return [each for each in found.values() if each.rank in ranks]


@pytest.mark.parametrize("scenario", GLOO)
def test_with_all_dumps_the_rank_and_its_call_are_right(scenario: str) -> None:
    cause, (group, sequence) = GLOO[scenario]
    found = diagnose(match(join(dumps(scenario, range(8))))).causes[0]
    assert (found["cause"], found["ranks"], found["one_of"]) == (cause, [GUILTY], False)
    assert (found["group"], found["sequence"], found["operation"]) == (group, sequence, "AllReduce")
    if cause is not Cause.NO_DUMP:
        (called,) = [each for each in found["called"] if each["rank"] == GUILTY]
        assert "hang.py:" in str(called["line"])


@pytest.mark.parametrize("scenario", NCCL)
def test_real_dumps_of_nccl_hang_as_planted(scenario: str) -> None:
    cause, rank, sequence = NCCL[scenario]
    found = diagnose(match(read_dumps(find_dumps(DATA / "nccl" / scenario)))).causes
    assert [(each["cause"], each["ranks"], each["sequence"]) for each in found] == [
        (cause, [rank], sequence)
    ]


def is_right(causes: Sequence[HangEntry], there: Sequence[int], scenario: str) -> bool:
    """Whether the guilty rank comes first, or its dump is said to be missing, with the right call.

    Where a rank that died left no dump, one whose call that ended is as likely to be the cause.
    """
    calls = {GLOO[scenario][1], *([("0", 7)] if 4 not in there else [])}
    right = [each for each in causes if (each["group"], each["sequence"]) in calls]
    if GUILTY in there:
        return right[:1] == list(causes[:1]) and right[0]["ranks"] == [GUILTY]
    return any(each["cause"] == Cause.NO_DUMP and GUILTY in each["ranks"] for each in right)


def test_with_half_of_the_dumps_nine_of_ten_are_right() -> None:
    chance, outcomes = random.Random(11), []
    for scenario in GLOO:
        of_all = dumps(scenario, range(8))
        for _ in range(20):
            there = chance.sample([each.rank for each in of_all], 4)
            half = [each for each in of_all if each.rank in there]
            outcomes.append(is_right(diagnose(match(join(half))).causes, there, scenario))
    assert len(outcomes) == 140
    assert sum(outcomes) >= 0.9 * len(outcomes)


def test_a_job_that_only_is_late_does_not_hang() -> None:
    assert diagnose(match(read_dumps(find_dumps(DATA / "nccl/late")))) == Diagnosis([], [])


# --- made by hand


def entry(number: int, name: str = "all_reduce", **changes: Any) -> dict[str, Any]:
    direct = name.startswith(("send", "recv"))
    return {
        "record_id": number, "process_group": ["0", "default_pg"], "is_p2p": direct,
        "collective_seq_id": number + 1, "p2p_seq_id": number + 1 if direct else 0,
        "profiling_name": f"nccl:{name}", "time_created_ns": 10**18 + number,
        "input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]],
        "output_dtypes": ["Float"], "state": "completed", "retired": True, "timeout_ms": 1000,
    } | changes  # fmt: skip


def job(folder: Path, *ranks: list[dict[str, Any]], **groups: list[int]) -> FlightCalls:
    members = {"0": [*range(len(ranks))]} | groups
    config = {
        name: {"name": name, "desc": "default_pg" if name == "0" else name, "ranks": str(listed)}
        for name, listed in members.items()
    }
    for rank, entries in enumerate(ranks):
        content = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(content, 2))
    return match(read_dumps(find_dumps(folder)))


def waits(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"state": "scheduled", "retired": False}


def test_what_is_before_a_recorder_s_begin_is_left_out(tmp_path: Path) -> None:
    whole, cut = [entry(n) for n in range(6)], [entry(n) for n in range(3, 6)]
    calls = job(tmp_path, whole, cut)
    assert calls.sequence.tolist() == [4, 5, 6]
    assert calls.counts.tolist() == calls.expected.tolist() == [2, 2, 2]


def test_matching_goes_on_after_a_mismatch(tmp_path: Path) -> None:
    ours = [entry(0), entry(1, "broadcast"), entry(2), entry(3)]
    theirs = [entry(0), entry(1, "reduce"), entry(2), entry(3)]
    calls = job(tmp_path, ours, theirs, ours)
    assert calls.counts.tolist() == [3, 3, 3, 3]
    (found,) = diagnose(calls).causes
    assert (found["cause"], found["ranks"], found["sequence"]) == (Cause.OTHER_OPERATION, [1], 2)


def test_sends_are_matched_by_sides_and_size_in_order(tmp_path: Path) -> None:
    sender = [
        entry(0, "send 0->1"), entry(1, "send 0->1", input_sizes=[[4]]), entry(2, "send 0->1"),
    ]  # fmt: skip
    receiver = [
        entry(0, "recv 1<-0", output_sizes=[[4]]), entry(1, "recv 1<-0"), entry(2, "recv 1<-0"),
    ]  # fmt: skip
    calls = job(tmp_path, sender, receiver)
    assert calls.counts.tolist() == [2, 2, 2]
    records = calls.entries["record"].to_pylist()
    assert sorted(zip(records[::2], records[1::2], strict=True)) == [(0, 1), (1, 0), (2, 2)]


def test_sends_of_recorders_that_dropped_some_are_matched_from_the_end(tmp_path: Path) -> None:
    sender = [entry(n, "send 0->1") for n in range(2, 7)]
    receiver = [entry(n, "recv 1<-0") for n in range(5, 8)]
    calls = job(tmp_path, sender, receiver)
    both = [row for call in range(calls.begins.size) if len(row := calls.rows(call)) == 2]
    records = calls.entries["record"].to_pylist()
    assert [(records[row[0]], records[row[1]]) for row in both] == [(4, 5), (5, 6), (6, 7)]


def test_a_rank_that_waits_elsewhere_is_no_cause(tmp_path: Path) -> None:
    # 0 and 1 wait for 2, which waits in another group for 3, which is asleep
    first = [entry(0), waits(entry(1))]
    inner = waits(entry(1, process_group=["1", "1"], collective_seq_id=1))
    calls = job(tmp_path, first, first, [entry(0), inner], [entry(0)], **{"1": [2, 3]})
    (found,) = diagnose(calls).causes
    assert (found["cause"], found["ranks"], found["waiting"]) == (Cause.NEVER_JOINED, [3], [2])
    assert found["group"] == "1"


def test_calls_that_wait_for_each_other_in_a_circle_are_all_causes(tmp_path: Path) -> None:
    inner = waits(entry(1, process_group=["1", "1"], collective_seq_id=1))
    calls = job(tmp_path, [entry(0), waits(entry(1))], [entry(0), inner], **{"1": [0, 1]})
    found = diagnose(calls).causes
    assert sorted((each["group"], each["ranks"]) for each in found) == [("0", [1]), ("1", [0])]


def test_of_two_ranks_the_one_that_broke_the_habit_is_named(tmp_path: Path) -> None:
    names = ["all_reduce", "broadcast", "reduce"] * 4
    ours = [entry(n, name) for n, name in enumerate(names)]
    theirs = [*ours[:10], entry(10, "reduce")]
    (found,) = diagnose(job(tmp_path, ours[:11], theirs)).causes
    assert (found["ranks"], found["sequence"], found["operation"]) == ([1], 11, "Broadcast")
    (found,) = diagnose(job(tmp_path, [entry(0)], [entry(0, "reduce")])).causes
    assert (found["ranks"], found["one_of"]) == ([0, 1], True)


def test_a_call_that_all_joined_and_that_does_not_end_is_stalled(tmp_path: Path) -> None:
    (found,) = diagnose(job(tmp_path, [waits(entry(0))], [waits(entry(0))])).causes
    assert (found["cause"], found["ranks"], found["waiting"]) == (Cause.STALLED, [], [0, 1])


def test_after_a_restart_old_numbers_are_other_calls(tmp_path: Path) -> None:
    again = [entry(n, collective_seq_id=number) for n, number in enumerate([1, 2, 3, 1, 2])]
    calls = job(tmp_path, again, again)
    assert calls.counts.tolist() == [2] * 5
    assert sorted(calls.restarts.tolist()) == [0, 0, 1, 1, 1]


def test_dumps_without_entries_are_no_hang(tmp_path: Path) -> None:
    assert diagnose(job(tmp_path, [], [])).causes == []


# --- the command line


def test_merge_of_a_folder_of_dumps_says_what_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    assert merge.main("merge", [str(DATA / "gloo/skip"), "--json"], None) == 0
    results = json.loads(capsys.readouterr().out)
    (found,) = results["hang"]
    assert (found["cause"], found["ranks"], found["sequence"]) == ("other_operation", [5], 7)
    assert merge.main("merge", [str(DATA / "gloo/skip"), "--fail-on", "info"], None) == 1
    assert results["verdict"] in capsys.readouterr().out


@pytest.mark.parametrize("folder", sorted(DATA.glob("*/*/")), ids=lambda path: path.name)
def test_every_diagnosis_can_be_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    merge.main("merge", [str(folder)], None)
    assert capsys.readouterr().out.strip()
    with pytest.raises(UsageError):
        merge.main("merge", [str(folder), "--html", str(tmp_path / "page.html")], None)


def test_a_dump_that_does_not_say_its_rank_is_given_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        shutil.copy(DATA / f"nccl/sleep/rank_{rank}.gz", tmp_path / f"{'ab'[rank]}.gz")
    given = [f"--rank={tmp_path / 'ab'[rank]}.gz={rank}" for rank in (0, 1)]
    merge.main("merge", [str(tmp_path), *given, "--json"], None)
    assert json.loads(capsys.readouterr().out)["dumps"] == [0, 1]


def test_dumps_beside_reports_are_no_reports(tmp_path: Path) -> None:
    content = {"version": "2.10", "pg_config": {}, "entries": [entry(n) for n in range(300)]}
    (tmp_path / "rank_1.json").write_text(json.dumps(content))
    assert (tmp_path / "rank_1.json").stat().st_size > 64 << 10
    trace(tmp_path / "rank0.json", seed(0))
    assert [source.path.name for source in find_sources([tmp_path])] == ["rank0.json"]
