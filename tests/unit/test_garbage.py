"""The garbage collector's pauses, as the agent notes them."""

from __future__ import annotations

import gc
import time

import numpy as np
from lab.counting import calls_of

from clusterprof.agent.rank.garbage_collector import LONG_NS, Pauses
from clusterprof.agent.rank.steps import Counter


def rubbish(count: int) -> None:
    """Objects that only the collector can free."""
    for _ in range(count):
        one: list[object] = []
        one.append(one)


def test_collections_inside_the_window_are_noted_with_the_step_logs_times() -> None:
    counter, pauses = Counter(), Pauses()
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
    head, *lines = pauses.text(counter).splitlines()
    assert head == "begin_ns,end_ns,generation,collected"
    rows = np.array([line.split(",") for line in lines], np.int64)
    assert len(rows) == count
    assert (rows[:, 1] - rows[:, 0] >= LONG_NS).all()
    assert rows[0, 0] > before
    assert rows[-1, 1] < time.time_ns()
    assert rows[:, 3].sum() >= 90_000


def test_a_collection_that_is_not_noted_costs_a_few_calls_of_a_function() -> None:
    info = {"generation": 0, "collected": 3, "uncollectable": 0}
    note = Pauses().note

    def collections() -> None:
        for _ in range(100):
            note("start", info)
            note("stop", info)

    # each time its own call, and at most two more
    assert calls_of(collections) <= 100 * 2 * 3 + 10


def test_a_program_that_empties_the_callbacks_is_left_alone() -> None:
    pauses = Pauses()
    kept = list(gc.callbacks)
    try:
        pauses.start()
        gc.callbacks.clear()
        pauses.stop()
        pauses.note("stop", {})
    finally:
        gc.callbacks[:] = kept
    assert pauses.kept == []
