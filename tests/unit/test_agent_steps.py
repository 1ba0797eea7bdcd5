"""What counts as a step, and what the step log says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.timing import REAL
from clusterprof.agent.rank.steps import GIVEN_UP, MOST_PENDING, Counter

SECOND = 1_000_000_000
HOUR = 3600 * SECOND


class Optimizer:
    """Stands for a torch optimizer: only its identity matters."""


def counting(outbox: Outbox | None = None) -> Counter:
    counter = Counter(outbox.clock if outbox else REAL)
    counter.begin(outbox)
    if outbox is not None:
        outbox.say("anchor", wall_ns=counter.wall(0), since=0)
    return counter


def test_each_step_of_one_optimizer_is_a_step() -> None:
    counter, only = counting(), Optimizer()
    for _ in range(5):
        counter.optimizer_stepped(only, (), {})
    assert counter.count == 5


def test_two_optimizers_in_one_iteration_are_one_step() -> None:
    counter, discriminator, generator = counting(), Optimizer(), Optimizer()
    for _ in range(40):
        counter.optimizer_stepped(discriminator)
        counter.optimizer_stepped(generator)
    assert counter.count == 40


def test_an_optimizer_per_parameter_does_not_multiply_the_steps() -> None:
    counter, optimizers = counting(), [Optimizer() for _ in range(300)]
    for _ in range(7):
        for optimizer in optimizers:
            counter.optimizer_stepped(optimizer)
    assert counter.count == 7


def test_critics_that_step_several_times_do_not_take_over() -> None:
    counter, generator, critic = counting(), Optimizer(), Optimizer()
    for _ in range(20):
        counter.optimizer_stepped(generator)
        for _ in range(5):
            counter.optimizer_stepped(critic)
    assert counter.count == 20


def test_an_optimizer_that_is_gone_is_followed_by_the_next() -> None:
    counter, warm_up = counting(), Optimizer()
    for _ in range(3):
        counter.optimizer_stepped(warm_up)
    del warm_up
    main = Optimizer()
    for _ in range(4):
        counter.optimizer_stepped(main)
    assert counter.count == 7


def test_an_optimizer_that_is_kept_but_no_longer_used_is_given_up() -> None:
    counter, warm_up, main = counting(), Optimizer(), Optimizer()
    for _ in range(3):
        counter.optimizer_stepped(warm_up)
    for _ in range(GIVEN_UP + 10):
        counter.optimizer_stepped(main)
    assert counter.count >= 3 + 10


def test_a_program_that_counts_by_itself_is_not_counted_twice() -> None:
    counter, optimizer = counting(), Optimizer()
    for _ in range(6):
        counter.optimizer_stepped(optimizer)
        counter.say()
    # The first optimizer step came before the program spoke up for the first time.
    assert counter.count == 7


def test_nothing_is_counted_once_it_has_ended() -> None:
    counter, optimizer = counting(), Optimizer()
    counter.optimizer_stepped(optimizer)
    counter.end()
    counter.optimizer_stepped(optimizer)
    assert counter.count == 1


def test_the_window_s_ends_are_called_at_their_counts() -> None:
    counter, optimizer, called = counting(), Optimizer(), []

    def at(count: int) -> int:
        called.append(count)
        return 5 if count == 2 else -1

    def later(count: int) -> int:
        called.append(-count)
        return -1

    counter.attend(2, at)
    counter.attend(5, later)
    for _ in range(9):
        counter.optimizer_stepped(optimizer)
    assert called == [2, 5, -5]


Log = Callable[[], list[tuple[int, ...]]]


@pytest.fixture
def log(rank_folder: Path, written: Callable[[], None]) -> Log:
    """Reads the rank's step log when all of it is there."""

    def read() -> list[tuple[int, ...]]:
        written()
        header, *lines = (rank_folder / "steps.csv").read_text().splitlines()
        assert header == "step,begin_ns,end_ns"
        return [tuple(map(int, line.split(","))) for line in lines]

    return read


