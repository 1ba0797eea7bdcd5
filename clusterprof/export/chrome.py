"""A merged run in Chrome's Trace Event format, which many viewers and scripts read.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. It has
every name with every slice, so Perfetto's own trace is a quarter of it in size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
import orjson

from clusterprof import words
from clusterprof.align.columns import Ints
from clusterprof.export.merged_tables import Merged
from clusterprof.export.perfetto import about_trace
from clusterprof.export.tracks import Cut, Track, moments, of_rank, shown

#: the process of what belongs to no single rank: the first, before that of the first rank
_COMMON = 1


def write(merged: Merged, file: IO[bytes], chosen: Cut) -> None:
    """Write all ranks on one clock; what is left out is noted in `chosen`."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    file.write(_line(_named("process_name", _COMMON, 0, "clusterprof")))
    members: list[Ints] = []
    for place, rank in enumerate(merged.ranks):
        process = _COMMON + 1 + place
        names = [
            _named("process_name", process, 0, shown(merged.names[rank])),
            {**_event("process_sort_index", "M", process, 0), "args": {"sort_index": place}},
        ]
        file.writelines(b"," + _line(each) for each in names)
        for line, track in enumerate(of_rank(merged, rank, chosen)):
            named = _named("thread_name", process, line, shown(track.name))
            order = {
                **_event("thread_sort_index", "M", process, line),
                "args": {"sort_index": line},
            }
            file.writelines(b"," + _line(each) for each in (named, order))
            if track.flow is not None:
                places = np.broadcast_to([[process], [line]], (2, len(track)))
                members.append(np.stack([track.flow, track.start, *places]))
            slices = _slices(track, process, line, chosen.begin_ns)
            file.writelines(b"," + _line(each) for each in slices)
    file.writelines(b"," + _line(each) for each in _flows(members, chosen.begin_ns))
    file.writelines(b"," + _line(each) for each in _findings(merged, chosen.begin_ns))
    about = {"begin_unix_ns": chosen.begin_ns, **about_trace(merged, chosen.notes)}
    file.write(b'],"otherData":' + orjson.dumps(about) + b"}\n")


def _line(event: dict[str, Any]) -> bytes:
    return orjson.dumps(event) + b"\n"


def _event(name: str, phase: str, process: int, line: int) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": process, "tid": line}


def _named(what: str, process: int, line: int, name: str) -> dict[str, Any]:
    return {**_event(what, "M", process, line), "args": {"name": name}}


def _slices(track: Track, process: int, line: int, begin_ns: int) -> Iterator[dict[str, Any]]:
    """Times in µs after the first begin."""
    names = [shown(name) for name in track.names]
    start = ((track.start - begin_ns) / 1000).tolist()
    length = ((track.end - track.start) / 1000).tolist()
    values = [(name, value.tolist(), has.tolist()) for name, (value, has) in track.values.items()]
    for at, code in enumerate(track.code.tolist()):
        event = {
            "name": names[code], "cat": track.category, "ph": "X", "ts": start[at],
            "dur": length[at], "pid": process, "tid": line,
        }  # fmt: skip
        arguments = {name: value[at] for name, value, has in values if has[at]}
        if track.flow is not None:
            arguments["collective"] = int(track.flow[at]) - 1
        yield {**event, "args": arguments} if arguments else event


def _flows(members: Sequence[Ints], begin_ns: int) -> Iterator[dict[str, Any]]:
    """The arrows through each collective's members, from the first one's begin to the last one's.

    `members` are rows of flow, begin (ns), process and line, of all that are in the trace. An event
    of a flow belongs to the slice that is open at its time.
    """
    flow, start, *places = np.concatenate([np.empty((4, 0), np.int64), *members], axis=1)
    order = np.lexsort((start, flow))
    flow = flow[order]
    first = np.diff(flow, prepend=0) != 0  # 0 is no flow
    last = np.diff(flow, append=0) != 0
    joins = (flow > 0) & ~(first & last)
    phase = np.where(first, "s", np.where(last, "f", "t"))[joins].tolist()
    order = order[joins]
    times = ((start[order] - begin_ns) / 1000).tolist()
    of_flow, process, line = (each.tolist() for each in (flow[joins], *(p[order] for p in places)))
    for at, sign in enumerate(phase):
        yield {
            **_event("members", sign, process[at], line[at]), "cat": "collective",
            "id": of_flow[at], "ts": times[at], **({"bp": "e"} if sign == "f" else {}),
        }  # fmt: skip


def _findings(merged: Merged, begin_ns: int) -> Iterator[dict[str, Any]]:
    for finding in merged.results["findings"]:
        for rank, time in moments(merged, finding):
            yield {
                **_event(finding["code"], "i", _COMMON, 0),
                "cat": "finding",
                "s": "g",
                "ts": (time - begin_ns) / 1000,
                "args": {
                    "rank": None if rank is None else shown(merged.names[rank]),
                    "summary": words.plain(finding["summary"]),
                    "recommendation": words.plain(finding["advice"]),
                    "severity": finding["severity"],
                    "saved_ns_per_step": finding["saved_ns_per_step"],
                },
            }
