"""What the reader of nsys exports must get right, checked on real recordings and changed copies."""

from __future__ import annotations

import functools
import json
import lzma
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from clusterprof.agent.contracts import identity
from clusterprof.ingest import read_report
from clusterprof.ingest.nsys.nccl_ranges import NO_KERNEL
from clusterprof.ingest.nsys.scrubbing import scrub
from clusterprof.tables import SCHEMAS, RankTables

Copy = Callable[..., Path]

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"

#: bytes of all gradients of the recorded model: 4 blocks of dim 2048 in bfloat16
DIM, LAYERS = 2048, 4
GRADIENT_BYTES = 2 * LAYERS * (12 * DIM * DIM + 3 * DIM + DIM + 4 * DIM + DIM + 4 * DIM)


@functools.cache
def unpacked(packed: Path) -> bytes:
    return lzma.decompress(packed.read_bytes())


@pytest.fixture
def changed(recordings: Path, tmp_path: Path) -> Copy:
    """A copy of a recording, changed by SQL statements."""

    def change(*statements: str, recording: str = "nsys-2025.3/ddp/rank0.sqlite") -> Path:
        copy = tmp_path / "changed.sqlite"
        copy.write_bytes(unpacked(recordings / f"{recording}.xz"))
        with closing(sqlite3.connect(copy)) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()
            database.execute("VACUUM")
        return copy

    return change


@pytest.fixture(scope="module")
def ddp(recordings: Path) -> list[RankTables]:
    folder = recordings / "nsys-2025.3" / "ddp"
    return [read_report(folder / f"rank{rank}.sqlite.xz") for rank in range(4)]


def tables_of(ranks: RankTables) -> dict[str, pa.Table]:
    return {name: getattr(ranks, name) for name in SCHEMAS}


def column(table: pa.Table, name: str) -> list[object]:
    values: list[object] = table.column(name).to_pylist()
    return values


def test_every_table_has_exactly_its_schema_and_is_sorted_by_begin(ddp: list[RankTables]) -> None:
    for ranks in ddp:
        for name, table in tables_of(ranks).items():
            assert table.schema.equals(SCHEMAS[name])
            table.validate(full=True)
        for table in (ranks.activity, ranks.host_calls):
            start = table.column("start_ns").to_numpy()
            assert (np.diff(start) >= 0).all()
            assert pc.all(pc.greater_equal(table["end_ns"], table["start_ns"])).as_py()


def test_a_report_says_who_it_is_by_its_own_environment(ddp: list[RankTables]) -> None:
    assert [ranks.info.rank for ranks in ddp] == [0, 1, 2, 3]
    assert [ranks.info.local_rank for ranks in ddp] == [0, 1, 2, 3]
    for ranks in ddp:
        info = ranks.info
        assert (info.world_size, info.device, info.host) == (4, "NVIDIA H200", "vm")
        assert (info.profiler, info.backend) == ("nsys 2025.3.2", "nccl")
        assert info.warnings == ()
    assert len({ranks.info.job for ranks in ddp}) == 1


def test_a_report_says_which_driver_it_ran_with(ddp: list[RankTables]) -> None:
    assert [tables.info.versions for tables in ddp] == [{"driver": "580.159.04"}] * len(ddp)


def test_the_ddp_recording_has_13_allreduces_a_step_on_one_communicator(
    ddp: list[RankTables],
) -> None:
    for ranks in ddp:
        calls = ranks.collective_calls
        assert calls.num_rows == 52
        assert set(column(calls, "operation")) == {"AllReduce"}
        assert set(column(calls, "communicator")) == {"0x2be99ac413cc7b82"}
        assert set(column(calls, "source")) == {"nvtx_payload"}
        assert column(calls, "call") == list(range(52))
        assert calls["group"].null_count == 52


def test_the_ranks_issue_the_same_messages_in_the_same_order(ddp: list[RankTables]) -> None:
    sizes = [column(ranks.collective_calls, "message_bytes") for ranks in ddp]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]


