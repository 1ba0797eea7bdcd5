"""Which kernel belongs to which NCCL call: small made-up captures, one rule each."""

from __future__ import annotations

from typing import Any

import numpy as np

from clusterprof.ingest.nsys import nccl_ranges
from clusterprof.ingest.nsys.events import NcclKernels, Ranges
from clusterprof.ingest.recording import Launched

THREAD = 7


class Payloads:
    """Stands for an export that has NCCL's payload as JSON, by NVTX row."""

    def __init__(self, by_row: dict[int, str]) -> None:
        self.by_row = by_row

    def has(self, table: str, *columns: str) -> bool:
        return columns == ("jsonText",)

    def text(self, table: str, column: str, reference: str) -> tuple[str, str]:
        return f"n.{column}", ""

    def rows(self, sql: str, *tables: str) -> list[tuple[Any, ...]]:
        return sorted(self.by_row.items())


def capture(
    events: list[tuple[str, int, int, int]],
    kernels: list[tuple[int, int, int, int]],
    thread: int = THREAD,
    kernel_name: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
) -> list[dict[str, Any]]:
    """Return the calls of a capture.

    `events` are NVTX ranges (name, begin, end, communicator; end -1: never closed), `kernels`
    (launch, begin, end, stream), all on one thread.
    """
    names = sorted({name for name, *_ in events} | {"ncclAllReduce"})
    start = np.array([event[1] for event in events], np.int64)
    ranges = Ranges(
        start=start,
        end=np.array([event[2] for event in events], np.int64),
        process=np.full(len(events), 1),
        thread=np.full(len(events), THREAD),
        domain=np.full(len(events), 3),
        row=np.arange(len(events)),
        name=np.array([names.index(event[0]) for event in events], np.int64),
        names=names,
        domains={(1, 3): "NCCL"},
    )
    payloads = {
        row: f'{{"NCCL communicator ID": {communicator}, "Message size [bytes]": 8}}'
        for row, (*_, communicator) in enumerate(events)
        if communicator
    }
    columns = np.array(kernels, np.int64).reshape(-1, 4).T
    known = np.full(len(kernels), True)
    launched = NcclKernels(
        start=columns[1],
        end=columns[2],
        stream=columns[3],
        launched=Launched(columns[0], columns[0] + 1, np.full(len(kernels), thread), known),
        name=np.zeros(len(kernels), np.int64),
        names=[kernel_name],
    )
    table, *_ = nccl_ranges.read(Payloads(payloads), ranges, launched)  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def spans(rows: list[dict[str, Any]]) -> list[tuple[int | None, int | None]]:
    return [(row["start_ns"], row["end_ns"]) for row in rows]


def test_a_call_has_the_kernel_launched_inside_its_range() -> None:
    rows = capture(
        [("ncclAllReduce", 10, 20, 1), ("ncclAllGather", 30, 40, 1)],
        [(35, 300, 400, 5), (15, 100, 200, 5)],
    )
    assert [row["operation"] for row in rows] == ["AllReduce", "AllGather"]
    assert spans(rows) == [(100, 200), (300, 400)]
    assert [row["communicator"] for row in rows] == ["0x0000000000000001"] * 2


def test_a_kernel_launched_on_another_thread_is_not_the_call_s() -> None:
    rows = capture([("ncclAllReduce", 10, 20, 1)], [(15, 100, 200, 5)], thread=THREAD + 1)
    assert [(row["source"], row["reason"]) for row in rows] == [
        ("nvtx_payload", nccl_ranges.NO_KERNEL),
        ("kernel_name", nccl_ranges.NO_CALL),
    ]
    assert spans(rows) == [(None, None), (100, 200)]


def test_calls_of_a_group_share_the_kernel_that_the_outermost_end_launched() -> None:
    rows = capture(
        [
            ("ncclGroupStart", 10, 11, 0),
            ("ncclSend", 12, 13, 1),
            ("ncclGroupStart", 14, 15, 0),
            ("ncclRecv", 16, 17, 1),
            ("ncclGroupEnd", 18, 19, 0),
            ("ncclGroupEnd", 20, 30, 0),
            ("ncclAllReduce", 40, 50, 1),
        ],
        [(25, 100, 200, 5), (45, 300, 400, 5)],
        kernel_name="ncclDevKernel_SendRecv",
    )
    assert [row["operation"] for row in rows] == ["Send", "Recv", "AllReduce"]
    assert spans(rows) == [(100, 200), (100, 200), (300, 400)]
    assert [row["group"] for row in rows] == [0, 0, None]


def test_calls_of_an_api_group_share_the_kernel_that_it_launched_at_its_end() -> None:
    # advanced tracing, by its documentation: no prefix, and a group around a single call as well
    rows = capture(
        [
            ("API Group", 10, 40, 1),
            ("Send", 11, 12, 1),
            ("Recv", 13, 14, 1),
            ("GroupLaunch", 20, 40, 1),
            ("API Group", 50, 80, 1),
            ("AllReduce", 51, 52, 1),
            ("GroupLaunch", 60, 80, 1),
        ],
        [(25, 100, 200, 5), (65, 300, 400, 5)],
    )
    assert [row["operation"] for row in rows] == ["Send", "Recv", "AllReduce"]
    assert spans(rows) == [(100, 200), (100, 200), (300, 400)]
    assert [row["group"] for row in rows] == [0, 0, None]


