"""What-ifs of a job whose operations are known, one row each: S, S_t, S_w, M_W and M_S as JSON.

    PYTHONPATH=. python bench/whatif.py FILE.parquet

FILE has the columns dp_rank, stage, rank, step, optype, start_ts and duration (seconds), seq_id,
mc, mb_id, gmc: an operation's type, its place in its stream, its model chunk in the stage and in
the model, and its microbatch. Definitions: "Understanding Stragglers in Large Model Training Using
What-if Analysis", Lin et al., OSDI 2025. The graph and its replay are clusterprof's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from clusterprof.analysis.model.by_report import NEVER
from clusterprof.analysis.model.replay import Graph

_PAIRS = {"forward-send": "forward-recv", "backward-send": "backward-recv"}
#: operations that the ranks of a group do together, and what is alike among the group's members
_JOINT = {
    "params-all-gather": ["stage", "mc"],
    "grads-reduce-scatter": ["stage", "mc"],
    "layernorm-grads-all-reduce": ["stage"],
    "embedding-grads-all-reduce": ["dp_rank"],
    "optimizer-clip-main-grad": ["dp_rank"],
}
_END = [
    "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad",
    "optimizer",
]  # fmt: skip
_COMPUTE = ["forward-compute", "backward-compute", "gc", "optimizer"]


def main() -> int:
    """Print the what-ifs of a file of operations."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    print(json.dumps(what_ifs(read(Path(sys.argv[1]))), indent=2))
    return 0


def read(path: Path) -> pd.DataFrame:
    """The operations, with times in whole nanoseconds and their group across the ranks."""
    found = pq.read_table(path).to_pandas()
    found["optype"] = found["optype"].astype(str)
    for name, column in (("start", "start_ts"), ("length", "duration")):
        found[name] = (found[column].astype(float) * 1e9).round().astype("int64")
    found = found.sort_values(["step", "rank", "start", "seq_id"], ignore_index=True)
    found["end"] = found["start"] + found["length"]
    found["group"] = _groups(found)
    last = found.groupby("group")["start"].transform("max")
    alone = ~found["group"].duplicated(keep=False)
    transfer = np.where(alone, found["length"], (found["end"] - last).clip(lower=0))
    found["takes"] = np.where(found["optype"].isin(_COMPUTE), found["length"], transfer)
    return found


def _groups(ops: pd.DataFrame) -> pd.Series:
    """One number for all operations that happen together on several ranks."""
    key = pd.Series(np.arange(len(ops)).astype(str), ops.index)
    for optype, alike in _JOINT.items():
        mine = ops[ops["optype"] == optype]
        key[mine.index] = optype + mine[["step", "seq_id", *alike]].astype(str).agg(
            "/".join, axis=1
        )
    last = int(ops["stage"].max())
    for send, receive in _PAIRS.items():
        onward = 1 if send.startswith("forward") else -1
        for optype, shift in ((send, onward), (receive, 0)):
            mine = ops[ops["optype"] == optype]
            # a chunk's last stage sends to the next chunk's first
            to = (mine["stage"] + shift) % (last + 1)
            parts = [mine["step"], mine["dp_rank"], to, mine["seq_id"]]
            key[mine.index] = send + pd.concat(parts, axis=1).astype(str).agg("/".join, axis=1)
    return pd.Series(pd.factorize(key)[0], ops.index)


def graph_of(ops: pd.DataFrame) -> tuple[Graph, np.ndarray]:
    """Moments: each operation's start and end, and each group's last arrival.

    Returns the graph, and for each edge the operation whose length it has (-1: none).
    """
    count = len(ops)
    last = 2 * count + ops["group"].to_numpy()
    each = np.arange(count)
    source, target = [2 * each, last], [last, 2 * each + 1]
    length = [np.full(count, -1), each]
    for before, after in _dependencies(ops):
        source.append(2 * before + 1)
        target.append(2 * after)
        length.append(np.full(len(before), -1))
    moments = 2 * count + int(ops["group"].max()) + 1
    made = Graph(moments, np.concatenate(source), np.concatenate(target))
    if len(made.circular):
        raise SystemExit(f"{len(made.circular)} moments wait for each other in a circle")
    return made, np.concatenate(length)