def test_the_messages_of_a_step_add_up_to_the_gradients_of_the_model(
    ddp: list[RankTables],
) -> None:
    sizes = ddp[0].collective_calls["message_bytes"].to_numpy().reshape(4, 13)
    assert sizes.sum(axis=1).tolist() == [GRADIENT_BYTES] * 4


def test_every_call_has_a_kernel_of_its_own_that_starts_after_the_call(
    ddp: list[RankTables],
) -> None:
    for ranks in ddp:
        calls = ranks.collective_calls
        assert calls["start_ns"].null_count == 0
        assert calls["reason"].null_count == calls.num_rows
        assert pc.all(pc.greater(calls["start_ns"], calls["issue_start_ns"])).as_py()
        assert len(set(column(calls, "start_ns"))) == calls.num_rows
        kernels = ranks.activity.filter(pc.equal(ranks.activity["kind"], "collective"))
        assert sorted(column(calls, "start_ns")) == column(kernels, "start_ns")  # type: ignore[type-var]


def test_on_one_host_small_collectives_end_together(ddp: list[RankTables]) -> None:
    # The wall clock of all four is one clock: a reader that mixed up epochs would be off by ms.
    smallest = np.argsort(ddp[0].collective_calls["message_bytes"].to_numpy())[:4]
    settled = sorted(smallest.tolist())[1:]
    ends = np.array([r.collective_calls["end_ns"].to_numpy()[settled] for r in ddp])
    assert (ends.max(axis=0) - ends.min(axis=0)).max() < 20_000


def test_activity_adds_up_to_what_the_export_holds(ddp: list[RankTables], changed: Copy) -> None:
    activity = ddp[0].activity
    lengths = pc.subtract(activity["end_ns"], activity["start_ns"])
    tables = {
        "copy": "CUPTI_ACTIVITY_KIND_MEMCPY",
        "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
    }
    with closing(sqlite3.connect(changed())) as database:
        for kind, table in tables.items():
            expected = database.execute(f'SELECT count(*), sum("end" - start) FROM {table}')
            mine = pc.equal(activity["kind"], kind)
            total = pc.sum(lengths.filter(mine)).as_py()
            assert (pc.sum(mine).as_py(), total) == expected.fetchone()
        (kernels,) = database.execute(f"SELECT count(*) FROM {KERNEL}").fetchone()
    assert (
        kernels == pc.sum(pc.is_in(activity["kind"], pa.array(["compute", "collective"]))).as_py()
    )


def test_every_kernel_knows_the_host_call_that_launched_it(ddp: list[RankTables]) -> None:
    for ranks in ddp:
        activity = ranks.activity
        assert activity["launch_start_ns"].null_count == 0
        early = pc.less_equal(activity["launch_start_ns"], activity["start_ns"])
        assert pc.all(early).as_py()
        launches = ranks.host_calls.filter(pc.equal(ranks.host_calls["kind"], "cuda"))
        assert set(column(activity, "launch_start_ns")) <= set(column(launches, "start_ns"))


def test_batches_come_from_pageable_memory_33_mb_a_step(ddp: list[RankTables]) -> None:
    for ranks in ddp:
        activity = ranks.activity
        batches = activity.filter(pc.equal(activity["direction"], "host_to_device"))
        assert column(batches, "size_bytes") == [33_554_432] * 4
        assert column(batches, "pageable") == [True] * 4
        others = activity.filter(pc.equal(activity["direction"], "device_to_device"))
        assert others.num_rows > 0
        assert others["pageable"].null_count == others.num_rows


def test_steps_are_the_ranges_that_the_program_named(ddp: list[RankTables]) -> None:
    for ranks in ddp:
        assert column(ranks.steps, "step") == [6, 7, 8, 9]
        assert set(column(ranks.steps, "source")) == {"nvtx"}
        assert ranks.info.begin_ns <= column(ranks.steps, "begin_ns")[0]  # type: ignore[operator]
        assert column(ranks.steps, "end_ns")[-1] <= ranks.info.end_ns  # type: ignore[operator]


