"""The timeline of collectives by rank, as data for the page's script and as one still picture.

A lane is a rank, a row in it a communicator. A bar begins at the rank's arrival; it is
wait until the last arrival and transfer after it. A rank is marked as late in a collective
only where it arrives after the second-to-last by more than the two clocks may err.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import words
from clusterprof.report.summary import evidence_steps, rank_uncertainties, stragglers
from clusterprof.results import UNBOUNDED_NS, Results

Numbers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

#: calls that one page carries: some 20 bytes each
MOST_CALLS = 8_000
MOST_LANES = 48
MOST_ROWS = 4
#: resolution of the embedded times, ns: a tenth of what the best clock can tell
UNIT_NS = 100


@dataclass(frozen=True)
class Calls:
    """One entry per call, sorted by collective; `of` numbers the collectives from 0."""

    of: Numbers
    lane: Numbers
    row: Numbers
    start: Numbers
    end: Numbers


@dataclass(frozen=True)
class Groups:
    """One entry per collective, in the order of their last arrival."""

    operation: Numbers
    communicator: Numbers
    state: Numbers
    message_bytes: Numbers
    order: Numbers
    confidence: Numbers
    last: Numbers
    #: lane of the rank that came last by more than the clocks may err, -1 where none did
    late: Numbers
    #: by how much the last arrives after the second-to-last, ns
    margin: Numbers
    #: what the two clocks may err by, ns
    bound: Numbers
    #: 1 where it could not be matched, so that wait and transfer are not known
    alone: Numbers


@dataclass(frozen=True)
class Step:
    """A step's place in the timeline, ns on the reference rank's clock."""

    number: int | None
    steady: bool
    begin: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Everything that is drawn; `notes` says what was left out and why."""

    ranks: list[int]
    rows: list[int]
    named: list[int]
    operations: list[str]
    communicators: list[str]
    states: list[str]
    calls: Calls
    groups: Groups
    steps: list[Step]
    typical: int
    notes: list[str]


def build(results: Results, collectives: pa.Table) -> Timeline | None:
    """The timeline, or None where no call has a place in time.

    `collectives` is the placed table: one row per collective and rank with
    `aligned_start_ns`, `aligned_end_ns` and `last_arrival_ns`.
    """
    has_times = (pc.is_valid(collectives[f"aligned_{edge}_ns"]) for edge in ("start", "end"))
    placed = collectives.filter(pc.and_(*has_times))
    notes = []
    if placed.num_rows < collectives.num_rows:
        lost = words.counted(collectives.num_rows - placed.num_rows, "call")
        notes.append(f"{lost} without a kernel in the report cannot be drawn")
    if placed.num_rows == 0:
        return None
    named = stragglers(results)
    lanes = _lanes(named, placed, notes)
    placed = placed.filter(pc.is_in(placed["rank"], pa.array(lanes, placed["rank"].type)))
    placed, steps = _within_limit(placed, _steps(results, placed), notes)
    of, last = _numbered(placed)
    placed = placed.take(pa.array(np.lexsort((_integers(placed["aligned_start_ns"]), of))))
    of = np.sort(of)
    lane = np.searchsorted(np.array(lanes), _integers(placed["rank"]))
    coded = {name: _coded(placed[name]) for name in ("operation", "communicator", "state")}
    row = _rows(lane, coded["communicator"][0])
    start, end = (_integers(placed[f"aligned_{edge}_ns"]) for edge in ("start", "end"))
    head = np.searchsorted(of, np.arange(len(last)))
    alone = np.asarray(pc.is_null(placed["wait_ns"])).astype(np.int64)[head]
    late, margin, bound = _lateness(results, lanes, of, lane, start, head)
    confidence = np.asarray(pc.fill_null(placed["confidence"].cast(pa.float64()), -0.01))
    return Timeline(
        ranks=lanes,
        rows=[int(row[lane == each].max(initial=0)) + 1 for each in range(len(lanes))],
        named=[lanes.index(rank) for rank in named if rank in lanes],
        operations=coded["operation"][1],
        communicators=coded["communicator"][1],
        states=coded["state"][1],
        calls=Calls(of, lane, row, start, end),
        groups=Groups(
            **{name: codes[head] for name, (codes, _) in coded.items()},
            message_bytes=_integers(placed["message_bytes"], -1)[head],
            order=_integers(placed["order"], -1)[head],
            confidence=np.floor(confidence * 100 + 1e-9).astype(np.int64)[head],
            last=last,
            late=np.where(alone == 1, -1, late),
            margin=margin,
            bound=bound,
            alone=alone,
        ),
        steps=steps,
        typical=_typical(results, steps),
        notes=notes,
    )


