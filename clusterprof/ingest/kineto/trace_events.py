"""The events of a Kineto trace, a few megabytes at a time, as compact columns.

A trace of 50 steps is 100 MB of JSON and several times that as Python objects: it is parsed in
pieces.
"""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clusterprof.columns import Bools, Ints
from clusterprof.errors import ReportError
from clusterprof.ingest import other_tools
from clusterprof.ingest.kineto.json_stream import NotAList, keys_of, pieces
from clusterprof.ingest.opening import opened, opened_ahead, unreadable
from clusterprof.ingest.recording import Calls, matching

#: microseconds, 127 years: what lies beyond is no time, nor fits 64 bits of nanoseconds
_FARTHEST_US = 4e15

_OF_DEVICE = ("correlation", "device", "stream", "bytes")
#: the categories of complete events ("ph": "X") that are read, each with the numbers read of its
#: arguments
CATEGORIES = {
    "kernel": _OF_DEVICE, "gpu_memcpy": _OF_DEVICE, "gpu_memset": _OF_DEVICE,
    "cuda_runtime": ("correlation",), "cuda_driver": ("correlation",), "cpu_op": (),
    "user_annotation": ("correlation",), "python_function": ("correlation",),
}  # fmt: skip
_COLUMNS = {"ts": "d", "dur": "d"} | dict.fromkeys(("process", "thread", "name", *_OF_DEVICE), "q")

#: what these categories were called before 2022
_FORMERLY = {
    "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
    "Operator": "cpu_op",
}  # fmt: skip
#: metadata that name a thread, or a process
_THREAD_NAME = "thread_name"
_NAMING = (_THREAD_NAME, "process_name", "process_labels")
_MOST_PROCESSES, _MOST_RANKS = 256, 1024
#: threads that were named and not numbered then get numbers from here on
_NAMED_THREADS = 1 << 40

#: microseconds: Python functions (`with_stack=True`) that took less explain no wait, and are many
_LEAST_FUNCTION_US = 20.0
#: how tools that merge ranks' traces label a process with its rank: `[TP02] 4002`
_OF_RANK = re.compile(r"\[([^\]]*\d[^\]]*)\] ")
#: how others do in the metadata of a process; more digits are no rank's
_RANK = re.compile(r"(?i)\brank\W*(\d{1,9})")
#: what an event raises that is none
_NO_TRACE = (AttributeError, OverflowError, RecursionError, TypeError, msgspec.ValidationError)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")


