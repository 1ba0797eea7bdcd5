"""The garbage collector's pauses, as the agent notes them."""

from __future__ import annotations

import gc
import signal
import sys
import time
from types import FrameType

import numpy as np
import pytest
from lab.counting import calls_of

from clusterprof.agent.rank.steps import Counter
from clusterprof.agent.rank.window import LONG_NS, Pauses


def rubbish(count: int) -> None:
    """Objects that only the collector can free."""
    for _ in range(count):
        one: list[object] = []
        one.append(one)


def test_collections_inside_the_window_are_noted_with_the_step_logs_times() -> None:
    counter = Counter()
    pauses = Pauses(counter)
    counter.begin()
    before = time.time_ns()
    pauses.start()
    rubbish(100_000)
    gc.collect()
    pauses.stop()
    count = len(pauses.kept)
    rubbish(100_000)
    gc.collect()
    assert len(pauses.kept) == count
    head, *lines = pauses.text().splitlines()
    assert head == "begin_ns,end_ns,generation,collected"
    rows = np.array([line.split(",") for line in lines], np.int64)
    assert len(rows) == count
    assert (rows[:, 1] - rows[:, 0] >= LONG_NS).all()
    assert rows[0, 0] > before
    assert rows[-1, 1] < time.time_ns()
    assert rows[:, 3].sum() >= 90_000


def test_a_collection_that_is_not_noted_costs_a_few_calls_of_a_function() -> None:
    info = {"generation": 0, "collected": 3, "uncollectable": 0}
    note = Pauses(Counter()).note

    def collections() -> None:
        for _ in range(100):
            note("start", info)
            note("stop", info)

    # each time its own call, and at most two more
    assert calls_of(collections) <= 100 * 2 * 3 + 10


def test_a_program_that_empties_the_callbacks_is_left_alone() -> None:
    pauses = Pauses(Counter())
    kept = list(gc.callbacks)
    try:
        pauses.start()
        gc.callbacks.clear()
        pauses.stop()
        pauses.note("stop", {})
    finally:
        gc.callbacks[:] = kept
    assert pauses.kept == []


class Preempted(Exception):
    """Of the program's own."""


def test_what_a_handler_raises_during_a_collection_comes_out_at_the_end_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    counter = Counter()
    pauses = Pauses(counter)
    counter.begin()
    pauses.start()

    def preempt(*_: object) -> None:
        raise Preempted

    def trace(frame: FrameType, *_: object) -> None:
        if frame.f_code is Pauses.note.__code__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    before = sys.gettrace(), signal.signal(signal.SIGUSR1, preempt)
    try:
        sys.settrace(trace)
        gc.collect()
        sys.settrace(before[0])
        with pytest.raises(Preempted):
            counter.say()
    finally:
        pauses.stop()
        signal.signal(signal.SIGUSR1, before[1])
    counter.say()
    assert counter.count == 2
    assert unraisable == []
    assert sys.unraisablehook == unraisable.append