def test_the_straggler_s_delay_shows_in_its_own_data_range(recordings: Path) -> None:
    longest = {}
    for rank in range(4):
        host = read_report(
            recordings / "nsys-2025.3" / "ddp-host-straggler" / f"rank{rank}.sqlite.xz"
        ).host_calls
        data = host.filter(pc.equal(host["name"], "data"))
        longest[rank] = pc.min(pc.subtract(data["end_ns"], data["start_ns"])).as_py()
    assert longest[2] > 20_000_000 > max(longest[0], longest[1], longest[3])


def test_names_of_cuda_calls_lose_their_api_version(ddp: list[RankTables]) -> None:
    names = set(column(ddp[0].host_calls, "name"))
    assert {"cudaLaunchKernel", "cuLaunchKernelEx", "step 6"} <= names


def test_in_a_group_the_kernel_is_the_one_that_the_group_end_launched(recordings: Path) -> None:
    # nsys 2024.2 exports no payload: operations come from the ranges' names alone.
    ranks = read_report(recordings / "nsys-2024.2" / "pipeline" / "rank0.sqlite.xz")
    calls = ranks.collective_calls
    counts = {each["values"]: each["counts"] for each in pc.value_counts(
        calls["operation"].cast(pa.string())).to_pylist()}  # fmt: skip
    assert counts == {"AllReduce": 60, "Send": 24, "Recv": 24}
    assert set(column(calls, "source")) == {"nvtx_name"}
    assert calls["communicator"].null_count == calls["message_bytes"].null_count == calls.num_rows
    paired = calls.filter(pc.is_in(calls["operation"], pa.array(["Send", "Recv"])))
    assert paired["group"].null_count == 0
    assert len(set(column(paired, "group"))) == 48
    assert pc.all(pc.greater(paired["start_ns"], paired["issue_end_ns"])).as_py()
    assert len(set(column(paired, "stream"))) == 1
    reduced = calls.filter(pc.equal(calls["operation"], "AllReduce"))
    assert set(column(reduced, "stream")).isdisjoint(column(paired, "stream"))


def test_warnings_are_those_of_nsys_that_are_not_always_there(recordings: Path) -> None:
    ranks = read_report(recordings / "nsys-2024.2" / "pipeline" / "rank0.sqlite.xz")
    assert len(ranks.warnings) == 2
    assert all(warning.startswith("nsys: ") for warning in ranks.warnings)
    assert not any("might have been collected" in warning for warning in ranks.warnings)


# --- changed copies ------------------------------------------------------------------------------