def _dependencies(ops: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs (before, after) of operations of one rank and step."""
    rank = ["step", "rank"]
    kind = ops["optype"]
    compute, collective = kind.isin(_COMPUTE), kind.isin(_JOINT)
    pairs = [_chained(ops[compute], rank), _chained(ops[collective], rank)]
    pairs += [_chained(ops[kind == k], rank) for pair in _PAIRS.items() for k in pair]
    last = ops[kind == "backward-compute"].drop_duplicates(rank, keep="last")
    pairs.append(_chained(ops[kind.isin(_END) | ops.index.isin(last.index)], rank))
    for way in ("forward", "backward"):
        computed = ops[kind == f"{way}-compute"]
        pairs.append(_in_order(ops[kind == f"{way}-recv"], computed, ops, way, receives=True))
        pairs.append(_in_order(computed, ops[kind == f"{way}-send"], ops, way, receives=False))
    chunk = [*rank, "mc"]
    for optype, computed, keep in (
        ("params-all-gather", "forward-compute", "first"),
        ("grads-reduce-scatter", "backward-compute", "last"),
    ):
        edge = ops[kind == computed].drop_duplicates(chunk, keep=keep)
        both = ops[kind == optype].reset_index().merge(edge.reset_index(), on=chunk)
        pair = both["index_x"].to_numpy(), both["index_y"].to_numpy()
        pairs.append(pair if keep == "first" else pair[::-1])
    return pairs


def _chained(ops: pd.DataFrame, by: list[str]) -> tuple[np.ndarray, np.ndarray]:
    after = ops.index.to_series().groupby([ops[c] for c in by]).shift(-1).dropna()
    return after.index.to_numpy(), after.to_numpy().astype(np.int64)


def _in_order(
    one: pd.DataFrame, other: pd.DataFrame, ops: pd.DataFrame, way: str, *, receives: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The n-th receive with the n-th compute that needs one, or such a compute with its send."""
    chunks = int(ops["gmc"].max())
    idle = (0 if way == "forward" else chunks) if receives else (chunks if way == "forward" else 0)
    if receives:
        other = other[other["gmc"] != idle]
    else:
        one = one[one["gmc"] != idle]
    rank = ["step", "rank"]
    first = one.assign(place=one.groupby(rank).cumcount()).reset_index()
    second = other.assign(place=other.groupby(rank).cumcount()).reset_index()
    both = first.merge(second, on=[*rank, "place"])
    return both["index_x"].to_numpy(), both["index_y"].to_numpy()


def what_ifs(ops: pd.DataFrame) -> dict[str, object]:
    """S, M_W, M_S, S_t, S by stage and S_w, and T without delays against the measured."""
    made, of = graph_of(ops)
    takes = ops["takes"].to_numpy()
    kinds = ops.groupby("optype")["takes"]
    middle = kinds.transform("median").where(~ops["optype"].isin(_COMPUTE), kinds.transform("mean"))
    ideal = middle.round().astype("int64").to_numpy()
    # sends and receives of one way are one type
    way = ops["optype"].str.replace(r"-(send|recv)$", "-pp-comm", regex=True)
    kept: dict[tuple[str, object], np.ndarray] = {}
    for name, column in (("type", way), ("dp", ops["dp_rank"]), ("stage", ops["stage"])):
        kept |= {(name, k): (column == k).to_numpy() for k in sorted(column.unique())}
    lengths = [takes, ideal, *(np.where(own, takes, ideal) for own in kept.values())]
    mean = _steps(ops, made, of, np.stack(lengths)).mean(axis=1)
    actual, perfect = mean[:2]
    of_kept = dict(zip(kept, mean[2:] / perfect, strict=True))
    slow = ops.drop_duplicates("rank").set_index("rank")[["dp_rank", "stage"]]
    workers = {
        int(rank): min(of_kept["dp", row.dp_rank], of_kept["stage", row.stage])
        for rank, row in slow.iterrows()
    }
    top = sorted(workers, key=lambda rank: -workers[rank])[: int(np.ceil(0.03 * len(workers)))]
    removed = [ops["rank"].isin(top), ops["stage"] == ops["stage"].max()]
    fixed = np.stack([np.where(own, ideal, takes) for own in removed])
    left = (actual - _steps(ops, made, of, fixed).mean(axis=1)) / (actual - perfect)
    measured = ops.groupby("step").apply(
        lambda step: step["end"].max() - step["start"].min(), include_groups=False
    )
    return {
        "S": actual / perfect,
        "M_W": left[0],
        "M_S": left[1],
        "S_t": {str(k): v for (name, k), v in of_kept.items() if name == "type"},
        "S_stage": {str(k): v for (name, k), v in of_kept.items() if name == "stage"},
        "S_dp": {str(k): v for (name, k), v in of_kept.items() if name == "dp"},
        "S_w": {str(rank): workers[rank] for rank in sorted(workers)},
        "measured_to_replayed": float(measured.mean() / actual),
    }


def _steps(ops: pd.DataFrame, made: Graph, of: np.ndarray, takes: np.ndarray) -> np.ndarray:
    """How long each step lasts, [what-ifs, steps] (ns), where operations take `takes`."""
    length = np.where(of >= 0, takes[:, of], 0)
    known = np.full((len(takes), made.moments), NEVER)
    waits = np.zeros(made.moments, dtype=bool)
    waits[made.order[made.target]] = True
    known[:, ~waits] = 0
    known[:, made.order] = made.one_pass(length[:, made.edge], known[:, made.order])
    ends = ops.index[ops["optype"] == "optimizer"].to_numpy()
    steps, place = np.unique(ops["step"].to_numpy()[ends], return_inverse=True)
    out = np.zeros((len(takes), len(steps)), dtype=np.int64)
    np.maximum.at(out.T, place, known[:, 2 * ends + 1].T)
    return out


if __name__ == "__main__":
    sys.exit(main())
