"""A merged run as tables for pandas, DuckDB or a spreadsheet: one CSV or Parquet file each.

Four of them say what kernels, copies, host calls and NVTX ranges took in the window, as nsys'
summaries do: by rank, and over all ranks. All that was captured counts, the first step of the
window too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.agent.contracts import files
from clusterprof.align.match import PLACED
from clusterprof.columns import (
    begins,
    first_after,
    first_at_or_after,
    integers,
    order_by,
    preceding,
)
from clusterprof.export.merged_tables import Merged
from clusterprof.report.text import spreadsheet_cell
from clusterprof.results import Finding, OperationEntry, RankEntry

_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}

#: a kernel is launch-bound where this part of its calls at least began on a stream that had
#: nothing more to do when the host launched it: most of them
_LAUNCH_BOUND = 0.5

_WHOLE, _TEXT = pa.int64(), pa.string()
#: what every summary has of each group. `rank` is null in the rows over all ranks, which have the
#: ranks with the least and the most instead of a median
_COMMON = (
    "calls", "total_ns", "mean_ns", "median_ns", "min_ns", "max_ns", "least_rank",
    "least_rank_total_ns", "most_rank", "most_rank_total_ns",
)  # fmt: skip
#: summary -> what its rows are of, and what else they have: sums over their calls
_FORMS: dict[str, tuple[dict[str, pa.DataType], tuple[str, ...]]] = {
    "kernels": ({"name": _TEXT, "kind": _TEXT}, ("launched_late",)),
    "copies": ({"direction": _TEXT, "memory": _TEXT, "size_up_to_bytes": _WHOLE}, ("bytes",)),
    "host_calls": ({"kind": _TEXT, "name": _TEXT}, ()),
    "ranges": ({"name": _TEXT}, ("device_ns",)),
}
#: the files, without their ending
NAMES = ("ranks", "steps", "operations", "findings", "collectives", *_FORMS)
Row = dict[str, Any]


def tables(merged: Merged) -> dict[str, pa.Table]:
    """All tables by name; times are ns, `aligned_…` on the reference rank's clock."""
    results, clock = merged.results, merged.clock
    ranks = _of_entries(results["ranks"], RankEntry)
    places = [clock.ranks.index(rank) for rank in merged.ranks]
    for name in ("offset_ns", "drift_ppm", "uncertainty_ns"):
        ranks = ranks.append_column(f"clock_{name}", pa.array(getattr(clock, name)[places]))
    return {
        "ranks": ranks,
        "steps": merged.accounts.append_column("steady_state", merged.is_steady),
        "operations": _of_entries(results["collectives"]["by_operation"], OperationEntry),
        "findings": _of_entries(results["findings"], Finding),
        "collectives": merged.collectives.select(PLACED.names),
        **_summaries(merged),
    }


def _of_entries(entries: Sequence[Any], form: type) -> pa.Table:
    """Members of results.json; lists and versions as texts (`0-3,8`, `driver 580; NCCL 2.28.9`)."""
    columns = {}
    for name, kind in get_type_hints(form).items():
        # paths of the machine that merged; command lines; what has parts of its own
        if name in {"source", "next", "evidence", "saving", "rows"}:
            continue
        values = [entry[name] for entry in entries]
        if get_origin(kind) is list:
            columns[name] = pa.array([words.numbers(value) for value in values], pa.string())
        elif get_origin(kind) is dict:
            lines = ["; ".join(f"{key} {item}" for key, item in value.items()) for value in values]
            columns[name] = pa.array(lines, pa.string())
        else:
            plain = next((variant for variant in (kind, *get_args(kind)) if variant in _TYPES), str)
            exact = [float(value) for value in values] if plain is float else values
            columns[name] = pa.array(exact, _TYPES[plain])
    return pa.table(columns)


def write_csv(merged: Merged, folder: Path) -> None:
    """Write every table as CSV (UTF-8, with a header). Raises OSError."""
    import pyarrow.csv as csv

    def write(table: pa.Table, file: IO[bytes]) -> None:
        """Texts so that no spreadsheet takes them for formulas, each in one line."""
        for place, field in enumerate(table.schema):
            if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type):
                texts = table[place].cast(pa.string()).combine_chunks().dictionary_encode()
                shown = [spreadsheet_cell(words.plain(t)) for t in texts.dictionary.to_pylist()]
                column = pa.array(shown, pa.string()).take(texts.indices)
                table = table.set_column(place, field.name, column)
        csv.write_csv(table, file)

    _write(merged, folder, "csv", write)


def write_parquet(merged: Merged, folder: Path) -> None:
    """Write every table as Parquet. Raises OSError."""
    import pyarrow.parquet as parquet

    _write(merged, folder, "parquet", parquet.write_table)


