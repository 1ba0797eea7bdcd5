"""One rank as tracks of slices: its steps, collectives, streams, NVTX ranges and host threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.columns import (
    Bools,
    Floats,
    Index,
    Ints,
    Objects,
    coded,
    combined,
    count_by,
    greatest_by,
    integers,
    last_at_or_before,
    order_by,
    places,
    rows_by,
    sum_by,
)
from clusterprof.export.merged_tables import Merged
from clusterprof.results import Finding

#: characters of a name, of which few viewers show more; some reports have 10 kB of template
LONGEST_NAME = 512
#: slices of one track that overlap without one being inside the other are put on tracks side by
#: side: more than this at once no profiler records, and none is read
MOST_LANES = 16
#: upper bounds of what one slice takes in a file, bytes; a name is counted beside
SLICE_BYTES = {"step": 160, "collective": 260, "device": 64, "host": 52}
#: the same where the values' names, and the slice's, are written with each slice (JSON), and with
#: a collective the event of its flow
JSON_BYTES = {"step": 260, "collective": 440, "device": 130, "host": 96}
#: the same of what is written around a name, and of a track's and its rank's description
NAME_BYTES, TRACK_BYTES = 16, 300
#: what is kept first where not all fits, and what it is called
CLASSES = {
    ("step",): ("step of a rank", "steps of ranks"),
    ("collective",): ("collective call", "collective calls"),
    ("device", "host"): ("kernel, copy or host call", "kernels, copies and host calls"),
}
#: limits of lengths (ns), eight to a power of two, for choosing what fits
_LENGTHS = np.unique(np.ceil(2.0 ** (np.arange(0, 62 * 8) / 8)).astype(np.int64))


@dataclass(frozen=True)
class Track:
    """Slices on one line by begin (of equals the longest first), ns on the clock of the export."""

    name: str
    #: step, collective, device or host
    kind: str
    start: Ints
    end: Ints
    #: the different names, and of each slice its name's place among them
    names: Objects
    code: Index
    #: the host thread, of which this shows the calls
    thread: int | None = None
    #: further values of each slice, and which slices have one
    values: Mapping[str, tuple[Ints, Bools]] = field(default_factory=dict)
    #: what joins slices of several ranks
    flow: Ints | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def category(self) -> str:
        """What viewers choose slices by: the kind, and of a host's ranges that they are such."""
        return "range" if self.kind == "host" and self.thread is None else self.kind

    def take(self, rows: Index) -> Track:
        """These slices only, in this order."""
        values = {name: (value[rows], has[rows]) for name, (value, has) in self.values.items()}
        start, end, code = self.start[rows], self.end[rows], self.code[rows]
        flow = None if self.flow is None else self.flow[rows]
        return replace(self, start=start, end=end, code=code, values=values, flow=flow)


@dataclass
class Cut:
    """When an export begins, and what is left out so that it stays within its size."""

    #: the first begin of all slices and findings, ns on the clock of the export
    begin_ns: int = 0
    #: slices of this kind that are shorter (ns) are left out
    shortest_ns: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def survey(merged: Merged, limit: float, *, json: bool = False) -> Cut:
    """Look at all slices, and choose the shortest to leave out: the rest takes `limit` bytes.

    Steps stay before collectives, and these before what ran on devices and hosts. `json`: as JSON
    instead of Perfetto's format.
    """
    cut, begins = Cut(), first_moment(merged)
    size = {kind: np.zeros(len(_LENGTHS)) for kind in SLICE_BYTES}
    count = {kind: np.zeros(len(_LENGTHS), np.int64) for kind in SLICE_BYTES}
    for track in (track for rank in merged.ranks for track in unlimited(merged, rank)):
        if len(track):
            begins.append(int(track.start.min()))
            limit -= TRACK_BYTES + len(shown(track.name).encode())
            _count(track, count[track.kind], size[track.kind], json=json)
    for kinds, nouns in CLASSES.items():
        slices = np.sum([count[kind] for kind in kinds], axis=0)
        sizes = np.sum([size[kind] for kind in kinds], axis=0)
        from_length = np.append(np.cumsum(sizes[::-1])[::-1], 0)
        first = int(np.argmax(from_length <= max(limit, 0)))
        limit -= from_length[first]
        shortest = int(_LENGTHS[first]) if first < len(_LENGTHS) else np.iinfo(np.int64).max
        cut.shortest_ns |= dict.fromkeys(kinds, shortest if first else 0)
        dropped, total = int(slices[:first].sum()), int(slices.sum())
        if dropped == total > 0:
            cut.notes.append(f"all {words.counted(total, *nouns)} are left out")
        elif dropped:
            which = f"which are shorter than {words.duration(shortest)}"
            some = f"{dropped:,} of {words.counted(total, *nouns)}"
            cut.notes.append(f"{some} are left out, {which}")
    cut.begin_ns = min(begins, default=0)
    return cut


