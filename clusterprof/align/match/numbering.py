"""One number for one step on all ranks, where the reports did not number them, or not alike.

Steps found by the optimizer's work (`source` is `optimizer`) count from 0 in each report, and
one report may begin a step later than another: their numbers mean nothing across ranks. Numbers
that the program gave may differ as well: a rank that takes six warm-up steps first has its step 20
when the others have their 14. The collectives, matched without any steps, show which are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.align.match.calls import UNKNOWN, is_counted, steps_of
from clusterprof.align.match.matching import match
from clusterprof.align.match.shift import CERTAIN, RHYTHM_FRAC
from clusterprof.align.time_stamps import deviations, spread
from clusterprof.columns import Ints, StepNumbers, greatest_by, integers, places, rows_by
from clusterprof.tables import RankTables, empty

#: this part of the collectives that two ranks share must show the same
_AGREE_FRAC = 0.6
#: so many steps have a rhythm; members of one collective on one host end within this
_FEW, _ONE_END_NS = 3, 20_000.0
#: steps of one training last as long on all ranks, but for the few that a window begins with
_UNLIKE = 1.5
#: in steps: ends of the same step on two ranks differ by less, and so do the calls and one clock
_BESIDE = 0.75
#: in steps: a clock that is off lies so near to a whole number of them once in a hundred times
_WHOLE = 0.005


def numbered(ranks: Sequence[RankTables]) -> list[RankTables]:
    """Return the ranks with steps numbered alike.

    Those that were numbered keep their numbers, unless most ranks count otherwise; a warning says
    by how much. A rank that shares no collective with any other keeps its own count: nothing is
    compared.
    """
    if len(ranks) < 2:
        return list(ranks)
    ranks = _in_stride(ranks)
    own = [r.rank for r in ranks if is_counted(r)]
    if not own:
        return _recounted(ranks)
    calls = _in_steps(ranks, own)
    shifts = {r.rank: 0 for r in ranks if r.rank not in own and r.steps.num_rows} or {min(own): 0}
    added = dict.fromkeys(own, 0) | shifts
    # from rank to rank through common collectives
    while reached := _by_calls(calls, shifts, set(own) - set(shifts)):
        shifts |= reached
    added |= shifts
    if len(own) == len(ranks):  # no rank has numbers from its program: count from 0
        least = min(int(r.steps["step"][0].as_py()) + added[r.rank] for r in ranks)
        added = {number: by - least for number, by in added.items()}
    return [_moved(r, added[r.rank]) if r.rank in own else r for r in ranks]


def _in_stride(ranks: Sequence[RankTables]) -> list[RankTables]:
    """Return the ranks with numbers that go up alike, each with a warning where it is changed.

    A rank that counts by twos gets the numbers that the others count by. One whose steps last many
    times as long as theirs and have as many times their calls, as if it marked every second one,
    has no step that is one of theirs.
    """
    measured = ((r, _pace(r)) for r in ranks if not is_counted(r))
    paces = {r.rank: (*pace, r) for r, pace in measured if pace}
    if not paces:
        return list(ranks)
    usual = Counter(by for by, *_ in paces.values()).most_common(1)[0][0]
    middle = sorted(paces.values(), key=lambda pace: pace[1])[(len(paces) - 1) // 2]
    _, lasts, calls, base = middle
    in_stride = []
    for r in ranks:
        by, ns, own, _ = paces.get(r.rank, (usual, lasts, calls, r))
        if by != usual:
            first, number = r.steps["step"][0].as_py(), r.steps["step"].to_numpy()
            r = _moved(r, (number - first) // by * usual - (number - first)).warned(
                f"its step numbers go up by {by}, those of most ranks by {usual}: they are counted "
                f"as the others', from {first} on"
            )
        longer, more = ns / lasts, own / calls
        unlike = min(longer, more) >= _UNLIKE or max(longer, more) <= 1 / _UNLIKE
        if unlike and _at_one_time(r, base):
            r = replace(r, steps=empty("steps")).warned(
                f"its steps last {longer:.2g} times as long as those of most ranks: they are "
                "others (a range around several steps or a part of one, or another job?), so that "
                "they are not compared"
            )
        in_stride.append(r)
    return in_stride


def _pace(tables: RankTables) -> tuple[int, float, float] | None:
    """By how much a rank's numbers go up, how long a step lasts (ns, median), and its calls.

    None where it has few steps, or numbers that do not go up evenly, or no timed call: hosts alone
    run ahead of each other.
    """
    if not (integers(tables.collective_calls, "end_ns") > 0).any():
        return None
    _, end = _ends(tables)
    number = tables.steps["step"].to_numpy()
    in_step = steps_of(tables.steps, integers(tables.collective_calls, "issue_start_ns")) != UNKNOWN
    apart = np.diff(number)
    if len(end) <= _FEW or len(apart) < _FEW or apart.min() < 1 or (apart % apart[0]).any():
        return None
    calls = max(int(in_step.sum()), 1) / len(number)
    return int(apart[0]), max(float(np.median(np.diff(end))), 1.0), calls


def _in_steps(ranks: Sequence[RankTables], bare: Collection[int]) -> pa.Table:
    """Matched calls of all ranks: rank, collective, confidence, and the step of the rank.

    The steps of the ranks `bare` are not used for the matching.
    """
    matched = match([replace(r, steps=empty("steps")) if r.rank in bare else r for r in ranks])
    issue, rows = integers(matched, "issue_start_ns"), rows_by(integers(matched, "rank"))
    step = np.full(len(issue), UNKNOWN, dtype=np.int64)
    for r in ranks:
        if r.rank in rows:
            step[rows[r.rank]] = steps_of(r.steps, issue[rows[r.rank]])
    calls = matched.select(["rank", "collective", "confidence"]).append_column(
        "step", pa.array(step)
    )
    return calls.filter(step != UNKNOWN)


def _recounted(ranks: Sequence[RankTables]) -> list[RankTables]:
    """Return ranks that all are numbered with the numbers that most of them have.

    Checked only where one rank's steps lie more than a step beside another's of the same number.
    Then, without any numbers, the calls show which steps are the same: by a certain match, or by
    the clock that ranks share: those of one host, and those whose steps end at once but for a
    whole number of steps.
    """
    stepping = [r for r in ranks if r.steps.num_rows]
    lead = _lead(stepping)
    whole = {rank for rank, ahead in lead.items() if abs(ahead - round(ahead)) < _WHOLE}
    beside = [r for r in stepping if abs(lead[r.rank]) > _BESIDE]
    # a clock that is off is no other number: the same step ends at once, but for a constant
    if all(r.rank not in whole and _ends_alike(_ends(stepping[0]), _ends(r)) for r in beside):
        changed = {r.rank: _doubted(r, stepping[0], lead[r.rank]) for r in beside}
    else:
        most = Counter(map(round, lead.values())).most_common(1)[0][0]
        base = next(r for r in stepping if round(lead[r.rank]) == most)
        calls = _trusted(ranks, base, whole)
        by_calls = _by_calls(calls, {base.rank: 0}, set(lead) - {base.rank})
        changed = {r.rank: _counted_as(base, r, lead, by_calls.get(r.rank)) for r in stepping}
    return [changed.get(r.rank, r) for r in ranks]


def _trusted(ranks: Sequence[RankTables], base: RankTables, one_clock: Collection[int]) -> pa.Table:
    """The calls (`_in_steps`) that match for certain, and those of ranks on the clock of `base`."""
    sharing = [r.rank for r in ranks if _one_host(r, base) or {r.rank, base.rank} <= {*one_clock}]
    calls = _in_steps(ranks, [r.rank for r in ranks])
    certain = calls["confidence"].to_numpy() >= CERTAIN
    return calls.filter(certain | np.isin(integers(calls, "rank"), sharing))


def _one_host(tables: RankTables, base: RankTables) -> bool:
    return bool(base.info.host) and tables.info.host == base.info.host


def _counted_as(
    base: RankTables, tables: RankTables, lead: Mapping[int, float], by_calls: int | None
) -> RankTables:
    """A rank with the numbers of `base`, by its calls and by its host's clock, and a warning.

    `lead` as of `_lead`. Ranks of one host share its clock: where the calls contradict it that is
    chance, as where the windows have nothing in common.
    """
    if tables is base or not _at_one_time(tables, base):
        return tables
    one_clock, by_clock = _one_host(tables, base), lead[base.rank] - lead[tables.rank]
    by = by_calls or 0
    if by_calls is None or (one_clock and abs(by_calls - by_clock) > _BESIDE):
        steps = max(_ends(tables)[1].size, _ends(base)[1].size)
        by = round(by_clock) if one_clock and abs(by_clock) > steps - 1 else 0
    if by:
        return _moved(tables, by).warned(_warning(tables, by, base))
    alike = round(lead[tables.rank]) == round(lead[base.rank]) or _common(tables, base)
    return tables if alike else tables.warned(_undecided(tables, base))


def _warning(tables: RankTables, by: int, base: RankTables) -> str:
    """The warning that `by` is added to a rank's step numbers, so that it counts as `base` does:
    `tables` has its own numbers still.
    """
    common = _common(tables, base, by)
    first = tables.steps["step"][0].as_py()
    overlap = (
        f"{words.counted(common, 'step')} in common with rank {base.rank}'s"
        if common
        else f"no step in common with rank {base.rank}'s"
    )
    return (
        f"its step numbers are {abs(by)} {'ahead of' if by < 0 else 'behind'} those of the other "
        f"ranks (warm-up steps of its own?): its step {first} is renumbered as {first + by}, "
        f"and so on; its window has {overlap}"
    )


def _doubted(tables: RankTables, base: RankTables, lead: float) -> RankTables:
    """A rank whose clock is taken to be off, with a warning where its numbers may be as well.

    `lead` as of `_lead`, ahead of `base`. So it is where other steps end as much alike.
    """
    number, end = _ends(tables)
    if not _ends_alike(_ends(base), (number - round(lead), end)):
        return tables
    beside = f"{abs(lead):.2g} steps {'ahead of' if lead > 0 else 'behind'} rank {base.rank}'s"
    return tables.warned(
        f"by the wall clocks its steps are {beside} of the same numbers: its host's clock is taken "
        "to be off, but it may count otherwise, since all steps take as long"
    )


def _undecided(tables: RankTables, base: RankTables) -> str:
    """The warning about a rank whose numbers are others than `base` has at that time."""
    own, theirs = (
        f"{side.steps['step'][0].as_py()} to {side.steps['step'][-1].as_py()}"
        for side in (tables, base)
    )
    return (
        f"its steps are numbered {own}, and those that rank {base.rank} took at the same time "
        f"{theirs}: it counts otherwise or its host's clock is off, which nothing tells, so that "
        "its steps are not compared with the others'"
    )


def _common(tables: RankTables, base: RankTables, by: int = 0) -> int:
    """How many steps two ranks have in common once `by` is added to the first one's."""
    own, theirs = tables.steps["step"].to_numpy() + by, base.steps["step"].to_numpy()
    return len(np.intersect1d(own, theirs))


