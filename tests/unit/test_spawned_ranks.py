"""Ranks that a program starts by itself, where that program runs under our nsys."""

from __future__ import annotations

import os
from typing import Any

import pytest

from clusterprof.agent.contracts import identity
from clusterprof.agent.contracts.identity import PLAN, Identity
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import LaterWindow, Plan, Selection
from clusterprof.agent.contracts.states import State
from clusterprof.agent.rank import rank as ranks

ALL = Selection("all", "all")


class States(Outbox):
    """Keeps the states that are sent."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sent: list[tuple[State | None, str | None]] = []

    def state(self, state: State | None, reason: str | None = None, **facts: Any) -> None:
        self.sent.append((state, reason))

    def of_window(self, number: int) -> Outbox:
        return self


@pytest.mark.parametrize("around", ["NSYS_PROFILING_SESSION_ID", None])
def test_one_that_a_later_window_is_to_capture_says_what_captures_it(
    around: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_CONFIG", "CUDA_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    if around:
        monkeypatch.setenv(around, "1")
    monkeypatch.setenv(PLAN, "/run/plan.json;profiled=session:%2Ftmp%2Fnowhere")
    plan = Plan("run", Selection("auto", "auto"), (10, 15), "nsys", armed=ALL)
    rank = ranks.Unnumbered(plan, Identity(0, 1, 0, identity.ALONE), True, True)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # the user's own: nothing is lent
    monkeypatch.setattr(rank, "begin", lambda: None)
    # as in the child, whose rank is known by now
    rank.numbered(Identity(1, 2, None, identity.GROUP))
    assert (rank.plan.profiler, os.environ[PLAN]) == ("torch", "/run/plan.json")
    outbox, captured = States(), []
    rank.outbox = outbox
    monkeypatch.setattr(rank, "take_part", lambda *args: captured.append(args[2]))
    rank.obey(LaterWindow(2, (20, 25), ALL, "torch", auto=True))
    reasons = [reason for state, reason in outbox.sent if state is State.LOST]
    assert captured == [around is None]
    assert ["--profiler torch" in (reason or "") for reason in reasons] == (
        [True] if around else []
    )
