"""The table that matching gives, one row per collective and rank: its schemas, and its making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.agent.contracts import words
from clusterprof.align.match.calls import SYNCHRONISING, UNKNOWN, Calls, Ints

_NAME = pa.dictionary(pa.int32(), pa.string())


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


#: One row per collective and rank. Times are still each rank's own wall clock.
MATCHED = pa.schema(
    [
        #: number of the logical operation; rows of one collective share it
        _required("collective", pa.int64()),
        #: the report's id, or `inferred:<ranks>` where the reports have none
        _required("communicator", pa.string()),
        _required("operation", _NAME),
        #: position within the communicator (point-to-point: within the pair), from 0
        _required("order", pa.int64()),
        _required("rank", pa.int32()),
        #: the row of this rank's `collective_calls`
        _required("call", pa.int32()),
        #: `matched`: every profiled member has it; `incomplete`: a profiled member lacks it;
        #: `unmatched`: no other rank has it. The last two have a `reason`.
        _required("state", _NAME),
        pa.field("reason", pa.string()),
        #: confidence in the match, 0 to 1: 1.0 for ids with steps and times that agree
        _required("confidence", pa.float64()),
        #: what the data dependency allows the clock to conclude. `both`: cannot end before
        #: every `both` and `source` member has started; `sink`: the same, but delays no member;
        #: `source`: may end at any time; `none`: nothing is known
        _required("role", _NAME),
        _required("stream", pa.int64()),
        pa.field("message_bytes", pa.int64()),
        #: the step in whose host range the call was issued; null outside any step
        pa.field("step", pa.int64()),
        pa.field("group", pa.int32()),
        pa.field("issue_start_ns", pa.int64()),
        pa.field("start_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        _required("source", _NAME),
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


@dataclass(frozen=True)
class _Part:
    """Some calls (`rows`) of one rank, with what matching found of each or of all."""

    calls: Calls
    rows: Ints
    collective: Ints
    order: Ints
    communicator: str
    state: Any
    reason: Any
    confidence: float
    role: Any

    def column(self, name: str) -> Any:
        """The values of a column of MATCHED for the rows: None or `UNKNOWN` where there is none."""
        if name == "rank":
            return np.full(len(self.rows), self.calls.rank)
        if name in _OF_MATCHING:
            value = getattr(self, name)
            return np.broadcast_to(np.asarray(value, dtype=_OF_MATCHING[name]), self.rows.shape)
        return getattr(self.calls, _FIELDS.get(name, name))[self.rows]


_OF_MATCHING = {
    "collective": np.int64, "order": np.int64, "confidence": np.float64, "communicator": object,
    "state": object, "reason": object, "role": object,
}  # fmt: skip


class MatchedRows:
    """Collects the rows of a matched table; every call of every rank goes in exactly once."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._next = 0

    def _fresh(self, count: int) -> Ints:
        self._next += count
        return np.arange(self._next - count, self._next)

    def unmatched(self, calls: Calls, rows: Ints, name: str, reason: str) -> None:
        """Add calls that are matched with no other rank's, with the reason."""
        own = calls.reason[rows]
        reasons = np.where(own == None, reason, own)  # noqa: E711  (elementwise)
        fresh, order = self._fresh(len(rows)), np.arange(len(rows))
        self._parts.append(
            _Part(calls, rows, fresh, order, name, "unmatched", reasons, 0.0, "none")
        )

    def pairs(
        self, name: str, a: Calls, send: Ints, b: Calls, recv: Ints, confidence: float
    ) -> None:
        """Add Sends of `a` with the Recvs of `b`, one to one."""
        fresh, order = self._fresh(len(send)), np.arange(len(send))
        whole = a.has[send] & b.has[recv]
        state = np.where(whole, "matched", "incomplete")
        reason = np.where(whole, None, "one side has no device kernel")  # type: ignore[call-overload]
        for calls, rows, role in ((a, send, "source"), (b, recv, "sink")):
            self._parts.append(
                _Part(calls, rows, fresh, order, name, state, reason, confidence, role)
            )

    def collectives(
        self,
        name: str,
        members: Sequence[Calls],
        rows: Sequence[Ints],
        order: Sequence[Ints],
        confidence: float,
        roots: dict[int, int],
    ) -> None:
        """Add one communicator's calls, given each member's place `order` in the common order.

        `roots` turns the communicator's rank of a root into a global rank.
        """
        length = 1 + max((int(o.max()) for o in order if len(o)), default=-1)
        present = np.zeros((len(members), length), dtype=bool)
        kernel = np.zeros_like(present)
        for m, (c, r, o) in enumerate(zip(members, rows, order, strict=True)):
            present[m, o], kernel[m, o] = True, c.has[r]
        whole = kernel.all(axis=0)
        # a call that only one of several members has cannot be compared with anything
        single = present.sum(axis=0) == 1
        state = np.where(whole, "matched", np.where(single, "unmatched", "incomplete"))
        reason = np.full(length, None, dtype=object)
        ranks = np.asarray([c.rank for c in members])
        for k in np.flatnonzero(~whole):
            absent = ranks[~present[:, k]].tolist()
            what = "not captured on" if absent else "no device kernel on"
            reason[k] = f"{what} {words.ranks(absent or ranks[~kernel[:, k]].tolist())}"
        fresh = self._fresh(length)
        for c, r, o in zip(members, rows, order, strict=True):
            role = _roles(c, r, roots)
            role[state[o] == "unmatched"] = "none"
            self._parts.append(
                _Part(c, r, fresh[o], o, name, state[o], reason[o], confidence, role)
            )

    def table(self) -> pa.Table:
        """Return everything collected so far, schema `MATCHED`, sorted by collective and rank."""
        self._parts = [part for part in self._parts if len(part.rows)]
        if not self._parts:
            return MATCHED.empty_table()
        columns = {name: self._column(name) for name in MATCHED.names}
        table = pa.table(columns, schema=MATCHED)
        return table.sort_by([("collective", "ascending"), ("rank", "ascending")])

    def _column(self, name: str) -> pa.Array:
        kind = MATCHED.field(name).type
        values = np.concatenate([part.column(name) for part in self._parts])
        if values.dtype == object:
            plain = pa.array(values, pa.string())
            return plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain
        if name in ("start_ns", "end_ns"):
            mask = ~np.concatenate([part.calls.has[part.rows] for part in self._parts])
        else:
            mask = (values == UNKNOWN) & MATCHED.field(name).nullable
        return pa.array(values, kind, mask=mask)


def _roles(calls: Calls, rows: Ints, roots: dict[int, int]) -> np.ndarray:
    """What each call's data dependency is: see `MATCHED`."""
    operation = calls.operation[rows]
    role = np.full(len(rows), "none", dtype=object)
    role[np.isin(operation.astype(str), list(SYNCHRONISING))] = "both"
    for name, (at_root, elsewhere) in _ROOTED.items():
        for root in np.unique(calls.root[rows][operation == name]):
            if int(root) in roots:
                mine = roots[int(root)] == calls.rank
                these = (operation == name) & (calls.root[rows] == root)
                role[these] = at_root if mine else elsewhere
    return role
