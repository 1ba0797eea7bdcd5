"""A merged run as tables for pandas, DuckDB or a spreadsheet: one CSV or Parquet file each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, get_args, get_origin, get_type_hints

import pyarrow as pa

from clusterprof import words
from clusterprof.agent.contracts import files
from clusterprof.align.match import PLACED
from clusterprof.export import summaries
from clusterprof.export.merged_tables import Merged
from clusterprof.report.csv_table import cell
from clusterprof.results import Finding, OperationEntry, RankEntry

#: what is not exported: paths of the machine that merged; command lines; what has parts of its own
_LEFT_OUT = {"source", "next", "evidence", "saving"}
#: the files, without their ending
NAMES = ("ranks", "steps", "operations", "findings", "collectives", *summaries.NAMES)
_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


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
        **summaries.summaries(merged),
    }


def _of_entries(entries: Sequence[Any], form: type) -> pa.Table:
    """Members of results.json as a table.

    Lists of ranks and steps are texts (`0-3,8`), and so are versions (`driver 580; NCCL 2.28.9`).
    """
    columns = {}
    for name, kind in get_type_hints(form).items():
        if name in _LEFT_OUT:
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

    def column(field: pa.Field, values: pa.ChunkedArray) -> pa.Array:
        """Texts that no spreadsheet takes for formulas, each in one line."""
        if not (pa.types.is_string(field.type) or pa.types.is_dictionary(field.type)):
            return values
        coded = values.cast(pa.string()).combine_chunks().dictionary_encode()
        shown = [cell(words.plain(text)) for text in coded.dictionary.to_pylist()]
        return pa.array(shown, pa.string()).take(coded.indices)

    def write(table: pa.Table, file: IO[bytes]) -> None:
        columns = map(column, table.schema, table.columns)
        csv.write_csv(pa.table([*columns], names=table.column_names), file)

    _write(merged, folder, "csv", write)


def write_parquet(merged: Merged, folder: Path) -> None:
    """Write every table as Parquet. Raises OSError."""
    import pyarrow.parquet as parquet

    _write(merged, folder, "parquet", parquet.write_table)


def _write(
    merged: Merged, folder: Path, ending: str, write: Callable[[pa.Table, IO[bytes]], None]
) -> None:
    by_name = tables(merged)
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        with files.new(folder / f"{name}.{ending}") as file:
            write(by_name[name], file)
