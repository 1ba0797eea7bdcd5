"""A merged run as a Perfetto trace: https://perfetto.dev/docs/reference/trace-packet-proto.

A process is a rank. Times are ns after `begin_ns`, which a snapshot of the clocks ties to UTC.
Field numbers are those of Perfetto's published definitions, by which the tests read the result.

`write` makes one trace of all ranks, `write_archive` one a rank and a manifest that says how they
align: https://perfetto.dev/docs/reference/perfetto-manifest. That has no field for a drift, so it
is removed from the times.
"""

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import IO

import numpy as np
import numpy.typing as npt

from clusterprof import __version__, words
from clusterprof.columns import Bools, Index, Ints, places
from clusterprof.export.merged_tables import Merged
from clusterprof.export.tracks import Cut, Track, first_moment, moments, of_rank, sequence, shown
from clusterprof.results import UNBOUNDED_NS

# -- Trace, TracePacket
_PACKET = 1
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS = 6, 8, 10, 11, 12, 13
_TRACK, _ATTRIBUTES = 60, 126
_CLEARED, _NEEDED = 1, 2
# -- ClockSnapshot
_REALTIME, _BOOTTIME = 1, 6
# -- TrackDescriptor, ProcessDescriptor, ThreadDescriptor
_UUID, _NAME, _PROCESS, _THREAD, _PARENT = 1, 2, 3, 4, 5
_CHILD_ORDERING, _PLACE, _DESCRIPTION, _PROCESS_ORDERING, _THREAD_ORDERING = 11, 12, 14, 19, 20
_EXPLICIT_CHILDREN, _EXPLICIT = 3, 1
# -- TrackEvent
_CATEGORY_ID, _ARGUMENT, _TYPE, _NAME_ID, _OF_TRACK, _CATEGORY, _EVENT_NAME, _FLOW = (
    3, 4, 9, 10, 11, 22, 23, 47,
)  # fmt: skip
_BEGIN, _END, _INSTANT = 1, 2, 3
# -- DebugAnnotation
_ARGUMENT_NAME_ID, _ARGUMENT_INT, _ARGUMENT_TEXT, _ARGUMENT_NAME = 1, 4, 6, 10
# -- InternedData
_CATEGORIES, _NAMES, _ARGUMENT_NAMES = 1, 2, 3

#: the attribute that says who wrote a trace
VERSION = "clusterprof.version"
#: the sequence of what belongs to no rank; each rank's is 2 + its place
_COMMON = 1

# -- the kinds of fields of Protocol Buffers
_VARINT, _FIXED64, _LENGTH = 0, 1, 2
#: encoded messages or parts of them, one a row
Rows = npt.NDArray[np.uint8]


def write(merged: Merged, file: IO[bytes], chosen: Cut) -> None:
    """Write the trace of all ranks on one clock; what is left out is noted in `chosen`."""
    ids = count(1)
    file.write(_head(chosen.begin_ns))
    for place, rank in enumerate(merged.ranks):
        tracks = of_rank(merged, rank, chosen)
        file.writelines(_rank_packets(merged, rank, place, tracks, chosen.begin_ns, ids))
    file.write(_common(merged, chosen.begin_ns, ids, chosen.notes))


def write_archive(merged: Merged, own: Merged, file: IO[bytes], chosen: Cut) -> None:
    """Write all ranks' traces and the manifest; `own`: the run on the ranks' own clocks."""
    offsets = dict(zip(merged.clock.ranks, merged.clock.offset_ns.tolist(), strict=True))
    names = {rank: f"clusterprof-rank-{rank:05d}.pftrace" for rank in merged.ranks}
    findings, begins = "clusterprof-findings.pftrace", {}
    with zipfile.ZipFile(file, "w") as archive:

        def add(name: str, content: bytes | str) -> None:
            member = zipfile.ZipInfo(name)  # the same whenever it is written
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            archive.writestr(member, content)

        for rank, name in names.items():
            tracks = of_rank(own, rank, chosen)
            begin_ns = min((int(track.start[0]) for track in tracks if len(track)), default=0)
            packets = _rank_packets(own, rank, 0, tracks, begin_ns, count(1))
            add(name, b"".join([_head(begin_ns, utc=False), *packets]))
            begins[rank] = begin_ns - offsets[rank]
        begin_ns = min([*begins.values(), *first_moment(merged)], default=0)
        add(findings, _head(begin_ns) + _common(merged, begin_ns, count(1), chosen.notes))
        # the clock of each file, as its snapshot has it
        clock, reference = "BOOTTIME", {"file": findings, "clock": "BOOTTIME"}
        ranks = [
            {
                "path": names[rank],
                "machine": {"name": shown(merged.names[rank])},
                "clocks": {"clock": clock, "sync_to": reference, "offset_ns": begin - begin_ns},
            }
            for rank, begin in begins.items()
        ]
        manifest = {
            "version": 1,
            "trace_time": {"clock": clock, "file": findings},
            "attributes": about_trace(merged, chosen.notes),
            "files": [{"path": findings, "machine": {"name": "clusterprof"}}, *ranks],
        }
        # by these first letters Perfetto knows it
        add("perfetto_manifest.json", json.dumps({"perfetto_manifest": manifest}))


