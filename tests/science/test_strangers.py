"""Traces that strangers made: what kernels do not say of themselves, and where they stand."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from simulate import Cause, Job, simulate
from strangers import trace
from studies import found_in

from clusterprof.align.clock import Clock
from clusterprof.align.match import match
from clusterprof.align.waiting_kernels import waiting_kernels
from clusterprof.analysis.findings.finding import capture
from clusterprof.errors import ReportError
from clusterprof.ingest import gather, read_report
from clusterprof.results import NODES, UNBOUNDED_NS
from clusterprof.study import Study, study
from clusterprof.tables import GRAPH, SCHEMAS, RankTables, empty

#: four ranks on one host whose collectives' ends differ by up to 300 µs; hosts run far ahead
SCATTERED = Job(
    phase_ns=300_000, small_calls=False, layers=4, steps=6, launch_ns=40_000, ranks_per_host=4,
    tear_ns=2_000_000, communicator_ids=False, transfer_ns=900_000,
)  # fmt: skip
NAMED = {"AllReduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}
SLEEPER = replace(SCATTERED, causes=(Cause("host", 2, 30_000_000),))


def read(job: Job, folder: Path, *, cut: int = 0, **how: object) -> list[RankTables]:
    """The ranks of a simulated job by their traces, which begin `cut` steps late."""
    ranks, _ = simulate(job)
    paths = []
    for tables in ranks:
        begin = tables.steps["begin_ns"][cut].as_py() if cut else 0
        paths.append(trace(tables, folder, begin_ns=begin, **how))  # type: ignore[arg-type]
    return [read_report(path) for path in paths]


def operations(tables: RankTables) -> Counter[str]:
    return Counter(tables.collective_calls["operation"].cast(pa.string()).to_pylist())


def matched(ranks: list[RankTables]) -> Study:
    return study(ranks)


def test_a_kernel_does_what_the_operator_around_its_launch_says(tmp_path: Path) -> None:
    ranks = read(replace(SCATTERED, sharded=True), tmp_path)
    truth = simulate(replace(SCATTERED, sharded=True))[0]
    assert operations(ranks[0]) == operations(truth[0])
    assert set(operations(ranks[0])) == {"AllGather", "ReduceScatter"}


@pytest.mark.parametrize("stated", ["kernel", "operator"])
def test_the_arguments_of_a_kernel_or_of_its_operator_tell_the_group(
    tmp_path: Path, stated: str
) -> None:
    calls = read(SCATTERED, tmp_path, arguments=stated)[1].collective_calls
    assert set(calls["communicator"].to_pylist()) == {"0[0-3]"}
    assert set(calls["message_bytes"].to_pylist()) == {4096}
    assert set(calls["operation"].cast(pa.string()).to_pylist()) == {"AllReduce"}


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 4>(vllm::RankData*)", {}),
        pytest.param(
            "mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*)",
            {"arguments": "kernel"},
            marks=pytest.mark.long,
        ),
        ("of_a_library_that_nobody_knows", {"arguments": "kernel"}),
        ("of_a_library_that_nobody_knows", {"operators": True}),
    ],
)
def test_kernels_of_any_library_that_exchange_data_name_the_rank_that_is_late(
    tmp_path: Path, kernel: str, how: dict[str, object]
) -> None:
    how = {"operators": False, **how}
    study = matched(read(SLEEPER, tmp_path, kernels={"AllReduce": kernel}, **how))
    assert study.results["collectives"]["unmatched"] == 0
    finding = study.results["findings"][0]
    assert (finding["code"], finding["rank"]) == ("straggler.host", 2)
    assert any(
        f"({kernel.removeprefix('void ').partition('<')[0].partition('(')[0]}) count" in warning
        for warning in study.results["warnings"]
    )


def test_a_kernel_launched_beside_a_collective_in_its_operator_is_none(tmp_path: Path) -> None:
    # operators last beyond the next launch
    job = replace(SCATTERED, launch_ns=8_000)
    ranks = read(job, tmp_path, arguments="kernel", kernels=NAMED)
    truth = simulate(job)[0]
    assert [operations(tables) for tables in ranks] == [operations(tables) for tables in truth]


@pytest.mark.parametrize("late", [True, False])
def test_kernels_of_one_launch_wait_for_each_other(tmp_path: Path, late: bool) -> None:
    job = replace(SLEEPER if late else SCATTERED, serial=True)
    study = matched(read(job, tmp_path, operators=False, graphs=True, kernels=NAMED))
    above = [each for each in study.results["findings"] if each["severity"] != "info"]
    assert study.results["collectives"]["unmatched"] == 0
    codes = [(each["code"], each["rank"]) for each in above]
    assert codes[0] == (("straggler.host", 2) if late else ("communication.exposed", None))
    assert "gpu.idle" not in dict(codes)


@pytest.mark.parametrize(
    ("kernel", "known"),
    [
        ("of_a_library_that_nobody_knows", []),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", ["Unknown"]),
        pytest.param("mscclKernel_Sum_half_Simple_false", ["Unknown"], marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_kernels_that_only_end_together_are_an_exchange_and_are_named(
    tmp_path: Path, late: bool, kernel: str, known: list[str]
) -> None:
    # on one clock, and on clocks of which nothing is known
    job = replace(SCATTERED, phase_ns=20_000, serial=True, offset_ns=(0, 0, 9_000_000, 0))
    job = replace(job, causes=SLEEPER.causes if late else ())
    study = matched(read(job, tmp_path, operators=False, kernels={"AllReduce": kernel}))
    warnings = [
        line for line in study.results["warnings"] if f"all of its members: {kernel}" in line
    ]
    findings = study.results["findings"]
    codes = [(each["code"], each["rank"]) for each in findings]
    assert len(warnings) == late
    assert codes[:1] == ([("straggler.host", 2)] if late else codes[:1])
    operations = [each["operation"] for each in study.results["collectives"]["by_operation"]]
    assert operations == (["Exchange"] if late else known)
    if late:  # and as much is saved as where a name tells all
        named = matched(read(job, tmp_path, operators=False, kernels=NAMED)).results["findings"][0]
        saved_ns = [each["saved_ns_per_step"] for each in (findings[0], named)]
        assert saved_ns[0] == pytest.approx(saved_ns[1], rel=0.05)


def kernels_of(*ranks: list[tuple[int, int]]) -> list[RankTables]:
    """Ranks with a kernel of one name in each of some steps, by begin and length (µs)."""
    out = []
    for rank, times in enumerate(ranks):
        base = simulate(replace(SCATTERED, dp=len(ranks), layers=1, steps=1))[0][rank]
        row = {"kind": "compute", "name": "kernel", "device": rank, "stream": 7}
        begins = [step * 100_000_000 for step in range(len(times))]
        rows = [
            row | {"launch_start_ns": at, "launch_end_ns": at, "start_ns": at + 1000 * begin,
                   "end_ns": at + 1000 * (begin + length)}
            for at, (begin, length) in zip(begins, times, strict=True)
        ]  # fmt: skip
        steps = [
            {"step": k, "begin_ns": at, "end_ns": at + 99_000_000, "source": "nvtx"}
            for k, at in enumerate(begins)
        ]
        out.append(
            replace(
                base,
                activity=pa.Table.from_pylist(rows, SCHEMAS["activity"]),
                steps=pa.Table.from_pylist(steps, SCHEMAS["steps"]),
            )
        )
    return out


def clock_of(ranks: list[RankTables], bound_ns: int) -> Clock:
    none = np.zeros(len(ranks), np.int64)
    numbers = tuple(tables.rank for tables in ranks)
    return Clock(0, 0, "", numbers, none, none.astype(float), np.full(len(ranks), bound_ns))


WAITS_ALWAYS = [(0, 5_000)] * 8, [(4_000, 1_000)] * 8
SLOWER_ALWAYS = [(0, 5_000)] * 8, [(0, 1_000)] * 8
WAITS_IN_TURN = [(0, 5_000), (4_000, 1_000)] * 4, [(4_000, 1_000), (0, 5_000)] * 4
WAITS_TWICE = [(0, 5_000)] * 2 + [(0, 1_000)] * 6, [(4_000, 1_000)] * 2 + [(0, 1_000)] * 6


@pytest.mark.parametrize(
    ("times", "on_one_clock", "without_a_clock"),
    [
        (WAITS_ALWAYS, True, False),
        (SLOWER_ALWAYS, False, False),
        (WAITS_IN_TURN, True, True),
        (WAITS_TWICE, False, False),
    ],
)
def test_a_kernel_waits_where_ends_coincide_and_begins_do_not_again_and_again(
    times: tuple[list[tuple[int, int]], ...], on_one_clock: bool, without_a_clock: bool
) -> None:
    ranks = kernels_of(*times)
    for bound_ns, waits in ((10_000, on_one_clock), (UNBOUNDED_NS, without_a_clock)):
        assert waiting_kernels(ranks, clock_of(ranks, bound_ns)) == ({"kernel"} if waits else set())


def merged(folder: Path, label: Callable[[int, dict[str, Any]], dict[str, Any]]) -> Path:
    """One trace of all events of a job that rank 2 delays, each labelled with its rank."""
    events, whole, alone = [], {}, label is of_gpu
    cause = Cause("gpu_slow" if alone else "host", 2, 30_000_000)
    for tables in simulate(replace(SCATTERED, tear_ns=0, causes=(cause,)))[0]:
        whole = json.loads(trace(tables, folder, arguments="kernel").read_text())
        # a process marks its steps once
        marks = not alone or tables.rank == 0
        mine = (each for each in whole["traceEvents"] if marks or "Step#" not in each["name"])
        events += [label(tables.rank, event) for event in mine]
    if label is of_number:
        for rank in range(4):
            label_of = {"ph": "M", "name": "process_labels", "pid": 4000 - rank}
            events.append(label_of | {"tid": 0, "ts": 0, "args": {"labels": f"rank {rank}"}})
    whole["distributedInfo"] |= {"rank": 0, "world_size": 1 if alone else 4}
    path = folder / "all" / "merged.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**whole, "traceEvents": events}))
    return path


def of_process(rank: int, event: dict[str, Any]) -> dict[str, Any]:
    return event | {"pid": f"[TP0{rank}] 4000"}


def of_arguments(rank: int, event: dict[str, Any]) -> dict[str, Any]:
    return event | {"args": event["args"] | {"rank": rank}}


def of_gpu(rank: int, event: dict[str, Any]) -> dict[str, Any]:
    args = dict(event["args"])
    if "correlation" in args:
        args["correlation"] += 1_000_000 * rank
    return event | {"args": args, "tid": 10 * rank + event["tid"]}


def of_number(rank: int, event: dict[str, Any]) -> dict[str, Any]:
    """As torch.profiler writes it: the process or the GPU, and launches numbered in each process.

    What it is called stands beside its events.
    """
    if "device" in event["args"]:
        return event | {"pid": rank}
    return event | {"pid": 4000 - rank}


@pytest.mark.parametrize("label", [of_process, of_arguments, of_gpu, of_number])
def test_each_rank_and_each_gpu_of_a_process_in_a_trace_is_a_rank(
    tmp_path: Path, label: Callable[[int, dict[str, Any]], dict[str, Any]]
) -> None:
    ranks = gather([merged(tmp_path, label)]).ranks
    assert [tables.rank for tables in ranks] == [0, 1, 2, 3]
    counts = {tables.collective_calls.num_rows for tables in ranks}
    assert counts == {simulate(SLEEPER)[0][0].collective_calls.num_rows}
    results = study(ranks).results
    assert any("the trace is of" in line for line in results["warnings"])
    assert results["collectives"]["matched"] >= counts.pop() - 1  # one may lie between two steps
    assert "rank 2 " in results["verdict"].lower()


def test_processes_in_a_trace_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    path = merged(tmp_path, lambda rank, event: of_number(rank, event))
    path.write_text(path.read_text().replace('"device": 3', '"device": 2'))
    with pytest.raises(ReportError, match="4 processes on 3 GPUs"):
        gather([path])


def in_whole_graphs(tables: RankTables) -> RankTables:
    """A rank whose steps are one CUDA graph each, recorded as a whole."""
    graphs = []
    begins = tables.steps["begin_ns"].to_pylist()
    rows = [row for row in tables.activity.to_pylist() if row["kind"] != "copy"]
    rows.sort(key=lambda row: row["launch_start_ns"])
    for _, of in groupby(rows, lambda row: bisect_right(begins, row["launch_start_ns"])):
        first, *rest = of
        graph = {"kind": "compute", "name": GRAPH, "stream": 7, "direction": None, "pageable": None}
        graphs.append(first | graph | {"end_ns": max(row["end_ns"] for row in (first, *rest))})
    calls = [
        {"start_ns": graph["launch_start_ns"], "end_ns": graph["launch_end_ns"], "kind": "cuda",
         "name": "cudaGraphLaunch", "thread": graph["launch_thread"]}
        for graph in graphs
    ]  # fmt: skip
    others = tables.host_calls.to_pylist()
    calls = sorted(calls + others, key=lambda call: call["start_ns"])
    return replace(
        tables,
        activity=pa.Table.from_pylist(graphs, SCHEMAS["activity"]),
        host_calls=pa.Table.from_pylist(calls, SCHEMAS["host_calls"]),
        collective_calls=empty("collective_calls"),
    )


def test_what_waits_unseen_in_whole_graphs_is_no_slow_gpu() -> None:
    late = (Cause("host", 1, 30_000_000),)
    job = replace(SCATTERED, dp=2, synchronous=True, causes=late)
    study = matched([in_whole_graphs(tables) for tables in simulate(job)[0]])
    assert "straggler.gpu" not in {each["code"] for each in study.results["findings"]}
    assert NODES in capture(study.dataset, [0])
    assert NODES not in capture(study.dataset, [0], profiler="torch")


PAIRS = replace(SLEEPER, dp=2, tp=2, communicator_ids=True, phase_ns=20_000, tear_ns=2_000_000)


def told_sizes(folder: Path, job: Job, ranks: Sequence[int], **job_info: object) -> Study:
    """The study of these ranks' traces, which give of their groups a name and the size alone."""
    for tables in simulate(job)[0]:
        if tables.rank in ranks:
            path = trace(tables, folder, arguments="kernel", operators=False, listed=False)
            content = json.loads(path.read_text())
            content["distributedInfo"] = {"rank": tables.rank, **job_info}
            path.write_text(json.dumps(content))
    found = gather([folder])
    return study(found.ranks, found.missing, found.warnings)