def _write(
    merged: Merged, folder: Path, ending: str, write: Callable[[pa.Table, IO[bytes]], None]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables(merged).items():
        with files.new(folder / f"{name}.{ending}") as file:
            write(table, file)


def _summaries(merged: Merged) -> dict[str, pa.Table]:
    """All summaries, by name: over all ranks first, then by rank, the longest first."""
    of_ranks: dict[str, list[Row]] = {name: [] for name in _FORMS}
    for rank in merged.ranks:
        for name, grouped in _groups_of_rank(merged, rank):
            of_ranks[name] += [{"rank": rank, **row} for row in grouped]
    tables = {}
    for name, (keys, sums) in _FORMS.items():
        rows = [*_over_ranks(of_ranks[name], tuple(keys), sums), *of_ranks[name]]
        rows.sort(key=lambda row: (-1 if row["rank"] is None else row["rank"], -row["total_ns"]))
        schema = {"rank": _WHOLE, **keys, **dict.fromkeys((*_COMMON, *sums), _WHOLE)}
        table = pa.Table.from_pylist(rows, pa.schema(schema))
        if name == "kernels":
            limit = pc.multiply(table["calls"], _LAUNCH_BOUND)
            is_bound = pc.greater_equal(table["launched_late"], limit).fill_null(False)
            table = table.append_column("bound", pc.if_else(is_bound, "launch", "unknown"))
        if name == "copies":
            took = pc.if_else(pc.greater(table["total_ns"], 0), table["total_ns"], None)
            rate = pc.divide(pc.multiply(table["bytes"], 1e9), took).fill_null(0)
            table = table.append_column("bytes_per_s", pc.trunc(rate).cast(_WHOLE))
        tables[name] = table
    return tables


def _over_ranks(rows: Sequence[Row], keys: Sequence[str], sums: Sequence[str]) -> Iterator[Row]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for key, members in groups.items():
        calls, total = (sum(row[name] for row in members) for name in ("calls", "total_ns"))
        least = min(members, key=lambda row: (row["total_ns"], row["rank"]))
        most = max(members, key=lambda row: (row["total_ns"], -row["rank"]))
        columns = {name: [row[name] for row in members] for name in sums}
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
            **{name: None if None in values else sum(values) for name, values in columns.items()},
        }


def _groups_of_rank(merged: Merged, rank: int) -> Iterator[tuple[str, list[Row]]]:
    columns = [
        "start_ns", "end_ns", "kind", "name", "device", "stream", "launch_start_ns", "size_bytes",
        "direction", "pageable",
    ]  # fmt: skip
    activity = merged.table(rank, "activity", columns)
    kind = activity["kind"].cast(_TEXT)
    is_kernel = pc.is_in(kind, pa.array(["compute", "collective"]))
    sums = {"launched_late": _launched_late(activity).filter(is_kernel)}
    yield "kernels", _grouped(activity.filter(is_kernel), "kernels", sums)
    yield "copies", _copies(activity.filter(pc.equal(kind, "copy")))
    calls = merged.table(rank, "host_calls", ["start_ns", "end_ns", "kind", "name"])
    is_range = pc.equal(calls["kind"].cast(_TEXT), "range")
    yield "host_calls", _grouped(calls.filter(pc.invert(is_range)), "host_calls", {})
    ranges = calls.filter(is_range)
    yield "ranges", _grouped(ranges, "ranges", {"device_ns": _launched_inside(ranges, activity)})


def _copies(table: pa.Table) -> list[Row]:
    size = np.maximum(integers(table, "size_bytes"), 0)
    power = np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
    columns = {
        "start_ns": table["start_ns"],
        "end_ns": table["end_ns"],
        "direction": table["direction"].cast(_TEXT).fill_null("other"),
        "memory": pc.if_else(table["pageable"], "pageable", "pinned").fill_null("unknown"),
        "size_up_to_bytes": np.where(size > 0, np.left_shift(1, power), 0),
    }
    return _grouped(pa.table(columns), "copies", {"bytes": pa.array(size)})


def _launched_late(activity: pa.Table) -> pa.Array:
    """1 where the stream had nothing more to do at the launch; null where no launch is known."""
    launch = integers(activity, "launch_start_ns", -1)
    if not (launch >= 0).any():
        return pa.nulls(len(launch), _WHOLE)
    start, end = integers(activity, "start_ns"), integers(activity, "end_ns")
    stream = np.stack([integers(activity, "device"), integers(activity, "stream")])
    order = order_by(*stream, start)
    idle = launch[order] >= preceding(end[order], 0)
    late = np.zeros(len(start), np.int64)
    late[order] = idle & (launch[order] >= 0) & ~begins(*stream[:, order])
    return pa.array(late)


def _launched_inside(ranges: pa.Table, activity: pa.Table) -> pa.Array:
    """How long what was launched while each range was open, by any thread, ran on the device."""
    launch = integers(activity, "launch_start_ns", -1)
    order = order_by(launch)
    length = integers(activity, "end_ns") - integers(activity, "start_ns")
    total = np.cumsum(np.append(0, np.where(launch >= 0, length, 0)[order]))
    until = first_after(launch[order], integers(ranges, "end_ns"))
    since = first_at_or_after(launch[order], integers(ranges, "start_ns"))
    return pa.array((total[until] - total[since]).astype(np.int64))


def _grouped(table: pa.Table, name: str, sums: Mapping[str, pa.Array]) -> list[Row]:
    """One row for each different combination of a summary's keys; `sums` are added up."""
    keys = {key: table[key].cast(kind) for key, kind in _FORMS[name][0].items()}
    ns = pc.max_element_wise(pc.subtract(table["end_ns"], table["start_ns"]), 0)
    of_ns = {"count": "calls", "sum": "total_ns", "min": "min_ns", "max": "max_ns"}
    groups = (
        pa.table({**keys, "ns": ns, **sums})
        .group_by([*keys], use_threads=False)
        .aggregate([*(("ns", how) for how in (*of_ns, "list")), *((key, "sum") for key in sums)])
    )
    renamed = {f"ns_{how}": column for how, column in of_ns.items()}
    renamed |= {f"{column}_sum": column for column in sums}
    groups = groups.rename_columns([renamed.get(name, name) for name in groups.column_names])
    rows: list[Row] = groups.drop_columns(["ns_list"]).to_pylist()
    for row, values in zip(rows, groups["ns_list"].combine_chunks(), strict=True):
        took = np.sort(values.values.to_numpy())
        row["mean_ns"] = row["total_ns"] // row["calls"]
        row["median_ns"] = int(took[(len(took) - 1) // 2] + took[len(took) // 2]) // 2
    return rows