def test_rows_in_any_order_give_the_same_tables(changed: Copy, ddp: list[RankTables]) -> None:
    shuffled = []
    for table in (KERNEL, "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "OSRT_API"):
        shuffled += [
            f"CREATE TABLE mixed AS SELECT * FROM {table} ORDER BY (start * 7919) % 10007",
            f"DROP TABLE {table}",
            f"ALTER TABLE mixed RENAME TO {table}",
        ]
    mixed = read_report(changed(*shuffled))
    for name in ("activity", "collective_calls", "steps"):
        assert tables_of(mixed)[name].to_pylist() == tables_of(ddp[0])[name].to_pylist()


def test_tables_with_a_version_in_their_name_are_found(
    changed: Copy, ddp: list[RankTables]
) -> None:
    renamed = read_report(
        changed(
            f"ALTER TABLE {KERNEL} RENAME TO {KERNEL}_V3",
            f"CREATE TABLE {KERNEL}_V2 (start INTEGER)",
            "ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY RENAME TO CUPTI_ACTIVITY_KIND_MEMCPY_V2",
        )
    )
    assert renamed.activity.to_pylist() == ddp[0].activity.to_pylist()


def test_a_report_without_nvtx_gives_calls_from_its_kernels_and_says_so(changed: Copy) -> None:
    ranks = read_report(changed("DROP TABLE NVTX_EVENTS"))
    calls = ranks.collective_calls
    assert calls.num_rows == 52
    assert set(column(calls, "source")) == {"kernel_name"}
    assert set(column(calls, "operation")) == {"AllReduce"}
    assert calls["start_ns"].null_count == 0
    assert "no NVTX range" in str(calls["reason"][0])
    assert set(column(ranks.steps, "source")) == {"optimizer"}


def test_a_call_without_a_kernel_stays_with_its_reason(changed: Copy) -> None:
    gone = "(SELECT id FROM StringIds WHERE value LIKE 'ncclDevKernel%') AND streamId > 0"
    ranks = read_report(
        changed(f"DELETE FROM {KERNEL} WHERE shortName IN {gone} AND start < 70000000")
    )
    calls = ranks.collective_calls
    assert calls.num_rows == 52
    assert calls["start_ns"].null_count == 13
    lost = calls.filter(pc.is_null(calls["start_ns"]))
    assert set(column(lost, "reason")) == {NO_KERNEL}
    assert column(lost, "call") == list(range(13))


def test_a_gpu_report_without_kernels_still_shows_the_host_and_warns(changed: Copy) -> None:
    ranks = read_report(changed(f"DROP TABLE {KERNEL}"))
    assert any("no kernels" in warning for warning in ranks.warnings)
    assert ranks.host_calls.num_rows > 4000
    assert ranks.collective_calls["start_ns"].null_count == 52


def test_the_payload_is_found_where_the_export_lost_its_schemas(
    changed: Copy, ddp: list[RankTables]
) -> None:
    ranks = read_report(changed("DROP TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES"))
    assert ranks.collective_calls.to_pylist() == ddp[0].collective_calls.to_pylist()


def test_the_layout_is_the_one_that_the_export_describes(
    changed: Copy, ddp: list[RankTables]
) -> None:
    swapped = read_report(
        changed(
            "UPDATE NVTX_PAYLOAD_SCHEMA_ENTRIES SET offset = CASE idx WHEN 0 THEN 8 ELSE 0 END"
            " WHERE idx IN (0, 1)"
        )
    )
    sizes = column(ddp[0].collective_calls, "message_bytes")
    assert column(swapped.collective_calls, "communicator") == [f"{size:#018x}" for size in sizes]
    # a communicator's id is no size
    assert set(column(swapped.collective_calls, "message_bytes")) == {None}
    assert swapped.warnings[-1].startswith(f"{len(sizes)} sizes ")


def test_a_payload_as_json_says_the_same_as_one_in_bytes(
    changed: Copy, ddp: list[RankTables]
) -> None:
    path = changed()
    calls = ddp[0].collective_calls.to_pylist()
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute(
            "SELECT rowid FROM NVTX_EVENTS WHERE binaryData IS NOT NULL ORDER BY start"
        ).fetchall()
        for (row,), call in zip(rows, calls, strict=True):
            number = int(call["communicator"], 16)
            size = f"{call['message_bytes']:,}"
            text = f'{{"NCCL communicator ID": {number}, "Message size [bytes]": "{size}"}}'
            database.execute(
                "UPDATE NVTX_EVENTS SET jsonText = ?, binaryData = NULL WHERE rowid = ?",
                (text, row),
            )
        database.commit()
    assert read_report(path).collective_calls.to_pylist() == calls


def test_text_that_is_no_payload_is_passed_over(changed: Copy) -> None:
    ranks = read_report(
        changed("UPDATE NVTX_EVENTS SET binaryData = NULL, jsonText = '[broken' WHERE domainId = 1")
    )
    assert set(column(ranks.collective_calls, "source")) == {"nvtx_name"}
    assert ranks.collective_calls["start_ns"].null_count == 0


# --- advanced NCCL tracing: built from the user guide of nsys, no such report is recorded ---------


def advanced(path: Path, *, without: int = 0, thread: int = 0) -> Path:
    """A recording as advanced tracing is documented to write it.

    Each call's range becomes an `API Group` with the call in its first part and a `GroupLaunch`
    around the launch of its kernel, in which the operation is scheduled; beside them are the
    operations on the GPU, by two channels each. The first `without` calls lay before the capture.
    Kernels were launched `thread` threads further.
    """
    calls = read_report(path).collective_calls.to_pylist()
    with closing(sqlite3.connect(path)) as database:
        ranges = database.execute(
            'SELECT rowid, start, "end", globalTid, domainId FROM NVTX_EVENTS'
            " WHERE binaryData IS NOT NULL ORDER BY start"
        ).fetchall()
        (epoch,) = database.execute(
            "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME"
        ).fetchone()

        def add(name: str, start: int, end: int, place: int, **payload: object) -> None:
            _, _, _, tid, domain = ranges[place]
            own = "localId" in payload
            database.execute(
                'INSERT INTO NVTX_EVENTS (start, "end", eventType, text, globalTid, domainId,'
                " jsonText) VALUES (?, ?, 59, ?, ?, ?, ?)",
                (start, end, name, tid + 99 * own, domain, json.dumps(payload)),
            )

        for place, (call, (row, start, end, *_)) in enumerate(zip(calls, ranges, strict=True)):
            name, apart = call["operation"], max((end - start) // 100, 2)
            who = {"commHash": int(call["communicator"], 16), "commRank": 0}
            what = {**who, "count": call["message_bytes"] // 2, "dataType": "ncclBfloat16"}
            database.execute("DELETE FROM NVTX_EVENTS WHERE rowid = ?", (row,))
            known = {"apiId": 1000 + place} if place >= without else {}
            if known:
                add("API Group", start, end, place, **who)
                add(name, start + 1, start + apart, place, **what, **known)
                add("GroupLaunch", start + apart, end, place, **who)
                add("GroupRuntime", start + apart, start + apart + 9, place, **who)
                add(name, start + apart + 1, start + apart + 8, place, **what, **known)
            for channel in range(2):
                begin = call["start_ns"] - epoch + 100 * channel
                number = {"seqNumber": place + 1, "localId": 7 + place, "channelId": channel}
                add(name, begin, call["end_ns"] - epoch - 100, place, **what, **number, **known)
        database.execute(
            "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = globalTid + ? WHERE correlationId"
            f" IN (SELECT k.correlationId FROM {KERNEL} k JOIN StringIds s ON s.id = k.shortName"
            " WHERE s.value LIKE 'nccl%')",
            (thread,),
        )
        database.commit()
    return path


@pytest.mark.parametrize("thread", [0, 7], ids=["blocking", "another thread launches"])
def test_no_call_of_advanced_tracing_and_no_kernel_stays_alone(
    changed: Copy, ddp: list[RankTables], thread: int
) -> None:
    read = read_report(advanced(changed(), thread=thread))
    same = ("operation", "communicator", "message_bytes", "stream", "start_ns", "end_ns", "group")
    for name in same:
        assert column(read.collective_calls, name) == column(ddp[0].collective_calls, name)
    assert set(column(read.collective_calls, "source")) == {"nvtx_payload"}
    assert set(column(read.collective_calls, "reason")) == {None}
    # what ran on the GPU is nothing that the host did
    began = column(ddp[0].collective_calls, "start_ns")
    assert not set(began) & set(column(read.host_calls, "start_ns"))


def test_each_function_of_a_communicator_is_numbered_apart(changed: Copy) -> None:
    ids = column(read_report(advanced(changed())).collective_calls, "operation_id")
    assert len(set(ids)) == len(ids)
    assert None not in ids
    path = changed(
        "UPDATE StringIds SET value = 'ncclAllGather' WHERE value = 'ncclAllReduce'",
        "UPDATE NVTX_EVENTS SET text = 'ncclAllGather' WHERE text = 'ncclAllReduce'",
    )
    others = read_report(advanced(path)).collective_calls
    assert set(column(others, "operation")) == {"AllGather"}
    assert not set(column(others, "operation_id")) & set(ids)


def test_an_id_of_nsys_comes_before_a_number_of_nccl(changed: Copy) -> None:
    path = advanced(changed())
    with closing(sqlite3.connect(path)) as database:
        database.execute(  # 64 bits without a sign
            "UPDATE NVTX_EVENTS SET jsonText = replace(jsonText, '\"seqNumber\": ',"
            " '\"operationId\": 184467440737095515') WHERE jsonText LIKE '%seqNumber%'"
        )
        database.commit()
    ids = column(read_report(path).collective_calls, "operation_id")
    numbers = [int(f"184467440737095515{k}") for k in range(1, len(ids) + 1)]
    assert ids == [each - (1 << 64 if each >> 63 else 0) for each in numbers]
    assert numbers[-1] >> 63


def test_calls_before_the_range_leave_their_kernels_without_ids(
    changed: Copy, ddp: list[RankTables]
) -> None:
    calls = read_report(advanced(changed(), without=3)).collective_calls
    assert column(calls, "start_ns") == column(ddp[0].collective_calls, "start_ns")
    assert column(calls, "source")[:4] == ["kernel_name"] * 3 + ["nvtx_payload"]
    assert column(calls, "operation_id")[:3] == [None] * 3


def init_range(rank: int, size: int, end: str) -> str:
    payload = (
        (1).to_bytes(8, "little")
        + (16777227).to_bytes(8, "little")
        + (24).to_bytes(8, "little")
        + (32).to_bytes(8, "little")
        + (0x2BE99AC413CC7B82).to_bytes(8, "little")
        + size.to_bytes(4, "little")
        + rank.to_bytes(4, "little")
        + (0).to_bytes(8, "little")
    )
    return (
        'INSERT INTO NVTX_EVENTS (start, "end", eventType, text, globalTid, domainId, binaryData)'
        f" SELECT 1000, {end}, 59, 'ncclCommInitRankConfig', globalTid, domainId,"
        f" x'{payload.hex()}' FROM NVTX_EVENTS WHERE binaryData IS NOT NULL LIMIT 1"
    )


def test_the_rank_can_come_from_the_communicator_of_all_ranks(changed: Copy) -> None:
    no_environment = "DELETE FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT%'"
    ranks = read_report(changed(no_environment, init_range(3, 4, "2000")))
    assert ranks.info.rank == 3
    assert set(column(ranks.collective_calls, "communicator_size")) == {4}


def test_a_smaller_communicator_does_not_give_the_rank(changed: Copy) -> None:
    ranks = read_report(changed(init_range(1, 2, "2000")))
    assert ranks.info.rank == 0


def test_an_init_range_that_was_never_closed_holds_no_calls(
    changed: Copy, ddp: list[RankTables]
) -> None:
    ranks = read_report(changed(init_range(0, 4, "NULL")))
    calls, expected = ranks.collective_calls, ddp[0].collective_calls
    for name in ("operation", "start_ns", "end_ns", "message_bytes", "group", "reason"):
        assert column(calls, name) == column(expected, name)


def test_the_rank_is_found_in_one_string_of_all_variables(changed: Copy) -> None:
    text = "x'" + b"SHELL=sh\0SLURM_PROCID=2\0SLURM_STEP_ID=0\0SLURM_NTASKS=8\0".hex() + "'"
    no_environment = "DELETE FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT%'"
    among_strings = f"INSERT INTO StringIds VALUES (99999999, CAST({text} AS TEXT))"
    of_the_system = (
        "INSERT INTO TARGET_INFO_SYSTEM_ENV"
        f" VALUES (0, '', 'DeviceEnvironment', 610, CAST({text} AS TEXT))"
    )
    for statement in (among_strings, of_the_system):
        info = read_report(changed(no_environment, statement)).info
        assert (info.rank, info.world_size) == (2, 8)


def test_one_new_row_has_a_launcher_s_ranks_known_live_and_in_a_report_and_its_scrubbed_copy(
    changed: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = identity.Launcher("prun", "PRUN_RANK", "PRUN_SIZE", "PRUN_LOCAL", local_size="PRUN_HERE")
    environ = {"PRUN_RANK": "3", "PRUN_SIZE": "8", "PRUN_LOCAL": "1", "PRUN_HERE": "2"}
    text = "x'" + "\0".join(f"{n}={v}" for n, v in environ.items()).encode().hex() + "'"
    report = changed(
        "DELETE FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT%'",
        "INSERT INTO TARGET_INFO_SYSTEM_ENV"
        f" VALUES (0, '', 'DeviceEnvironment', 610, CAST({text} AS TEXT))",
    )
    assert identity.identify(environ) is None
    monkeypatch.setattr(identity, "LAUNCHERS", (row, *identity.LAUNCHERS))
    me = identity.identify(environ, "prun")
    assert me == (3, 8, 1, "prun")
    assert identity.nodes(me, environ) > 1
    scrub(report, tmp_path / "scrubbed.sqlite")
    for path in (report, tmp_path / "scrubbed.sqlite"):
        info = read_report(path).info
        assert (info.rank, info.world_size, info.local_rank) == (3, 8, 1)


def test_no_environment_value_but_rank_and_size_is_kept(changed: Copy) -> None:
    secret = "hunter2-f00ba7"
    kept = read_report(
        changed(
            "INSERT INTO META_DATA_CAPTURE VALUES"
            f" ('PROCESS_0:ENVIRONMENT_VARIABLE', 'API_TOKEN=\"{secret}\"'),"
            f" ('PROCESS_0:ENVIRONMENT_VARIABLE', 'SLURM_JOB_ID=\"{secret}\"')"
        )
    )
    assert kept.info.job is not None
    assert secret not in repr(kept.info)
    for table in tables_of(kept).values():
        assert secret not in str(table.to_pydict())


def test_the_job_s_fingerprint_differs_where_the_rendezvous_does(
    changed: Copy, ddp: list[RankTables]
) -> None:
    port = "UPDATE META_DATA_CAPTURE SET value = 'MASTER_PORT=\"1\"'"
    other = read_report(changed(f"{port} WHERE value LIKE 'MASTER_PORT%'"))
    assert other.info.job not in (None, ddp[0].info.job)


def test_errors_of_nsys_are_passed_on_once(changed: Copy) -> None:
    again = (
        "INSERT INTO DIAGNOSTIC_EVENT SELECT 5, 1, 1, 3, 'CUPTI buffers were lost', globalPid"
        " FROM DIAGNOSTIC_EVENT LIMIT 2"
    )
    assert read_report(changed(again)).warnings == ("nsys: CUPTI buffers were lost",)


def test_work_of_a_child_process_is_not_the_rank_s(changed: Copy, ddp: list[RankTables]) -> None:
    child = f"CREATE TABLE child AS SELECT * FROM {KERNEL} LIMIT 5"
    moved = "UPDATE child SET globalPid = globalPid + (1 << 24)"
    ranks = read_report(changed(child, moved, f"INSERT INTO {KERNEL} SELECT * FROM child"))
    assert ranks.activity.num_rows == ddp[0].activity.num_rows


def test_python_s_waits_for_the_gil_are_calls_of_their_own_kind(changed: Copy) -> None:
    tid = "(SELECT globalTid FROM NVTX_EVENTS LIMIT 1)"
    ranks = read_report(
        changed(
            "INSERT INTO NVTX_EVENTS (start, eventType, text, globalTid, domainId)"
            f" VALUES (-5, 75, 'GIL Trace', {tid}, 7)",
            'INSERT INTO NVTX_EVENTS (start, "end", eventType, text, globalTid, domainId)'
            f" VALUES (50000000, 50001000, 59, 'Waiting for GIL', {tid}, 7)",
        )
    )
    python = ranks.host_calls.filter(pc.equal(ranks.host_calls["kind"], "python"))
    assert column(python, "name") == ["Waiting for GIL"]


def test_whole_cuda_graphs_are_work_with_a_warning(changed: Copy) -> None:
    columns = "start, end, deviceId, streamId, correlationId, globalPid"
    quoted = columns.replace("end", '"end"')
    ranks = read_report(
        changed(
            f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT {quoted} FROM {KERNEL} LIMIT 3"
        )
    )
    assert column(ranks.activity, "name").count("CUDA graph") == 3
    assert any("3 CUDA graphs" in warning for warning in ranks.warnings)