def test_a_group_has_no_more_members_than_its_size_tells(tmp_path: Path) -> None:
    found = told_sizes(tmp_path, PAIRS, range(4), world_size=4)
    groups = {(each["kind"], *each["ranks"]) for each in found.results["topology"]["groups"]}
    assert groups == {("tensor", 0, 1), ("tensor", 2, 3), ("data", 0, 2), ("data", 1, 3)}
    assert found.results["collectives"]["unmatched"] == 0
    worst = found.results["findings"][0]
    assert (worst["code"], worst["rank"]) == ("straggler.host", 2)
    assert sum("they are several" in each for each in found.results["warnings"]) == 2


@pytest.mark.parametrize("profiled", [4, 3])
def test_one_group_that_each_report_calls_otherwise_is_found_by_its_size(
    tmp_path: Path, profiled: int
) -> None:
    for tables in simulate(replace(SLEEPER, tear_ns=0, phase_ns=20_000))[0][:profiled]:
        path = trace(tables, tmp_path, arguments="kernel", operators=False)
        content = json.loads(path.read_text())
        for event in content["traceEvents"]:
            if event["args"].pop("Process Group Ranks", None):
                event["args"]["Process Group Name"] = f"mesh_{tables.rank}"
        path.write_text(json.dumps(content))
    found = gather([tmp_path])
    results = study(found.ranks, found.missing, found.warnings).results
    assert results["collectives"]["unmatched"] == 0
    # the rank that is not profiled is one of its four members
    assert any("differently (mesh_0, mesh_1" in each for each in results["warnings"])
    late = [each["rank"] for each in results["findings"] if each["code"] == "straggler.host"]
    assert late == [2]