def _count(track: Track, count: Ints, size: Floats, *, json: bool) -> None:
    """Add slices and bytes by length; a name once, with its longest slice, in JSON with each."""
    length = np.maximum(last_at_or_before(_LENGTHS, track.end - track.start), 0)
    longest = greatest_by(track.code, length, np.full(len(track.names), -1, np.int64))
    used = np.flatnonzero(longest >= 0)
    name_bytes = np.zeros(len(track.names))
    for code in used.tolist():
        text = shown(track.names[code])
        escapes = text.count('"') + text.count("\\") if json else 0
        name_bytes[code] = len(text.encode()) + escapes
    slices = count_by(length, len(_LENGTHS))
    count += slices
    size += slices * (JSON_BYTES if json else SLICE_BYTES)[track.kind]
    if json:
        size += sum_by(length, name_bytes[track.code], len(_LENGTHS))
    else:
        size += sum_by(longest[used], name_bytes[used] + NAME_BYTES, len(_LENGTHS))


def of_rank(merged: Merged, rank: int, chosen: Cut) -> list[Track]:
    """A rank's tracks as shown; what overlaps without nesting is on several of one name."""
    tracks = []
    for track in unlimited(merged, rank):
        shortest_ns = chosen.shortest_ns.get(track.kind, 0)
        track = track.take(np.flatnonzero(track.end - track.start >= shortest_ns))
        track = track.take(order_by(track.start, -track.end))
        lane = lanes(track.start, track.end)
        tracks += [track.take(np.flatnonzero(lane == k)) for k in np.unique(lane[lane >= 0])]
        if (lane < 0).any():
            many = words.counted(int((lane < 0).sum()), "slice")
            chosen.notes.append(
                f"{many} of {merged.names[rank]}, {track.name}, left out: they overlap "
                f"{MOST_LANES} others at once"
            )
    return tracks


def unlimited(merged: Merged, rank: int) -> Iterator[Track]:
    """The tracks of one rank with all that it has, in no order of time."""
    yield _steps(merged, rank)
    yield from _collectives(merged, rank)
    yield from _streams(merged, rank)
    yield from _threads(merged, rank)


def _times(
    merged: Merged, rank: int, table: pa.Table, begin: str = "start_ns"
) -> tuple[Ints, Ints]:
    """A table's begins and ends on the clock of the export; no end is before its begin."""
    start, end = (merged.clock.align(rank, integers(table, column)) for column in (begin, "end_ns"))
    return start, np.maximum(end, start)


def _steps(merged: Merged, rank: int) -> Track:
    rows = merged.accounts.filter(pc.equal(merged.accounts["rank"], rank))
    step, code = places(integers(rows, "step"))
    parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    values = {name: (integers(rows, name), np.ones(rows.num_rows, np.bool_)) for name in parts}
    names = np.array([f"step {number}" for number in step], np.object_)
    times = _times(merged, rank, rows, "begin_ns")
    return Track("steps", "step", *times, names, code, values=values)


def _collectives(merged: Merged, rank: int) -> Iterator[Track]:
    table = merged.collectives
    placed = pc.and_(pc.is_valid(table["start_ns"]), pc.is_valid(table["end_ns"]))
    table = table.filter(pc.and_(placed, pc.equal(table["rank"], rank)))
    (operations, operation), (states, state) = coded(table, "operation"), coded(table, "state")
    # what is not matched says so in its name
    names = [
        name if how == "matched" else f"{name} ({how})" for name in operations for how in states
    ]
    values = {
        name: (integers(table, name), np.asarray(pc.is_valid(table[name])))
        for name in ("message_bytes", "wait_ns", "transfer_ns", "lateness_ns", "last_rank")
    }
    whole = Track(
        "",
        "collective",
        *_times(merged, rank, table),
        np.array(names, np.object_),
        operation * len(states) + state,
        values=values,
        # a flow's number is its collective's, from 1; 0 is none
        flow=integers(table, "collective") + 1,
    )
    called = {
        group["communicator"]: group["description"] or (group["kind"] + " ").replace("unknown ", "")
        for group in merged.results["topology"]["groups"]
    }
    communicators, communicator = coded(table, "communicator")
    for place, rows in rows_by(communicator).items():
        name = communicators[place]
        label = " ".join(f"{called.get(name, '')} {words.communicator(str(name), 40)}".split())
        yield replace(whole.take(rows), name=f"collectives · {label}")