def test_a_capture_that_begins_inside_a_group_still_finds_its_kernel() -> None:
    rows = capture([("ncclSend", 12, 13, 1), ("ncclGroupEnd", 20, 30, 0)], [(25, 100, 200, 5)])
    assert spans(rows) == [(100, 200)]
    assert rows[0]["group"] == 0


def test_a_group_that_the_capture_cuts_off_says_why_it_has_no_kernel() -> None:
    rows = capture(
        [
            ("ncclGroupStart", 1, 2, 0),
            ("ncclSend", 3, 4, 1),
            ("ncclGroupEnd", 5, 6, 0),
            ("ncclGroupStart", 10, 11, 0),
            ("ncclSend", 12, 13, 1),
        ],
        [(5, 100, 200, 5)],
    )
    assert spans(rows) == [(100, 200), (None, None)]
    assert rows[1]["reason"] == nccl_ranges.NO_GROUP_END


def test_in_a_group_of_two_communicators_each_call_has_the_kernel_on_its_stream() -> None:
    rows = capture(
        [
            ("ncclAllReduce", 1, 2, 1),
            ("ncclAllReduce", 3, 4, 2),
            ("ncclGroupStart", 10, 11, 0),
            ("ncclAllReduce", 12, 13, 1),
            ("ncclAllReduce", 14, 15, 2),
            ("ncclGroupEnd", 20, 30, 0),
        ],
        [(1, 50, 60, 40), (3, 70, 80, 41), (22, 100, 200, 41), (24, 300, 400, 40)],
    )
    assert [row["stream"] for row in rows] == [40, 41, 40, 41]
    assert spans(rows)[2:] == [(300, 400), (100, 200)]
    assert [row["reason"] for row in rows] == [None] * 4


def test_kernels_of_a_group_that_cannot_be_told_apart_are_given_as_one_span() -> None:
    rows = capture(
        [
            ("ncclGroupStart", 10, 11, 0),
            ("ncclAllReduce", 12, 13, 1),
            ("ncclAllReduce", 14, 15, 2),
            ("ncclGroupEnd", 20, 30, 0),
        ],
        [(22, 100, 200, 41), (24, 300, 400, 40)],
    )
    assert spans(rows) == [(100, 400)] * 2
    assert [row["reason"] for row in rows] == [nccl_ranges.UNCLEAR] * 2


def test_several_kernels_of_one_communicator_are_one_span_without_a_doubt() -> None:
    rows = capture(
        [
            ("ncclGroupStart", 10, 11, 0),
            ("ncclAllReduce", 12, 13, 1),
            ("ncclReduceScatter", 14, 15, 1),
            ("ncclGroupEnd", 20, 30, 0),
        ],
        [(22, 100, 200, 40), (24, 300, 400, 40)],
    )
    assert spans(rows) == [(100, 400)] * 2
    assert [row["reason"] for row in rows] == [None, None]


def test_a_call_cut_off_by_the_end_of_the_capture_keeps_its_kernel() -> None:
    rows = capture([("ncclAllReduce", 10, -1, 1)], [(15, 100, 200, 5)])
    assert spans(rows) == [(100, 200)]
    assert rows[0]["issue_end_ns"] is None


def test_ranges_that_are_no_collectives_are_no_calls() -> None:
    rows = capture([("ncclCommInitRank", 1, -1, 0), ("ncclCommDestroy", 3, 4, 0)], [])
    assert rows == []


def test_kernels_alone_are_calls_named_after_themselves() -> None:
    names = {
        "ncclDevKernel_AllReduce_Sum_f32_TREE_LL128": "AllReduce",
        "ncclDevKernel_SendRecv": "SendRecv",
        "ncclKernel_ReduceScatter_RING_SIMPLE_Sum_half": "ReduceScatter",
        "ncclDevKernel_Generic_1": "Unknown",
        "ncclSymkDevKernel_AllGather_ST": "AllGather",
    }
    for name, operation in names.items():
        (row,) = capture([], [(15, 100, 200, 5)], kernel_name=name)
        assert (row["operation"], row["source"], row["communicator"]) == (
            operation,
            "kernel_name",
            None,
        )


def exchange(begin: int, sends: int, receives: int) -> list[tuple[str, int, int, int]]:
    """A group of NCCL's calls as PyTorch makes its all-to-all of them, without payloads."""
    names = ["ncclSend", "ncclRecv"] * min(sends, receives)
    names += ["ncclSend"] * (sends - receives) + ["ncclRecv"] * (receives - sends)
    inside = [(name, begin + 1 + k, begin + 2 + k, 0) for k, name in enumerate(names)]
    end = begin + 2 + len(names)
    start = ("ncclGroupStart", begin, begin + 1, 0)
    return [start, *inside, ("ncclGroupEnd", end, end + 10, 0)]


SENT = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)"


def test_a_group_of_sends_and_receives_without_payloads_is_one_all_to_all() -> None:
    rows = capture(
        [*exchange(100, 2, 2), *exchange(200, 3, 2)],
        # the first was launched before the window
        [(-1, 20, 90, 5), (110, 120, 190, 5), (210, 220, 290, 5)],
        kernel_name=SENT,
    )
    assert [row["operation"] for row in rows] == ["AllToAll"] * 3
    assert spans(rows) == [(20, 90), (120, 190), (220, 290)]


def test_a_send_and_a_receive_between_neighbours_are_two_calls() -> None:
    rows = capture([*exchange(100, 1, 1), *exchange(200, 3, 0)], [], kernel_name=SENT)
    assert [row["operation"] for row in rows] == ["Send", "Recv", "Send", "Send", "Send"]
