"""The operator of torch.distributed around a kernel's launch, which says what the kernel does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.ingest.columns import Bools, Ints, matching
from clusterprof.ingest.kineto.trace_events import Trace
from clusterprof.ingest.operations import operation

#: from the outside in, as PyTorch nests them: `c10d_functional::all_to_all_single` around
#: `c10d::alltoall_base_` around `record_param_comms` around `nccl:all_to_all`. The inner says more.
_NESTED = (r"^_?c10d_functional::", r"^c10d::", r"^record_param_comms$", r"^nccl:")


@dataclass(frozen=True)
class Operator:
    """What is said around a launch: an operator's name, empty where none tells, and arguments."""

    name: str = ""
    #: of `record_param_comms`, from PyTorch 2.2 on: `Collective name` and its like
    args: Mapping[str, Any] = field(default_factory=dict)


def operators(trace: Trace, base: int, thread: Ints, time: Ints, known: Bools) -> list[Operator]:
    """Return the operator in which each launch lies (by its thread and time, ns)."""
    names, args = [""] * len(time), [{}] * len(time)  # type: list[str], list[Mapping[str, Any]]
    for pattern in _NESTED:
        wanted = matching(pa.array(trace.names, pa.string()), pattern)
        for category in ("cpu_op", "user_annotation"):
            spans = trace.spans[category]
            codes = spans.column("name")
            rows = np.flatnonzero(wanted[codes]) if codes.size else codes
            if not rows.size:
                continue
            begin, end = (each[rows] for each in spans.times(base))
            at = _around(begin, end, spans.column("thread")[rows], thread, time)
            for k in np.flatnonzero(known & (at >= 0)).tolist():
                row = int(rows[at[k]])
                name = trace.names[codes[row]]
                if operation(name) != "Unknown":
                    names[k] = name
                if "Collective name" in spans.args.get(row, ()):
                    args[k] = spans.args[row]
    return [Operator(*each) for each in zip(names, args, strict=True)]


def _around(begin: Ints, end: Ints, of: Ints, thread: Ints, time: Ints) -> Ints:
    """Return for each time the place of the span of its thread that is around it, else -1."""
    found = np.full(len(time), -1, np.int64)
    for one in np.unique(thread):
        rows = np.flatnonzero(of == one)
        rows = rows[np.lexsort((-end[rows], begin[rows]))]
        if not rows.size:
            continue
        mine = np.flatnonzero(thread == one)
        last = np.searchsorted(begin[rows], time[mine], side="right") - 1
        # the one that began last, or where that has ended the one that reaches farthest
        reach = np.maximum.accumulate(end[rows])
        farthest = np.searchsorted(reach, reach, side="left")
        for at in (farthest[last], last):
            inside = (last >= 0) & (end[rows][at] >= time[mine])
            found[mine[inside]] = rows[at[inside]]
    return found
