"""Bad dumps of the flight recorder, through `clusterprof merge`: each is named, the rest is merged.

In all of these rank 3 of four never joins the AllReduce in which the others wait, or its dump is
the bad one: then it is said that its dump is missing, and nothing about the rank is made up.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from seeds import Hostile, content as seed, trace

from clusterprof.cli import merge
from clusterprof.errors import ReportError
from clusterprof.ingest.flight.all_dumps import find_dumps, read_dumps

Entry = dict[str, Any]
Merged = Callable[[Mapping[str, Any]], dict[str, Any]]

FLIGHT = Path(__file__).resolve().parents[1] / "data/flight"
SECOND, HOUR = 10**9, 3600 * 10**9
WORLD = [0, 1, 2, 3]
NEVER_JOINED = [("never_joined", [3], 6)]
NO_DUMP = [("no_dump", [3], 6)]


def entry(number: int, group: str = "0", **changes: Any) -> Entry:
    return {
        "record_id": number, "process_group": [group, "default_pg" if group == "0" else "tp"],
        "collective_seq_id": number + 1, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + number * SECOND,
        "input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]],
        "output_dtypes": ["Float"], "state": "completed", "retired": True, "timeout_ms": 600_000,
    } | changes  # fmt: skip


def waits(one: Entry) -> Entry:
    return one | {"state": "scheduled", "retired": False}


def dump(entries: list[Entry], *, version: str = "2.10", **groups: list[int]) -> dict[str, Any]:
    members = {"0": WORLD} | {name[1:]: ranks for name, ranks in groups.items()}
    config = {
        name: {"name": name, "desc": "default_pg" if name == "0" else "tp", "ranks": str(ranks)}
        for name, ranks in members.items()
    }
    return {"version": version, "pg_config": config, "entries": entries}


def changed(entries: list[Entry], **by: int) -> list[Entry]:
    """The entries with something added to their numbers."""
    return [each | {name: each[name] + more for name, more in by.items()} for each in entries]


FIVE = [entry(n) for n in range(5)]
SIX = [*FIVE, waits(entry(5))]
JOB = {f"rank_{rank}.json": dump(SIX) for rank in range(3)} | {"rank_3.json": dump(FIVE)}
PICKLES = {f"nccl_trace_rank_{rank}": pickle.dumps(JOB[f"rank_{rank}.json"], 2) for rank in WORLD}
LAST = json.dumps(JOB["rank_3.json"]).encode()


@pytest.fixture
def merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Merged:
    """What `clusterprof merge` prints of a folder of files (JSON, or bytes as they are)."""

    def made(files: Mapping[str, Any]) -> dict[str, Any]:
        for name, content in files.items():
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (tmp_path / name).write_bytes(raw)
        assert merge.main("merge", [str(tmp_path)], None) == 0
        text = capsys.readouterr().out
        assert merge.main("merge", [str(tmp_path), "--json"], None) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert found["verdict"] in text
        assert all(f"warning: {each}" in text for each in found["warnings"])
        return found

    return made


def hang(found: Mapping[str, Any]) -> list[tuple[str, list[int], int]]:
    return [(each["cause"], each["ranks"], each["sequence"]) for each in found["hang"]]


def test_as_they_are_the_dumps_name_the_rank(merged: Merged) -> None:
    found = merged(JOB)
    assert (hang(found), found["missing"], found["warnings"]) == (NEVER_JOINED, [], [])


#: each in place of rank 3's dump, or beside it: what is bad, what is said of it, what is left
DAMAGED: dict[str, tuple[Mapping[str, Any], str]] = {
    "cut short": (JOB | {"rank_3.json": LAST[:-40]}, "rank_3.json"),
    "cut before its entries": (JOB | {"rank_3.json": LAST[:20]}, "rank_3.json"),
    "empty": (JOB | {"rank_3.json": b""}, "rank_3.json is empty"),
    "packed and cut short": (
        {f"{name}.gz": gzip.compress(json.dumps(each).encode()) for name, each in JOB.items()}
        | {"rank_3.json.gz": gzip.compress(LAST)[:15]},
        "rank_3.json.gz is cut short",
    ),
    "a pickle, cut short": (
        PICKLES | {"nccl_trace_rank_3": PICKLES["nccl_trace_rank_3"][:100]},
        "nccl_trace_rank_3",
    ),
    "an empty pickle": (PICKLES | {"nccl_trace_rank_3": b""}, "nccl_trace_rank_3 is empty"),
    "an older version": (JOB | {"rank_3.json": dump(FIVE, version="0.9")}, "version '0.9'"),
    "a later version": (JOB | {"rank_3.json": dump(FIVE, version="3.0")}, "version '3.0'"),
    "another rank's": (
        JOB | {"rank_3.json": dump([entry(0, "1")], _1=[0, 1])},
        "rank_3.json is not rank 3's",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_dump_is_named_with_its_rank(merged: Merged, what: str) -> None:
    files, words = DAMAGED[what]
    found = merged(files)
    assert hang(found) == NO_DUMP
    (missing,) = found["missing"]
    assert missing["rank"] == 3
    assert words in missing["reason"]
    (warning,) = found["warnings"]
    assert words in warning


@pytest.mark.parametrize("protocol", range(6))
def test_of_a_hostile_pickle_nothing_is_executed(
    merged: Merged, tmp_path: Path, protocol: int
) -> None:
    hostile = dump([entry(0, frames=Hostile(tmp_path / "made"))])
    found = merged(PICKLES | {"nccl_trace_rank_3": pickle.dumps(hostile, protocol)})
    assert not (tmp_path / "made").exists()
    assert hang(found) == NO_DUMP
    assert "nothing of it was executed" in found["warnings"][0]


OTHER_JOBS: dict[str, tuple[list[Entry], str]] = {
    "of an hour later": (changed(FIVE, time_created_ns=HOUR), "another job"),
    "of an hour earlier": (changed(FIVE, time_created_ns=-HOUR), "another job"),
    "of later calls": (
        changed(FIVE, time_created_ns=HOUR, collective_seq_id=1000, record_id=1000),
        "another job",
    ),
    "without timeouts": (
        changed([each | {"timeout_ms": None} for each in FIVE], time_created_ns=HOUR),
        "another job",
    ),
}


@pytest.mark.parametrize("what", OTHER_JOBS)
def test_a_dump_of_another_time_is_left_out(merged: Merged, what: str) -> None:
    entries, reason = OTHER_JOBS[what]
    found = merged(JOB | {"rank_3.json": dump(entries)})
    assert hang(found) == NO_DUMP
    assert [(each["rank"], reason in each["reason"]) for each in found["missing"]] == [(3, True)]
    assert ["rank_3.json" in each for each in found["warnings"]] == [True]


def test_a_rank_that_stopped_long_before_the_others_is_of_the_same_job(merged: Merged) -> None:
    """The others waited for it until the timeout, and beyond: it called all that they finished."""
    late = waits(entry(5, time_created_ns=10**18 + HOUR))
    files = {f"rank_{rank}.json": dump([*FIVE, late]) for rank in range(3)}
    found = merged(files | {"rank_3.json": dump(FIVE)})
    assert (hang(found), found["warnings"]) == (NEVER_JOINED, [])
    # and so is one that has called nothing at all
    found = merged(files | {"rank_3.json": dump([])})
    assert (found["dumps"], found["warnings"]) == (WORLD, [])


#: of an attempt whose ranks were started over, one that its new process has not overwritten
ATTEMPTS: dict[str, list[Entry]] = {
    "as far as the other ranks": changed(FIVE, time_created_ns=-8 * SECOND),
    "not so far": changed(FIVE[:3], time_created_ns=-8 * SECOND),
    "much farther": [
        entry(900 + n, time_created_ns=10**18 + (n - 9) * SECOND) for n in range(6)
    ],
    "far, while the others have dropped their first": changed(FIVE, time_created_ns=-8 * SECOND),
    "of another operation": [
        each | {"profiling_name": "nccl:_all_gather_base"}
        for each in changed(FIVE, time_created_ns=-8 * SECOND)
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", ATTEMPTS)
def test_a_dump_of_an_earlier_attempt_is_left_out(merged: Merged, what: str) -> None:
    """It is newer than the timeout, and of the ranks that were started over."""
    six = changed(SIX, record_id=900, collective_seq_id=900) if "dropped" in what else SIX
    files = {f"rank_{rank}.json": dump(six) for rank in range(3)}
    found = merged(files | {"rank_3.json": dump(ATTEMPTS[what])})
    assert hang(found) == [("no_dump", [3], 906 if "dropped" in what else 6)]
    (missing,) = found["missing"]
    assert (missing["rank"], "another attempt" in missing["reason"]) == (3, True)
    (warning,) = found["warnings"]
    assert "rank 3 (rank_3.json)" in warning
    assert "another attempt" in warning


def test_in_a_run_whose_clocks_are_seconds_wrong_all_dumps_are_of_one_attempt(
    tmp_path: Path,
) -> None:
    """Its folder says which attempt they are of."""
    for rank in WORLD:
        folder = tmp_path / f"ranks/{rank:05d}"
        folder.mkdir(parents=True)
        entries = changed(SIX, time_created_ns=(rank == 3) * -8 * SECOND)
        (folder / "flight.json.gz").write_bytes(gzip.compress(json.dumps(dump(entries)).encode()))
    found = read_dumps(find_dumps(tmp_path))
    assert (found.ranks, found.warnings) == ((*WORLD,), [])


def test_of_two_attempts_the_newer_is_merged_with_half_of_the_ranks(merged: Merged) -> None:
    older = changed(SIX, time_created_ns=-8 * SECOND)
    for there in (2, 3, 4):
        found = merged({f"rank_{n}.json": dump(SIX if n < there else older) for n in WORLD})
        assert found["dumps"] == WORLD[:there]
        assert len(found["warnings"]) == (there < 4)
    # of which too few left theirs to tell who hangs: of the others it is known
    found = merged({f"rank_{n}.json": dump(SIX if n < 1 else older) for n in WORLD})
    assert (found["dumps"], len(found["warnings"])) == ([1, 2, 3], 1)


def test_after_a_restart_within_its_process_older_dumps_are_of_another_attempt(
    merged: Merged,
) -> None:
    again = [entry(9 + n, collective_seq_id=n + 1) for n in range(3)]
    renewed = [*FIVE, *again[:2], waits(again[2])]
    found = merged(
        {f"rank_{rank}.json": dump(renewed) for rank in range(3)} | {"rank_3.json": dump(FIVE)}
    )
    assert hang(found) == [("no_dump", [3], 3)]
    assert ["rank_3.json" in each for each in found["warnings"]] == [True, False]


def test_a_rank_that_came_to_a_call_long_before_the_others_is_of_their_attempt(
    merged: Merged,
) -> None:
    """All recorders begin with the call in which it waited: it joined no later one."""
    early = entry(0, time_created_ns=10**18 - 60 * SECOND)
    # NCCL's recorder knows when a call was seen to end
    ends = early | {"time_discovered_completed_ns": 10**18 + 1}
    waiting = {f"rank_{rank}.json": dump([FIVE[0], waits(FIVE[1])]) for rank in range(3)}
    found = merged(waiting | {"rank_3.json": dump([ends])})
    assert (hang(found), found["warnings"]) == ([("never_joined", [3], 2)], [])
    # gloo's does not: it may as well be of another attempt
    found = merged(waiting | {"rank_3.json": dump([early])})
    assert hang(found) == [("never_joined", [3], 2)]
    (warning,) = found["warnings"]
    assert "rank 3" in warning
    assert "the dumps are merged" in warning


def test_who_ends_a_broadcast_before_others_call_it_is_of_their_attempt(merged: Merged) -> None:
    """Its root waits for none: that it ended says nothing of the others."""
    root = [
        entry(n, profiling_name="nccl:broadcast", time_created_ns=10**18 - (60 - n) * SECOND)
        for n in range(2)
    ]
    others = [each | {"profiling_name": "nccl:broadcast"} for each in FIVE[:2]]
    files = {f"rank_{rank}.json": dump([*others, waits(FIVE[2])]) for rank in range(3)}
    found = merged(files | {"rank_3.json": dump(root)})
    assert hang(found) == [("never_joined", [3], 3)]
    assert len(found["warnings"]) == 1


def test_of_real_attempts_the_earlier_one_s_dump_says_nothing_of_the_newer(merged: Merged) -> None:
    """Rank 2 of the second attempt left none; the first one's would show that it never joined."""
    first, second = (FLIGHT / "restarted" / each for each in ("first", "second"))
    files = {path.name: path.read_bytes() for path in second.iterdir()}
    found = merged(files | {"rank_2.gz": (first / "rank_2.gz").read_bytes()})
    assert hang(found) == [("no_dump", [2], 7)]
    (warning,) = found["warnings"]
    assert "rank 2 (rank_2.gz)" in warning
    found = merged(files | {f"old_{path.name}": path.read_bytes() for path in first.iterdir()})
    assert (found["dumps"], hang(found)) == ([0, 1], [("no_dump", [2], 7)])


