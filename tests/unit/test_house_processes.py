from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

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
