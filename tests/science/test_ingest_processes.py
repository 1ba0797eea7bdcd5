"""A report of several ranks (`nsys profile torchrun …`): every rank in it is read, by process."""

from __future__ import annotations

import lzma
import sqlite3
import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from clusterprof.align.clock import alignment
from clusterprof.errors import ReportError
from clusterprof.ingest import gather, read_report
from clusterprof.study import Study, study

#: what points into the strings of an export
_STRINGS = {"nameId", "shortName", "demangledName", "mangledName", "textId"}
_TIMES = {"start", "end", "timestamp"}
_EVENTS = ("CUPTI_ACTIVITY_KIND_%", "NVTX_EVENTS", "OSRT_API", "DIAGNOSTIC_EVENT")
_UNNAMED = "DELETE FROM META_DATA_CAPTURE WHERE name = 'PROCESS_0:ENVIRONMENT_VARIABLE'"

Joined = Callable[..., Path]


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory, recordings: Path) -> Joined:
    """`joined(name, ranks, *statements)`: the recorded ranks as nsys has them around torchrun."""

    def join(name: str, *statements: str, ranks: Sequence[int] = range(4), then: str = "") -> Path:
        folder = tmp_path_factory.mktemp("joined")
        parts = [folder / f"{rank}.part" for rank in ranks]
        for rank, part in zip(ranks, parts, strict=True):
            packed = recordings / "nsys-2025.3" / name / f"rank{rank}.sqlite.xz"
            part.write_bytes(lzma.decompress(packed.read_bytes()))
        whole = folder / f"{then or 'whole'}.sqlite"
        parts[0].rename(whole)
        with closing(sqlite3.connect(whole)) as database:
            for place, part in enumerate(parts[1:], 1):
                _add(database, part, place * 10_000_000)
            for statement in (_UNNAMED, *statements):
                database.execute(statement)
            database.commit()
        return whole

    return join


def _add(database: sqlite3.Connection, part: Path, strings: int) -> None:
    """Add one rank's events, its strings numbered from `strings` on, on the first one's clock."""
    database.execute("ATTACH ? AS other", [str(part)])
    epochs = [
        database.execute(f"SELECT utcEpochNs FROM {each}.TARGET_INFO_SESSION_START_TIME").fetchone()
        for each in ("main", "other")
    ]
    later = epochs[1][0] - epochs[0][0]
    database.execute(f"INSERT INTO StringIds SELECT id + {strings}, value FROM other.StringIds")
    like = " OR ".join(f"name LIKE '{each}'" for each in _EVENTS)
    found = database.execute(
        f"SELECT name FROM other.sqlite_master WHERE type = 'table' AND ({like})"
    ).fetchall()
    for (table,) in found:
        names = [row[1] for row in database.execute(f"PRAGMA other.table_info({table})")]
        values = [
            f'"{name}" + {later if name in _TIMES else strings if name in _STRINGS else 0}'
            if name in _TIMES | _STRINGS
            else f'"{name}"'
            for name in names
        ]
        columns = ", ".join(f'"{name}"' for name in names)
        database.execute(
            f"INSERT INTO main.{table} ({columns}) SELECT {', '.join(values)} FROM other.{table}"
        )
    database.commit()
    database.execute("DETACH other")


def merged(*paths: Path, **options: dict[Path, int]) -> Study:
    gathered = gather(list(paths), **options)  # type: ignore[arg-type]
    return study(gathered.ranks, gathered.missing, gathered.warnings)


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-host-straggler"])
def test_all_ranks_of_one_report_are_read_as_if_each_had_one(
    joined: Joined, studied: Callable[[str], Study], recording: str
) -> None:
    apart, one = studied(recording), merged(joined("ddp-host-straggler"))
    assert [tables.rank for tables in one.ranks] == [0, 1, 2, 3]
    for ours, theirs in zip(one.ranks, apart.ranks, strict=True):
        for name in ("activity", "collective_calls", "steps"):
            assert getattr(ours, name).num_rows == getattr(theirs, name).num_rows
        assert ours.collective_calls["start_ns"].equals(theirs.collective_calls["start_ns"])
        assert ours.info.device == theirs.info.device
    assert one.results["findings"][0]["rank"] == 2
    assert one.results["findings"][0]["code"] == "straggler.host"
    assert len(one.results["findings"]) == len(apart.results["findings"])


def test_ranks_of_one_report_have_one_clock_without_any_collective(joined: Joined) -> None:
    names = "SELECT id FROM StringIds WHERE value LIKE '%nccl%'"
    kernels = f"DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE shortName IN ({names})"
    calls = f"DELETE FROM NVTX_EVENTS WHERE text LIKE 'nccl%' OR textId IN ({names})"
    results = merged(joined("ddp", kernels, calls)).results
    assert results["collectives"]["matched"] == 0
    clock = results["clock"]
    assert clock["method"] == alignment.BY_REPORT
    assert max(each["uncertainty_ns"] for each in clock["ranks"]) < 100_000


