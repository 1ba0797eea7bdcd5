"""A program with a torch.profiler of its own, under nsys on a GPU.

Measured on two H200s (nsys 2025.3.1, torch 2.11): its trace has no kernels then, whether our
window is open or not, and both end well; under --profiler torch it has all 210 of them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from clusterprof.agent.contracts import descriptors, states
from clusterprof.agent.contracts.identity import PLAN
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.agent.rank import profilers, window
from clusterprof.agent.rank.steps import Counter


def train(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, *, own: bool) -> list[str]:
    """Eight steps with a window 2:6, the program's own profiler from step 3 on; what nsys did."""
    asked: list[str] = []
    kineto = profilers.Kineto()
    autograd = ModuleType("torch.autograd.profiler")
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        setattr(autograd, name, lambda: None)
    kineto.watch(autograd)
    monkeypatch.setattr(profilers, "kineto", kineto)
    monkeypatch.setattr(profilers, "uses_cuda", lambda: True)
    monkeypatch.setattr(profilers, "drain", lambda: None)

    def ask(address: str, request: str, seconds: float) -> socket.socket:
        asked.append(request)
        return socket.socket()

    monkeypatch.setattr(descriptors, "asked", ask)
    monkeypatch.setattr(profilers, "_answer", lambda *of: "ok")
    monkeypatch.setenv(PLAN, "/plan.json;profiled=session:%2Fnowhere")
    counter = Counter()
    made = window.Window(Plan("", Selection("all", "all"), (2, 6), "nsys"), outbox, counter)
    counter.attend(made.first, made.at)
    counter.begin()
    for step in range(8):
        if own and step == 3:
            autograd._prepare_profiler()
            autograd._enable_profiler()
        counter.boundary()
    made.finish()
    return [word for word in asked if word != "size"]


def test_nsys_keeps_its_window_and_the_result_says_what_the_program_s_own_trace_lacks(
    outbox: Outbox, rank_folder: Path, written: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(outbox, monkeypatch, own=True) == ["start 1", "stop"]
    written()
    found = states.read(str(rank_folder))
    assert found["step_end"] == 6
    assert all(fact in found["reason"] for fact in ("torch.profiler", "--profiler torch"))


def test_without_a_profiler_of_its_own_nothing_is_said(
    outbox: Outbox, rank_folder: Path, written: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(outbox, monkeypatch, own=False) == ["start 1", "stop"]
    written()
    assert "reason" not in states.read(str(rank_folder))
