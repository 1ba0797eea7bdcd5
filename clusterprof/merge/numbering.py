"""One number for one step on all ranks, where the reports did not number them.

Steps found by the optimizer's work (`source` is `optimizer`) count from 0 in each report, and
one report may begin a step later than another: their numbers say nothing across ranks. The
collectives, matched without any steps, do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.merge.calls import UNKNOWN, Ints, steps_of
from clusterprof.merge.matching import match
from clusterprof.tables import RankTables, empty

#: this part of the collectives that two ranks share must say the same
_AGREE_FRAC = 0.6


def numbered(ranks: Sequence[RankTables]) -> list[RankTables]:
    """Return the ranks with steps numbered alike; those that were numbered keep their numbers.

    A rank that shares no collective with any other keeps its own count: nothing is compared.
    """
    own = {r.rank: r for r in ranks if _is_counted(r)}
    if not own or len(ranks) < 2:
        return list(ranks)
    matched = match([replace(r, steps=empty("steps")) if r.rank in own else r for r in ranks])
    rank = matched["rank"].to_numpy()
    collective = matched["collective"].to_numpy()
    issue = pc.fill_null(matched["issue_start_ns"], 0).to_numpy()
    step = np.full(len(rank), UNKNOWN, dtype=np.int64)
    for r in ranks:
        step[rank == r.rank] = steps_of(r, issue[rank == r.rank])
    added = _added(ranks, own, rank, collective, step)
    if len(own) == len(ranks):  # nobody has numbers of his own: count from 0
        least = min(int(r.steps["step"][0].as_py()) + added[r.rank] for r in ranks)
        added = {number: by - least for number, by in added.items()}
    return [_moved(r, added[r.rank]) if r.rank in own else r for r in ranks]


def _is_counted(tables: RankTables) -> bool:
    sources = tables.steps["source"].cast(pa.string())
    return bool(len(sources)) and sources[0].as_py() == "optimizer"


def _added(
    ranks: Sequence[RankTables],
    own: dict[int, RankTables],
    rank: Ints,
    collective: Ints,
    step: Ints,
) -> dict[int, int]:
    """What to add to each rank's numbers, from rank to rank through common collectives."""
    known = {r.rank: 0 for r in ranks if r.rank not in own and r.steps.num_rows}
    if not known:
        known[min(own)] = 0
    added = dict(known)
    while left := [r for r in own if r not in added]:
        found = {r: by for r in left if (by := _by_calls(r, added, rank, collective, step))}
        if not found:
            break
        added |= {r: by[0] for r, by in found.items()}
    return {r: added.get(r, 0) for r in {*own, *added}}


def _by_calls(
    one: int, added: dict[int, int], rank: Ints, collective: Ints, step: Ints
) -> tuple[int] | None:
    """What the collectives that `one` shares with numbered ranks say; None where they disagree."""
    said: list[Ints] = []
    mine = np.flatnonzero((rank == one) & (step != UNKNOWN))
    order = mine[np.argsort(collective[mine], kind="stable")]
    for other, by in added.items():
        theirs = np.flatnonzero((rank == other) & (step != UNKNOWN))
        _, a, b = np.intersect1d(collective[order], collective[theirs], return_indices=True)
        said.append(step[theirs[b]] + by - step[order[a]])
    votes = np.concatenate(said) if said else np.zeros(0, dtype=np.int64)
    if not len(votes):
        return None
    values, counts = np.unique(votes, return_counts=True)
    best = int(np.argmax(counts))
    return (int(values[best]),) if counts[best] >= _AGREE_FRAC * len(votes) else None


def _moved(tables: RankTables, by: int) -> RankTables:
    steps = tables.steps
    number = pa.array(steps["step"].to_numpy() + by, pa.int64())
    at = steps.schema.get_field_index("step")
    return replace(tables, steps=steps.set_column(at, steps.schema.field("step"), number))