def test_a_job_is_as_large_as_its_largest_group(tmp_path: Path) -> None:
    job = replace(SLEEPER, dp=8, communicator_ids=True)
    found = told_sizes(tmp_path, job, (0, 1))
    assert [each["world_size"] for each in found.results["ranks"]] == [8, 8]
    assert found.results["findings"][0]["code"] == "straggler.unprofiled"
    assert any("8 ranks at least" in each for each in found.results["warnings"])


def test_a_run_says_how_large_its_job_is_before_its_groups_do(tmp_path: Path) -> None:
    for tables in simulate(PAIRS)[0][:1]:
        path = trace(tables, tmp_path, arguments="kernel", operators=False, listed=False)
        path.write_text(path.read_text().replace('"world_size": 4', '"world_size": null'))
    (found,) = gather([tmp_path], world_size=64).ranks
    assert found.info.world_size == 64
    assert not any("ranks at least" in each for each in found.warnings)
    (found,) = gather([tmp_path]).ranks
    assert found.info.world_size == 2


def test_a_job_that_is_said_to_be_smaller_than_a_group_of_it_is_not(tmp_path: Path) -> None:
    job = replace(SLEEPER, dp=8, communicator_ids=True)
    found = told_sizes(tmp_path, job, range(4), world_size=4)
    assert {each["world_size"] for each in found.results["ranks"]} == {8}
    assert any("gives it 4 is wrong" in each for each in found.results["warnings"])


