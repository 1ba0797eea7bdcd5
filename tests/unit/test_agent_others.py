"""Profilers that are not ours, without a GPU: what torch has of CUDA is a stand-in here."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from clusterprof.agent.contracts import identity
from clusterprof.agent.rank import profilers
from clusterprof.agent.rank.rank import Claim


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> tuple[SimpleNamespace, list[str]]:
    called: list[str] = []
    success = object()
    stand_in = SimpleNamespace(
        cudaError=SimpleNamespace(success=success),
        cudaProfilerStart=lambda: called.append("start") or success,
        cudaProfilerStop=lambda: called.append("stop") or success,
    )
    core = ModuleType("torch._C")
    core._cudart = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C", core)
    monkeypatch.setattr(profilers, "_cuda_range", None)
    return stand_in, called


def test_the_program_s_own_cuda_profiler_calls_do_not_move_our_window(
    cudart: tuple[SimpleNamespace, list[str]],
) -> None:
    program, called = cudart
    ours = profilers.cuda_range()
    assert ours is not None
    assert program.cudaProfilerStart() is program.cudaError.success
    assert called == []
    start, stop = ours
    start()
    assert program.cudaProfilerStop() is program.cudaError.success
    stop()
    assert called == ["start", "stop"]
    assert profilers.cuda_range() is ours


def test_without_a_torch_of_cuda_there_is_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "_cuda_range", None)
    monkeypatch.setitem(sys.modules, "torch._C", ModuleType("torch._C"))
    assert profilers.cuda_range() is None


def profiler_module() -> tuple[ModuleType, list[str]]:
    module, called = ModuleType("torch.autograd.profiler"), []
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        setattr(module, name, lambda *_, name=name, **__: called.append(name))
    return module, called


def test_what_the_program_profiles_with_is_known_from_its_first_call_to_its_last() -> None:
    kineto, (module, called) = profilers.Kineto(), profiler_module()
    kineto.watch(module)
    kineto.comes = lambda what: called.append("way for " + what)
    module._prepare_profiler("config", activity_filter=None)
    assert kineto.program == profilers.TORCH
    module._enable_profiler("config")
    module._disable_profiler()
    assert kineto.program is None
    module._enable_profiler("config")
    assert kineto.program == profilers.NVTX
    assert called == [
        "way for torch.profiler", "_prepare_profiler", "_enable_profiler", "_disable_profiler",
        "way for emit_nvtx", "_enable_profiler",
    ]  # fmt: skip


def test_ours_is_not_the_program_s() -> None:
    kineto, (module, called) = profilers.Kineto(), profiler_module()
    kineto.watch(module)
    kineto.comes = called.append
    with kineto.ours():
        module._prepare_profiler()
        module._enable_profiler()
    assert kineto.program is None
    assert called == ["_prepare_profiler", "_enable_profiler"]


@pytest.mark.parametrize(
    ("environ", "printed"),
    [
        ({}, None),
        ({"CUDA_INJECTION64_PATH": ""}, None),
        ({"NSYS_PROFILING_SESSION_ID": "7"}, "nsys"),
        ({"QUADD_INJECTION_CONFIG": "/tmp/injection_config_7"}, "nsys"),
        ({"CUDA_INJECTION64_PATH": "/opt/tool.so"}, "/opt/tool.so"),
    ],
)
def test_a_profiler_around_the_program_is_seen_in_its_environment(
    environ: dict[str, str], printed: str | None
) -> None:
    found = identity.other_profiler(environ)
    assert found is None if printed is None else printed in str(found)


def test_a_rank_is_claimed_once() -> None:
    folder = f"/nowhere/{os.getpid()}/ranks/00000"
    first, second = Claim(), Claim()
    assert first.take(folder) is None
    assert second.take(folder) == os.getpid()
    first.release()
    assert second.take(folder) is None
    assert first.take(folder) == os.getpid()
    second.release()
