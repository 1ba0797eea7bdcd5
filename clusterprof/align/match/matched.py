"""The table that matching gives, one row per collective and rank: its schemas, and its making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof import words
from clusterprof.align.match.calls import UNKNOWN, Part
from clusterprof.columns import Ints, Objects, order_by
from clusterprof.ingest.operations import SYNCHRONISING
from clusterprof.tables import NAME, required

#: One row per collective and rank. Times are still each rank's own wall clock.
MATCHED = pa.schema(
    [
        #: number of the logical operation; rows of one collective share it
        required("collective", pa.int64()),
        #: the report's id, or `inferred:<ranks>` where the reports have none
        required("communicator", pa.string()),
        required("operation", NAME),
        #: position within the communicator (point-to-point: within the pair), from 0
        required("order", pa.int64()),
        required("rank", pa.int32()),
        #: the row of this rank's `collective_calls`
        required("call", pa.int32()),
        #: `matched`: every profiled member has it; `incomplete`: a profiled member lacks it;
        #: `unmatched`: no other rank has it. The last two have a `reason`.
        required("state", NAME),
        pa.field("reason", pa.string()),
        #: confidence in the match, 0 to 1: 1.0 for ids with steps and times that agree
        required("confidence", pa.float64()),
        #: what the data dependency allows the clock to conclude. `both`: cannot end before
        #: every `both` and `source` member has started; `sink`: the same, but delays no member;
        #: `source`: may end at any time; `none`: nothing is known
        required("role", NAME),
        required("stream", pa.int64()),
        pa.field("message_bytes", pa.int64()),
        #: the step in whose host range the call was issued; null outside any step
        pa.field("step", pa.int64()),
        pa.field("group", pa.int32()),
        pa.field("issue_start_ns", pa.int64()),
        pa.field("start_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        required("source", NAME),
    ]
)

#: `MATCHED` with times on the reference rank's clock. `wait_ns` and `transfer_ns` are null
#: where the collective is not `matched` or has a single member: its last arrival is unknown.
PLACED = pa.schema(
    [
        *MATCHED,
        pa.field("aligned_start_ns", pa.int64()),
        pa.field("aligned_end_ns", pa.int64()),
        pa.field("last_arrival_ns", pa.int64()),
        pa.field("last_rank", pa.int32()),
        #: last arrival minus the second-to-last: what the last rank alone has cost
        pa.field("lateness_ns", pa.int64()),
        pa.field("wait_ns", pa.int64()),
        pa.field("transfer_ns", pa.int64()),
    ]
)

_ROOTED = {"Broadcast": ("source", "sink"), "Scatter": ("source", "sink")}
_ROOTED |= {"Reduce": ("sink", "source"), "Gather": ("sink", "source")}
#: columns of MATCHED that come from `Calls`, where their names differ
_FIELDS = {"message_bytes": "size", "issue_start_ns": "issue", "start_ns": "start", "end_ns": "end"}


class MatchedRows:
    """Collects the rows of a matched table; every call of every rank goes in exactly once."""

    def __init__(self) -> None:
        self._parts: list[tuple[Part, dict[str, Any]]] = []
        self._next = 0
        #: the communicators whose operations' ids contradict each other, and how
        self.contradicted: dict[str, str] = {}

    def _fresh(self, count: int) -> Ints:
        self._next += count
        return np.arange(self._next - count, self._next)

    def _add(
        self, calls: Part, name: str, collective: Ints, order: Ints, cells: dict[str, Any]
    ) -> None:
        """Add calls with their `cells`: by column of MATCHED an array, or one value for all."""
        if len(calls):
            names = np.asarray(name, dtype=object)
            own = {"communicator": names, "collective": collective, "order": order}
            self._parts.append((calls, {"rank": calls.rank, **own, **cells}))

    def unmatched(self, calls: Part, name: str, reason: str) -> None:
        """Add calls that are matched with no other rank's, with the reason."""
        own = calls.whole.reason[calls.rows]
        reasons = np.where(own == None, reason, own)  # noqa: E711  (elementwise)
        cells = {"state": "unmatched", "reason": reasons, "confidence": 0.0, "role": "none"}
        self._add(calls, name, self._fresh(len(calls)), np.arange(len(calls)), cells)

    def pairs(self, name: str, send: Part, recv: Part, confidence: float) -> None:
        """Add Sends with the Recvs of another rank, one to one."""
        fresh, order = self._fresh(len(send)), np.arange(len(send))
        whole = send.whole.has[send.rows] & recv.whole.has[recv.rows]
        state = np.where(whole, "matched", "incomplete")
        reason = np.where(whole, None, "one side has no device kernel")  # type: ignore[call-overload]
        for calls, role in ((send, "source"), (recv, "sink")):
            cells = {"state": state, "reason": reason, "confidence": confidence, "role": role}
            self._add(calls, name, fresh, order, cells)

    def collectives(
        self,
        name: str,
        parts: Sequence[Part],
        order: Sequence[Ints],
        confidence: float,
        roots: dict[int, int],
    ) -> None:
        """Add one communicator's calls, given each member's place `order` in the common order.

        `roots` turns the communicator's rank of a root into a global rank.
        """
        length = 1 + max((int(o.max()) for o in order if len(o)), default=-1)
        present, kernel = np.zeros((2, len(parts), length), dtype=bool)
        for m, (calls, o) in enumerate(zip(parts, order, strict=True)):
            present[m, o], kernel[m, o] = True, calls.whole.has[calls.rows]
        whole = kernel.all(axis=0)
        # a call that only one of several members has cannot be compared with anything
        single = present.sum(axis=0) == 1
        state = np.where(whole, "matched", np.where(single, "unmatched", "incomplete"))
        reason = np.full(length, None, dtype=object)
        ranks = np.asarray([calls.rank for calls in parts])
        for k in np.flatnonzero(~whole):
            absent = ranks[~present[:, k]].tolist()
            problem = "not captured on" if absent else "no device kernel on"
            reason[k] = f"{problem} {words.ranks(absent or ranks[~kernel[:, k]].tolist())}"
        fresh = self._fresh(length)
        for calls, o in zip(parts, order, strict=True):
            role = _roles(calls, roots)
            role[state[o] == "unmatched"] = "none"
            cells = {"state": state[o], "reason": reason[o], "confidence": confidence, "role": role}
            self._add(calls, name, fresh[o], o, cells)

    def table(self) -> pa.Table:
        """Return everything collected so far, schema `MATCHED`, sorted by collective and rank."""
        if not self._parts:
            return MATCHED.empty_table()
        table = pa.table({name: self._column(name) for name in MATCHED.names}, schema=MATCHED)
        order = order_by(table["collective"].to_numpy(), table["rank"].to_numpy())
        return table.take(pa.array(order))

    def _column(self, name: str) -> pa.Array:
        field = MATCHED.field(name)
        values = np.concatenate(
            [
                np.broadcast_to(cells[name], calls.rows.shape)
                if name in cells
                else getattr(calls.whole, _FIELDS.get(name, name))[calls.rows]
                for calls, cells in self._parts
            ]
        )
        if values.dtype.kind in "OU":
            plain = pa.array(values.astype(object), pa.string())
            return plain.dictionary_encode() if pa.types.is_dictionary(field.type) else plain
        mask = (values == UNKNOWN) & field.nullable
        if name in ("start_ns", "end_ns"):
            mask = ~np.concatenate([calls.whole.has[calls.rows] for calls, _ in self._parts])
        return pa.array(values, field.type, mask=mask)


def _roles(calls: Part, roots: dict[int, int]) -> Objects:
    """What each call's data dependency is: see `MATCHED`."""
    operation, call_root = calls.whole.operation[calls.rows], calls.whole.root[calls.rows]
    role = np.where(np.isin(operation, SYNCHRONISING), "both", "none").astype(object)
    for name, (at_root, elsewhere) in _ROOTED.items():
        for root in np.unique(call_root[operation == name]).tolist():
            if root in roots:
                of_root = (operation == name) & (call_root == root)
                role[of_root] = at_root if roots[root] == calls.rank else elsewhere
    return role