def test_of_a_list_and_a_size_that_contradict_each_other_the_list_is_taken(tmp_path: Path) -> None:
    for tables in simulate(SLEEPER)[0]:
        path = trace(tables, tmp_path, arguments="kernel", operators=False)
        path.write_text(path.read_text().replace('"Group size": 4', '"Group size": 2'))
    found = gather([tmp_path])
    assert {*found.ranks[0].collective_calls["communicator_size"].to_pylist()} == {4}
    (warning,) = (each for each in found.warnings if "another size" in each)
    assert warning.startswith("ranks 0–3: ")
    assert study(found.ranks).results["collectives"]["unmatched"] == 0


@pytest.mark.parametrize("size", [0, -3, "many", 10**12])
def test_a_size_that_is_none_costs_no_rank(tmp_path: Path, size: object) -> None:
    path = trace(simulate(SLEEPER)[0][0], tmp_path, arguments="kernel", operators=False)
    path.write_text(
        path.read_text().replace('"Group size": 4', f'"Group size": {json.dumps(size)}')
    )
    assert {*read_report(path).collective_calls["communicator_size"].to_pylist()} == {4}


def test_a_file_that_is_called_after_another_rank_is_named(tmp_path: Path) -> None:
    for tables in simulate(SLEEPER)[0]:
        path = trace(tables, tmp_path, arguments="kernel")
        path.rename(tmp_path / f"x_rank-{(tables.rank + 1) % 4}.pt.trace.json")
    found = gather([tmp_path], ranks={tmp_path / "x_rank-0.pt.trace.json": 3})
    assert [tables.rank for tables in found.ranks] == [0, 1, 2, 3]
    numbers = [
        re.findall(r"(\d+): .*called after rank (\d+), and read as (\d+)", each)
        for each in found.warnings
    ]
    assert [*chain(*numbers)] == [(str(r), str((r + 1) % 4), str(r)) for r in range(4)]


