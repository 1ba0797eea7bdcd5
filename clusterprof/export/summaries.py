"""What kernels, copies, host calls and NVTX ranges took in the window, as nsys' summaries say it.

By rank, and over all ranks. All that was captured counts, the first step of the window too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.columns import Ints, coded, integers
from clusterprof.export.merged_tables import Merged

#: a kernel is launch-bound where this part of its calls at least began on a stream that had
#: nothing more to do when the host launched it: most of them
LAUNCH_BOUND = 0.5

_WHOLE, _TEXT = pa.int64(), pa.string()
#: what every summary has of each group. `rank` is null in the rows over all ranks, which have the
#: ranks with the least and the most instead of a median
_COMMON = [
    ("calls", _WHOLE),
    ("total_ns", _WHOLE),
    ("mean_ns", _WHOLE),
    ("median_ns", _WHOLE),
    ("min_ns", _WHOLE),
    ("max_ns", _WHOLE),
    ("least_rank", _WHOLE),
    ("least_rank_total_ns", _WHOLE),
    ("most_rank", _WHOLE),
    ("most_rank_total_ns", _WHOLE),
]
#: summary -> what its rows are of, and what else they have: sums over their calls
_FORMS: dict[str, tuple[list[tuple[str, Any]], list[tuple[str, Any]]]] = {
    "kernels": ([("name", _TEXT), ("kind", _TEXT)], [("launched_late", _WHOLE)]),
    "copies": (
        [("direction", _TEXT), ("memory", _TEXT), ("size_up_to_bytes", _WHOLE)],
        [("bytes", _WHOLE)],
    ),
    "host_calls": ([("kind", _TEXT), ("name", _TEXT)], []),
    "ranges": ([("name", _TEXT)], [("device_ns", _WHOLE)]),
}
NAMES = tuple(_FORMS)


def summaries(merged: Merged) -> dict[str, pa.Table]:
    """All summaries, by name: over all ranks first, then by rank, the longest first."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _FORMS}
    for rank in merged.ranks:
        for name, found in _of_rank(merged, rank):
            rows[name] += [{"rank": rank, **row} for row in found]
    return {name: _table(name, found) for name, found in rows.items()}


def _table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    keys, more = _FORMS[name]
    every = [*_over_ranks(rows, [key for key, _ in keys], [key for key, _ in more]), *rows]
    every.sort(key=lambda row: (-1 if row["rank"] is None else row["rank"], -row["total_ns"]))
    schema = [("rank", _WHOLE), *keys, *_COMMON, *more]
    if name == "kernels":
        for row in every:
            late = row["launched_late"]
            row["bound"] = (
                "launch" if late is not None and late >= LAUNCH_BOUND * row["calls"] else "unknown"
            )
        schema.append(("bound", _TEXT))
    if name == "copies":
        for row in every:
            row["bytes_per_s"] = int(row["bytes"] * 1e9 / row["total_ns"]) if row["total_ns"] else 0
        schema.append(("bytes_per_s", _WHOLE))
    return pa.Table.from_pylist(every, pa.schema(schema))


def _over_ranks(
    rows: Sequence[dict[str, Any]], keys: Sequence[str], sums: Sequence[str]
) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for key, members in groups.items():
        calls, total = (sum(row[name] for row in members) for name in ("calls", "total_ns"))
        least = min(members, key=lambda row: (row["total_ns"], row["rank"]))
        most = max(members, key=lambda row: (row["total_ns"], -row["rank"]))
        yield {
            "rank": None,
            **dict(zip(keys, key, strict=True)),
            "calls": calls,
            "total_ns": total,
            "mean_ns": total // calls,
            "min_ns": min(row["min_ns"] for row in members),
            "max_ns": max(row["max_ns"] for row in members),
            "least_rank": least["rank"],
            "least_rank_total_ns": least["total_ns"],
            "most_rank": most["rank"],
            "most_rank_total_ns": most["total_ns"],
            **{
                name: None if any(row[name] is None for row in members)
                else sum(row[name] for row in members)
                for name in sums
            },
        }  # fmt: skip


