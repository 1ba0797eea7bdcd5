"""One number for one step on all ranks, where the reports did not number them, or not alike.

Steps found by the optimizer's work (`source` is `optimizer`) count from 0 in each report, and
one report may begin a step later than another: their numbers say nothing across ranks. Numbers
that somebody gave may differ as well: a rank that takes six warm-up steps first has its step 20
when the others have their 14. The collectives, matched without any steps, tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.align.match.calls import UNKNOWN, Ints, steps_of
from clusterprof.align.match.matching import match
from clusterprof.align.match.shift import DRIFT_LIMIT_PPM, SURE
from clusterprof.tables import RankTables, empty

#: this part of the collectives that two ranks share must say the same
_AGREE_FRAC = 0.6
#: so many steps have a rhythm; members of one collective on one host end within this
_FEW, _TOGETHER_NS = 3, 10_000.0
#: steps; the same step of two ranks ends within less, and of what calls and one clock say as well
_BESIDE = 0.75


def numbered(ranks: Sequence[RankTables]) -> list[RankTables]:
    """Return the ranks with steps numbered alike.

    Those that were numbered keep their numbers, unless most ranks count otherwise; a warning says
    by how much. A rank that shares no collective with any other keeps its own count: nothing is
    compared.
    """
    own = {r.rank: r for r in ranks if _is_counted(r)}
    if len(ranks) < 2:
        return list(ranks)
    if not own:
        return _recounted(ranks)
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


def _recounted(ranks: Sequence[RankTables]) -> list[RankTables]:
    """Return ranks that all are numbered with the numbers that most of them have.

    Looked at only where one rank's steps lie more than a step beside another's of the same number.
    Then, without any numbers, the calls say which steps are the same: sure of their rhythm, or by
    the clock that ranks of one host share.
    """
    stepping = [r for r in ranks if r.steps.num_rows]
    lead = _lead(stepping)
    beside = [r for r in stepping if abs(lead[r.rank]) > _BESIDE]
    # a clock that is off is no other number: the same step ends at once, but for a constant
    if all(_ends_alike(_ends(stepping[0]), _ends(r)) for r in beside):
        return list(ranks)
    near = {rank: round(each) if np.isfinite(each) else None for rank, each in lead.items()}
    most = Counter(near.values()).most_common(1)[0][0]
    base = next(r for r in stepping if near[r.rank] == most)
    matched = match([replace(r, steps=empty("steps")) for r in ranks])
    rank, collective = (matched[name].to_numpy() for name in ("rank", "collective"))
    sure = matched["confidence"].to_numpy() >= SURE
    issue = pc.fill_null(matched["issue_start_ns"], 0).to_numpy()
    step = np.full(len(rank), UNKNOWN, dtype=np.int64)
    for r in stepping:
        here = (rank == r.rank) & (sure | (bool(r.info.host) and r.info.host == base.info.host))
        step[here] = steps_of(r, issue[here])
    out = []
    for r in ranks:
        by = 0
        if r.rank in lead and r is not base:
            told = _by_calls(r.rank, {base.rank: 0}, rank, collective, step)
            by = _believed(r, base, lead[base.rank] - lead[r.rank], told)
        out.append(_moved(r, by).warned(_said(r, by, base)) if by else r)
    return out


def _believed(
    tables: RankTables, base: RankTables, by_clock: float, told: tuple[int] | None
) -> int:
    """What to add to a rank's numbers, of what its calls and its host's clock say.

    Ranks of one host share its clock: what calls say against it is chance, as where the windows
    have nothing in common.
    """
    shared = bool(base.info.host) and tables.info.host == base.info.host and np.isfinite(by_clock)
    if told is not None and not (shared and abs(told[0] - by_clock) > _BESIDE):
        return told[0]
    steps = max(_ends(tables)[1].size, _ends(base)[1].size)
    return round(by_clock) if shared and abs(by_clock) > steps - 1 else 0


def _said(tables: RankTables, by: int, base: RankTables) -> str:
    """What a user is told of a rank whose steps are `by` behind what it counts."""
    mine, theirs = tables.steps["step"].to_numpy() + by, base.steps["step"].to_numpy()
    both = len(np.intersect1d(mine, theirs))
    how = f"{abs(by)} {'ahead of' if by < 0 else 'behind'}"
    shared = f"{both} step{'s' if both != 1 else ''}"
    return (
        f"it counts steps {how} the others, as a rank does that takes steps of its own first: its "
        f"step {mine[0] - by} is their {mine[0]}, and is called so; its window has "
        + (
            f"{shared} in common with rank {base.rank}'s"
            if both
            else "no step in common with theirs"
        )
    )


def _lead(ranks: Sequence[RankTables]) -> dict[int, float]:
    """By how many steps each rank is ahead of the first, by the wall clocks: in the median."""
    if not ranks:
        return {}
    first = _ends(ranks[0])
    usual = max(float(np.median(np.diff(first[1]))), 1.0) if len(first[1]) > 1 else np.inf
    lead = {}
    for r in ranks:
        number, end = _ends(r)
        _, a, b = np.intersect1d(first[0], number, return_indices=True)
        lead[r.rank] = float(np.median(first[1][a] - end[b])) / usual if len(a) else np.inf
    return lead


def _ends_alike(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> bool:
    """Whether steps of one number end together, but for a constant and a drift."""
    _, a, b = np.intersect1d(one[0], other[0], return_indices=True)
    if len(a) < _FEW:
        return False
    apart, when = (one[1][a] - other[1][b]).astype(float), (one[1][a] - one[1][a[0]]).astype(float)
    limit = DRIFT_LIMIT_PPM * 1e-6
    slope = np.clip(np.polyfit(when, apart - apart[0], 1)[0], -limit, limit)
    rest = apart - apart[0] - slope * when
    return float(np.quantile(np.abs(rest - np.median(rest)), 0.8)) < _TOGETHER_NS


def _ends(tables: RankTables) -> tuple[Ints, Ints]:
    """Steps, and when the last of each one's calls ended; without any, the host's part of it.

    On the device all ranks are in one step at once; their hosts run ahead by several steps.
    """
    calls = tables.collective_calls
    end = pc.fill_null(calls["end_ns"], 0).to_numpy()
    of = steps_of(tables, pc.fill_null(calls["issue_start_ns"], 0).to_numpy())
    timed = (end > 0) & (of != UNKNOWN)
    if not timed.any():
        return tables.steps["step"].to_numpy(), tables.steps["end_ns"].to_numpy()
    number, place = np.unique(of[timed], return_inverse=True)
    last = np.zeros(len(number), np.int64)
    np.maximum.at(last, place, end[timed])
    return number, last


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
