"""`bench/whatif.py`, the published method, against a slow simulator that follows its words."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench" / "whatif.py"
STEPS, REPLICAS, STAGES, BATCHES = 3, 2, 3, 4
COMPUTE = ("forward-compute", "backward-compute", "gc", "optimizer")


class Op(NamedTuple):
    """One operation: `number` is its place among those of its kind in its rank and step."""

    step: int
    dp: int
    stage: int
    kind: str
    number: int = 0


def order(stage: int) -> list[tuple[str, int]]:
    """One stage's forwards and backwards: one forward, one backward."""
    ahead = min(STAGES - 1 - stage, BATCHES)
    out = [("forward", k) for k in range(ahead)]
    for k in range(ahead, BATCHES):
        out += [("forward", k), ("backward", k - ahead)]
    return out + [("backward", k) for k in range(BATCHES - ahead, BATCHES)]


def operations() -> list[Op]:
    """All operations; of one rank and step in the order of its host."""
    out = []
    for step, dp, stage in np.ndindex(STEPS, REPLICAS, STAGES):
        mine = functools.partial(Op, step, dp, stage)
        out.append(mine("params-all-gather"))
        for way, k in order(stage):
            first, last = (0, STAGES - 1) if way == "forward" else (STAGES - 1, 0)
            out += [mine(f"{way}-recv", k)] if stage != first else []
            out.append(mine(f"{way}-compute", k))
            out += [mine(f"{way}-send", k)] if stage != last else []
        out += [mine("gc"), mine("grads-reduce-scatter"), mine("layernorm-grads-all-reduce")]
        out += [mine("embedding-grads-all-reduce")] if stage in (0, STAGES - 1) else []
        out += [mine("optimizer-clip-main-grad"), mine("optimizer")]
    return out


OPS = operations()


def group(op: Op) -> tuple[object, ...]:
    """What is alike among the operations that happen together on several ranks."""
    if op.kind.endswith(("-send", "-recv")):
        way, _, end = op.kind.partition("-")
        onward = 1 if way == "forward" else -1
        to = op.stage + (onward if end == "send" else 0)
        return (op.step, op.dp, way, to, op.number)
    if op.kind in ("params-all-gather", "grads-reduce-scatter", "layernorm-grads-all-reduce"):
        return (op.step, op.kind, op.stage)
    if op.kind in ("embedding-grads-all-reduce", "optimizer-clip-main-grad"):
        return (op.step, op.kind, op.dp)
    return tuple(op)


MEMBERS: dict[tuple[object, ...], list[Op]] = {}
for each in OPS:
    MEMBERS.setdefault(group(each), []).append(each)
RANKS: dict[tuple[int, int, int], list[Op]] = {}
for each in OPS:
    RANKS.setdefault((each.step, each.dp, each.stage), []).append(each)


def before(op: Op) -> list[Op]:
    """What must have ended before an operation starts: nothing, at a step's begin."""
    rank = RANKS[op.step, op.dp, op.stage]
    communicates = [
        o for o in rank if o.kind not in COMPUTE and not o.kind.endswith(("-send", "-recv"))
    ]
    end = [o for o in rank if o.kind.startswith(("layernorm", "embedding", "optimizer"))]
    chains = [[o for o in rank if o.kind in COMPUTE], communicates, end]
    chains += [[o for o in rank if o.kind == op.kind]]
    out = [c[c.index(op) - 1] for c in chains if op in c and c.index(op)]
    way, _, what = op.kind.partition("-")
    last = [o for o in rank if o.kind == "backward-compute"][-1]
    if what == "compute":
        out += [o for o in rank if o.kind == f"{way}-recv" and o.number == op.number]
        out += [rank[0]] if (way, op.number) == ("forward", 0) else []
    elif what == "send":
        out += [o for o in rank if o.kind == f"{way}-compute" and o.number == op.number]
    elif op.kind in ("grads-reduce-scatter", "layernorm-grads-all-reduce"):
        out.append(last)
    return out


def times(takes: dict[Op, int]) -> tuple[dict[Op, int], dict[Op, int]]:
    """When each operation starts and ends, one after the other."""

    @functools.cache
    def start(op: Op) -> int:
        return max((end(o) for o in before(op)), default=0)

    @functools.cache
    def end(op: Op) -> int:
        return max(start(o) for o in MEMBERS[group(op)]) + takes[op]

    return {op: start(op) for op in OPS}, {op: end(op) for op in OPS}


def step_ns(takes: dict[Op, int]) -> float:
    _, end = times(takes)
    return float(np.mean([max(end[o] for o in OPS if o.step == s) for s in range(STEPS)]))