def _at_one_time(tables: RankTables, base: RankTables) -> bool:
    """Whether two ranks' windows are no further apart than the shorter one lasts, by the clocks.

    Over a longer time a small difference of pace is a step.
    """
    (_, own), (_, theirs) = _ends(tables), _ends(base)
    if not len(own) or not len(theirs):
        return False
    shorter = min(own[-1] - own[0], theirs[-1] - theirs[0])
    return bool(max(own[0] - theirs[-1], theirs[0] - own[-1]) <= shorter)


def _lead(ranks: Sequence[RankTables]) -> dict[int, float]:
    """By how many steps each rank's numbers are ahead of the first's, by the wall clocks.

    In the median of its steps; beyond the first rank's window as if its steps went on.
    """
    if not ranks:
        return {}
    number, end = _ends(ranks[0])
    usual = max(float(np.median(np.diff(end))), 1.0) if len(end) > 1 else np.inf
    lead = {}
    for r in ranks:
        steps, own_end = _ends(r)
        expected = np.interp(own_end - end[0], end - end[0], number)
        expected += (np.minimum(own_end - end[0], 0) + np.maximum(own_end - end[-1], 0)) / usual
        lead[r.rank] = float(np.median(steps - expected)) if np.isfinite(usual) else 0.0
    return lead


