"""Recordings as they would be had their ranks' clocks been wrong in a known way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.tables import RankTables


def with_clock(tables: RankTables, offset_ns: int, drift_ppm: float, middle_ns: int) -> RankTables:
    """Return `tables` as a clock would have stamped them that reads `offset_ns` more at
    `middle_ns` (wall time of the true clock) and gains `drift_ppm`.
    """

    def wrong(column: pa.ChunkedArray) -> pa.ChunkedArray:
        known = np.asarray(pc.fill_null(column, middle_ns).to_numpy(), dtype=np.int64)
        moved = wall(known, offset_ns, drift_ppm, middle_ns)
        mask = np.asarray(pc.is_null(column).to_numpy(), dtype=bool)
        return pa.chunked_array([pa.array(moved, pa.int64(), mask=mask)])

    def moved(table: pa.Table) -> pa.Table:
        for k, field in enumerate(table.schema):
            if field.name.endswith("_ns"):
                table = table.set_column(k, field, wrong(table[field.name]))
        return table

    ends = np.asarray([tables.info.begin_ns, tables.info.end_ns], dtype=np.int64)
    begin, end = wall(ends, offset_ns, drift_ppm, middle_ns).tolist()
    return replace(
        tables,
        info=replace(tables.info, begin_ns=begin, end_ns=end),
        activity=moved(tables.activity),
        collective_calls=moved(tables.collective_calls),
        steps=moved(tables.steps),
        host_calls=moved(tables.host_calls),
    )


def wall(
    true_ns: npt.NDArray[np.int64], offset_ns: int, drift_ppm: float, middle_ns: int
) -> npt.NDArray[np.int64]:
    """Return what such a clock reads at true times (ns)."""
    gained = np.rint(drift_ppm * 1e-6 * (true_ns - middle_ns)).astype(np.int64)
    return np.asarray(true_ns + offset_ns + gained, dtype=np.int64)


def middle(ranks: Sequence[RankTables]) -> int:
    """Return the middle of all ranks' device activities (ns)."""
    first = min(int(pc.min(t.activity["start_ns"]).as_py()) for t in ranks)
    last = max(int(pc.max(t.activity["end_ns"]).as_py()) for t in ranks)
    return (first + last) // 2