def test_a_dump_of_a_job_of_another_size_is_left_out(merged: Merged) -> None:
    other = dump(FIVE) | {"pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}}
    found = merged(JOB | {"other_1.json": other})
    assert hang(found) == NEVER_JOINED
    assert [each["reason"] for each in found["missing"]] == ["of a job of another size"]
    assert ["other_1.json" in each for each in found["warnings"]] == [True]


def test_of_two_whole_jobs_in_one_folder_the_newer_is_merged(merged: Merged) -> None:
    older = {f"old_{name}": dump(changed(SIX, time_created_ns=-HOUR)) for name in JOB}
    found = merged(JOB | older)
    assert hang(found) == NEVER_JOINED
    assert sorted(each["rank"] for each in found["missing"]) == WORLD
    assert all("old_rank_" in each["source"] for each in found["missing"])
    assert len(found["warnings"]) == 1


def test_of_a_rank_twice_the_newer_dump_counts(merged: Merged) -> None:
    found = merged(JOB | {"old_3.json": dump(FIVE[:3])})
    assert hang(found) == NEVER_JOINED
    assert [Path(each["source"]).name for each in found["missing"]] == ["old_3.json"]
    assert ["old_3.json" in each for each in found["warnings"]] == [True]


def test_the_dump_of_another_job_takes_no_ranks_place(merged: Merged) -> None:
    found = merged(JOB | {"new_3.json": dump(changed(SIX, time_created_ns=HOUR))})
    assert hang(found) == NEVER_JOINED
    assert [Path(each["source"]).name for each in found["missing"]] == ["new_3.json"]


@pytest.mark.parametrize("version", ["2.2", "2.4", "2.9", "2.10"])
def test_versions_of_torch_2_4_to_2_13_are_merged_with_each_other(
    merged: Merged, version: str
) -> None:
    """Version 2.2, of torch 2.4, has neither threads nor the library's version."""
    since = {"2.2": 2, "2.4": 4, "2.9": 9, "2.10": 10}[version]
    plain = {"time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    threads = {"thread_id": "1", "thread_name": "python"} if since > 4 else {}
    entries = [each | plain | threads | {"pg_id": 0, "op_id": 1} for each in FIVE]
    other = dump(entries, version=version) | ({"comm_lib_version": "2.27"} if since > 4 else {})
    found = merged(JOB | {"rank_3.json": other})
    assert hang(found) == NEVER_JOINED
    assert len(found["warnings"]) == (version != "2.10")


def tensor(last: int, *, ended: bool = True, **changes: Any) -> list[Entry]:
    """Two calls of all ranks, and so many of a group of two named 7."""
    calls = [entry(2 + n, "7", collective_seq_id=n + 1, **changes) for n in range(last)]
    return [*FIVE[:2], *calls[:-1], calls[-1] if ended else waits(calls[-1])]


def test_groups_of_one_name_are_told_apart_by_their_ranks(merged: Merged) -> None:
    pairs = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    calls = {0: tensor(3), 1: tensor(3), 2: tensor(4, ended=False), 3: tensor(3)}
    found = merged({f"rank_{rank}.json": dump(calls[rank], _7=pairs[rank]) for rank in WORLD})
    assert hang(found) == [("never_joined", [3], 4)]
    assert found["hang"][0]["waiting"] == [2]


def test_groups_of_one_name_whose_ranks_no_dump_lists_are_left_out(merged: Merged) -> None:
    gathers = {"profiling_name": "gloo:all_gather", "output_sizes": [[8], [8]]}
    files = {
        f"rank_{rank}.json": dump(tensor(3 - rank // 2, ended=rank > 1, **gathers))
        for rank in WORLD
    }
    found = merged(files)
    assert (found["hang"], found["dumps"]) == ([], WORLD)
    (warning,) = found["warnings"]
    assert "tp 7" in warning


def test_of_two_groups_of_one_name_in_a_rank_torch_lists_the_ranks_of_one(merged: Merged) -> None:
    """Those of `tp`: the members of `dp` are the ranks that called something in it."""
    other = entry(5, "7", process_group=["7", "dp"], collective_seq_id=1)
    files = {
        f"rank_{rank}.json": dump([*tensor(3), other if rank else waits(other)], _7=[0, 1])
        for rank in (0, 1)
    }
    files |= {f"rank_{rank}.json": dump([*FIVE[:2], other]) for rank in (2, 3)}
    found = merged(files)
    assert found["dumps"] == WORLD
    (cause,) = found["hang"]
    assert (cause["cause"], cause["description"], cause["waiting"]) == ("stalled", "dp", [0])


def test_after_an_elastic_restart_the_new_numbers_are_other_calls(merged: Merged) -> None:
    again = [entry(5 + n, collective_seq_id=n + 1) for n in range(3)]
    waiting = [*FIVE, *again[:2], waits(again[2])]
    files = {f"rank_{rank}.json": dump(waiting) for rank in range(3)}
    for last in ([*FIVE, *again[:2]], again[:2]):  # started anew, or its recorder as well
        found = merged(files | {"rank_3.json": dump(last)})
        assert hang(found) == [("never_joined", [3], 3)]
        (warning,) = found["warnings"]
        assert "process group 0 begin anew" in warning


def test_where_no_dump_can_be_read_it_is_an_error(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(dump(FIVE, version="3.0")))
    with pytest.raises(ReportError):
        merge.main("merge", [str(tmp_path)], None)


def test_a_trace_that_is_called_as_dumps_are_is_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_1.json").write_text(json.dumps(dump(FIVE)))
    trace(tmp_path / "rank_0.json", seed(0))
    assert merge.main("merge", [str(tmp_path), "--json"], None) == 0
    assert "findings" in json.loads(capsys.readouterr().out)
