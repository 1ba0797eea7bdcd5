"""The timeline by rank, as data for the page's script, which draws it.

A lane is a rank. Its rows are the program's phases, the host's threads, the device, and one for
each communicator. In those a bar begins at the rank's arrival; it is
wait until the last arrival and transfer after it. A rank is marked as late in a collective
only where it arrives after the second-to-last by more than the two clocks may err.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.report.summary import Summary
from clusterprof.results import UNBOUNDED_NS, Results, steps_to_look_at

Numbers = npt.NDArray[np.int64]

#: calls that one page carries, some 20 bytes each, of at most so many ranks
MOST_CALLS = {64: 50_000, 2**31: 120_000}
MOST_ROWS = 4
#: characters of a name that the page carries: kernels of templates have thousands
_MOST_OF_NAME = 200
#: lanes that are open at first
MOST_LANES = 8
#: rows of hosts and devices, in order (`lanes.parquet`)
ROWS = ("phase", "host", "second_host", "device")
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
class Spans:
    """What hosts and devices did: one entry per span, by lane, row and time."""

    lane: Numbers
    row: Numbers
    #: number in `names`, each a kind and a name
    name: Numbers
    start: Numbers
    end: Numbers
    count: Numbers
    names: list[tuple[str, str]]
    #: spans shorter than this are merged, ns
    merged_below: int


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
    spans: Spans
    steps: list[Step]
    typical: int
    #: the longest steady-state step where that is another one, else -1
    worst: int
    #: named choices of lanes, the first is open
    presets: list[tuple[str, list[int]]]
    notes: list[str]


def build(run: Summary, collectives: pa.Table, spans: pa.Table | None = None) -> Timeline | None:
    """The timeline, or None where nothing has a place in time.

    `collectives` is the placed table: one row per collective and rank with
    `aligned_start_ns`, `aligned_end_ns` and `last_arrival_ns`. `spans` is what hosts and devices
    did (`merged/lanes.parquet`).
    """
    has_times = (pc.is_valid(collectives[f"aligned_{edge}_ns"]) for edge in ("start", "end"))
    placed = collectives.filter(pc.and_(*has_times))
    tables = [table for table in (placed, spans) if table is not None]
    ranks = np.unique(np.concatenate([table["rank"].to_numpy() for table in tables])).tolist()
    if not ranks:
        return None
    notes = []
    if placed.num_rows < collectives.num_rows:
        lost = words.counted(collectives.num_rows - placed.num_rows, "call")
        notes.append(f"{lost} without a kernel in the report cannot be drawn")
    drawn = _spans_of(spans, ranks)
    if drawn.merged_below:
        short = words.duration(drawn.merged_below)
        notes.append(f"spans shorter than {short} are merged, each kind one behind the other")
    placed, steps = _within_limit(run.results, placed, spans, len(ranks), notes)
    numbers = [step.number for step in steps]
    first = [numbers.index(step) for step in steps_to_look_at(run.results) if step in numbers]
    typical, worst = [*first, -1, -1][:2] if first else (0, -1)
    calls, groups, names = _calls_of(placed, ranks, run)
    named = run.stragglers()
    return Timeline(
        ranks=ranks,
        rows=[int(calls.row[calls.lane == lane].max(initial=0)) + 1 for lane in range(len(ranks))],
        named=[ranks.index(rank) for rank in named if rank in ranks],
        operations=names["operation"],
        communicators=names["communicator"],
        states=names["state"],
        calls=calls,
        groups=groups,
        spans=drawn,
        steps=steps,
        typical=typical,
        worst=worst,
        presets=_presets(run, ranks, named),
        notes=notes,
    )


def _calls_of(
    placed: pa.Table, ranks: list[int], run: Summary
) -> tuple[Calls, Groups, dict[str, list[str]]]:
    """The calls, their collectives, and the names of operations, communicators and states."""
    of, last = _numbered(placed)
    placed = placed.take(pa.array(np.lexsort((_integers(placed["aligned_start_ns"]), of))))
    of = np.sort(of)
    lane = np.searchsorted(np.array(ranks), _integers(placed["rank"]))
    coded = {name: _coded(placed[name]) for name in ("operation", "communicator", "state")}
    start, end = (_integers(placed[f"aligned_{edge}_ns"]) for edge in ("start", "end"))
    head = np.searchsorted(of, np.arange(len(last)))
    alone = np.asarray(pc.is_null(placed["wait_ns"])).astype(np.int64)[head]
    # who came last, and by how much after the second-to-last
    uncertainty = np.array([run.uncertainties.get(rank, 0) for rank in ranks], np.int64)
    final = np.append(head[1:], len(of))[: len(head)] - 1
    before = np.maximum(final - 1, head)
    margin = start[final] - start[before]
    bound = uncertainty[lane[final]] + uncertainty[lane[before]]
    is_late = (margin > bound) & (final > head) & (alone == 0)
    confidence = np.asarray(pc.fill_null(placed["confidence"].cast(pa.float64()), -0.01))
    groups = Groups(
        **{name: codes[head] for name, (codes, _) in coded.items()},
        message_bytes=_integers(placed["message_bytes"], -1)[head],
        order=_integers(placed["order"], -1)[head],
        confidence=np.floor(confidence * 100 + 1e-9).astype(np.int64)[head],
        last=last,
        late=np.where(is_late, lane[final], -1),
        margin=margin,
        bound=bound,
        alone=alone,
    )
    # a row of its rank's lane for each communicator, at most `MOST_ROWS`
    pairs, of_pair = np.unique(
        np.stack([lane, coded["communicator"][0]]), axis=1, return_inverse=True
    )
    row = np.minimum(np.arange(pairs.shape[1]) - np.searchsorted(pairs[0], pairs[0]), MOST_ROWS - 1)
    calls = Calls(of, lane, row[of_pair.reshape(-1)], start, end)
    return calls, groups, {name: texts for name, (_, texts) in coded.items()}


#: columns of the collectives that the page gets unchanged
_AS_IS = ("operation", "communicator", "state", "order", "confidence", "late", "alone")


def embedded(timeline: Timeline, run: Summary) -> dict[str, Any]:
    """The timeline as compact plain data: times in units of `UNIT_NS` after the first begin.

    Per collective the last arrival is a difference from the one before; per call there are
    its wait (arrival before the last) and its duration, in the order of the collectives.
    """
    groups, calls = timeline.groups, timeline.calls
    zero = min(step.begin for step in timeline.steps)
    kinds = {
        words.plain(group["communicator"]): group["kind"]
        for group in run.results["topology"]["groups"]
        if group["kind"] != "unknown"
    }
    medians = {step["step"]: step["duration_ns"] for step in run.results["steps"]}
    last = (groups.last - zero) // UNIT_NS
    return {
        "unit_ns": UNIT_NS,
        "lanes": [
            {
                "rank": rank,
                "host": words.plain(run.hosts.get(rank, "")),
                "rows": rows,
                "named": lane in timeline.named,
            }
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
                # what "longest" is by: the median over ranks, as everywhere
                "median": medians.get(step.number or 0, step.end - step.begin) // UNIT_NS,
            }
            for step in timeline.steps
        ],
        "typical": timeline.typical,
        "worst": timeline.worst,
        "presets": [
            {"name": name, "lanes": np.searchsorted(timeline.ranks, ranks).tolist()}
            for name, ranks in timeline.presets
        ],
        # findings that name ranks, by their anchors
        "findings": [
            {"anchor": f"finding-{number}", "code": finding["code"], "ranks": finding["ranks"]}
            for number, finding in enumerate(run.findings, 1)
        ],
        # what the communicators are for, as far as that is known
        "groups": [kinds.get(name, "") for name in timeline.communicators],
        "spans": _embedded_spans(timeline.spans, zero),
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


def _embedded_spans(spans: Spans, zero: int) -> dict[str, Any]:
    """Per lane and row how many; per span what lies before it, its length and its name's number.

    `many` are the counts of spans that stand for more than one, by their places in `merged`.
    """
    start, end = ((times - zero) // UNIT_NS for times in (spans.start, spans.end))
    key = spans.lane * len(ROWS) + spans.row
    fresh = np.diff(key, prepend=-1) != 0
    before = np.where(fresh, 0, np.r_[0, end[:-1]])
    merged = np.flatnonzero(spans.count > 1)
    return {
        "rows": list(ROWS),
        "kinds": [kind for kind, _ in spans.names],
        "names": [name for _, name in spans.names],
        "merged_below": -(-spans.merged_below // UNIT_NS),
        "key": key[fresh].tolist(),
        "size": np.diff(np.flatnonzero(np.r_[fresh, True])).tolist(),
        "gap": (start - before).tolist(),
        "length": (end - start).tolist(),
        "name": spans.name.tolist(),
        "merged": np.diff(merged, prepend=0).tolist(),
        "many": spans.count[merged].tolist(),
    }


def _presets(run: Summary, ranks: list[int], named: list[int]) -> list[tuple[str, list[int]]]:
    """Choices of lanes by name: the first is open at first, the last has all ranks."""
    by_wait = sorted(run.averages, key=lambda row: row.exposed_wait_ns)
    least = [row.rank for row in by_wait if row.rank in ranks][:MOST_LANES]
    that_wait_least = f"the {len(least)} that wait least"
    peers: dict[str, list[int]] = {}
    for rank in named[:1]:
        for group in run.results["topology"]["groups"]:
            if rank in group["ranks"] and len(group["ranks"]) > 1:
                others = [peer for peer in group["ranks"] if peer in ranks and peer != rank]
                # an even choice of them
                count = min(2 * MOST_LANES - 1, len(others))
                even = np.linspace(0, max(len(others) - 1, 0), count).round()
                name = f"rank {rank} and its {group['kind']} group"
                peers.setdefault(name, [rank, *(others[int(k)] for k in even)])
    presets = [*peers.items()]
    if len(ranks) > MOST_LANES:
        near = [rank for group in peers.values() for rank in group]
        opened = [*named[: MOST_LANES // 2], *near, *least]
        what = "stragglers and peers" if named else that_wait_least
        presets = [(what, list(dict.fromkeys(opened))[:MOST_LANES]), *presets]
        presets += [(that_wait_least, least)] if named else []
    of_host = {
        host: rank for rank, host in sorted(run.hosts.items(), reverse=True) if rank in ranks
    }
    if len(of_host) > 1:
        presets.append(("one rank per host", [*of_host.values()]))
    presets = [(name, sorted(some)) for name, some in presets if len(some) < len(ranks)]
    every = ("all ranks", ranks)
    return [*presets, every] if len(ranks) > MOST_LANES else [every, *presets]


def _spans_of(table: pa.Table | None, ranks: list[int]) -> Spans:
    """The spans as arrays, by lane, row and time."""
    if table is not None:
        table = table.filter(pc.is_in(table["row"].cast(pa.string()), pa.array(ROWS)))
    if table is None or not table.num_rows:
        none = np.zeros(0, np.int64)
        return Spans(none, none, none, none, none, none, [], 0)
    row, rows = _coded(table["row"])
    row = np.array([ROWS.index(name) for name in rows], np.int64)[row]
    kind, kinds = _coded(table["kind"])
    text, texts = _coded(table["name"])
    pairs, name = np.unique(kind * len(texts) + text, return_inverse=True)
    names = [
        (kinds[pair // len(texts)], texts[pair % len(texts)][:_MOST_OF_NAME]) for pair in pairs
    ]
    lane = np.searchsorted(np.array(ranks), _integers(table["rank"]))
    start, end, count = (_integers(table[column]) for column in ("start_ns", "end_ns", "count"))
    columns = np.stack([lane, row, name.reshape(-1), start, end, count])
    below = int(pc.max(table["merged_below_ns"]).as_py())
    lane, row, name, start, end, count = columns[:, np.lexsort((start, row, lane))]
    return Spans(lane, row, name, start, end, count, names, below)


def _steps(results: Results, placed: pa.Table, spans: pa.Table | None) -> list[Step]:
    """The steps in time.

    The end of one is the next one's begin or the last end in it. Results without any step give one
    span over everything.
    """
    first = [pc.min(placed["aligned_start_ns"]).as_py()]
    final = [pc.max(placed["aligned_end_ns"]).as_py()]
    if spans is not None:
        first.append(pc.min(spans["start_ns"]).as_py())
        final.append(pc.max(spans["end_ns"]).as_py())
    begin, end = min(t for t in first if t is not None), max(t for t in final if t is not None)
    # Calls of other times than the results' steps (a foreign table) still get a span.
    entries = sorted(results["steps"], key=lambda entry: entry["step"])
    entries = [step for step in entries if step.get("begin_ns") and step["begin_ns"] < end]
    if not entries:
        return [Step(number=None, steady=True, begin=begin, end=max(end, begin + 1))]
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
    last = np.full(int(of.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, of, arrival)
    by_arrival = np.argsort(last, kind="stable")
    return np.argsort(by_arrival)[of], last[by_arrival]


def _within_limit(
    results: Results, placed: pa.Table, spans: pa.Table | None, ranks: int, notes: list[str]
) -> tuple[pa.Table, list[Step]]:
    """The steps that are drawn, and their calls, of limited number.

    They are those of the spans, if there are any, as long as their calls fit: the typical and the
    worst first, then those in steady state.
    """
    most = next(count for size, count in MOST_CALLS.items() if ranks <= size)
    steps = _steps(results, placed, spans)
    of, last = _numbered(placed)
    begins = np.array([each.begin for each in steps])
    step = np.maximum(np.searchsorted(begins, last, side="right") - 1, 0)
    per_step = np.bincount(step[of], minlength=len(steps))
    able = list(range(len(steps)))
    if spans is not None and spans.num_rows:
        of_spans = set(pc.unique(spans["step"]).to_pylist()) - {None}
        able = [k for k in able if steps[k].number in of_spans] or able
    first = steps_to_look_at(results)
    order = [k for number in first for k in able if steps[k].number == number]
    order += sorted(able, key=lambda k: (not steps[k].steady, k))
    kept: list[int] = []
    for index in dict.fromkeys(order):
        if kept and per_step[[*kept, index]].sum() > most:
            break
        kept.append(index)
    kept.sort()
    if len(kept) < len(steps):
        numbers = words.spans((steps[i].number or 0 for i in kept), limit=6)
        some = words.counted(len(kept), "step")
        notes.append(f"the timeline carries {some} of {len(steps)}: {numbers}")
    keep = np.isin(step, kept)
    length = np.zeros(len(keep), np.int64)
    spent = pc.subtract(placed["aligned_end_ns"], placed["aligned_start_ns"])
    np.maximum.at(length, of, _integers(spent))
    longest = np.argsort(np.where(keep, -length, 1), kind="stable")
    fits = longest[np.cumsum(np.bincount(of)[longest]) <= most]
    if len(fits) < keep.sum():
        notes.append(f"its {int(keep.sum()) - len(fits):,} shortest collectives are not drawn")
        keep &= np.isin(np.arange(len(keep)), fits)
    return placed.filter(pa.array(keep[of])), [steps[i] for i in kept]


def _integers(column: pa.ChunkedArray, missing: int = 0) -> Numbers:
    return np.asarray(pc.fill_null(column.cast(pa.int64()), missing), np.int64)


def _coded(column: pa.ChunkedArray) -> tuple[Numbers, list[str]]:
    """Codes and their texts, fit to be shown; a missing text is empty."""
    encoded = pc.fill_null(column.cast(pa.string()), "").combine_chunks().dictionary_encode()
    texts = [words.plain(text) for text in encoded.dictionary.to_pylist()]
    return np.asarray(encoded.indices, np.int64), texts
