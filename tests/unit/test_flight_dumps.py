"""Dumps of the flight recorder become tables, whoever wrote them, and nothing is executed."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.counting import calls_of
from seeds import Hostile

from clusterprof.errors import ReportError
from clusterprof.ingest.engines import Lost, Readers
from clusterprof.ingest.flight import all_dumps
from clusterprof.ingest.flight.all_dumps import Flight, find_dumps, read_dumps
from clusterprof.ingest.flight.dump import ENTRIES, read_dump
from clusterprof.ingest.flight.dump_file import PickleError, unpickled

DATA = Path(__file__).resolve().parents[1] / "data/flight"


def entry(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"],
        "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + number * 10**9,
        "input_sizes": [[8, 4]], "input_dtypes": ["BFloat16"], "output_sizes": [[8, 4]],
        "output_dtypes": ["BFloat16"], "state": "completed", "retired": True,
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "is_p2p": False,
        "timeout_ms": 600_000,
    } | changes  # fmt: skip


def dump(entries: list[dict[str, Any]], ranks: str = "[0, 1]", **changes: Any) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "entries": entries} | changes


def older(
    numbers: list[int], config: dict[int, Any] | None = None, *, group: int = 0,
    sends: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """A dump as torch 2.3 writes it: calls of one group with these numbers, some of them sends."""
    entries = [
        {
            "record_id": place, "pg_id": group, "seq_id": number, "op_id": place + 1,
            "profiling_name": "nccl:send 0->1" if number in sends else "nccl:all_reduce",
            "time_created_ns": 10**18 + number * 10**9, "input_sizes": [[8, 4]],
            "output_sizes": [[8, 4]], "state": "completed", "retired": True, "frames": [],
            "time_discovered_started_ns": None, "time_discovered_completed_ns": 10**18,
        }
        for place, number in enumerate(numbers)
    ]  # fmt: skip
    return {"entries": entries, "version": "1.4", "pg_config": config or {0: [0, 1]}}


def written(folder: Path, *documents: Any) -> Flight:
    for rank, document in enumerate(documents):
        (folder / f"rank_{rank}.json").write_text(json.dumps(document))
    return read_dumps(find_dumps(folder))


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_every_real_dump_is_read(kind: str) -> None:
    for folder in sorted((DATA / kind).iterdir()):
        flight = read_dumps(find_dumps(folder))
        assert flight.entries.schema == ENTRIES
        assert not flight.warnings
        assert not flight.missing
        assert flight.absent == ((5,) if folder.name == "died" else ())
        frames = {*flight.entries["frame"].to_pylist()} - {None}
        assert all("hang.py" in frame or "/g.py" in frame for frame in frames)


def test_a_pickle_and_json_of_one_recorder_say_the_same(tmp_path: Path) -> None:
    pickled = DATA / "nccl/skip/rank_1.gz"
    as_json = tmp_path / "x_1.json"
    as_json.write_text(json.dumps(pickle.loads(gzip.decompress(pickled.read_bytes()))))
    assert read_dump(pickled).entries == read_dump(as_json).entries


def test_a_file_packed_in_two_pieces_is_read_whole(tmp_path: Path) -> None:
    content = json.dumps(dump([entry(0)])).encode()
    (tmp_path / "x_1.json.gz").write_bytes(b"".join(map(gzip.compress, (content[:9], content[9:]))))
    assert read_dump(tmp_path / "x_1.json.gz").entries.num_rows == 1


def test_what_a_killed_process_was_to_read_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: Readers, _function: Any, shares: Sequence[Any], *_more: Any) -> list[Lost]:
        return [Lost("was killed", "n1")] * len(shares)

    (tmp_path / "x_1.json").write_text(json.dumps(dump([entry(0)])))
    monkeypatch.setattr(Readers, "read_each", lost)
    assert all_dumps.read_dumps([(tmp_path / "x_1.json", None)], workers=2).ranks == (1,)


def test_sends_of_a_batch_end_with_it() -> None:
    # NCCL's recorder gives the end and the duration of a batch to an entry of its own
    late = read_dump(DATA / "nccl/late/rank_1.json.gz").entries.to_pylist()
    batched = [each for each in late if each["operation"] == "Send"]
    assert len(batched) == 20
    assert all(each["finished"] for each in batched)
    assert all(each["duration_ns"] for each in batched[2:])
    assert all(each["peer"] == 0 for each in batched)


def test_what_a_dump_says_of_an_entry(tmp_path: Path) -> None:
    sent = entry(
        1, profiling_name="nccl:send 1->0", is_p2p=True, p2p_seq_id=7, duration_ms=1.5,
        state="started", retired=False,
    )  # fmt: skip
    (row, direct) = written(tmp_path, dump([entry(0), sent])).entries.to_pylist()
    assert (row["operation"], row["sequence"], row["bytes"]) == ("AllReduce", 1, 64)
    assert (row["enqueue_ns"], row["timeout_ns"]) == (10**18, 600 * 10**9)
    assert (row["duration_ns"], row["finished"]) == (None, True)
    assert (direct["sequence"], direct["p2p"], direct["peer"]) == (7, True, 0)
    assert (direct["duration_ns"], direct["finished"]) == (1_500_000, False)


def test_a_rank_is_what_the_dump_says_and_never_a_place_in_a_list(tmp_path: Path) -> None:
    for name in ("nccl_trace_rank_10", "nccl_trace_rank_2"):
        (tmp_path / name).write_bytes(pickle.dumps(dump([entry(0)], str([*range(12)])), 2))
    assert read_dumps(find_dumps(tmp_path)).ranks == (2, 10)
    # of groups with one rank in common it is that one, whatever the file is called
    crossing = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": "dp", "ranks": "[1, 3]"},
        "2": {"name": "2", "desc": "tp", "ranks": "[2, 3]"},
    }
    entries = [
        entry(n, process_group=[str(n), each["desc"]]) for n, each in enumerate(crossing.values())
    ]
    for name in ("rank_0.json", "some.json"):
        (tmp_path / name).write_text(json.dumps(dump(entries, pg_config=crossing)))
        assert read_dump(tmp_path / name).rank == 3
    (tmp_path / "rank_7.json").write_text(json.dumps(dump([entry(0)])))
    (tmp_path / "unnamed.json").write_text(json.dumps(dump([entry(0)])))
    for name in ("rank_7.json", "unnamed.json"):
        with pytest.raises(ReportError):
            read_dump(tmp_path / name)
    assert read_dump(tmp_path / "unnamed.json", 1).rank == 1


def test_a_run_directory_says_the_rank_and_the_last_process_counts(tmp_path: Path) -> None:
    for rank, names in ((0, ["flight.json.gz"]), (9, ["flight.json.gz", "flight.2.json.gz"])):
        folder = tmp_path / f"ranks/{rank:05d}"
        folder.mkdir(parents=True)
        for number, name in enumerate(names):
            entries = [entry(each) for each in range(1 + number)]
            content = json.dumps(dump(entries, pg_config={})).encode()
            (folder / name).write_bytes(gzip.compress(content))
    flight = read_dumps(find_dumps(tmp_path))
    assert flight.ranks == (0, 9)
    assert flight.entries["rank"].to_pylist() == [0, 9, 9]
    assert flight.world_size == 10


def test_groups_of_one_name_with_other_members_are_two(tmp_path: Path) -> None:
    def of(ranks: str) -> dict[str, Any]:
        config = {"7": {"name": "7", "desc": "mesh_tp", "ranks": ranks}}
        return dump([entry(0, process_group=["7", "mesh_tp"])], pg_config=config)

    flight = written(tmp_path, of("[0, 1]"), of("[0, 1]"), of("[2, 3]"), of("[2, 3]"))
    assert [group.ranks for group in flight.groups] == [(0, 1), (2, 3)]
    assert flight.entries["group"].to_pylist() == [0, 0, 1, 1]


def test_a_rank_without_a_dump_is_a_member_by_the_groups_beside_the_others(tmp_path: Path) -> None:
    def left(rank: int, groups: bytes) -> None:
        folder = tmp_path / f"ranks/{rank:05d}"
        folder.mkdir(parents=True)
        entries = [entry(0), entry(1, process_group=["3", "dp"])]
        content = json.dumps(dump(entries, pg_config={"": {"name": "", "ranks": "[]"}})).encode()
        (folder / "flight.json.gz").write_bytes(gzip.compress(content))
        (folder / "groups.json.gz").write_bytes(groups)

    listed = {"pg_config": {"0": {"ranks": [0, 1, 2, 3]}, "3": {"ranks": [0, 2, 3]}}}
    left(0, gzip.compress(json.dumps(listed).encode()))
    # one whose own list is damaged is in the groups that list it
    left(2, gzip.compress(json.dumps(listed).encode())[:-20])
    flight = read_dumps(find_dumps(tmp_path))
    assert [(group.ranks, group.complete) for group in flight.groups] == [
        ((0, 1, 2, 3), True), ((0, 2, 3), True)
    ]  # fmt: skip
    assert flight.absent == (1, 3)
    assert len(flight.warnings) == 1


def test_numbers_that_begin_anew_are_another_group_in_time(tmp_path: Path) -> None:
    numbers = [5, 6, 1, 2, 1]
    entries = [entry(n, collective_seq_id=number) for n, number in enumerate(numbers)]
    flight = written(tmp_path, dump(entries))
    assert flight.entries["restarts"].to_pylist() == [2, 2, 1, 1, 0]
    assert len(flight.warnings) == 1


def test_parts_of_a_batch_share_a_number(tmp_path: Path) -> None:
    entries = [entry(n, collective_seq_id=number) for n, number in enumerate([1, 2, 2, 2, 3])]
    assert written(tmp_path, dump(entries)).entries["part"].to_pylist() == [0, 0, 1, 2, 0]


BAD: dict[str, Callable[[Path], object]] = {
    "cut-short.json": lambda path: path.write_text(json.dumps(dump([entry(0)]))[:-40]),
    "cut_1.json.gz": lambda path: path.write_bytes(gzip.compress(b"{" * 999)[:-9]),
    "cut_1.json.xz": lambda path: path.write_bytes(lzma.compress(os.urandom(999))[:-99]),
    "cut_1": lambda path: path.write_bytes(pickle.dumps(dump([entry(0)]), 2)[:-90]),
    "old_1.json": lambda path: path.write_text(json.dumps(dump([entry(0)], version="0.9"))),
    "none_1.json": lambda path: path.write_text(json.dumps(dump([entry(0)], version=None))),
    "list_1": lambda path: path.write_bytes(pickle.dumps([{"seq_id": 1}], 2)),
    "config_1": lambda path: path.write_bytes(
        pickle.dumps(older([1], {1: {"ranks": "[0]"}}, group=1), 2)
    ),
    "cut-off_1": lambda path: path.write_bytes(pickle.dumps(older([2, 3], sends=[3]), 2)),
    "odd_1.json": lambda path: path.write_text(json.dumps(dump([entry(0, record_id="x")]))),
    "far_1.json": lambda path: path.write_text(json.dumps(dump([entry(0, time_created_ns=2**63)]))),
    "deep_1.json": lambda path: path.write_text('{"version":"2.1","entries":' + "[" * 100_000),
    "lacks_1.json": lambda path: path.write_text(json.dumps(dump([{"record_id": 1}]))),
    "size_1.json": lambda path: path.write_text(json.dumps(dump([entry(0, input_sizes=[["a"]])]))),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_dump_is_a_missing_one_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "rank_0.json").write_text(json.dumps(dump([entry(0)])))
    BAD[name](tmp_path / name)
    flight = read_dumps([(tmp_path / "rank_0.json", None), (tmp_path / name, None)])
    assert flight.ranks == (0,)
    assert [each["source"] for each in flight.missing] == [str(tmp_path / name)]
    assert len(flight.warnings) == 1
    with pytest.raises(ReportError):
        read_dumps([(tmp_path / name, None)])


def pickled(folder: Path, *documents: Any) -> Flight:
    for rank, document in enumerate(documents):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document, 2))
    return read_dumps(find_dumps(folder))


def test_the_dumps_of_torch_2_3_are_read(tmp_path: Path) -> None:
    # each rank numbers its own groups: what is 1 to ranks 0 and 1 is 2 to none
    config = {0: [0, 1, 2, 3], 1: [0, 1], 2: [0, 1]}, {0: [0, 1, 2, 3], 1: [2, 3]}
    made = [older([4, 5], config[rank // 2], group=1) for rank in range(4)]
    flight = pickled(tmp_path, *made)
    assert not flight.warnings
    assert flight.world_size == 4
    assert [(each.name, each.ranks, each.complete) for each in flight.groups] == [
        ("0-1", (0, 1), True), ("2-3", (2, 3), True)
    ]  # fmt: skip
    rows = flight.entries.to_pylist()
    assert [(row["rank"], row["sequence"], row["p2p"]) for row in rows] == [
        (rank, number, False) for rank in range(4) for number in (4, 5)
    ]
    assert all(row["finished"] and row["bytes"] is None for row in rows)


def test_of_torch_2_3_s_numbers_those_of_collectives_are_the_same_on_all_ranks(
    tmp_path: Path,
) -> None:
    flight = pickled(tmp_path, older([1, 2, 3, 4], sends=[2, 3]), older([1, 2, 3], sends=[1]))
    rows = flight.entries.to_pylist()
    assert [(row["operation"], row["sequence"]) for row in rows] == [
        ("AllReduce", 1), ("Send", 1), ("Send", 2), ("AllReduce", 2),
        ("Send", 1), ("AllReduce", 1), ("AllReduce", 2),
    ]  # fmt: skip


def test_the_dumps_of_torch_2_2_are_read_as_far_as_they_name_their_group(tmp_path: Path) -> None:
    def dumped(last: int) -> list[dict[str, Any]]:
        of_all, of_some = older([*range(1, last)])["entries"], older([7], group=1)["entries"]
        lacks = ("record_id", "op_id", "time_created_ns", "time_discovered_started_ns")
        return [
            {name: value for name, value in each.items() if name not in lacks}
            | {"time_created_us": each["time_created_ns"] // 1000}
            for each in of_all + of_some
        ]

    flight = pickled(tmp_path, dumped(5), dumped(4))
    assert [(each.name, each.ranks) for each in flight.groups] == [("0", (0, 1))]
    assert flight.entries["sequence"].to_pylist() == [1, 2, 3, 4, 1, 2, 3]
    assert flight.entries["enqueue_ns"][0].as_py() == 10**18 + 10**9
    assert [each[:7] for each in flight.warnings] == ["rank 0:", "rank 1:"]


def test_a_recorder_without_entries_says_that_the_program_makes_no_collective(
    tmp_path: Path,
) -> None:
    """As torch 2.11 leaves it in a program that exchanges by symmetric memory alone."""
    kept = {name: value for name, value in dump([]).items() if name != "entries"}
    (tmp_path / "rank_0.json").write_text(json.dumps(kept))
    with pytest.raises(ReportError, match="no collective that torch's flight recorder records"):
        read_dump(tmp_path / "rank_0.json")


def test_more_than_any_recorder_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0.json").write_bytes(b" " * ((64 << 20) + 1))
    with pytest.raises(ReportError):
        read_dump(tmp_path / "rank_0.json")


def test_another_jobs_dump_is_left_out(tmp_path: Path) -> None:
    hour = 3600 * 10**9
    entries = [entry(n) for n in range(4)]
    later = [entry(n, time_created_ns=10**18 + hour) for n in range(4)]
    three = "[0, 1, 2]"
    flight = written(tmp_path, dump(entries, three), dump(later, three), dump(entries, three))
    assert flight.ranks == (0, 2)
    assert [each["rank"] for each in flight.missing] == [1]
    # a job of another size is known without a clock
    flight = written(tmp_path, dump(entries, three), dump(entries), dump(entries, three))
    assert flight.ranks == (0, 2)
    assert flight.absent == (1,)


def test_of_a_rank_twice_the_newer_dump_counts(tmp_path: Path) -> None:
    (tmp_path / "old_1.json").write_text(json.dumps(dump([entry(0)])))
    flight = written(tmp_path, dump([entry(0)]), dump([entry(0), entry(1)]))
    assert flight.entries["rank"].to_pylist() == [0, 1, 1]
    assert [each["source"] for each in flight.missing] == [str(tmp_path / "old_1.json")]


def test_dumps_of_other_versions_are_read_with_a_warning(tmp_path: Path) -> None:
    flight = written(tmp_path, dump([entry(0)]), dump([entry(0)], version="2.4"))
    assert flight.ranks == (0, 1)
    assert len(flight.warnings) == 1


def test_an_older_version_without_some_fields_is_read(tmp_path: Path) -> None:
    old = entry(0)
    for name in ("is_p2p", "timeout_ms", "time_discovered_started_ns"):
        del old[name]
    (row,) = written(tmp_path, dump([old], version="2.2")).entries.to_pylist()
    assert (row["p2p"], row["timeout_ns"]) == (False, None)


# --- pickles


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_pickle_is_executed(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps(dump([entry(0, frames=Hostile(tmp_path / "touched"))]), protocol)
    with pytest.raises(PickleError):
        unpickled(content)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_data_is_what_it_was(protocol: int) -> None:
    same = [{"a": 1}]
    data = {
        "n": [0, 1, 255, 256, 70_000, -1, 2**40, -(2**62)], "f": [0.5, 1e300], "t": ((), (1,)),
        "deep": [[[("x", None, True, False)]]], "s": ["", "ü" * 300], "twice": [same, same],
    }  # fmt: skip
    assert unpickled(pickle.dumps(data, protocol)) == data


HOSTILE = {
    "a memo index of four billion is only a number": b"\x80\x02]r\xff\xff\xff\xff.",
    "text longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "an integer of two gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "ten thousand deep": b"\x80\x02" + b"]" * 10_000 + b"a" * 9_999 + b".",
    "a billion by reference": b"\x80\x02]q\x00K\x01a"
    + b"".join(b"(]" + b"q%c" % n + b"(" + b"h%c" % (n - 1) * 100 + b"e" for n in range(1, 9))
    + b".",
    "nothing on the stack": b"\x80\x02.",
    "no end": b"\x80\x02" + b"]0" * 10,
    "a mark behind the stack": b"\x80\x02(]K\x01ae.",
    "a key that is a list": b"\x80\x02}]K\x01s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_or_read_with_little_work(name: str) -> None:
    found: list[object] = []

    def read() -> None:
        try:
            found.append(unpickled(HOSTILE[name]))
        except PickleError:
            found.append(None)

    assert calls_of(read) < 200_000
    assert found in ([None], [[]])
