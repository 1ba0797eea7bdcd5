"""The timeline by rank, as data for the page's script, which draws it.

A lane is a rank. Its rows are the program's phases, the host's threads, the device, and one for
each communicator. In those a bar begins at the rank's arrival; it is
wait until the last arrival and transfer after it. A rank is marked as late in a collective
only where it arrives after the second-to-last by more than the two clocks may err.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.columns import (
    Ints,
    Stretches,
    begins,
    count_by,
    first_of,
    greatest_by,
    integers,
    inverse,
    last_at_or_before,
    order_by,
    places,
    preceding,
    row_of,
)
from clusterprof.report.summary import Summary
from clusterprof.results import UNBOUNDED_NS, Results, steps_to_look_at
from clusterprof.tables import SPAN_ROWS, SPANS

#: calls that one page carries, some 20 bytes each, of at most so many ranks
MOST_CALLS = {64: 50_000, 2**31: 120_000}
MOST_ROWS = 4
#: lanes that are open at first
MOST_LANES = 8
#: resolution of the embedded times, ns: a tenth of what the best clock can tell
UNIT_NS = 100


@dataclass(frozen=True)
class Step:
    """A step's place in the timeline, ns on the reference rank's clock."""

    number: int | None
    steady: bool
    begin: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """What the page's script draws, and what the page itself says of it."""

    #: compact plain data: times in units of `UNIT_NS` after the first step's begin
    data: dict[str, Any]
    ranks: list[int]
    steps: list[Step]
    #: the place in `steps` of the one that is shown first
    typical: int
    #: the kinds of bars that are drawn; `alone` is a collective that was not matched
    kinds: set[str]
    #: what was left out, and why
    notes: list[str]


def build(run: Summary, collectives: pa.Table, spans: pa.Table | None = None) -> Timeline | None:
    """The timeline, or None where nothing has a place in time.

    `collectives` is the placed table: one row per collective and rank with
    `aligned_start_ns`, `aligned_end_ns` and `last_arrival_ns`. `spans` is what hosts and devices
    did (`merged/lanes.parquet`).
    """
    has_times = (pc.is_valid(collectives[f"aligned_{edge}_ns"]) for edge in ("start", "end"))
    placed = collectives.filter(pc.and_(*has_times))
    spans = SPANS.empty_table() if spans is None else spans
    spans = spans.filter(pc.is_in(spans["row"].cast(pa.string()), pa.array(SPAN_ROWS)))
    ranks = np.union1d(placed["rank"].to_numpy(), spans["rank"].to_numpy()).tolist()
    if not ranks:
        return None
    notes = _left_out(collectives.num_rows - placed.num_rows, spans)
    placed, steps = _within_limit(run.results, placed, spans, len(ranks), notes)
    zero = min(step.begin for step in steps)
    calls, drawn = _call_columns(placed, ranks, run, zero), _span_columns(spans, ranks, zero)
    numbers = {step.number: k for k, step in enumerate(steps)}
    first = [numbers[step] for step in steps_to_look_at(run.results) if step in numbers]
    # the longest steady-state step where that is another one than the typical
    typical, worst = [*(first or [0]), -1][:2]
    medians = {entry["step"]: entry["duration_ns"] for entry in run.results["steps"]}
    data = {
        "unit_ns": UNIT_NS,
        "lanes": _lanes(run, ranks, calls),
        "steps": [
            {
                "step": step.number,
                "steady": step.steady,
                "begin": (step.begin - zero) // UNIT_NS,
                "end": (step.end - zero) // UNIT_NS,
                # over the ranks, as everywhere: by it the longest is chosen
                "median": medians.get(step.number or 0, step.end - step.begin) // UNIT_NS,
            }
            for step in steps
        ],
        "typical": typical,
        "worst": worst,
        "presets": _presets(run, ranks),
        # findings that name ranks, by their anchors
        "findings": [
            {"anchor": f"finding-{number}", "code": finding["code"], "ranks": finding["ranks"]}
            for number, finding in enumerate(run.results["findings"], 1)
        ],
        "spans": drawn,
        **calls,
    }
    kinds = {*drawn["kinds"], *(["alone"] if any(calls["alone"]) else [])}
    return Timeline(data, ranks, steps, typical, kinds, notes)


