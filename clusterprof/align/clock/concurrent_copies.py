"""What a copy that runs beside a collective adds to its end.

A kernel has ended when what it wrote has reached memory. Where the device copies within itself
at that moment (DistributedDataParallel bringing a reduced bucket to its gradients, say) that takes
a good microsecond longer: in the small AllReduces of 19 recordings (H200s of one host, nsys and
torch.profiler, two and four members) the members whose device was in the middle of such a copy
ended 1.2 to 2.2 µs after those whose device was not, whichever recording is left out. A copy that
begins or ends in those microseconds shows no such delay. Seen for copies only; what kernels add
nobody has measured.

An expectation that `estimates` takes off. No bound rests on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.tables import RankTables

#: by how much later a collective ends in the middle of a copy
DELAY_NS = 1_750.0
#: in the middle: the copy began so long before the end, and goes on for so long after it
_BEFORE_NS, _AFTER_NS = 2_000, 1_000

Floats = npt.NDArray[np.float64]


def delays(matched: pa.Table, ranks: Sequence[RankTables]) -> Floats:
    """Return by how much a copy delayed the end of each row of `matched` (schema MATCHED), ns."""
    out = np.zeros(matched.num_rows)
    rank = matched["rank"].to_numpy()
    order = np.argsort(rank, kind="stable")
    ends = np.asarray(pc.fill_null(matched["end_ns"], 0).to_numpy(), dtype=np.int64)
    for tables in ranks:
        begin, after = _copies(tables)
        if not len(begin):
            continue
        first, last = np.searchsorted(rank, [tables.rank, tables.rank + 1], sorter=order)
        mine = order[first:last]
        # the copy that goes on longest of those that began early enough
        k = np.searchsorted(begin, ends[mine] - _BEFORE_NS, side="right") - 1
        out[mine] = DELAY_NS * ((k >= 0) & (after[k] >= ends[mine] + _AFTER_NS))
    return out


def _copies(tables: RankTables) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Begins of the copies within the device, in order, and until when those so far go on."""
    inside = pc.equal(tables.activity["direction"].cast(pa.string()), "device_to_device")
    some = tables.activity.select(["start_ns", "end_ns"]).filter(pc.fill_null(inside, False))
    begin, end = some["start_ns"].to_numpy(), some["end_ns"].to_numpy()
    order = np.argsort(begin, kind="stable")
    return begin[order], np.maximum.accumulate(end[order])
