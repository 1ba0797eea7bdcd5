"""How many ranks a job has at least, and what contradicts it, by the sizes of its communicators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pyarrow.compute as pc

from clusterprof import words
from clusterprof.tables import RankTables

#: communicators that a warning lists
_MOST_NAMED = 4


def with_world(found: Sequence[RankTables]) -> list[RankTables]:
    """Return the ranks of one job with its size, where the reports state none or too few.

    It has as many ranks as its largest communicator has members: a warning names that.
    """
    stated = max((each.info.world_size or 0 for each in found), default=0)
    largest = max(found, key=_largest, default=None)
    if largest is None or _largest(largest) <= max(stated, len(found)):
        return list(found)
    size = _largest(largest)
    by = f"the job has {size} ranks at least, as the size or members of its communicator tell"
    doubt = f": the report that gives it {stated} is wrong" if stated else ", which no report says"
    return [
        replace(each, info=replace(each.info, world_size=size)).warned(
            *([by + doubt] if each is largest else [])
        )
        for each in found
    ]


def _largest(tables: RankTables) -> int:
    """How many ranks a rank's communicators tell of: their size, or the highest of their members.

    0 where none tells any.
    """
    calls = tables.collective_calls
    size = pc.max(calls["communicator_size"]).as_py() or 0
    highest = pc.max(pc.list_flatten(calls["members"])).as_py()
    return max(size, 0 if highest is None else highest + 1)


def ambiguous(found: Sequence[RankTables]) -> list[str]:
    """Return a warning of communicators of one name that more ranks have than they have members.

    Or fewer, though all ranks are there.
    """
    ranks: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for tables in found:
        calls = tables.collective_calls.filter(pc.is_null(tables.collective_calls["members"]))
        for name in calls["communicator"].unique().drop_null().to_pylist():
            mine = calls.filter(pc.equal(calls["communicator"], name))["communicator_size"]
            ranks.setdefault(name, []).append(tables.rank)
            sizes[name] = max(sizes.get(name, 0), pc.max(mine).as_py() or 0)
    unprofiled = max((t.info.world_size or math.inf for t in found), default=0) - len(found)
    ids = any(name.startswith("0x") for name in ranks)
    unprofiled = math.inf if ids else unprofiled
    split = [name for name, having in ranks.items() if sizes[name] - len(having) > unprofiled]
    several = words.listed((words.plain(name.removesuffix("[]")) for name in split), _MOST_NAMED)
    differently = (
        f"reports name one communicator differently ({several}): who belongs together is inferred "
        "from times"
    )
    return [differently][: len(split)] + [
        f"communicator {words.plain(name)} has {sizes[name]} members, and {words.ranks(having)}"
        " have one of that name: they are several, and who belongs together is inferred from times"
        for name, having in ranks.items()
        if 1 < sizes[name] < len(having)
    ]
