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
from clusterprof.columns import Ints, Stretches, order_by
from clusterprof.export.merged_tables import Merged
from clusterprof.export.perfetto import about_trace
from clusterprof.export.tracks import Cut, Track, moments, of_rank, shown

#: the process of what belongs to no single rank: the first, before that of the first rank
_COMMON = 1


def write(merged: Merged, file: IO[bytes], chosen: Cut) -> None:
    """Write all ranks on one clock; what is left out is noted in `chosen`."""
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(_events(merged, chosen)):
        file.write((b"," if number else b"") + orjson.dumps(event) + b"\n")
    about = {"begin_unix_ns": chosen.begin_ns, **about_trace(merged, chosen.notes)}
    file.write(b'],"otherData":' + orjson.dumps(about) + b"}\n")


def _events(merged: Merged, chosen: Cut) -> Iterator[dict[str, Any]]:
    yield from _named("process", _COMMON, 0, "clusterprof")
    members: list[Ints] = []
    for place, rank in enumerate(merged.ranks):
        process = _COMMON + 1 + place
        yield from _named("process", process, 0, merged.names[rank], place)
        for line, track in enumerate(of_rank(merged, rank, chosen)):
            yield from _named("thread", process, line, track.name, line)
            if track.flow is not None:
                lines = np.broadcast_to([[process], [line]], (2, len(track)))
                members.append(np.stack([track.flow, track.start, *lines]))
            yield from _slices(track, process, line, chosen.begin_ns)
    yield from _flows(members, chosen.begin_ns)
    yield from _findings(merged, chosen.begin_ns)


def _event(name: str, phase: str, process: int, line: int, **members: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": process, "tid": line, **members}


def _named(
    kind: str, process: int, line: int, name: str, order: int | None = None
) -> Iterator[dict[str, Any]]:
    """What a process or thread is called, and where it stands among the others."""
    yield _event(f"{kind}_name", "M", process, line, args={"name": shown(name)})
    if order is not None:
        yield _event(f"{kind}_sort_index", "M", process, line, args={"sort_index": order})


def _slices(track: Track, process: int, line: int, begin_ns: int) -> Iterator[dict[str, Any]]:
    """Times in µs after the first begin."""
    names = [shown(name) for name in track.names]
    start = ((track.start - begin_ns) / 1000).tolist()
    length = ((track.end - track.start) / 1000).tolist()
    values = [(name, value.tolist(), has.tolist()) for name, (value, has) in track.values.items()]
    for k, code in enumerate(track.code.tolist()):
        event = {
            "name": names[code], "cat": track.category, "ph": "X", "ts": start[k],
            "dur": length[k], "pid": process, "tid": line,
        }  # fmt: skip
        arguments = {name: value[k] for name, value, has in values if has[k]}
        if track.flow is not None:
            arguments["collective"] = int(track.flow[k]) - 1
        yield {**event, "args": arguments} if arguments else event


def _flows(members: Sequence[Ints], begin_ns: int) -> Iterator[dict[str, Any]]:
    """Arrows through each collective's `members`: rows of flow, begin (ns), process and line."""
    flows = np.concatenate([np.empty((4, 0), np.int64), *members], axis=1)
    flows = flows[:, order_by(flows[0], flows[1])]
    of_flow = Stretches.of(flows[0])
    phases = np.full(flows.shape[1], "t")
    phases[of_flow.last], phases[of_flow.first] = "f", "s"
    # 0 is no flow, and one member alone is joined with none
    joins = (flows[0] > 0) & (of_flow.size > 1)[of_flow.of_row]
    for phase, member in zip(phases[joins].tolist(), flows[:, joins].T.tolist(), strict=True):
        flow, start, process, line = member
        # by its time: an event of a flow belongs to the slice that is open then
        time = (start - begin_ns) / 1000
        event = _event("members", phase, process, line, cat="collective", id=flow, ts=time)
        yield {**event, "bp": "e"} if phase == "f" else event


def _findings(merged: Merged, begin_ns: int) -> Iterator[dict[str, Any]]:
    for finding in merged.results["findings"]:
        for rank, time in moments(merged, finding):
            arguments = {
                "rank": None if rank is None else shown(merged.names[rank]),
                "summary": words.plain(finding["summary"]),
                "recommendation": words.plain(finding["advice"]),
                "severity": finding["severity"],
                "saved_ns_per_step": finding["saved_ns_per_step"],
                "saved_alone_ns": finding["saved_alone_ns"],
            }
            yield _event(
                finding["code"], "i", _COMMON, 0,
                cat="finding", s="g", ts=(time - begin_ns) / 1000, args=arguments,
            )  # fmt: skip