def _of_rank(merged: Merged, rank: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    columns = [
        "start_ns", "end_ns", "kind", "name", "device", "stream", "launch_start_ns", "size_bytes",
        "direction", "pageable",
    ]  # fmt: skip
    activity = merged.table(rank, "activity", columns)
    calls = merged.table(rank, "host_calls", ["start_ns", "end_ns", "kind", "name"])
    if activity is not None:
        is_kernel = pc.is_in(activity["kind"].cast(_TEXT), pa.array(["compute", "collective"]))
        late = _launched_late(activity)
        sums = {} if late is None else {"launched_late": late[np.asarray(is_kernel)]}
        found = _grouped(activity.filter(is_kernel), ["name", "kind"], sums)
        yield "kernels", found if sums else [{**row, "launched_late": None} for row in found]
        yield "copies", _copies(activity.filter(pc.equal(activity["kind"].cast(_TEXT), "copy")))
    if calls is not None:
        is_range = pc.equal(calls["kind"].cast(_TEXT), "range")
        yield "host_calls", _grouped(calls.filter(pc.invert(is_range)), ["kind", "name"], {})
        ranges = calls.filter(is_range)
        on_device = np.zeros(ranges.num_rows, np.int64)
        if activity is not None:
            on_device = _launched_inside(ranges, activity)
        yield "ranges", _grouped(ranges, ["name"], {"device_ns": on_device})


def _copies(table: pa.Table) -> list[dict[str, Any]]:
    memory = pc.if_else(table["pageable"], "pageable", "pinned").fill_null("unknown")
    direction = table["direction"].cast(_TEXT).fill_null("other")
    table = table.append_column("memory", memory)
    table = table.set_column(table.schema.get_field_index("direction"), "direction", direction)
    size = np.maximum(integers(table, "size_bytes"), 0)
    power = np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
    up_to = pa.array(np.where(size > 0, np.left_shift(1, power), 0)).cast(_TEXT)
    table = table.append_column("size_up_to_bytes", up_to)
    rows = _grouped(table, list(dict(_FORMS["copies"][0])), {"bytes": size})
    return [{**row, "size_up_to_bytes": int(row["size_up_to_bytes"])} for row in rows]


def _launched_late(activity: pa.Table) -> Ints | None:
    """1 for each activity whose stream had nothing more to do when it was launched.

    None where the report names no launches.
    """
    launch = integers(activity, "launch_start_ns", -1)
    if not (launch >= 0).any():
        return None
    start, end = integers(activity, "start_ns"), integers(activity, "end_ns")
    stream = np.stack([integers(activity, "device"), integers(activity, "stream")])
    order = np.lexsort((start, stream[1], stream[0]))
    same = np.r_[False, (np.diff(stream[:, order]) == 0).all(axis=0)]
    before = np.r_[0, end[order][:-1]]
    late = np.zeros(len(start), np.int64)
    late[order] = (launch[order] >= before) & (launch[order] >= 0) & same
    return late


def _launched_inside(ranges: pa.Table, activity: pa.Table) -> Ints:
    """How long what was launched while each range was open, by any thread, ran on the device."""
    launch = integers(activity, "launch_start_ns", -1)
    order = np.argsort(launch, kind="stable")
    length = integers(activity, "end_ns") - integers(activity, "start_ns")
    total = np.r_[0, np.cumsum(np.where(launch >= 0, length, 0)[order])]
    until = np.searchsorted(launch[order], integers(ranges, "end_ns"), "right")
    since = np.searchsorted(launch[order], integers(ranges, "start_ns"), "left")
    return np.asarray(total[until] - total[since], np.int64)


def _grouped(
    table: pa.Table, keys: Sequence[str], sums: Mapping[str, Ints]
) -> list[dict[str, Any]]:
    """One row for each different combination of keys."""
    if not table.num_rows:
        return []
    codes = [coded(table, key) for key in keys]
    group = np.zeros(table.num_rows, np.int64)
    for names, code in codes:
        group = group * len(names) + code
    ns = np.maximum(integers(table, "end_ns") - integers(table, "start_ns"), 0)
    order = np.lexsort((ns, group))
    values, first, count = np.unique(group[order], return_index=True, return_counts=True)
    sorted_ns = ns[order]
    totals = {name: np.add.reduceat(value[order], first) for name, value in sums.items()}
    total = np.add.reduceat(sorted_ns, first)
    low, high = sorted_ns[first + (count - 1) // 2], sorted_ns[first + count // 2]
    rows = []
    for at in range(len(values)):
        row, last = order[first[at]], first[at] + count[at] - 1
        made: dict[str, Any] = {
            key: str(names[code[row]]) for key, (names, code) in zip(keys, codes, strict=True)
        }
        made |= {
            "calls": int(count[at]),
            "total_ns": int(total[at]),
            "mean_ns": int(total[at] // count[at]),
            "median_ns": int((low[at] + high[at]) // 2),
            "min_ns": int(sorted_ns[first[at]]),
            "max_ns": int(sorted_ns[last]),
        }
        rows.append(made | {name: int(value[at]) for name, value in totals.items()})
    return rows
