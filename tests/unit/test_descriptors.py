"""Which descriptors a program has under nsys: those that were given, in their places."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from clusterprof.agent.contracts import descriptors


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """Descriptors of our own, not inherited by what is started."""
    numbers = [os.open(os.devnull, os.O_RDWR) for _ in range(4)]
    yield numbers
    for number in numbers:
        os.close(number)


def test_a_program_has_what_its_launcher_gave_it_and_nothing_of_nsys(opened: list[int]) -> None:
    of_nsys, *sent = opened
    os.set_inheritable(of_nsys, True)
    # the last one has come under a number that is given as well
    actions = descriptors.placed({0: sent[0], sent[2]: sent[1], 250: sent[2], 1: 1, 2: 2})
    dup2 = [action for action in actions if action[0] == os.POSIX_SPAWN_DUP2]
    closed = [action[1] for action in actions if action[0] == os.POSIX_SPAWN_CLOSE]
    assert [number for *_, number in dup2] == [0, 1, 2, sent[2], 250]
    assert all(source not in (0, 1, 2, sent[2], 250) for _, source, _ in dup2)
    assert of_nsys in closed
    assert not {0, 1, 2, sent[2], 250} & set(closed)
    for _, source, _ in dup2:
        if source not in sent:
            os.close(source)


def test_a_stream_that_was_closed_is_dev_null_under_nsys(opened: list[int]) -> None:
    actions = descriptors.placed({0: opened[0], 1: opened[1]})
    ((_, source, _),) = [action for action in actions if action[-1] == 2]
    assert os.fstat(source).st_rdev == os.stat(os.devnull).st_rdev
    os.close(source)


def test_a_descriptor_that_another_thread_closes_meanwhile_is_left_out(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = opened[0], max(opened) + 100
    os.set_inheritable(kept, True)
    monkeypatch.setattr(descriptors, "open_ones", lambda: [kept, gone])
    assert descriptors.inherited() == [kept]