def _streams(merged: Merged, rank: int) -> Iterator[Track]:
    columns = ["start_ns", "end_ns", "kind", "name", "device", "stream", "size_bytes"]
    table = merged.table(rank, "activity", columns)
    kinds, kind = coded(table, "kind")
    has_size = np.asarray(pc.is_valid(table["size_bytes"]))
    values = {"size_bytes": (integers(table, "size_bytes"), has_size)} if has_size.any() else {}
    times = _times(merged, rank, table)
    whole = Track("", "device", *times, *coded(table, "name"), values=values)
    for (gpu, number), rows in _groups(integers(table, "device"), integers(table, "stream")):
        stream = f"GPU {gpu} stream {number}" if gpu >= 0 else f"stream {number}"
        # what a stream is for: the kind of most of its slices
        purpose = kinds[count_by(kind[rows]).argmax()]
        yield replace(whole.take(rows), name=f"{stream} · {purpose}")


def _threads(merged: Merged, rank: int) -> Iterator[Track]:
    columns = ["start_ns", "end_ns", "kind", "name", "thread"]
    table = merged.table(rank, "host_calls", columns)
    kinds, kind = coded(table, "kind")
    whole = Track("", "host", *_times(merged, rank, table), *coded(table, "name"))
    is_call = (kinds[kind] != "range").astype(np.int64)
    for (calls, thread), rows in _groups(is_call, integers(table, "thread")):
        if calls:
            yield replace(whole.take(rows), name=f"thread {thread}", thread=thread)
        else:
            yield replace(whole.take(rows), name=f"NVTX · thread {thread}")


def _groups(first: Ints, second: Ints) -> Iterator[tuple[tuple[int, int], Index]]:
    """The rows of each pair of values, in the pairs' order."""
    for rows in rows_by(combined(first, second)).values():
        yield (int(first[rows[0]]), int(second[rows[0]])), rows


def sequence(start: Ints, end: Ints) -> tuple[Index, Bools]:
    """The begins and ends of a track's slices in order: edges, and which of them are ends.

    Edge k < n is the begin of slice k, n + k its end; of slices without a length only the begin.
    At one moment what began last ends first, and ends come before begins.
    """
    count = np.arange(len(start))
    ended = np.flatnonzero(end > start)
    edges = np.concatenate((count, len(start) + ended))
    time, is_end = np.concatenate((start, end[ended])), edges >= len(start)
    order = order_by(time, ~is_end, np.concatenate((count, -ended)))
    return edges[order], is_end[order]


def lanes(start: Ints, end: Ints) -> Ints:
    """The track of each slice (in `Track`'s order), so that those of one nest; -1: too many."""
    lane = np.zeros(len(start), np.int64)
    if _nested(start, end):
        return lane
    open_: list[list[int]] = [[] for _ in range(MOST_LANES)]
    for place, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for number, ends in enumerate(open_):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or finish <= ends[-1]:
                ends.append(finish)
                lane[place] = number
                break
        else:
            lane[place] = -1
    return lane


def _nested(start: Ints, end: Ints) -> bool:
    """Whether every end belongs to the slice that is innermost there, as deep as it began."""
    edges, is_end = sequence(start, end)
    count = len(start)
    lasts = np.zeros(count, np.bool_)
    lasts[edges[is_end] - count] = True
    whole = is_end | lasts[np.where(is_end, 0, edges)]
    edges, is_end = edges[whole], is_end[whole]
    depth = np.cumsum(np.where(is_end, -1, 1)) + is_end  # with itself, at begin and at end
    of_slice = np.zeros(count, np.int64)
    of_slice[edges[~is_end]] = depth[~is_end]
    return bool((of_slice[edges[is_end] - count] == depth[is_end]).all())


def moments(merged: Merged, finding: Finding) -> list[tuple[int | None, int]]:
    """Rank and time (reference rank's clock) of a finding's evidence, else of its first step."""
    times = []
    for line in finding["evidence"]:
        rank, time = line.get("rank"), line.get("time_ns")
        # evidence is of any form: true is 1, and no number
        if type(rank) is int and rank in merged.names and type(time) is int and time >= 0:
            times.append((time, rank))
    if times:
        return [(rank, time) for time, rank in sorted(times)]
    begins = {step["step"]: step["begin_ns"] for step in merged.results["steps"]}
    of_steps = [begins[step] for step in finding["steps"] if step in begins]
    rank = finding["rank"] if finding["rank"] in merged.names else None
    return [(rank, min(of_steps or begins.values()))] if begins else []


def first_moment(merged: Merged) -> list[int]:
    """When the first finding shows, ns on the reference rank's clock: one, or none."""
    firsts = (moments(merged, finding)[:1] for finding in merged.results["findings"])
    return sorted(time for first in firsts for _, time in first)[:1]


def shown(name: object) -> str:
    """A name as it is written: one line, nothing that turns the writing direction, not too long."""
    text = words.plain(str(name))
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"