def _packet(*fields: bytes) -> bytes:
    return message(_PACKET, *fields)


def _head(begin_ns: int, *, utc: bool = True) -> bytes:
    """Whose times these are, our order, and UTC (in an archive not: its manifest has that)."""
    clocks = [message(1, number(1, _BOOTTIME), number(2, 0))]
    if utc:
        clocks.append(message(1, number(1, _REALTIME), number(2, begin_ns)))
    version = message(1, text(1, VERSION), text(3, __version__))
    root = [number(_UUID, 0), number(_PROCESS_ORDERING, _EXPLICIT)]
    parts = [
        message(_ATTRIBUTES, version),
        message(_CLOCK_SNAPSHOT, *clocks, number(2, _BOOTTIME)),
        message(_TRACK, *root, number(_THREAD_ORDERING, _EXPLICIT)),
    ]
    return b"".join(_packet(number(_SEQUENCE, _COMMON), content) for content in parts)


def _rank_packets(
    merged: Merged,
    rank: int,
    place: int,
    tracks: Sequence[Track],
    begin_ns: int,
    ids: Iterator[int],
) -> Iterator[bytes]:
    """One rank's process, numbered from 1 (0 is the idle one): its tracks, and their slices."""
    process = number(1, place + 1)
    on, own = number(_SEQUENCE, place + 2), next(ids)
    entry = next(entry for entry in merged.results["ranks"] if entry["rank"] == rank)
    device, clock = entry["device"] or "no GPU", _uncertainty(merged, rank)
    described = [
        number(_UUID, own),
        message(_PROCESS, process, text(6, shown(merged.names[rank]))),
        text(_DESCRIPTION, shown(f"{device}; {entry['profiler']}; clock {clock}")),
        number(_CHILD_ORDERING, _EXPLICIT_CHILDREN),
        number(_PLACE, place),
    ]
    yield _packet(on, number(_FLAGS, _CLEARED), message(_TRACK, *described))
    interned = 0
    for line, track in enumerate(tracks):
        if not len(track):
            continue
        track_id = next(ids)
        name, order = shown(track.name), number(_PLACE, line)
        if track.thread is None:
            form = [text(_NAME, name), number(_PARENT, own), order]
        else:
            thread = [process, number(2, track.thread), text(5, name)]
            form = [message(_THREAD, *thread), order]
        yield _packet(on, message(_TRACK, number(_UUID, track_id), *form))
        used, code = places(track.code)
        yield _interned(track, used, interned, line, on)
        yield _slices(track, code + interned + 1, line, track_id, on, begin_ns)
        interned += len(used)


def _uncertainty(merged: Merged, rank: int) -> str:
    bound = merged.clock.uncertainty(rank)
    return "of unknown offset" if bound >= UNBOUNDED_NS else words.bound(bound)


def _interned(track: Track, used: Index, before: int, line: int, on: bytes) -> bytes:
    """The names that a track's slices refer to by number, `before` of them interned already."""
    names = [
        message(_NAMES, number(1, before + k), text(2, shown(track.names[name])))
        for k, name in enumerate(used, 1)
    ]
    arguments = [
        message(_ARGUMENT_NAMES, number(1, _argument(line, k)), text(2, name))
        for k, name in enumerate(track.values)
    ]
    category = message(_CATEGORIES, number(1, line + 1), text(2, track.category))
    content = message(_INTERNED, category, *names, *arguments)
    return _packet(on, number(_FLAGS, _NEEDED), content)