def test_the_log_has_every_step_once_with_begin_before_end(outbox: Outbox, log: Log) -> None:
    counter, optimizer = counting(outbox), Optimizer()
    for step in range(10):
        counter.optimizer_stepped(optimizer)
        if step in (3, 4):
            counter.flush()
            log()
    counter.flush()
    rows = log()
    assert [row[0] for row in rows] == list(range(10))
    assert all(begin <= end for _, begin, end in rows)
    assert all(rows[i][2] == rows[i + 1][1] for i in range(9))


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_wall_clock_that_is_set_makes_no_step_longer_nor_negative(
    clock: ManualClock, outbox: Outbox, log: Log, by: int
) -> None:
    counter, optimizer, begin = counting(outbox), Optimizer(), clock.wall_ns()
    for step in range(6):
        if step == 3:
            clock.wall_ahead_ns += by
        clock.sleep(1)
        counter.optimizer_stepped(optimizer)
    counter.flush()
    rows = log()
    assert len(rows) == 6
    assert [row[1] - begin for row in rows] == [step * SECOND for step in range(6)]
    assert [row[2] - begin for row in rows] == [(step + 1) * SECOND for step in range(6)]


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_the_log_is_of_the_wall_clock_at_the_window_s_opening_as_the_report_is(
    clock: ManualClock, outbox: Outbox, log: Log, by: int
) -> None:
    counter, optimizer = counting(outbox), Optimizer()
    for _ in range(3):
        counter.optimizer_stepped(optimizer)
    counter.flush()
    assert len(log()) == 3
    clock.wall_ahead_ns += by
    counter.attend(5, lambda count: counter.anchor() or -1)
    for _ in range(4):
        counter.optimizer_stepped(optimizer)
    opened = clock.wall_ns()
    clock.wall_ahead_ns -= by  # and back, inside the window
    counter.optimizer_stepped(optimizer)
    counter.flush()
    rows = log()
    assert [row[0] for row in rows] == list(range(8))
    assert abs(rows[5][1] - opened) < HOUR / 60
    times = [time for row in rows for time in row[1:]]
    assert times == sorted(times)
    assert times[-1] - times[0] < HOUR / 60


def test_what_the_profiler_stalls_lies_between_two_steps(
    clock: ManualClock, outbox: Outbox, log: Log
) -> None:
    counter, optimizer = counting(outbox), Optimizer()
    stalled: list[int] = []

    def stall(count: int) -> int:
        for _ in range(2):
            stalled.append(counter.wall(clock.now_ns()))
            clock.sleep(0.05)
        return -1

    counter.attend(1, stall)
    counter.optimizer_stepped(optimizer)
    counter.optimizer_stepped(optimizer)
    counter.flush()
    first, second = log()
    assert first[2] <= stalled[0]
    assert stalled[1] <= second[1]


@pytest.mark.parametrize("turn", [2, 5, 10, 20])
def test_two_optimizers_that_take_turns_both_count(turn: int) -> None:
    counter, first, second = counting(), Optimizer(), Optimizer()
    for begin in range(0, 80, 2 * turn):
        for optimizer in (first, second):
            for _ in range(min(turn, 80 - begin)):
                counter.optimizer_stepped(optimizer)
    assert counter.count == 80


def test_a_pair_of_optimizers_that_takes_turns_with_a_pair_counts_once_a_step() -> None:
    counter, pairs = counting(), [(Optimizer(), Optimizer()), (Optimizer(), Optimizer())]
    for turn in range(8):
        for _ in range(10):
            for optimizer in pairs[turn % 2]:
                counter.optimizer_stepped(optimizer)
    # The first turn of the second pair could as well be more of the first one's step.
    assert counter.count == 70


def test_a_step_that_is_counted_late_has_its_own_time(
    clock: ManualClock, outbox: Outbox, log: Log
) -> None:
    counter, first, second = counting(outbox), Optimizer(), Optimizer()
    for optimizer in (first, first, second):
        counter.optimizer_stepped(optimizer)
    before = clock.wall_ns()
    clock.sleep(0.02)
    counter.optimizer_stepped(second)
    counter.flush()
    rows = log()
    assert [row[0] for row in rows] == [0, 1, 2, 3]
    assert rows[2][2] == before == rows[3][2] - 20_000_000


