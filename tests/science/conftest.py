"""Tests that read recordings, simulate jobs and study them; like unit tests they start no process.

A study is made once (`studies`) for all tests that run in one process: those of a file, and in
whatever file they are those that take the same `recording` or `job_kind` as their parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import studies
from lab.collected import run
from lab.no_processes import no_processes
from studies import Simulated

from clusterprof.study import Study

__all__ = ["no_processes", "run"]


@pytest.fixture(scope="session")
def studied() -> Callable[[str], Study]:
    """`studied(name)`: the study of a recording, made once, its arrays read-only."""
    return studies.studied


@pytest.fixture(scope="session")
def simulated() -> Callable[..., Simulated]:
    """`simulated(kind, seed)`: a job of `simulate.cases`, its profiled ranks, and their study."""
    return studies.simulated