#: columns of the collectives that the page gets unchanged
_AS_IS = ("operation", "communicator", "state", "order", "confidence", "late", "alone")


def embedded(timeline: Timeline) -> dict[str, Any]:
    """The timeline as compact plain data: times in units of `UNIT_NS` after the first begin.

    Per collective the last arrival is a difference from the one before; per call there are
    its wait (arrival before the last) and its duration, in the order of the collectives.
    """
    groups, calls = timeline.groups, timeline.calls
    zero = min(step.begin for step in timeline.steps)
    last = (groups.last - zero) // UNIT_NS
    return {
        "unit_ns": UNIT_NS,
        "lanes": [
            {"rank": rank, "rows": rows, "named": lane in timeline.named}
            for lane, (rank, rows) in enumerate(zip(timeline.ranks, timeline.rows, strict=True))
        ],
        "operations": timeline.operations,
        "communicators": timeline.communicators,
        "states": timeline.states,
        "steps": [
            {
                "step": step.number,
                "steady": step.steady,
                "begin": (step.begin - zero) // UNIT_NS,
                "end": (step.end - zero) // UNIT_NS,
            }
            for step in timeline.steps
        ],
        "typical": timeline.typical,
        **{name: getattr(groups, name).tolist() for name in _AS_IS},
        "bytes": groups.message_bytes.tolist(),
        "last": np.diff(last, prepend=0).tolist(),
        "margin": (groups.margin // UNIT_NS).tolist(),
        # -1: no bound is known
        "bound": np.where(groups.bound < UNBOUNDED_NS, -(-groups.bound // UNIT_NS), -1).tolist(),
        "members": np.bincount(calls.of, minlength=len(last)).tolist(),
        "lane": calls.lane.tolist(),
        "row": calls.row.tolist(),
        "wait": ((groups.last[calls.of] - calls.start) // UNIT_NS).tolist(),
        "length": ((calls.end - calls.start) // UNIT_NS).tolist(),
    }


_WIDTH, _GUTTER, _TOP, _ROW, _GAP = 1000, 72, 24, 15, 9
#: how far apart two arrivals have to be in the picture for the last to be marked
_VISIBLE = 3


def picture(timeline: Timeline) -> dict[str, Any]:
    """The typical step as a still picture, for paper and for browsers without scripts.

    An SVG of `width` x `height` with one path a tone: `wait`, `transfer`, `alone`, `late`.
    """
    step = timeline.steps[timeline.typical]
    calls, groups = timeline.calls, timeline.groups
    heights = [rows * _ROW for rows in timeline.rows]
    tops = np.cumsum([_TOP, *(height + _GAP for height in heights)])
    shown = (calls.end > step.begin) & (calls.start < step.end)
    scale = (_WIDTH - _GUTTER - 4) / max(step.end - step.begin, 1)

    def across(times: Numbers) -> Reals:
        inside = np.clip(times, step.begin, step.end) - step.begin
        return np.asarray(_GUTTER + inside * scale, np.float64)

    of = calls.of[shown]
    last = np.clip(groups.last[of], calls.start[shown], calls.end[shown])
    start, turn, end = across(calls.start[shown]), across(last), across(calls.end[shown])
    y = tops[calls.lane[shown]] + calls.row[shown] * _ROW
    alone = groups.alone[of] == 1
    late = (groups.late[of] == calls.lane[shown]) & (groups.last[of] >= step.begin)
    late &= groups.margin[of] * scale >= _VISIBLE
    return {
        "title": "the window" if step.number is None else f"step {step.number}",
        "width": _WIDTH,
        "height": tops[-1],
        "gutter": _GUTTER,
        "lanes": [
            {
                "rank": rank,
                "top": tops[lane],
                "middle": tops[lane] + heights[lane] / 2,
                "height": heights[lane],
                "named": lane in timeline.named,
            }
            for lane, rank in enumerate(timeline.ranks)
        ],
        "ticks": _ticks(step.end - step.begin, scale),
        "wait": _bars(start[~alone], turn[~alone], y[~alone]),
        "transfer": _bars(turn[~alone], end[~alone], y[~alone]),
        "alone": _bars(start[alone], end[alone], y[alone]),
        "late": _marks(turn[late], y[late]),
    }


def _bars(left: Reals, right: Reals, y: Numbers) -> str:
    """One path of rectangles; those narrower than half a unit share one per half unit."""
    real = right - left > 0.02
    left, right, y = left[real], right[real], y[real]
    narrow = right - left < 0.5
    key = np.where(narrow, np.floor(left * 2).astype(np.int64), -1 - np.arange(len(left)))
    width = np.maximum(right - left, 0.5)
    return "".join(
        f"M{left[i]:.1f} {y[i]}h{width[i]:.1f}v{_ROW - 2}h-{width[i]:.1f}z" for i in _first(key, y)
    )


def _marks(x: Reals, y: Numbers) -> str:
    """Triangles that point at a late arrival from above its bar, one per unit."""
    key = np.floor(x).astype(np.int64)
    return "".join(f"M{x[i]:.1f} {y[i] + 3}l-4 -7h8z" for i in _first(key, y))


def _first(*keys: Numbers) -> Numbers:
    """Where each combination of the keys comes first, in order."""
    _, first = np.unique(np.stack(keys), axis=1, return_index=True)
    return np.sort(first)


def _ticks(span_ns: int, scale: float) -> list[tuple[float, str]]:
    rough = span_ns / 8
    power = 10.0 ** math.floor(math.log10(max(rough, 1)))
    every = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    decimals = max(0, 6 - math.floor(math.log10(every)))
    count = int(span_ns / every) + 1
    return [
        (round(_GUTTER + k * every * scale, 1), words.milliseconds(k * every, min(decimals, 3)))
        for k in range(count)
        if k * every * scale < _WIDTH - _GUTTER - 30
    ]


def _lanes(stragglers: Sequence[int], placed: pa.Table, notes: list[str]) -> list[int]:
    """The ranks that get a lane: all, or those that findings name and an even choice."""
    ranks = sorted(pc.unique(placed["rank"]).to_pylist())
    if len(ranks) <= MOST_LANES:
        return ranks
    named = [rank for rank in stragglers if rank in ranks][: MOST_LANES // 2]
    others = [rank for rank in ranks if rank not in named]
    even = np.linspace(0, len(others) - 1, MOST_LANES - len(named)).round().astype(int)
    notes.append(f"{MOST_LANES} of {len(ranks)} ranks have a lane, those that findings name first")
    return sorted({*named, *(others[i] for i in even)})


def _steps(results: Results, placed: pa.Table) -> list[Step]:
    """The steps in time; the end of one is the next one's begin or the last end in it.

    Results without any step give one span over everything.
    """
    first = int(pc.min(placed["aligned_start_ns"]).as_py())
    final = int(pc.max(placed["aligned_end_ns"]).as_py())
    # Calls of other times than the results' steps (a foreign table) still get a span.
    entries = sorted(results["steps"], key=lambda entry: entry["step"])
    entries = [step for step in entries if step.get("begin_ns") and step["begin_ns"] < final]
    if not entries:
        return [Step(number=None, steady=True, begin=first, end=max(final, first + 1))]
    begins = [entry["begin_ns"] for entry in entries]
    ends = [*begins[1:], begins[-1] + entries[-1]["duration_ns"]]
    return [
        Step(entry["step"], entry["settled"], begin, max(end, begin + 1))
        for entry, begin, end in zip(entries, begins, ends, strict=True)
    ]


def _numbered(placed: pa.Table) -> tuple[Numbers, Numbers]:
    """Each call's collective, numbered by their last arrivals; and those, ns."""
    arrival = _integers(pc.coalesce(placed["last_arrival_ns"], placed["aligned_start_ns"]))
    _, of = np.unique(_integers(placed["collective"]), return_inverse=True)
    last = np.full(int(of.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, of, arrival)
    by_arrival = np.argsort(last, kind="stable")
    return np.argsort(by_arrival)[of], last[by_arrival]


def _lateness(
    results: Results, lanes: list[int], of: Numbers, lane: Numbers, start: Numbers, head: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Lane of the last rank, its margin and bound; calls are sorted by collective and arrival."""
    known = rank_uncertainties(results)
    uncertainty = np.array([known.get(rank, 0) for rank in lanes], np.int64)
    final = np.append(head[1:], len(of)) - 1
    before = np.maximum(final - 1, head)
    margin = start[final] - start[before]
    bound = uncertainty[lane[final]] + uncertainty[lane[before]]
    late = np.where((margin > bound) & (final > head), lane[final], -1)
    return late, margin, bound


def _rows(lane: Numbers, communicator: Numbers) -> Numbers:
    """A row of its rank's lane for each communicator, at most `MOST_ROWS`."""
    pairs, of = np.unique(np.stack([lane, communicator]), axis=1, return_inverse=True)
    first = np.searchsorted(pairs[0], pairs[0])
    row = np.minimum(np.arange(pairs.shape[1]) - first, MOST_ROWS - 1)
    return np.asarray(row[of.reshape(-1)], np.int64)


def _within_limit(
    placed: pa.Table, steps: list[Step], notes: list[str]
) -> tuple[pa.Table, list[Step]]:
    """Keep whole steps, steady-state ones first, of at most `MOST_CALLS` calls."""
    if placed.num_rows <= MOST_CALLS:
        return placed, steps
    of, last = _numbered(placed)
    begins = np.array([each.begin for each in steps])
    step = np.maximum(np.searchsorted(begins, last, side="right") - 1, 0)
    per_step = np.bincount(step[of], minlength=len(steps))
    kept: list[int] = []
    for index in sorted(np.flatnonzero(per_step).tolist(), key=lambda i: (not steps[i].steady, i)):
        if kept and per_step[[*kept, index]].sum() > MOST_CALLS:
            break
        kept.append(index)
    kept.sort()
    numbers = words.spans((steps[i].number or 0 for i in kept), limit=6)
    some = words.counted(len(kept), "step")
    notes.append(f"the timeline carries {some} of {len(steps)}: {numbers}")
    keep = np.isin(step, kept)
    length = np.zeros(len(keep), np.int64)
    spent = pc.subtract(placed["aligned_end_ns"], placed["aligned_start_ns"])
    np.maximum.at(length, of, _integers(spent))
    longest = np.argsort(np.where(keep, -length, 1), kind="stable")
    fits = longest[np.cumsum(np.bincount(of)[longest]) <= MOST_CALLS]
    if len(fits) < keep.sum():
        notes.append(f"its {int(keep.sum()) - len(fits):,} shortest collectives are not drawn")
        keep &= np.isin(np.arange(len(keep)), fits)
    return placed.filter(pa.array(keep[of])), [steps[i] for i in kept]


def _typical(results: Results, steps: Sequence[Step]) -> int:
    """The evidence step of median duration, of those in the costliest finding if it names any."""
    evidence = set(evidence_steps(results)[0])
    named = set(results["findings"][0]["steps"]) if results["findings"] else set()
    wanted = evidence & named or evidence
    able = [i for i, step in enumerate(steps) if step.number in wanted] or list(range(len(steps)))
    able.sort(key=lambda i: steps[i].end - steps[i].begin)
    return able[(len(able) - 1) // 2]


def _integers(column: pa.ChunkedArray, missing: int = 0) -> Numbers:
    return np.asarray(pc.fill_null(column.cast(pa.int64()), missing), np.int64)


def _coded(column: pa.ChunkedArray) -> tuple[Numbers, list[str]]:
    """Codes and their texts, fit to be shown; a missing text is empty."""
    encoded = pc.fill_null(column.cast(pa.string()), "").combine_chunks().dictionary_encode()
    texts = [words.plain(text) for text in encoded.dictionary.to_pylist()]
    return np.asarray(encoded.indices, np.int64), texts