@pytest.mark.parametrize("name", ["node1_local_rank0", "localrank3", "local-rank.7"])
def test_a_rank_on_a_node_is_none_of_the_job(name: str, tmp_path: Path) -> None:
    trace(simulate(SLEEPER)[0][2], tmp_path).rename(tmp_path / f"{name}.json")
    assert not [each for each in gather([tmp_path]).warnings if "called after" in each]


def test_a_rank_beyond_its_job_is_named(tmp_path: Path) -> None:
    path = trace(simulate(SLEEPER)[0][2], tmp_path)
    path.write_text(path.read_text().replace('"world_size": 4', '"world_size": 2'))
    (warning,) = (each for each in gather([path]).warnings if "no rank 2" in each)
    assert warning.endswith("its job has ranks 0 to 1")


def test_numbers_and_lists_that_are_written_as_text_are_read(tmp_path: Path) -> None:
    path = trace(simulate(SCATTERED)[0][1], tmp_path, arguments="kernel")
    text = path.read_text().replace('"In msg nelems": 1024', '"In msg nelems": "1024"')
    config = '"pg_config": [{"pg_name": "0", "ranks": "[0, 1, 2, 3]"}], "backend"'
    text = text.replace('"Group size": 4', '"Group size": "4"').replace('"backend"', config)
    text = re.sub(r'"(ts|dur|rank)": (\d+)', r'"\1": "\2"', text)
    path.write_text(text)
    read_from_text = read_report(path)
    assert read_from_text.rank == 1
    calls = read_from_text.collective_calls
    assert set(calls["message_bytes"].to_pylist()) == {4096}
    assert set(calls["communicator_size"].to_pylist()) == {4}
    assert set(calls["communicator"].to_pylist()) == {"0[0-3]"}


