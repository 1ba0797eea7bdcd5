"""Which reports become tables on their nodes: known before the launch, decided by each rank."""

from __future__ import annotations

import json

import pytest

from clusterprof.agent.contracts.identity import Identity
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.arguments import parse_ranks
from clusterprof.errors import UsageError
from clusterprof.launch import profiling, watch


def plan(when: str, keep: str, ranks: str, pp: int | None = None) -> Plan:
    wanted = profiling.reduction_for(when, keep, "nsys")
    return Plan("run", parse_ranks(ranks, pp=pp), (5, 10), "torch", reduction=wanted)


def reduces(made: Plan, size: int | None, environ: dict[str, str] | None = None) -> str | None:
    found = made.reduces(Identity(0, size, 0, "torchrun"), environ or {})
    return found.when if found else None


@pytest.mark.parametrize(
    ("when", "keep", "ranks", "size", "decided"),
    [
        ("auto", "gather", "all", 8, None),
        ("auto", "gather", "all", 9, "node"),
        ("auto", "gather", "all", None, None),
        ("auto", "gather", "0-8", 64, "node"),
        ("auto", "gather", "0-7", 64, None),
        ("auto", "none", "0", 1, "node"),
        ("now", "gather", "0", 1, "now"),
        ("none", "gather", "all", 64, None),
    ],
)
def test_reports_are_reduced_on_their_nodes_where_many_ranks_are_profiled(
    when: str, keep: str, ranks: str, size: int | None, decided: str | None
) -> None:
    assert reduces(plan(when, keep, ranks), size) == decided
    assert profiling.reduction_for(when, keep, "none") is None


def test_how_many_ranks_are_profiled_is_known_to_the_rank() -> None:
    stages = plan("auto", "gather", "stages", pp=16)
    assert [reduces(stages, size) for size in (64, 63)] == ["node", None]
    each_node = plan("auto", "gather", "one-per-node")
    of_torchrun = {"LOCAL_WORLD_SIZE": "8"}
    assert [reduces(each_node, size, of_torchrun) for size in (64, 65, 72)] == [
        None, "node", "node",
    ]  # fmt: skip
    of_srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "9"}
    assert reduces(each_node, 9, of_srun) == "node"
    assert reduces(each_node, 64) is None, "the launcher does not say"


def test_a_second_window_is_reduced_by_the_ranks_that_it_captures() -> None:
    first = plan("auto", "gather", "auto")
    assert reduces(first, 1024) is None
    assert watch.MOST <= profiling.MANY_RANKS  # so what --ranks auto orders is not reduced
    for count, decided in ((8, None), (9, "node")):
        ordered = Selection("", "ranks", tuple(range(count)))  # as `obey` does
        assert reduces(first._replace(selection=ordered), 1024) == decided
    dropped = plan("auto", "none", "auto")
    ordered = Selection("", "ranks", (0, 3))
    assert reduces(dropped._replace(selection=ordered), 1024) == "node"


@pytest.mark.parametrize(
    ("when", "keep", "profiler"), [("none", "node", "nsys"), ("none", "none", "nsys"),
                                   ("auto", "node", "torch")]
)  # fmt: skip
def test_reports_are_not_dropped_without_tables(when: str, keep: str, profiler: str) -> None:
    with pytest.raises(UsageError, match=f"--keep-reports {keep}"):
        profiling.reduction_for(when, keep, profiler)


def test_the_plan_has_it_for_the_ranks() -> None:
    wanted = profiling.reduction_for("now", "none", "nsys")
    assert wanted is not None
    plan = Plan("run", Selection("0", "ranks", (0,)), (5, 10), "torch", reduction=wanted)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    content = {
        **json.loads(json.dumps(plan.to_json())),
        "reduction": {"when": "soon", "keep_reports": "", "command": []},
    }
    with pytest.raises(ValueError, match="'reduction'"):
        Plan.from_json(content)
    assert "each report is removed then" in profiling.reduction_text(wanted, (0,))


def test_what_a_dry_run_says_of_it() -> None:
    usual = profiling.reduction_for("auto", "gather", "nsys")
    assert profiling.reduction_text(usual, tuple(range(8))) == ""
    assert profiling.reduction_text(usual, tuple(range(9))).startswith("on each node")
    assert profiling.reduction_text(usual, None).startswith("of more than 8 ranks, on each node")
    assert profiling.reduction_text(None, None) == ""