@pytest.fixture(scope="module")
def takes() -> dict[Op, int]:
    """Lengths in ns: stage 2 has more layers, replica 1 is slower at times."""
    rng = np.random.default_rng(4)

    def length(op: Op) -> int:
        if op.kind in COMPUTE[:2]:
            whole = (1 + (op.kind == "backward-compute")) * (1.4 if op.stage == 2 else 1.0)
            return int(20_000_000 * whole * (1 + 0.2 * (op.dp == 1 and op.step == 1)))
        return int(rng.integers(0, 3) if op.kind == "gc" else 2_000_000)

    made = {op: length(op) + int(rng.integers(0, 1_000_000)) for op in OPS}
    # the members of a group end together
    return {op: made[MEMBERS[group(op)][0]] for op in OPS}


def ideal(takes: dict[Op, int]) -> dict[Op, int]:
    middle = {
        kind: (np.mean if kind in COMPUTE else np.median)(
            [ns for op, ns in takes.items() if op.kind == kind]
        )
        for kind in {op.kind for op in OPS}
    }
    return {op: round(float(middle[op.kind])) for op in OPS}


@pytest.fixture(scope="module")
def found(takes: dict[Op, int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What `bench/whatif.py` says of the table of these operations."""
    start, end = times(takes)
    rows = [
        {
            "dp_rank": op.dp, "stage": op.stage, "rank": op.stage * REPLICAS + op.dp,
            "step": op.step, "optype": op.kind, "start_ts": start[op] / 1e9,
            "duration": (end[op] - start[op]) / 1e9, "seq_id": op.number,
            "mc": 0 if op.kind in (*COMPUTE[:2], "params-all-gather", "grads-reduce-scatter")
            else -1,
            "mb_id": op.number, "gmc": op.stage if op.kind in COMPUTE[:2] else -1,
        }
        for op in OPS
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("published") / "trace.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    spec = importlib.util.spec_from_file_location("bench_whatif", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    return dict(bench.what_ifs(bench.read(path)))


def test_the_replay_without_delays_is_what_was_measured(found: dict[str, object]) -> None:
    assert found["measured_to_replayed"] == pytest.approx(1, abs=1e-6)


def test_slowdowns_are_those_of_the_published_definitions(
    takes: dict[Op, int], found: dict[str, object]
) -> None:
    best = ideal(takes)
    perfect = step_ns(best)

    def keeping(keeps: Callable[[Op], bool]) -> float:
        return step_ns({op: takes[op] if keeps(op) else best[op] for op in OPS}) / perfect

    assert found["S"] == pytest.approx(keeping(lambda op: True), rel=1e-6)
    for name in ("forward", "backward"):
        kinds = {
            f"{name}-compute": (f"{name}-compute",),
            f"{name}-pp-comm": (f"{name}-send", f"{name}-recv"),
        }
        for kind, of in kinds.items():
            want = keeping(lambda op, of=of: op.kind in of)  # type: ignore[misc]
            assert found["S_t"][kind] == pytest.approx(want, rel=1e-6), kind  # type: ignore[index]
    by_dp = [keeping(lambda op, k=k: op.dp == k) for k in range(REPLICAS)]  # type: ignore[misc]
    by_stage = [keeping(lambda op, k=k: op.stage == k) for k in range(STAGES)]  # type: ignore[misc]
    for dp, stage in np.ndindex(REPLICAS, STAGES):
        want = min(by_dp[dp], by_stage[stage])
        rank = str(stage * REPLICAS + dp)
        assert found["S_w"][rank] == pytest.approx(want, rel=1e-6)  # type: ignore[index]


def test_what_is_left_without_the_worst_worker_and_the_last_stage_is_as_published(
    takes: dict[Op, int], found: dict[str, object]
) -> None:
    best = ideal(takes)
    now, perfect = step_ns(takes), step_ns(best)

    def removed(repairs: Callable[[Op], bool]) -> float:
        fixed = step_ns({op: best[op] if repairs(op) else takes[op] for op in OPS})
        return (now - fixed) / (now - perfect)

    workers: dict[str, float] = found["S_w"]  # type: ignore[assignment]
    worst = int(max(workers, key=lambda rank: workers[rank]))
    stage, dp = divmod(worst, REPLICAS)
    mine = removed(lambda op: (op.stage, op.dp) == (stage, dp))
    assert found["M_W"] == pytest.approx(mine, abs=1e-6)
    assert found["M_S"] == pytest.approx(removed(lambda op: op.stage == STAGES - 1), abs=1e-6)