def test_a_control_character_in_a_name_costs_no_trace(tmp_path: Path) -> None:
    path = trace(simulate(SCATTERED)[0][1], tmp_path)
    whole = read_report(path)
    raw = path.read_bytes().replace(b"cudaLaunchKernel", b"cuda\x01Launch\x1fKernel", 1)
    path.write_bytes(raw)
    assert read_report(path).activity.num_rows == whole.activity.num_rows


def test_kernels_launched_before_the_window_are_of_their_streams_group(tmp_path: Path) -> None:
    ranks = read(SCATTERED, tmp_path, cut=2, arguments="kernel")
    for tables in ranks:
        calls = tables.collective_calls
        assert calls["issue_start_ns"].null_count > 0
        assert set(calls["communicator"].to_pylist()) == {"0[0-3]"}
        assert operations(tables).keys() == {"AllReduce"}
        assert not tables.warnings


def test_kernels_launched_before_the_window_come_first_in_their_streams_order(
    tmp_path: Path,
) -> None:
    table = match(read(SLEEPER, tmp_path, cut=2, arguments="kernel"))
    rows = table.to_pandas()
    before = rows[rows["step"].isna()]
    assert len(before)
    for _, mine in rows.groupby("rank"):
        assert mine.sort_values("order")["start_ns"].is_monotonic_increasing
    whole = table.filter(pc.equal(table["state"].cast(pa.string()), "matched"))
    assert whole.num_rows > 0.8 * table.num_rows
    assert set(whole["communicator"].to_pylist()) == {"0[0-3]"}


def test_kernels_with_a_sequence_number_are_matched_by_it_alone(tmp_path: Path) -> None:
    # all calls are alike, and neither steps nor windows say which is which
    paths = []
    for tables in simulate(SCATTERED)[0]:
        calls = tables.collective_calls
        at = calls.schema.get_field_index("operation_id")
        numbered = calls.set_column(at, calls.schema.field(at), pa.array(range(1, len(calls) + 1)))
        begin = tables.steps["begin_ns"][tables.rank].as_py()
        own = replace(tables, collective_calls=numbered)
        paths.append(trace(own, tmp_path, begin_ns=begin, arguments="kernel", steps=False))
    ranks = [read_report(path) for path in paths]
    ids = {t.rank: t.collective_calls["operation_id"].to_pylist() for t in ranks}
    assert None in ids[3]
    rows = match(ranks).to_pandas()
    rows["id"] = [ids[rank][call] for rank, call in zip(rows["rank"], rows["call"], strict=True)]
    whole = rows[rows["state"] == "matched"]
    assert set(whole["confidence"]) == {1.0}
    assert set(whole.groupby("collective")["id"].nunique()) == {1}
    common = set.intersection(*(set(each) - {None} for each in ids.values()))
    assert common <= set(whole["id"])


