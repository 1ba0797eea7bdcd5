"""NCCL's payloads in nsys's JSON: real NCCL 2.21, 2.25 and 2.28 under nsys 2022.4 to 2024.2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.errors import ReportError
from clusterprof.ingest.nsys import nccl_payloads
from clusterprof.ingest.nsys.events import Ranges
from clusterprof.ingest.nsys.nccl_payloads import Payloads, read_json
from clusterprof.ingest.nsys.schema import process_of, thread_of

FOLDER = Path(__file__).parents[1] / "data" / "nsys-json"
#: what the program that was recorded asked of NCCL: bytes, and root or peer
ASKED = {
    "ncclAllReduce": (4_000, None),
    "ncclAllGather": (4_000, None),
    "ncclReduceScatter": (12_000, None),
    "ncclBroadcast": (16_000, ("root", 3)),
    "ncclReduce": (20_000, ("root", 5)),
    "ncclAlltoAll": (24_000, None),
    "ncclGather": (24_400, ("root", 6)),
    "ncclScatter": (24_800, ("root", 7)),
    "ncclSend": (28_000, ("peer", 8)),
    "ncclRecv": (28_004, ("peer", 9)),
}
SINCE_2_28 = ("ncclAlltoAll", "ncclGather", "ncclScatter")
COMMUNICATOR = 0xA1B2C3D4E5F60718 - (1 << 64)


def recording(version: str) -> Path:
    (path,) = FOLDER.glob(f"nccl-{version}-*.json")
    return path


def ranges_of(path: Path) -> Ranges:
    """The ranges as the same report's SQLite has them, in no order, at rows of their own."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [each["NvtxEvent"] for each in events if each["Type"] == 59][::-1]
    tid = np.array([int(each["GlobalTid"]) for each in spans])
    return Ranges(
        start=np.array([int(each["Timestamp"]) for each in spans]),
        end=np.array([int(each["EndTimestamp"]) for each in spans]),
        process=process_of(tid),
        thread=thread_of(tid),
        domain=np.array([int(each["DomainId"]) for each in spans]),
        row=1000 - np.arange(len(spans)),
        name=np.zeros(len(spans), np.int64),
        names=["any"],
        domains={(int(process_of(tid[:1])[0]), 1): "NCCL"},
    )


def decoded(payloads: Payloads) -> list[tuple[int | None, int | None, object]]:
    """Communicator, bytes, and root or peer of each payload, in the order of the rows."""

    def at(name: str, place: int) -> int | None:
        there = bool(payloads.present[name][place])
        return int(payloads.values[name][place]) if there else None

    rows = []
    for place in range(payloads.row.size):
        last = {name: at(name, place) for name in ("root", "peer")}
        known = next(((name, value) for name, value in last.items() if value is not None), None)
        rows.append((at("communicator", place), at("bytes", place), known))
    return rows


@pytest.mark.parametrize(
    ("version", "communicator"), [("2.21", None), ("2.25", COMMUNICATOR), ("2.28", COMMUNICATOR)]
)
def test_every_payload_says_what_was_asked_of_nccl(version: str, communicator: int | None) -> None:
    path = recording(version)
    expected = [
        (communicator, *asked)
        for name, asked in ASKED.items()
        if version == "2.28" or name not in SINCE_2_28
    ]
    assert decoded(read_json(path, ranges_of(path))) == expected


def test_the_order_of_the_ranges_is_theirs_and_not_the_file_s() -> None:
    path = recording("2.28")
    payloads = read_json(path, ranges_of(path))
    assert (np.diff(payloads.row) > 0).all()
    assert payloads.row.size == len(ASKED)


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_events_that_a_piece_of_the_file_cuts_in_two_are_read(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recording("2.28")
    whole = decoded(read_json(path, ranges_of(path)))
    monkeypatch.setattr(nccl_payloads, "_PIECE", size)
    assert decoded(read_json(path, ranges_of(path))) == whole


@pytest.mark.parametrize("name", ["start", "process", "thread", "domain"])
def test_a_payload_of_another_thread_or_domain_is_no_one_s(name: str) -> None:
    path = recording("2.28")
    ranges = ranges_of(path)
    other = replace(ranges, **{name: getattr(ranges, name) + 1})
    assert read_json(path, other).row.size == 0


@pytest.mark.parametrize(
    "line",
    [
        b'{"Type":59,"NvtxEvent":{"Payload":{"BinaryData":[{"SchemaId":"1677',
        b'{"Type":59,"NvtxEvent":{"Payload":{"BinaryData":[]}}}',
        b'{"Type":59,"NvtxEvent":{"Payload":{"BinaryData":[{"SchemaId":"5","Data":"A"}]}}}',
        b'{"BinaryData": 7}',
    ],
)
def test_what_nsys_does_not_write_is_one_clear_error(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(line)
    with pytest.raises(ReportError, match=str(path)):
        read_json(path, ranges_of(recording("2.28")))