def _argument(line: int, k: int) -> int:
    return line * 16 + k + 1


def _slices(track: Track, name: Ints, line: int, own: int, on: bytes, begin_ns: int) -> bytes:
    """The begins and ends of all slices of a track. `name`: the number of each one's name."""
    edges, is_end = sequence(track.start, track.end)
    position = np.empty(2 * len(track), np.intp)
    position[edges] = np.arange(len(edges))
    of_track = number(_OF_TRACK, own)
    parts = []
    for rows, with_values in _alike(track, track.end > track.start):
        is_slice = bool(track.end[rows[0]] > track.start[rows[0]])
        values = [
            messages(
                _ARGUMENT, len(rows), number(_ARGUMENT_NAME_ID, _argument(line, k)),
                numbers(_ARGUMENT_INT, track.values[argument][0][rows]),
            )
            for k, argument in with_values
        ]  # fmt: skip
        flow = [] if track.flow is None else [fixed(_FLOW, track.flow[rows])]
        event = messages(
            _EVENT, len(rows), number(_TYPE, _BEGIN if is_slice else _INSTANT), of_track,
            number(_CATEGORY_ID, line + 1), numbers(_NAME_ID, name[rows]), *flow, *values,
        )  # fmt: skip
        time = numbers(_TIMESTAMP, track.start[rows] - begin_ns)
        packets = messages(_PACKET, len(rows), time, on, number(_FLAGS, _NEEDED), event)
        parts.append((position[rows], packets))
    ended = edges[is_end] - len(track)
    event = messages(_EVENT, len(ended), number(_TYPE, _END), of_track)
    time = numbers(_TIMESTAMP, track.end[ended] - begin_ns)
    parts.append((np.flatnonzero(is_end), messages(_PACKET, len(ended), time, on, event)))
    return in_order(parts)


def _alike(track: Track, is_slice: Bools) -> Iterator[tuple[Index, list[tuple[int, str]]]]:
    """The slices that have the same values: their places, and place and name of each value."""
    form = is_slice.astype(np.int64)
    for k, (_, has) in enumerate(track.values.values()):
        form += has.astype(np.int64) << (k + 1)
    for bits in np.unique(form):
        having = [(k, name) for k, name in enumerate(track.values) if bits >> (k + 1) & 1]
        yield np.flatnonzero(form == bits), having


def _common(merged: Merged, begin_ns: int, ids: Iterator[int], notes: Sequence[str]) -> bytes:
    """What belongs to no single rank: findings as instants, and what is to be known of all."""
    on, own = number(_SEQUENCE, _COMMON), next(ids)
    about = about_trace(merged, notes)
    attributes = [
        message(1, text(1, key), number(2, value) if isinstance(value, int) else text(3, value))
        for key, value in about.items()
    ]
    named = [number(_UUID, own), text(_NAME, "clusterprof"), number(_PLACE, 0)]
    packets = [
        _packet(on, message(_ATTRIBUTES, *attributes)),
        _packet(on, message(_TRACK, *named)),
        _instant("about this trace", own, 0, about, on),
    ]
    for finding in merged.results["findings"]:
        values: dict[str, str | int] = {
            "summary": finding["summary"],
            "recommendation": finding["advice"],
            "severity": finding["severity"],
            "confidence": words.confidence(finding["confidence"]),
            "saved_ns_per_step": finding["saved_ns_per_step"],
            "saved_alone_ns": finding["saved_alone_ns"],
            "saved_least_ns": finding["saved_least_ns"],
            "saved_most_ns": finding["saved_most_ns"],
            "saved_uncertainty_ns": finding["saved_uncertainty_ns"],
        }
        for rank, time in moments(merged, finding):
            rank_name = {} if rank is None else {"rank": merged.names[rank]}
            instant = _instant(finding["code"], own, time - begin_ns, rank_name | values, on)
            packets.append(instant)
    return b"".join(packets)


def _instant(name: str, own: int, time: int, values: Mapping[str, str | int], on: bytes) -> bytes:
    """An event without length on the track `own`, ns after the begin, with arguments `values`."""
    arguments = [
        message(
            _ARGUMENT,
            text(_ARGUMENT_NAME, key),
            number(_ARGUMENT_INT, value) if isinstance(value, int)
            else text(_ARGUMENT_TEXT, words.plain(value)),
        )
        for key, value in values.items()
    ]  # fmt: skip
    event = [
        number(_TYPE, _INSTANT), number(_OF_TRACK, own), text(_CATEGORY, "finding"),
        text(_EVENT_NAME, shown(name)), *arguments,
    ]  # fmt: skip
    return _packet(number(_TIMESTAMP, time), on, message(_EVENT, *event))


