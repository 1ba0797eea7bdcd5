"""What one process hands to another comes back as it was."""

from __future__ import annotations

import gc
import os
from multiprocessing import Pipe
from pathlib import Path

import pyarrow as pa
import pytest

from clusterprof.ingest import handover


@pytest.mark.parametrize("rows", [0, 3, 3_000_000], ids=["none", "few", "as a view"])
def test_what_is_unpacked_is_what_was_packed(rows: int) -> None:
    table = pa.table({"a": pa.array(range(rows), pa.int32()), "b": pa.array([None] * rows)})
    made = handover.unpack(handover.pack([table, "text", None]))
    assert made[0].equals(table)
    assert made[1:] == ["text", None]


@pytest.mark.parametrize("name", ["memfd_create", "nothing"])
def test_a_file_reaches_who_is_at_the_other_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, name, raising=False)
    ours, theirs = Pipe()
    gc.collect()  # what earlier tests have left open is not closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    handover.send(ours, handover.pack(("a", 1)))
    assert handover.unpack(handover.receive(theirs)) == ("a", 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_small_tables_do_not_hold_the_memory_of_large_ones() -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:clusterprof")

    before = mapped()
    large, small = handover.unpack(handover.pack([pa.array(range(3_000_000)), pa.array(range(3))]))
    assert mapped() == before + 1
    del large
    assert mapped() == before
    assert small.to_pylist() == [0, 1, 2]