def _ends_alike(one: tuple[StepNumbers, Ints], other: tuple[StepNumbers, Ints]) -> bool:
    """Whether steps of one number end together, but for a constant and a drift."""
    _, a, b = np.intersect1d(one[0], other[0], return_indices=True)
    if len(a) < _FEW:
        return False
    return spread(deviations(one[1][a] - other[1][b], one[1][a]), RHYTHM_FRAC) < _ONE_END_NS


def _ends(tables: RankTables) -> tuple[StepNumbers, Ints]:
    """Steps, and when the last of each one's calls ended; without any, the host's part of it.

    On the device all ranks are in one step at once; their hosts run ahead by several steps.
    """
    calls = tables.collective_calls
    end = integers(calls, "end_ns")
    step_of_call = steps_of(tables.steps, integers(calls, "issue_start_ns"))
    timed = (end > 0) & (step_of_call != UNKNOWN)
    if not timed.any():
        return tables.steps["step"].to_numpy(), tables.steps["end_ns"].to_numpy()
    number, place = places(step_of_call[timed])
    return number, greatest_by(place, end[timed], np.zeros(len(number), np.int64))


def _by_calls(calls: pa.Table, added: Mapping[int, int], wanted: Collection[int]) -> dict[int, int]:
    """What to add to the steps of the ranks `wanted`, by collectives that they share with `added`.

    `calls` as of `_in_steps`; `added` has what is added to a rank's. Ranks whose collectives
    disagree are left out.
    """
    rank, collective, step = (integers(calls, name) for name in ("rank", "collective", "step"))
    sought, theirs = (np.isin(rank, list(ranks)) for ranks in (wanted, added))
    number = step + np.array([added.get(r, 0) for r in rank.tolist()], dtype=np.int64)
    numbers = pa.table({"collective": collective[theirs], "number": number[theirs]})
    numbers = numbers.group_by(["collective", "number"]).aggregate([([], "count_all")])
    own = pa.table({"rank": rank[sought], "collective": collective[sought], "step": step[sought]})
    votes = own.join(numbers, "collective", join_type="inner")
    votes = votes.append_column("by", pc.subtract(votes["number"], votes["step"]))
    counted: dict[int, Counter[int]] = {}
    for vote in votes.group_by(["rank", "by"]).aggregate([("count_all", "sum")]).to_pylist():
        counted.setdefault(vote["rank"], Counter())[vote["by"]] = vote["count_all_sum"]
    best = {r: max(sorted(tally), key=tally.__getitem__) for r, tally in counted.items()}
    return {r: by for r, by in best.items() if counted[r][by] >= _AGREE_FRAC * counted[r].total()}


def _moved(tables: RankTables, by: int | Ints) -> RankTables:
    steps = tables.steps
    number = pa.array(steps["step"].to_numpy() + by, pa.int64())
    column = steps.schema.get_field_index("step")
    return replace(tables, steps=steps.set_column(column, steps.schema.field("step"), number))