def about_trace(merged: Merged, notes: Iterable[str]) -> dict[str, str | int]:
    """What is to be known of the whole export: verdict, clock with uncertainty, what is missing."""
    clock = merged.results["clock"]
    values: dict[str, str | int] = {
        VERSION: __version__,
        "clusterprof.verdict": merged.results["verdict"],
        "clusterprof.clock.reference_rank": clock["reference_rank"],
        "clusterprof.clock.method": clock["method"],
    }
    for rank, name in merged.names.items():
        values[f"clusterprof.clock.uncertainty.{name}"] = _uncertainty(merged, rank)
    if clock["assumed"]:
        values["clusterprof.clock.assumed"] = words.ranks(clock["assumed"])
    missing = [entry["rank"] for entry in merged.results["missing"] if entry["rank"] is not None]
    if missing:
        values["clusterprof.missing"] = words.ranks(missing)
    values["clusterprof.left_out"] = "; ".join(notes) or "nothing"
    return {shown(key): value if isinstance(value, int) else words.plain(value)
            for key, value in values.items()}  # fmt: skip


# -- Protocol Buffers' wire format ----------------------------------------------------------------
#
# Single messages as bytes, and messages by the million as arrays. The protobuf package encodes one
# message at a time, some 50,000 a second. Here all messages of one form are rows of one array. They
# have one length, so a varint has as many bytes as the largest of its column needs; the format
# allows the additional ones.


def _varint(value: int) -> bytes:
    """A whole number; a negative one as 64 bits in two's complement."""
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def number(field: int, value: int) -> bytes:
    """A field with a whole number."""
    return _varint(field << 3 | _VARINT) + _varint(value)


def text(field: int, value: str) -> bytes:
    """A field with text."""
    return message(field, value.encode("utf-8", "backslashreplace"))


def message(field: int, *parts: bytes) -> bytes:
    """A field with a message of these parts."""
    content = b"".join(parts)
    return _varint(field << 3 | _LENGTH) + _varint(len(content)) + content


def numbers(field: int, values: Ints) -> Rows:
    """The same field of every message, with whole numbers."""
    left = values.astype(np.uint64)
    width = max(1, -(-int(left.max(initial=0)).bit_length() // 7))
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    encoded = (left[:, None] >> shifts).astype(np.uint8) & np.uint8(0x7F)
    encoded[:, :-1] |= np.uint8(0x80)
    return _after(_varint(field << 3 | _VARINT), encoded)


def fixed(field: int, values: Ints) -> Rows:
    """The same, as 64 bits of fixed length."""
    encoded = values.astype("<u8").view(np.uint8).reshape(-1, 8)
    return _after(_varint(field << 3 | _FIXED64), encoded)


def messages(field: int, count: int, *parts: bytes | Rows) -> Rows:
    """`count` messages: parts that all share, and parts with a row for each."""
    none = np.empty((count, 0), np.uint8)
    content = np.hstack([_after(p, none) if isinstance(p, bytes) else p for p in parts])
    return _after(_varint(field << 3 | _LENGTH) + _varint(content.shape[1]), content)


def _after(begin: bytes, rows: Rows) -> Rows:
    """Every row after the same bytes."""
    joined = np.empty((len(rows), len(begin) + rows.shape[1]), np.uint8)
    joined[:, : len(begin)] = np.frombuffer(begin, np.uint8)
    joined[:, len(begin) :] = rows
    return joined


def in_order(parts: Sequence[tuple[npt.NDArray[np.intp], Rows]]) -> bytes:
    """All rows by their positions, which are the whole numbers from 0, each once."""
    length = np.zeros(sum(len(positions) for positions, _ in parts), np.int64)
    for positions, rows in parts:
        length[positions] = rows.shape[1]
    begin = np.cumsum(length) - length
    content = np.empty(int(length.sum()), np.uint8)
    for positions, rows in parts:
        content[begin[positions][:, None] + np.arange(rows.shape[1])] = rows
    return content.tobytes()
