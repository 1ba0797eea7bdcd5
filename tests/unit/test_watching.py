"""When a rank saves its recorder for the watch: at the same times on all ranks, and cheaply."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from lab.clock import ManualClock

from clusterprof.agent.rank.recorder import Watching

S = 1_000_000_000


class Rank:
    """A rank that takes steps of `step_s`; `calls` are the counts at which the watch was called."""

    def __init__(self, step_s: float, every_s: int = 60) -> None:
        self.clock = ManualClock()
        self.recorder = SimpleNamespace(is_open=False)
        outbox = SimpleNamespace(clock=self.clock)
        self.watching = Watching(
            every_s, cast("Any", [self.recorder]), cast("Any", outbox), cast("Any", None)
        )
        self.watching.save = self.save  # type: ignore[method-assign]
        self.step_s, self.count, self.due = step_s, 0, 0
        self.calls: list[int] = []
        self.saved_s: list[float] = []

    def save(self) -> None:
        self.saved_s.append(self.clock.wall_ns() / S)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.clock.sleep(self.step_s)
            self.count += 1
            if 0 <= self.due <= self.count:
                self.calls.append(self.count)
                self.due = self.watching.at(self.count)


def test_it_is_saved_at_the_first_step_after_each_multiple_of_the_time() -> None:
    rank = Rank(0.5)
    rank.train(1000)
    assert len(rank.saved_s) == 8
    assert all(0 <= second % 60 <= 0.5 for second in rank.saved_s), rank.saved_s


def test_between_two_times_the_clock_is_read_in_few_of_the_steps() -> None:
    rank = Rank(0.1, 600)
    rank.train(12_000)
    assert len(rank.saved_s) == 2
    assert len(rank.calls) < 100


def test_steps_that_become_long_do_not_make_it_late() -> None:
    rank = Rank(0.01, 60)
    rank.train(1_000)
    rank.step_s = 1.0
    rank.train(300)
    assert all(second % 60 <= 31 for second in rank.saved_s), rank.saved_s
    assert all(second % 60 <= 1 for second in rank.saved_s[1:]), rank.saved_s


def test_a_window_that_is_open_has_a_dump_of_its_own() -> None:
    rank = Rank(0.5)
    rank.recorder.is_open = True
    rank.train(300)
    assert rank.saved_s == []
    rank.recorder.is_open = False
    rank.train(300)
    assert rank.saved_s


def test_a_recorder_that_cannot_be_had_is_tried_again_at_the_next_time() -> None:
    rank = Rank(0.5)
    rank.watching.save = lambda: (_ for _ in ()).throw(OSError)  # type: ignore[method-assign]
    rank.train(200)
    rank.watching.save = rank.save  # type: ignore[method-assign]
    rank.train(200)
    assert len(rank.saved_s) == 2


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_is_set_does_not_end_it(jump_s: int) -> None:
    rank = Rank(0.5)
    rank.train(200)
    rank.clock.wall_ahead_ns += jump_s * S
    rank.train(2_000)
    assert len(rank.saved_s) > 10