_MISSING = msgspec.Raw(b"null")


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """An event's arguments that are read, None where they are missing or null.

    Versions of PyTorch differ in which they write, and whether a collective's numbers are texts.
    """

    name: Any = None
    labels: Any = None
    rank: Any = None
    correlation: Any = None
    device: Any = None
    stream: Any = None
    bytes: Any = None
    function: Any = msgspec.field(name="Python id", default=None)
    caller: Any = msgspec.field(name="Python parent id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    dtype: Any = None
    elements_in: Any = msgspec.field(name="In msg nelems", default=None)
    elements_out: Any = msgspec.field(name="Out msg nelems", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    number: Any = msgspec.field(name="Seq", default=None)
    to_rank: Any = msgspec.field(name="Dst Rank", default=None)
    from_rank: Any = msgspec.field(name="Src Rank", default=None)
    #: JSON, null where missing: all operators have them, and only gloo's are looked into
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=_MISSING)
    types: msgspec.Raw = msgspec.field(name="Input type", default=_MISSING)
    #: "false" of a collective that was open at the capture's end; of some versions beside these
    finished: Any = None


NO_ARGUMENTS = Arguments()


class Event(msgspec.Struct, gc=False):
    """What is read of one event; other tools leave out some of it, and write texts for numbers."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Arguments | None = None
    finished: Any = None


#: made here, once: threads that each make their first one at a time crash msgspec (0.22)
_EVENTS = msgspec.json.Decoder(list[Event])


@dataclass
class Spans:
    """The complete events of one category, in the file's order; -1 for a missing argument."""

    arrays: dict[str, array[Any]] = field(
        default_factory=lambda: {name: array(kind) for name, kind in _COLUMNS.items()}
    )
    #: place -> arguments, for collectives only
    args: dict[int, Arguments] = field(default_factory=dict)

    def column(self, name: str) -> Ints:
        """Return a column in its own memory; an empty one has none."""
        values = self.arrays[name]
        return np.frombuffer(values, values.typecode) if values else np.empty(0, values.typecode)

    def some(self, rows: Ints) -> Spans:
        """Return those in these rows."""
        arrays = {
            name: array(values.typecode, self.column(name)[rows].tobytes() if values else b"")
            for name, values in self.arrays.items()
        }
        kept = enumerate(rows.tolist())
        return Spans(arrays, {new: self.args[old] for new, old in kept if old in self.args})

    @cached_property
    def start(self) -> Ints:
        """Begin in ns since the trace's zero, exact to the nanosecond that was written.

        `ts` is microseconds with three decimals: at 4e12 one double is 1 ns from the next, and
        multiplied by 1000 it would be rounded once more. Whole and decimals apart are exact.
        """
        ts = self.column("ts")
        whole = np.floor(ts)
        start: Ints = whole.astype(np.int64) * 1000 + np.rint((ts - whole) * 1000).astype(np.int64)
        return start

    @cached_property
    def end(self) -> Ints:
        """End in ns since the trace's zero, no earlier than the begin."""
        length = np.rint(self.column("dur") * 1000).astype(np.int64)
        end: Ints = self.start + np.maximum(length, 0)
        return end


@dataclass
class Trace:
    """A whole trace: its metadata, and per category its spans."""

    meta: dict[str, Any]
    spans: dict[str, Spans]
    names: list[str]
    #: thread id -> name, of threads that the trace names
    threads: dict[int, str]
    #: number -> name of the Python functions, by which a function refers to its caller
    functions: dict[int, str] = field(default_factory=dict)
    #: category -> number of events, of those that are not read
    unread: Counter[str] = field(default_factory=Counter)
    #: names of the processes
    processes: set[str] = field(default_factory=set)
    #: process id -> rank, of processes whose name or label has one
    labelled: dict[int, int] = field(default_factory=dict)
    #: what several ranks' traces were merged into, by the label of each rank
    ranks: dict[str, Trace] = field(default_factory=dict)

    def by_rank(self) -> dict[int, Trace]:
        """Return the traces of `ranks` by the one number in each label, or else by their order."""
        labels = {tuple(map(int, re.findall(r"\d+", label))): label for label in self.ranks}
        plain = all(len(numbers) == 1 for numbers in labels)
        return {
            numbers[0] if plain else k: self.ranks[labels[numbers]]
            for k, numbers in enumerate(sorted(labels))
        }

    def take_name(self, event: Event) -> None:
        """Take what an event of `_NAMING` calls a thread or a process."""
        args = event.args or NO_ARGUMENTS
        if event.name == _THREAD_NAME:
            if isinstance(event.tid, int):
                self.threads[event.tid] = str(args.name or "")
            return
        name = str(args.name or args.labels or "")
        rank = _RANK.search(name)
        if rank and type(event.pid) is int and len(self.labelled) < _MOST_RANKS:
            self.labelled[event.pid] = int(rank[1])
        if args.name and len(self.processes) < _MOST_PROCESSES:
            self.processes.add(name)

    def of_device(self, device: int, process: int | None = None) -> Trace:
        """Return the trace with this device's work only, and of its hosts with this process's."""
        spans = dict(self.spans)
        for category, whole in self.spans.items():
            of_device = "device" in CATEGORIES[category]
            name, wanted = ("device", device) if of_device else ("process", process)
            if wanted is not None:
                spans[category] = whole.some(np.flatnonzero(whole.column(name) == wanted))
        return replace(self, spans=spans)

    def named(self, category: str, pattern: str) -> Bools:
        """Return for each span of a category whether its name matches a regular expression."""
        return matching(self.names, pattern)[self.spans[category].column("name")]

    def calls(self, kind: str, *categories: str) -> Calls:
        """Return the spans of some categories as calls of the host."""
        spans = [self.spans[category] for category in categories]
        start, end = (np.concatenate([getattr(s, n) for s in spans]) for n in ("start", "end"))
        thread, name = (np.concatenate([s.column(n) for s in spans]) for n in ("thread", "name"))
        ids = np.concatenate([s.column("correlation") for s in spans]) if kind == "cuda" else None
        return Calls(kind, start, end, thread, name, self.names, ids)


def read(path: Path) -> Trace:
    """Read a trace (`.json`, `.json.gz`, `.json.xz`).

    Raises `ReportError` where the file is missing, empty, truncated, not JSON, or no trace.
    """
    trace, codes = _of(meta={}), dict[str, int]()
    try:
        if path.stat().st_size == 0:
            raise ReportError(f"{path} is empty", "the profiler wrote nothing: record again")
        with opened_ahead(path) as file:
            for events in pieces(file, "traceEvents", trace.meta, _EVENTS):
                _take_ranks(events, trace, codes)
        for rank_trace in (trace, *trace.ranks.values()):
            _check_times(rank_trace)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, f"not a whole {path.suffix[1:]} file: {error}") from error
    except _NO_TRACE as error:
        raise _damaged(path, f"not a Kineto trace: {type(error).__name__} {error}") from error
    except msgspec.DecodeError as error:
        with opened(path) as file:
            named = other_tools.by_keys(path, keys_of(file) or ())
        raise named or _damaged(path, f"not whole JSON: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except NotAList as error:
        keys = f", but: {', '.join(error.keys[:6])}" if error.keys else ""
        no_trace = _damaged(path, f"not a Kineto trace: {error}{keys}")
        raise other_tools.by_keys(path, error.keys) or no_trace from error
    except ValueError as error:
        raise _damaged(path, f"not a Kineto trace: {type(error).__name__} {error}") from error
    trace.names = list(codes)
    return trace


def _of(meta: dict[str, Any]) -> Trace:
    """Return a trace of which nothing was read yet."""
    return Trace(meta, {category: Spans() for category in CATEGORIES}, [], {})


def _check_times(trace: Trace) -> None:
    """Raise ValueError for a time that is none; times are added to others later."""
    for spans in trace.spans.values():
        for values in (spans.column("ts"), spans.column("dur")):
            if values.size and not np.abs(values).max() < _FARTHEST_US:
                raise ValueError("an event lies more than a century from the trace's beginning")


def _damaged(path: Path, why: str) -> ReportError:
    return ReportError(
        f"{path} cannot be read: {why}", "record or copy it again, and compare the sizes"
    )


def _take_ranks(events: list[Event], trace: Trace, codes: dict[str, int]) -> None:
    """Add events to the columns of the ranks by which their processes or arguments are labelled."""
    matches = [isinstance(event.pid, str) and _OF_RANK.match(event.pid) for event in events]
    labels = [match[1] if match else "" for match in matches]
    if not any(matches):
        ranks = [event.args and event.args.rank for event in events]
        labels = [str(rank) if type(rank) is int else "" for rank in ranks]
        if 2 * labels.count("") >= len(labels):
            return _take(events, trace, codes)
    by_label: dict[str, list[Event]] = {"": []}
    for label, event in zip(labels, events, strict=True):
        by_label.setdefault(label, []).append(event)
    _take(by_label.pop(""), trace, codes)
    if len(by_label.keys() | trace.ranks.keys()) > _MOST_RANKS:
        raise ValueError("its events are labelled with more ranks than one trace can hold")
    for label, labelled in by_label.items():
        rank_trace = trace.ranks.setdefault(label, _of(trace.meta))
        names = {name: code for code, name in enumerate(rank_trace.names)}
        _take(labelled, rank_trace, names)
        rank_trace.names = list(names)
    return None


def _take(events: list[Event], trace: Trace, codes: dict[str, int]) -> None:
    """Add a piece's events to the columns."""
    by_category: dict[str, list[Event]] = {category: [] for category in CATEGORIES}
    for event in events:
        if event.ph != "X":
            if event.name in _NAMING:
                trace.take_name(event)
            continue
        kept = by_category.get(event.cat)
        if kept is None and event.cat in _FORMERLY:
            now = _FORMERLY[event.cat]
            is_step = now == "cpu_op" and event.name.startswith("ProfilerStep#")
            kept = by_category["user_annotation" if is_step else now]
        if kept is not None:
            kept.append(event)
        else:
            trace.unread[event.cat or ""] += 1
    by_category["python_function"] = _functions(by_category["python_function"], trace.functions)
    for category, kept in by_category.items():
        if kept:
            _extend(trace.spans[category], kept, codes, category)


def _numbers(threads: list[Any]) -> array[int]:
    """Return thread ids; of older traces those that are texts (`"4093687616"`, `"stream 7"`)."""
    try:
        return array("q", threads)
    except TypeError:
        return array("q", map(_number, threads))


def _number(thread: Any) -> int:
    if not isinstance(thread, str):
        return int(thread)
    return int(thread) if thread.isdecimal() else _NAMED_THREADS + zlib.crc32(thread.encode())


def _functions(events: list[Event], names: dict[int, str]) -> list[Event]:
    """Return the Python functions that took long, those of C with the function that called them.

    A caller comes before what it calls, and took at least as long.
    """
    kept = [event for event in events if (event.dur or 0) >= _LEAST_FUNCTION_US]
    for event in kept:
        args = event.args or NO_ARGUMENTS
        # the address of an object would make a name of its own of each
        name = _ADDRESS.sub("", event.name)
        names[args.function] = name
        caller = names.get(args.caller or -1)
        event.name = f"{name} in {caller}" if name.startswith("<") and caller else name
    return kept


def _extend(spans: Spans, events: list[Event], codes: dict[str, int], category: str) -> None:
    arrays = spans.arrays
    first = len(arrays["ts"])
    arrays["ts"].extend([float(event.ts) for event in events])  # some tools write text
    arrays["dur"].extend([float(event.dur or 0) for event in events])
    arrays["process"].extend(map(_process, map(attrgetter("pid"), events)))
    arrays["thread"].extend(_numbers([event.tid for event in events]))
    arrays["name"].extend([codes.setdefault(event.name, len(codes)) for event in events])
    args = [event.args or NO_ARGUMENTS for event in events]
    for name in CATEGORIES[category]:
        numbers = map(attrgetter(name), args)
        arrays[name].extend([-1 if number is None else number for number in numbers])
    for row, (event, arguments) in enumerate(zip(events, args, strict=True), first):
        if event.name.startswith("gloo:") or arguments.collective is not None:
            finished = arguments.finished if event.finished is None else event.finished
            # apart from the piece of text that their JSON lies in
            shapes, types = arguments.shapes.copy(), arguments.types.copy()
            spans.args[row] = msgspec.structs.replace(
                arguments, finished=finished, shapes=shapes, types=types
            )


def _process(pid: Any) -> int:
    """Return a process's id, -1 where it is no number (or none that fits)."""
    return pid if type(pid) is int and 0 <= pid < _NAMED_THREADS else -1
