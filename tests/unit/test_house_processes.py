from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

_STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=False),
    "os.system": lambda: os.system("true"),
    "os.fork": os.fork,
    "os.posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "os.execv": lambda: os.execv("/bin/true", ["true"]),
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=int).start(),
}


@pytest.fixture
def attempts(no_processes: list[str]) -> list[str]:
    return no_processes


@pytest.mark.parametrize("start", _STARTS.values(), ids=_STARTS.keys())
def test_a_unit_test_cannot_start_a_process(
    start: Callable[[], object], attempts: list[str]
) -> None:
    with pytest.raises(BaseException, match="a unit test may not start a process"):
        start()
    assert len(attempts) == 1
    attempts.clear()


def test_an_attempt_that_the_code_swallowed_is_still_known(attempts: list[str]) -> None:
    with contextlib.suppress(BaseException):
        os.system("true")
    assert attempts
    attempts.clear()


def test_a_machine_that_stalls_at_an_example_fails_no_test() -> None:
    drawn = []

    @given(st.integers())
    def stalls_once(number: int) -> None:
        drawn.append(number)
        time.sleep(0.3 if len(drawn) == 1 else 0.0)

    stalls_once()
    assert len(drawn) > 1
