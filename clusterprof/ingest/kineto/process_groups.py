"""Process groups as a Kineto trace lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessGroup:
    """One process group that this rank belongs to, with the global ranks of its members."""

    name: str
    ranks: tuple[int, ...]

    @property
    def communicator(self) -> str:
        """Its id, equal on all members: name and ranks (`1[0-3,8]`), for names are counted."""
        return f"{self.name}[{_abridged(self.ranks)}]"


def process_groups(distributed: dict[str, Any]) -> dict[str, ProcessGroup]:
    """Return name -> group from a trace's `distributedInfo`, in order of creation."""
    groups = {}
    for entry in distributed.get("pg_config") or ():
        if isinstance(entry, dict) and "pg_name" in entry:
            name = str(entry["pg_name"])
            groups[name] = ProcessGroup(name, listed(entry.get("ranks", ())))
    return groups


def listed(ranks: object) -> tuple[int, ...]:
    """Return the ranks of a list, or of its text; none where Kineto cut it short with dots.

    Half a list would name another group.
    """
    text = str(ranks)
    return () if "..." in text else tuple(int(rank) for rank in re.findall(r"\d+", text))


def _abridged(ranks: Sequence[int]) -> str:
    """Return `0-3,8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
