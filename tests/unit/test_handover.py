"""What one process hands to another comes back as it was."""

from __future__ import annotations

import gc
import os
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from lab.clock import ManualClock

from clusterprof.ingest import engines, handover
from clusterprof.launch import handing_out


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


def test_a_task_that_reads_for_ever_loses_its_source_though_it_sends_updates(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing_out, "REAL", clock)
    monkeypatch.setattr(handing_out, "limit_s", lambda source: 60.0)
    ours, theirs = Pipe()
    sent = SimpleNamespace(test=lambda: (True, None))
    comm = cast("Any", SimpleNamespace(isend=lambda *_: sent))
    leader = handing_out.Leader(comm, theirs, ["first", "n1"])
    (task,) = leader._tasks.values()
    leader._waiting.append((7, cast("Any", "a report")))
    for after_s in (0.0, 60.0 + engines.SILENCE_S, 1.0):
        clock.sleep(after_s)
        task.updated = clock.now()
        assert not ours.poll()
        leader._look_after(1, task, beats=False)
    assert ours.poll()
    index, lost = ours.recv()
    assert (index, lost.host) == (7, "n1")
    assert lost.why.startswith("took longer than")
    assert task.lost
