"""Dumps of torch 2.2 and 2.3 in the form that later versions have.

That of torch 2.2 is a list of entries alone, in microseconds; versions 1.x have more, from 1.4 on
the ranks of each group. Each rank numbers its groups for itself: what names one on all its members
is its ranks, and how many of the same ranks were made before it. Sends and receives are counted
together with the collectives of their group, and each rank counts its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof import words
from clusterprof.errors import ReportError
from clusterprof.ingest.operations import operation

_DIRECTED = ("Send", "Recv")
#: the group that torch makes first, of all ranks
_WORLD = 0


def as_version_2(path: Path, document: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return a dump as version 2 would have it, and warnings.

    Raises ReportError where its recorder has dropped what the calls' numbers could be counted by.
    """
    entries = [{"record_id": place, **entry} for place, entry in enumerate(document["entries"])]
    if all("process_group" in entry for entry in entries):
        return document, []
    config = document.get("pg_config") or {}
    groups = _groups({int(number): sorted(ranks) for number, ranks in config.items()})
    made = [_entry(call, *groups[call["pg_id"]][:2]) for call in entries if call["pg_id"] in groups]
    by_group: dict[int, list[dict[str, Any]]] = {}
    for call in made:
        by_group.setdefault(call["pg_id"], []).append(call)
    for calls in by_group.values():
        _count(path, calls)
    listed = {
        name: {"name": name, "desc": text, "ranks": ranks} for name, text, ranks in groups.values()
    }
    lost = len(entries) - len(made)
    text = (
        f"{lost} of {len(entries)} calls are of groups whose ranks the dump does not list: left out"
    )
    new = {"version": document["version"], "entries": made, "pg_config": listed}
    return new, [text] * bool(lost)


def _groups(ranks: Mapping[int, list[int]]) -> dict[int, tuple[str, str, list[int]]]:
    """Return name, description and ranks of each group of a rank, by its number."""
    made: Counter[tuple[int, ...]] = Counter()
    described = {_WORLD: ("0", "default_pg", ranks.get(_WORLD, []))}
    for number in sorted({*ranks} - {_WORLD}):
        members = ranks[number]
        made[tuple(members)] += 1
        which = f" ({made[tuple(members)]})" if made[tuple(members)] > 1 else ""
        described[number] = (words.numbers(members) + which, "", members)
    return described


def _entry(entry: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    us = entry.get("time_created_us")
    return {
        **entry,
        "process_group": [name, text],
        "time_created_ns": entry["time_created_ns"] if us is None else us * 1000,
        "is_p2p": operation(entry["profiling_name"]) in _DIRECTED,
    }


def _count(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Number the collectives of one group, and apart from them its sends and receives."""
    numbers = np.array([entry["seq_id"] for entry in entries], np.int64)
    directed = np.array([entry["is_p2p"] for entry in entries], bool)
    # what ends a batch has the number of its parts
    directed |= np.isin(numbers, numbers[directed])
    if directed.any() and numbers.min() > 1:
        raise ReportError(
            f"{path} lacks the first calls of a process group with sends and receives, which torch "
            "before 2.4 counts with its collectives: these have no numbers that other ranks share",
            "set TORCH_NCCL_TRACE_BUFFER_SIZE to more entries than the job makes, or take torch 2.4"
            " or later",
        )
    own = numbers.copy()
    for rows in (directed, ~directed) if directed.any() else ():
        own[rows] = np.unique(numbers[rows], return_inverse=True)[1].reshape(-1) + 1
    for entry, number, p2p in zip(entries, own.tolist(), directed.tolist(), strict=True):
        entry["is_p2p"] = p2p
        entry["collective_seq_id"], entry["p2p_seq_id"] = (0, number) if p2p else (number, 0)
