"""The matched table while it is being built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from clusterprof.align.match.calls import SYNCHRONISING, UNKNOWN, Calls, Ints
from clusterprof.align.match.matched import MATCHED

_ROOTED = {"Broadcast": ("source", "sink"), "Scatter": ("source", "sink")}
_ROOTED |= {"Reduce": ("sink", "source"), "Gather": ("sink", "source")}


class Rows:
    """Collects blocks of rows; every call of every rank goes in exactly once."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._next = 0

    def _block(
        self,
        calls: Calls,
        rows: Ints,
        collective: Ints,
        order: Ints,
        name: str,
        state: Any,
        reason: Any,
        confidence: float,
        role: Any,
    ) -> None:
        if len(rows):
            self._blocks.append(
                {
                    "calls": calls,
                    "rows": rows,
                    "collective": collective,
                    "order": order,
                    "communicator": name,
                    "state": np.broadcast_to(np.asarray(state, dtype=object), rows.shape),
                    "reason": np.broadcast_to(np.asarray(reason, dtype=object), rows.shape),
                    "confidence": confidence,
                    "role": np.broadcast_to(np.asarray(role, dtype=object), rows.shape),
                }
            )

    def alone(self, calls: Calls, rows: Ints, name: str, reason: str) -> None:
        """Add calls that are matched with no other rank's, and say why."""
        fresh = self._next + np.arange(len(rows))
        self._next += len(rows)
        own = calls.reason[rows]
        reasons = np.where(own == None, reason, own)  # noqa: E711  (elementwise)
        self._block(
            calls, rows, fresh, np.arange(len(rows)), name, "unmatched", reasons,
            0.0, "none",
        )  # fmt: skip

    def pairs(self, name: str, a: Calls, send: Ints, b: Calls, recv: Ints, sure: float) -> None:
        """Add Sends of `a` with the Recvs of `b`, one to one."""
        fresh = self._next + np.arange(len(send))
        self._next += len(send)
        order = np.arange(len(send))
        whole = a.has[send] & b.has[recv]
        state = np.where(whole, "matched", "incomplete")
        reason = np.where(whole, None, "one side has no device kernel")  # type: ignore[call-overload]
        for calls, rows, role in ((a, send, "source"), (b, recv, "sink")):
            self._block(calls, rows, fresh, order, name, state, reason, sure, role)

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
        ranks = [c.rank for c in members]
        length = 1 + max((int(o.max()) for o in order if len(o)), default=-1)
        present = np.zeros((len(members), length), dtype=bool)
        kernel = np.zeros_like(present)
        for m, (c, r, o) in enumerate(zip(members, rows, order, strict=True)):
            present[m, o], kernel[m, o] = True, c.has[r]
        whole = kernel.all(axis=0)
        reason = np.full(length, None, dtype=object)
        for k in np.flatnonzero(~whole):
            lacking = [ranks[m] for m in np.flatnonzero(~present[:, k])]
            what = "not captured on" if lacking else "no device kernel on"
            lacking = lacking or [ranks[m] for m in np.flatnonzero(~kernel[:, k])]
            reason[k] = f"{what} {_named(lacking)}"
        # a call that only one of several members has cannot be compared with anything
        single = present.sum(axis=0) == 1
        state = np.where(whole, "matched", np.where(single, "unmatched", "incomplete"))
        for c, r, o in zip(members, rows, order, strict=True):
            role = _roles(c, r, roots)
            role[state[o] == "unmatched"] = "none"
            self._block(c, r, self._next + o, o, name, state[o], reason[o], confidence, role)
        self._next += length

    def table(self) -> pa.Table:
        """Return all rows, sorted by collective and rank, in the schema `MATCHED`."""
        if not self._blocks:
            return MATCHED.empty_table()
        columns = {name: self._column(name) for name in MATCHED.names}
        table = pa.table(columns, schema=MATCHED)
        return table.sort_by([("collective", "ascending"), ("rank", "ascending")])

    def _column(self, name: str) -> pa.Array:
        kind = MATCHED.field(name).type
        blocks = self._blocks
        if name in ("collective", "order"):
            return pa.array(np.concatenate([b[name] for b in blocks]), kind)
        if name in ("state", "reason", "role"):
            return _encoded(np.concatenate([b[name] for b in blocks]), kind)
        if name == "communicator":
            each = [np.full(len(b["rows"]), b[name], dtype=object) for b in blocks]
            return pa.array(np.concatenate(each), kind)
        if name == "confidence":
            return pa.array(np.concatenate([np.full(len(b["rows"]), b[name]) for b in blocks]))
        if name == "rank":
            each = [np.full(len(b["rows"]), b["calls"].rank) for b in blocks]
            return pa.array(np.concatenate(each), kind)
        field = {
            "message_bytes": "size",
            "issue_start_ns": "issue",
            "start_ns": "start",
            "end_ns": "end",
        }.get(name, name)
        values = np.concatenate([getattr(b["calls"], field)[b["rows"]] for b in blocks])
        if values.dtype == object:
            return _encoded(values, kind)
        if name in ("start_ns", "end_ns"):
            mask = ~np.concatenate([b["calls"].has[b["rows"]] for b in blocks])
        else:
            mask = (values == UNKNOWN) & MATCHED.field(name).nullable
        return pa.array(values, kind, mask=mask)


def _encoded(values: Any, kind: pa.DataType) -> pa.Array:
    plain = pa.array(values, pa.string())
    return plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain


def _named(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"


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
