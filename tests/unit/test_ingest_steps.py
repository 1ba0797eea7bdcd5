"""Which ranges are steps, and the step log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clusterprof.errors import ReportError
from clusterprof.ingest.operations import exchange_of, kernel_operation, operation
from clusterprof.ingest.rank_steps import from_ranges, period, read_log, steps_table, usual_step
from clusterprof.ingest.recording import Calls


def steps_of(*names: str, threads: list[int] | None = None) -> list[int]:
    """The steps of ranges of 10 ns, one after another, with these names."""
    kinds = sorted(set(names))
    codes = np.array([kinds.index(name) for name in names], np.int64)
    begin = 1000 + 20 * np.arange(len(names))
    thread = np.array(threads or [1] * len(names))
    table = from_ranges(Calls("range", begin, begin + 10, thread, codes, kinds), "nvtx")
    steps: list[int] = table["step"].to_pylist()
    return steps


def test_a_damaged_line_is_named_by_its_number_behind_blank_ones_too(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step,begin_ns,end_ns\n\n\n0,1,2\n1,x,3\n2,3,4\n")
    with pytest.raises(ReportError, match="damaged at line 5"):
        read_log(tmp_path / "steps.csv")


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["step 6", "data", "step 7"], [6, 7]),
        (["Step#6", "Step#7"], [6, 7]),
        (["iteration 6", "iteration 7"], [6, 7]),
        (["iter=6", "iter=7"], [6, 7]),
        (["global_step 6", "global_step 7"], [6, 7]),
        (["train_step_6", "train_step_7"], [6, 7]),
        (["ProfilerStep#6", "ProfilerStep#7"], [6, 7]),
        (["clusterprof step 6", "step 900", "step 901", "clusterprof step 7"], [6, 7]),
        (["iteration 0", "step 6", "step 7", "step 8"], [6, 7, 8]),
        (["step 0", "step 1", "step 0", "step 1"], [0, 1, 2, 3]),
        (["timestep 6", "step", "step six", "steps 6", "backward"], []),
    ],
)
def test_steps_are_found_by_their_names(names: list[str], steps: list[int]) -> None:
    assert steps_of(*names) == steps


def test_ranges_of_another_thread_do_not_double_the_steps() -> None:
    assert steps_of("step 1", "step 2", "step 2", threads=[1, 1, 2]) == [1, 2]


def test_a_step_that_was_never_closed_is_no_step() -> None:
    names = ["step 1", "step 2"]
    begin = np.array([10, 30], np.int64)
    ranges = Calls("range", begin, np.array([20, -1]), begin * 0, np.array([0, 1]), names)
    table = from_ranges(ranges, "nvtx")
    assert table["step"].to_pylist() == [1]


def log(folder: Path, text: str) -> Path:
    path = folder / "steps.csv"
    path.write_text(text)
    return path


HEADER = "step,begin_ns,end_ns\n"


def test_a_last_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    steps = read_log(log(tmp_path, f"{HEADER}1,10,20\n2,20,30\n3,3"), 0, 100)
    assert steps["step"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "step,begin_ns,end_ns"),
        ("a,b\n1,2\n", "step,begin_ns,end_ns"),
        (f"{HEADER}1,10,20\nx,20,30\n2,30,40\n", "line 3"),
        (f"{HEADER}1,20,10\n2,30,40\n", "line 2"),
        ("\xff\xfe", "steps.csv"),
    ],
)
def test_a_bad_step_log_is_a_clear_error(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ReportError, match=where):
        read_log(path, 0, 100)


def test_a_step_log_that_is_not_there_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="does not exist"):
        read_log(tmp_path / "steps.csv", 0, 100)


def test_an_empty_window_has_no_steps(tmp_path: Path) -> None:
    assert read_log(log(tmp_path, f"{HEADER}1,10,20\n"), 50, 60).num_rows == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclAllReduce", "AllReduce"),
        ("ncclBcast", "Broadcast"),
        ("ncclAlltoAll", "AllToAll"),
        ("gloo:all_reduce", "AllReduce"),
        ("gloo:reduce_scatter", "ReduceScatter"),
        ("_allgather_base", "AllGather"),
        ("all_to_allv", "AllToAll"),
        ("nccl:send 0->2", "Send"),
        ("recv", "Recv"),
        ("ncclGroupStart", "Unknown"),
        ("", "Unknown"),
    ],
)
def test_an_operation_has_one_name(name: str, expected: str) -> None:
    assert operation(name) == expected


def test_a_kernel_s_operation_is_read_off_its_name() -> None:
    assert kernel_operation("ncclDevKernel_Broadcast_RING_LL") == "Broadcast"
    assert kernel_operation("void ncclKernel_AllGather_RING_LL_Sum_int8_t()") == "AllGather"
    assert kernel_operation("ncclDevKernel_Generic_4") == "Unknown"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "SendRecv"),
        ("ncclSymkDevKernel_AllGather_ST", "AllGather"),
        ("mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*) [clone .kd]", "Unknown"),
        ("void mscclpp::allreduceAllPairs<float>(float*)", "AllReduce"),
        ("void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16>()", "AllReduce"),
        ("void <unnamed>::multimem_all_gather_kernel<int>(char*)", "AllGather"),
        ("void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)", "AllReduce"),
        ("allreduce_fusion_kernel_oneshot_lamport", "AllReduce"),
        ("void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 4>()", "AllReduce"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int)", "ReduceScatter"),
        ("userbuffers_fp16_sum_inplace_gpu_mc_ag", "AllGather"),
        ("kuserbuffers_pushsend", "Unknown"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)", "AllToAll"),
        ("void deep_ep::internode_ll::combine<7168>(void*)", "Unknown"),
        ("nvshmemi_transfer_barrier_on_stream", "Barrier"),
    ],
)
def test_a_kernel_of_any_library_that_exchanges_data_is_known_by_its_name(
    name: str, expected: str
) -> None:
    assert exchange_of(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long*)",
        "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
        "void cutlass::Kernel<cutlass::epilogue::AllReduce>(Params)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
        "dispatch",
    ],
)
def test_a_kernel_that_computes_is_no_exchange(name: str) -> None:
    assert exchange_of(name) is None


def test_what_a_step_took_before_the_capture_is_read_off_the_step_log() -> None:
    ms = 1_000_000
    ends = np.cumsum(np.r_[np.full(3, 900), np.full(10, 20), np.full(10, 70)]) * ms
    begins = np.r_[0, ends[:-1]]
    log = steps_table(np.arange(len(ends)), begins, ends, "steplog")
    # the first three warm up; the capture begins with step 13
    assert usual_step(log, int(begins[13])) == 20 * ms
    # a pause now and then belongs to it
    assert usual_step(log, int(begins[15])) == (10 * 20 + 2 * 70) * ms // 12
    assert usual_step(log, int(begins[6])) is None


def test_batches_that_are_handed_over_four_at_a_time_and_a_checkpoint_keep_their_pace() -> None:
    ms = 1_000_000
    # a loader's four processes on an H200: three steps of 2 ms, then one of 124
    noise = np.random.default_rng(5).uniform(0.95, 1.05, 40)
    length = np.r_[5000, 3, 2, np.tile([2.0, 2.0, 2.0, 124.0], 10) * noise] * ms
    ends = np.cumsum(length.astype(np.int64))
    begins = np.r_[0, ends[:-1]]
    log = steps_table(np.arange(len(ends)), begins, ends, "steplog")
    for capture in (35, 37, 38, 43):
        usual = usual_step(log, int(ends[capture - 1]))
        assert usual == pytest.approx(32.5 * ms, rel=0.05)
    # and one of ten seconds among equals
    ends = np.cumsum(np.r_[np.full(20, 30), 10_000, np.full(9, 30)]) * ms
    begins = np.r_[0, ends[:-1]]
    log = steps_table(np.arange(len(ends)), begins, ends, "steplog")
    assert usual_step(log, int(ends[-1])) == 30 * ms


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_steps_have_no_pattern(count: int) -> None:
    assert period(np.full(count, 7, np.int64)) == 1