def test_ends_that_scatter_by_hundreds_of_microseconds_are_those_of_one_group(
    tmp_path: Path,
) -> None:
    found = study(read(replace(SLEEPER, steps=10), tmp_path, cut=2))
    rows = found.collectives.filter(
        pc.equal(found.collectives["state"].cast(pa.string()), "matched")
    )
    assert set(rows["communicator"].to_pylist()) == {"inferred:0,1,2,3"}
    assert rows.num_rows > 0.8 * found.collectives.num_rows
    assert "rank 2 " in found.results["verdict"].lower()
    printed = [w for w in found.results["warnings"] if "end within" in w]
    assert len(printed) == 1
    assert max(found.clock.uncertainty_ns) < 5_000_000


def test_ranks_that_never_wait_for_one_another_are_no_group(tmp_path: Path) -> None:
    ranks = read(SLEEPER, tmp_path)
    other = simulate(replace(SLEEPER, seed=7, causes=(Cause("host", 2, 24_000_000),)))[0][2]
    stranger = read_report(trace(other, tmp_path))
    table = match([ranks[0], replace(stranger, info=replace(stranger.info, rank=1))])
    assert set(table["state"].cast(pa.string()).to_pylist()) == {"unmatched"}


@pytest.mark.parametrize("small", [False, True])
def test_all_ranks_of_a_job_that_only_end_together_roughly_are_one_group(
    tmp_path: Path, small: bool
) -> None:
    # no one sleeps: begins differ no more than ends do
    ranks = read(replace(SCATTERED, dp=8, small_calls=small), tmp_path, cut=1)
    table = match(ranks)
    assert set(table["communicator"].to_pylist()) == {"inferred:0,1,2,3,4,5,6,7"}
    most = max(tables.collective_calls.num_rows for tables in ranks)
    assert pc.count_distinct(table["collective"]).as_py() == most
    # of a part of the job no one can know
    some = set(match(ranks[:3])["communicator"].to_pylist())
    assert small or len(some) > 1


def test_two_groups_over_the_same_ranks_stay_two_where_ends_scatter(tmp_path: Path) -> None:
    ranks = read(replace(SCATTERED, dp=8, sharded=True, seed=1), tmp_path, cut=1)
    table = match(ranks)
    names = {"inferred:0,1,2,3,4,5,6,7", "inferred:0,1,2,3,4,5,6,7#2"}
    assert set(table["communicator"].to_pylist()) == names
    for name in names:
        rows = table.filter(pc.equal(table["communicator"], name))
        assert pc.count_distinct(rows["operation"].cast(pa.string())).as_py() == 1


@pytest.mark.parametrize(
    ("sleeps_ms", "named"),
    [((20, 28), True), ((20, 0), False), pytest.param((0, 0), False, marks=pytest.mark.long)],
)
def test_two_steps_tell_a_rank_that_sleeps_in_both_from_one_that_pauses_once(
    tmp_path: Path, sleeps_ms: tuple[int, int], named: bool
) -> None:
    # active=3 of torch.profiler's schedule: of the steps 6 to 8 the first shows its start
    causes = tuple(
        Cause("host", 2, ms * 1_000_000, steps=(step,))
        for step, ms in zip((7, 8), sleeps_ms, strict=True)
    )
    job = replace(SCATTERED, steps=3, layer_ns=8_000_000, causes=causes)
    findings = found_in(read(job, tmp_path))
    late = [each["rank"] for each in findings if each["code"].startswith("straggler.")]
    assert late == ([2] if named else [])