def test_ranks_that_nothing_names_are_in_their_gpus_order_and_that_is_said(joined: Joined) -> None:
    turned = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 3 - deviceId"
    plain, gathered = gather([joined("ddp")]), gather([joined("ddp", turned)])
    assert [tables.rank for tables in gathered.ranks] == [0, 1, 2, 3]
    begun = [each.collective_calls["start_ns"] for each in plain.ranks]
    turned_round = [each.collective_calls["start_ns"] for each in reversed(gathered.ranks)]
    assert turned_round == begun
    (warning,) = [each for each in gathered.warnings if "process 9" in each]
    assert warning.startswith("ranks 0–3: ")
    assert "--rank FILE=FIRST" in warning


def test_ranks_that_made_their_communicators_in_the_window_are_named_by_them(
    joined: Joined,
) -> None:
    body = {rank: struct.pack("<Qiii4x", 0xABC, 4, 3 - rank, 0) for rank in range(4)}
    header = struct.pack("<QQQQ", 1, (1 << 24) + 11, 24, 32)
    inits = [
        "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, domainId, text, binaryData)"
        " SELECT start - 1000, start - 500, 59, globalTid, domainId, 'ncclCommInitRank',"
        f" x'{(header + body[rank]).hex()}' FROM NVTX_EVENTS WHERE rowid ="
        " (SELECT min(n.rowid) FROM NVTX_EVENTS n WHERE n.domainId IN (SELECT domainId FROM"
        " NVTX_EVENTS WHERE eventType = 75 AND (text = 'NCCL' OR textId IN (SELECT id FROM"
        " StringIds WHERE value = 'NCCL'))) AND n.eventType = 59"
        " AND (n.globalTid >> 24) & 16777215 = (SELECT DISTINCT (k.globalPid >> 24) & 16777215"
        f" FROM CUPTI_ACTIVITY_KIND_KERNEL k WHERE k.deviceId = {rank}))"
        for rank in range(4)
    ]
    gathered = gather([joined("ddp", *inits)])
    assert [tables.rank for tables in gathered.ranks] == [0, 1, 2, 3]
    assert [
        max(set(devices), key=devices.count)
        for tables in gathered.ranks
        for devices in [tables.activity["device"].to_pylist()]
    ] == [3, 2, 1, 0]
    assert {tables.info.world_size for tables in gathered.ranks} == {4}
    assert not [each for each in gathered.warnings if "--rank" in each]


def test_the_user_says_the_first_of_a_report_s_ranks(joined: Joined) -> None:
    first, second = joined("ddp", ranks=(0, 1)), joined("ddp", ranks=(2, 3), then="second")
    gathered = gather([first, second], ranks={second: 2})
    assert [tables.rank for tables in gathered.ranks] == [0, 1, 2, 3]
    assert [tables.info.source for tables in gathered.ranks] == [first, first, second, second]


def test_a_diagnostic_is_of_its_own_process(joined: Joined) -> None:
    of_rank_2 = (
        "INSERT INTO DIAGNOSTIC_EVENT (timestamp, timestampType, source, severity, text, globalPid)"
        " SELECT 1, 1, 1, 2, 'CUDA buffers were dropped', globalPid FROM"
        " CUPTI_ACTIVITY_KIND_KERNEL WHERE deviceId = 2 LIMIT 1"
    )
    helper = (
        "INSERT INTO DIAGNOSTIC_EVENT (timestamp, timestampType, source, severity, text, globalPid)"
        f" VALUES (2, 1, 1, 2, 'cannot be traced', {77 << 24})"
    )
    gathered = gather([joined("ddp", of_rank_2, helper)])
    assert "rank 2: nsys: CUDA buffers were dropped" in gathered.warnings
    assert "ranks 0–3: nsys process 77: cannot be traced" in gathered.warnings


def test_a_rank_whose_times_are_none_costs_no_other_rank_of_its_report(joined: Joined) -> None:
    far = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = -(1 << 61) WHERE deviceId = 1"
    gathered = gather([joined("ddp", far)])
    assert [tables.rank for tables in gathered.ranks] == [0, 2, 3]
    (lost,) = gathered.missing
    assert lost["reason"].startswith("rank 1 of ")


def test_a_rank_s_helpers_are_no_ranks(joined: Joined) -> None:
    # a rank that torchrun started, by the environment of the profiled command, has no others
    named = [
        "INSERT INTO META_DATA_CAPTURE (name, value) VALUES"
        f" ('PROCESS_0:ENVIRONMENT_VARIABLE', '{each}')"
        for each in ('RANK="0"', 'WORLD_SIZE="4"', 'LOCAL_RANK="0"', 'TORCHELASTIC_RUN_ID="x"')
    ]
    gathered = gather([joined("ddp", *named)])
    assert [tables.rank for tables in gathered.ranks] == [0]


def test_a_process_that_drives_several_gpus_is_refused_or_named(joined: Joined) -> None:
    every_second = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1 WHERE correlationId % 2"
    path = joined("ddp", every_second, ranks=[0])
    with pytest.raises(ReportError, match=r"drives 2 GPUs \(0-1\)"):
        gather([path])
    # one of which it is known that it is of one rank is read
    (warning,) = (each for each in read_report(path, rank=0).warnings if "2 GPUs" in each)
    assert "read as one" in warning


def test_a_process_that_runs_little_on_another_gpu_is_one_rank(joined: Joined) -> None:
    some = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1 WHERE correlationId % 30 = 0"
    tables = read_report(joined("ddp", some, ranks=[0]), rank=0)
    assert not [each for each in tables.warnings if "GPUs" in each]
