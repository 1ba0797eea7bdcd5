"""plan.json: one value on the launching host and in every rank, refused where it is odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ForwardRef

import pytest

from clusterprof.agent.contracts import plan as plans
from clusterprof.agent.contracts.identity import Identity
from clusterprof.agent.contracts.plan import (
    LaterWindow,
    Meeting,
    NsysPlan,
    Plan,
    Reduction,
    Selection,
)

NSYS = NsysPlan(
    "/opt/nsys", "2025.3.2", None, {"gpu": "cuda", "cpu": "osrt"}, ["profile"], ["launch"],
    ["start"], ["stop"], 60,
)  # fmt: skip
PLAN = Plan(
    "/runs/a b", Selection("0,8", "ranks", (0, 8)), (3, 6), "nsys", "srun", "loop:step",
    nsys=NSYS, hang_after=3, meeting=Meeting("00ff", ("h1", "h2")),
)  # fmt: skip


def written(folder: Path, **changed: Any) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps({**PLAN.to_json(), **changed}))
    return str(path)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert plans.read(written(tmp_path)) == PLAN
    alone = Plan("/runs/x", Selection("all", "all"), (0, 1), "torch")
    assert Plan.from_json(json.loads(json.dumps(alone.to_json()))) == alone


def test_the_run_directory_is_where_it_is_here(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    found = plans.read(written(tmp_path))
    assert found.run == str(tmp_path)
    assert found.of_attempt({"TORCHELASTIC_RESTART_COUNT": "1"}).run == f"{tmp_path}/attempt-2"


def test_what_a_newer_one_adds_to_this_version_is_left_alone(tmp_path: Path) -> None:
    assert plans.read(written(tmp_path, colour="blue")) == PLAN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", 2), ("schema_version", "1"), ("run", None), ("window", [6, 3]),
        ("window", [3]), ("selection", {"kind": "some"}), ("selection", {"kind": []}),
        ("selection", {"kind": "ranks", "ranks": [-1]}), ("profiler", "perf"), ("nsys", None),
        ("nsys", {"path": "/bin/sh"}), ("nsys", {**NSYS._asdict(), "start_s": 601}),
        ("hang_after", -1), ("emit_nvtx", "yes"), ("meeting", []),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_followed_is_refused_by_its_name(
    tmp_path: Path, key: str, value: Any
) -> None:
    path = written(tmp_path, **{key: value})
    with pytest.raises(ValueError) as refused:
        plans.read(path)
    named = f"version {value}" if value == 2 else "no plan" if key == "schema_version" else key
    assert path in str(refused.value)
    assert named in str(refused.value)


@pytest.mark.parametrize("content", [[], None, "plan", {}, {"run": "/runs/x"}])
def test_what_is_no_plan_is_refused(content: Any) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(content)


@pytest.mark.parametrize(
    "kind", [Identity, LaterWindow, Meeting, NsysPlan, Plan, Reduction, Selection]
)
def test_a_rank_s_start_compiles_no_annotation(kind: type) -> None:
    assert not any(isinstance(each, ForwardRef) for each in kind.__annotations__.values())
