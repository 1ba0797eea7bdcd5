"""What `tests/unit` and `tests/science` share: they start no process, and draw the same examples.

A test that tries to start a process fails, and belongs in `tests/integration`.
"""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

# The same examples in each run, and each may take as long as the machine stalls for.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

_EVENTS = {
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
}
_attempts: list[str] = []
_forbidden = False


class ProcessInUnitTest(BaseException):
    """Not an Exception, so that no `except Exception` of the code under test hides it."""


def _refuse(what: str) -> NoReturn:
    _attempts.append(what)
    raise ProcessInUnitTest(f"a unit test may not start a process: {what}")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    # An audit hook sees every way of starting a process, however it was imported.
    if _forbidden and event in _EVENTS:
        _refuse(f"{event} {arguments[:2]}")


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuses every process start, and fails the test even when the refusal was swallowed."""
    global _forbidden
    # multiprocessing's spawn goes past the audited calls.
    monkeypatch.setattr(
        multiprocessing.process.BaseProcess,
        "start",
        lambda process: _refuse(f"multiprocessing {process.name}"),
    )
    _attempts.clear()
    _forbidden = True
    try:
        yield _attempts
    finally:
        _forbidden = False
    assert not _attempts, f"this unit test started or tried to start: {_attempts}"