def test_a_discriminator_trained_alone_first_does_not_multiply_the_steps() -> None:
    counter, generator, critic = counting(), Optimizer(), Optimizer()
    for _ in range(30):
        counter.optimizer_stepped(critic)
    for _ in range(20):
        counter.optimizer_stepped(generator)
        counter.optimizer_stepped(critic)
    assert counter.count == 50


def test_inner_optimizers_made_anew_in_each_step_do_not_count() -> None:
    counter, outer = counting(), Optimizer()
    for _ in range(20):
        counter.optimizer_stepped(outer)
        inner = Optimizer()
        for _ in range(5):
            counter.optimizer_stepped(inner)
        del inner
    assert counter.count == 20


def step_elsewhere(counter: Counter, optimizer: Optimizer, steps: int) -> None:
    thread = threading.Thread(
        target=lambda: [counter.optimizer_stepped(optimizer) for _ in range(steps)]
    )
    thread.start()
    thread.join()


def test_the_steps_of_one_thread_are_counted_beside_another() -> None:
    counter, optimizer, other = counting(), Optimizer(), Optimizer()
    for _ in range(10):
        counter.optimizer_stepped(optimizer)
        step_elsewhere(counter, other, 3)
    assert counter.count == 10


def test_successive_threads_are_counted_one_after_the_other() -> None:
    counter, optimizer = counting(), Optimizer()
    for _ in range(5):
        step_elsewhere(counter, optimizer, 4)
    assert counter.count == 20


def test_a_thread_that_trains_on_while_the_counted_one_does_not_is_followed() -> None:
    counter, optimizer = counting(), Optimizer()
    counter.optimizer_stepped(optimizer)
    step_elsewhere(counter, optimizer, GIVEN_UP + 10)
    assert counter.count >= 10


def test_what_is_due_inside_a_backward_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    core, autograd = ModuleType("torch._C"), ModuleType("torch.autograd")
    monkeypatch.setitem(sys.modules, "torch._C", core)
    monkeypatch.setitem(sys.modules, "torch.autograd", autograd)
    counter, optimizer, opened = counting(), Optimizer(), []
    counter.attend(2, lambda count: opened.append((count, core._current_graph_task_id())) or -1)

    def backward() -> None:
        core._current_graph_task_id = lambda: 0
        counter.optimizer_stepped(optimizer)
        core._current_graph_task_id = lambda: -1

    core._current_graph_task_id = lambda: -1
    autograd.backward = backward
    for _ in range(3):
        autograd.backward()
    assert opened[0] == (2, -1)
    assert counter.count == 3


def test_steps_of_no_time_at_all_are_handed_over_before_they_take_memory(
    clock: ManualClock,
) -> None:
    counter, most = Counter(clock), 0
    counter.begin()
    for _ in range(3 * MOST_PENDING):
        counter.say()
        most = max(most, len(counter._pending))
    assert counter.count == 3 * MOST_PENDING
    assert most <= MOST_PENDING


def test_what_the_writer_has_is_read_more_often_while_an_order_is_expected(
    clock: ManualClock, outbox: Outbox
) -> None:
    counter, read_at = counting(outbox), []
    counter.after_flush = lambda: read_at.append(clock.now())

    def steps(seconds: float) -> int:
        """How often the writer was read in so long, in steps of 10 ms."""
        read_at.clear()
        for _ in range(round(seconds * 100)):
            clock.sleep(0.01)
            counter.boundary()
        return len(read_at)

    assert steps(4) == 2
    counter.expect(3)
    assert 25 <= steps(3) <= 31
    counter.expect(0)
    assert steps(4) == 2
    counter.expect(1)
    steps(1)
    assert steps(4) <= 3, "nothing came"