def _left_out(calls: int, spans: pa.Table) -> list[str]:
    """What cannot be drawn as it is: calls without a time, and short spans."""
    notes = []
    if calls:
        lost = words.counted(calls, "call")
        notes.append(f"{lost} without a kernel in the report cannot be drawn")
    if merged_below_ns := pc.max(spans["merged_below_ns"]).as_py():
        short = words.duration(merged_below_ns)
        notes.append(f"spans shorter than {short} are merged, each kind one behind the other")
    return notes


def _lanes(run: Summary, ranks: list[int], calls: dict[str, list[Any]]) -> list[dict[str, Any]]:
    stragglers = run.stragglers()
    lane, row = (np.array(calls[name], np.int64) for name in ("lane", "row"))
    last_rows = greatest_by(lane, row, np.zeros(len(ranks), np.int64)).tolist()
    return [
        {
            "rank": rank,
            "host": words.plain(run.hosts.get(rank, "")),
            "rows": last_row + 1,
            "named": rank in stragglers,
        }
        for rank, last_row in zip(ranks, last_rows, strict=True)
    ]


def _call_columns(
    placed: pa.Table, ranks: list[int], run: Summary, zero: int
) -> dict[str, list[Any]]:
    """The calls, by collective and rank's arrival; the collectives, by their last arrival.

    Per collective the last arrival is a difference from the one before; per call there are
    its wait (arrival before the last) and its duration, in the order of the collectives.
    """
    collective, last = _numbered(placed)
    placed = placed.take(order_by(collective, integers(placed, "aligned_start_ns")))
    collective = np.sort(collective)
    members = Stretches.of(collective)
    lane = row_of(ranks, integers(placed, "rank"))
    coded = {name: _coded(placed[name]) for name in ("operation", "communicator", "state")}
    start, end = (integers(placed, f"aligned_{edge}_ns") for edge in ("start", "end"))
    alone = np.asarray(pc.is_null(placed["wait_ns"])).astype(np.int64)[members.first]
    # who came last, and by how much after the second-to-last
    uncertainty = np.array([run.uncertainties.get(rank, 0) for rank in ranks], np.int64)[lane]
    final, before = members.last, np.maximum(members.last - 1, members.first)
    margin, bound = start[final] - start[before], uncertainty[final] + uncertainty[before]
    is_late = (margin > bound) & (members.size > 1) & (alone == 0)
    confidence = np.asarray(pc.fill_null(placed["confidence"].cast(pa.float64()), -0.01))
    # a row of its rank's lane for each communicator, at most `MOST_ROWS`
    pairs, of_pair = np.unique(
        np.stack([lane, coded["communicator"][0]]), axis=1, return_inverse=True
    )
    row = np.minimum(np.arange(pairs.shape[1]) - first_of(begins(pairs[0])), MOST_ROWS - 1)
    # what the communicators are for, as far as that is known
    kinds = {
        words.plain(group["communicator"]): group["kind"]
        for group in run.results["topology"]["groups"]
        if group["kind"] != "unknown"
    }
    columns = {name: codes[members.first] for name, (codes, _) in coded.items()} | {
        "bytes": integers(placed, "message_bytes", -1)[members.first],
        "order": integers(placed, "order", -1)[members.first],
        "confidence": np.floor(confidence * 100 + 1e-9).astype(np.int64)[members.first],
        "last": np.diff((last - zero) // UNIT_NS, prepend=0),
        # lane of the rank that came last by more than the clocks may err, -1 where none did
        "late": np.where(is_late, lane[final], -1),
        # by how much the last arrives after the second-to-last
        "margin": margin // UNIT_NS,
        # what the two clocks may err by; -1: no bound is known
        "bound": np.where(bound < UNBOUNDED_NS, -(-bound // UNIT_NS), -1),
        # 1 where it could not be matched, so that wait and transfer are not known
        "alone": alone,
        "members": members.size,
        "lane": lane,
        "row": row[of_pair.reshape(-1)],
        "wait": (last[collective] - start) // UNIT_NS,
        "length": (end - start) // UNIT_NS,
    }
    return {
        **{f"{name}s": texts for name, (_, texts) in coded.items()},
        "groups": [kinds.get(name, "") for name in coded["communicator"][1]],
        **{name: column.tolist() for name, column in columns.items()},
    }


def _span_columns(spans: pa.Table, ranks: list[int], zero: int) -> dict[str, list[Any]]:
    """Per lane and row how many spans; per span what lies before it, its length, its name's number.

    `names` and `kinds` go together. `many` are the counts of spans that stand for more than one, by
    their places in `merged`.
    """
    (row, rows), (kind, kinds) = _coded(spans["row"]), _coded(spans["kind"])
    text, texts = _coded(spans["name"])
    pairs, name = places(kind * len(texts) + text)
    key = row_of(ranks, integers(spans, "rank")) * len(SPAN_ROWS)
    key += np.array([SPAN_ROWS.index(name) for name in rows], np.int64)[row]
    start, end, count = (integers(spans, column) for column in ("start_ns", "end_ns", "count"))
    order = order_by(key, start)
    key, name, count = key[order], name[order], count[order]
    start, end = ((times[order] - zero) // UNIT_NS for times in (start, end))
    of_key = Stretches.of(key)
    gap = start - preceding(end, 0)
    gap[of_key.first] = start[of_key.first]
    merged = np.flatnonzero(count > 1)
    columns = {
        "key": key[of_key.first],
        "size": of_key.size,
        "gap": gap,
        "length": end - start,
        "name": name,
        "merged": np.diff(merged, prepend=0),
        "many": count[merged],
    }
    return {
        "rows": list(SPAN_ROWS),
        "kinds": [kinds[pair // len(texts)] for pair in pairs],
        # kernels of templates have names of thousands of characters
        "names": [texts[pair % len(texts)][:200] for pair in pairs],
        "merged_below": -(-(pc.max(spans["merged_below_ns"]).as_py() or 0) // UNIT_NS),
        **{column: values.tolist() for column, values in columns.items()},
    }


def _presets(run: Summary, ranks: list[int]) -> list[dict[str, Any]]:
    """Choices of lanes by name: the first is open at first, the last has all ranks."""
    named = run.stragglers()
    averages = [row for row in run.averages if row.rank in ranks]
    averages.sort(key=lambda row: row.exposed_wait_ns)
    waiting_least = [row.rank for row in averages[:MOST_LANES]]
    that_wait_least = f"the {len(waiting_least)} that wait least"
    presets = _peers(run, named[0], ranks) if named else []
    if len(ranks) > MOST_LANES:
        near = chain.from_iterable(dict(presets).values())
        opened = [*named[: MOST_LANES // 2], *near, *waiting_least]
        label = "stragglers and peers" if named else that_wait_least
        presets = [(label, list(dict.fromkeys(opened))[:MOST_LANES]), *presets]
        presets += [(that_wait_least, waiting_least)] if named else []
    by_host = sorted(run.hosts.items(), reverse=True)
    of_host = {host: rank for rank, host in by_host if rank in ranks}
    if len(of_host) > 1:
        presets.append(("one rank per host", [*of_host.values()]))
    presets = [(name, some) for name, some in presets if len(some) < len(ranks)]
    presets.insert(len(presets) if len(ranks) > MOST_LANES else 0, ("all ranks", ranks))
    return [
        {"name": name, "lanes": row_of(ranks, np.sort(np.array(some))).tolist()}
        for name, some in presets
    ]


def _peers(run: Summary, rank: int, ranks: list[int]) -> list[tuple[str, list[int]]]:
    """A rank with an even choice of the drawn members of each of its groups."""
    peers: dict[str, list[int]] = {}
    for group in run.results["topology"]["groups"]:
        if rank in group["ranks"] and len(group["ranks"]) > 1:
            others = [peer for peer in group["ranks"] if peer in ranks and peer != rank]
            count = min(2 * MOST_LANES - 1, len(others))
            even = np.linspace(0, max(len(others) - 1, 0), count).round()
            name = f"rank {rank} and its {group['kind']} group"
            peers.setdefault(name, [rank, *(others[int(k)] for k in even)])
    return [*peers.items()]


def _steps(results: Results, placed: pa.Table, spans: pa.Table) -> list[Step]:
    """The steps in time, each up to the next one's begin or its last end.

    Results without any step give one span over everything, and so do calls of other times than
    theirs (a foreign table).
    """
    first = [pc.min(column).as_py() for column in (placed["aligned_start_ns"], spans["start_ns"])]
    final = [pc.max(column).as_py() for column in (placed["aligned_end_ns"], spans["end_ns"])]
    begin, end = min(t for t in first if t is not None), max(t for t in final if t is not None)
    entries = [step for step in results["steps"] if step["begin_ns"] < end]
    if not entries:
        return [Step(number=None, steady=True, begin=begin, end=max(end, begin + 1))]
    ends = [step["begin_ns"] for step in entries[1:]]
    ends.append(entries[-1]["begin_ns"] + entries[-1]["duration_ns"])
    return [
        Step(step["step"], step["settled"], step["begin_ns"], max(end, step["begin_ns"] + 1))
        for step, end in zip(entries, ends, strict=True)
    ]


def _numbered(placed: pa.Table) -> tuple[Ints, Ints]:
    """Each call's collective, numbered by their last arrivals; and those, ns."""
    arrival = pc.coalesce(placed["last_arrival_ns"], placed["aligned_start_ns"]).to_numpy()
    numbers, collective = places(integers(placed, "collective"))
    last = greatest_by(collective, arrival, np.full(len(numbers), np.iinfo(np.int64).min))
    by_arrival = order_by(last)
    return inverse(by_arrival)[collective], last[by_arrival]


def _within_limit(
    results: Results, placed: pa.Table, spans: pa.Table, ranks: int, notes: list[str]
) -> tuple[pa.Table, list[Step]]:
    """The steps to draw (those with spans, typical and worst first, that fit), and their calls."""
    most_calls = next(count for size, count in MOST_CALLS.items() if ranks <= size)
    steps = _steps(results, placed, spans)
    collective, last = _numbered(placed)
    step_begins = np.array([entry.begin for entry in steps])
    step = np.maximum(last_at_or_before(step_begins, last), 0)
    per_step = count_by(step[collective], len(steps))
    with_spans = set(pc.unique(spans["step"]).to_pylist()) - {None}
    able = [k for k, entry in enumerate(steps) if entry.number in with_spans] or range(len(steps))
    looked_at = steps_to_look_at(results)
    turn = {number: k - len(looked_at) for k, number in enumerate(looked_at)}
    order = sorted(able, key=lambda k: (turn.get(steps[k].number or 0, 0), not steps[k].steady, k))
    fitting = int(np.count_nonzero(np.cumsum(per_step[order]) <= most_calls))
    kept = sorted(order[: max(fitting, 1)])
    if len(kept) < len(steps):
        numbers = words.spans((steps[i].number or 0 for i in kept), limit=6)
        some = words.counted(len(kept), "step")
        notes.append(f"the timeline carries {some} of {len(steps)}: {numbers}")
    keep = np.isin(step, kept)
    spent = integers(placed, "aligned_end_ns") - integers(placed, "aligned_start_ns")
    length = greatest_by(collective, spent, np.zeros(len(keep), np.int64))
    longest = order_by(np.where(keep, -length, 1))
    fits = longest[np.cumsum(count_by(collective)[longest]) <= most_calls]
    if len(fits) < keep.sum():
        notes.append(f"its {int(keep.sum()) - len(fits):,} shortest collectives are not drawn")
        keep &= np.isin(np.arange(len(keep)), fits)
    return placed.filter(pa.array(keep[collective])), [steps[i] for i in kept]


def _coded(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    """Codes and their texts, fit to be shown; a missing text is empty."""
    encoded = pc.fill_null(column.cast(pa.string()), "").combine_chunks().dictionary_encode()
    texts = [words.plain(text) for text in encoded.dictionary.to_pylist()]
    return np.asarray(encoded.indices, np.int64), texts
