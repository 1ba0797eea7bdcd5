"""One rank's dump of PyTorch's flight recorder, as a table of what it called.

The format is that of `torch.distributed.flight_recorder`, versions 2.x of the dump (torch 2.4 on;
`version_1` brings older ones into it): pickles as torch writes them on a timeout
(`TORCH_FR_DUMP_TEMP_FILE`), or JSON. gloo records every collective and no point-to-point operation,
and names no group's ranks: in a run these are in `groups.json.gz` beside the dump.
"""

from __future__ import annotations

import functools
import gc
import lzma
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import files, paths
from clusterprof.agent.contracts.messages import users_line
from clusterprof.errors import ReportError
from clusterprof.ingest.flight.unpickle import PickleError, unpickled
from clusterprof.ingest.flight.version_1 import as_version_2
from clusterprof.ingest.kineto.json_stream import keys_of
from clusterprof.ingest.kineto.nccl_kernels import DTYPE_BYTES
from clusterprof.ingest.opening import FARTHEST, check_regular, opened, unreadable
from clusterprof.ingest.operations import operation
from clusterprof.tables import HIGHEST_RANK, NAME, required

Ints = npt.NDArray[np.int64]

#: What one rank called, in order. `sequence` counts the group's collectives, or with `p2p` the
#: rank's point-to-point operations in it; `part` those that share one number, as coalesced ones do.
#: `restarts` is how often the group's numbers began anew after this entry (the group was made
#: again). `bytes` is what the rank hands in (Scatter, Recv: what it gets). Times are this host's
#: wall clock.
ENTRIES = pa.schema(
    [
        required("rank", pa.int32()),
        #: index into the groups beside the table
        required("group", pa.int32()),
        required("restarts", pa.int32()),
        required("sequence", pa.int64()),
        required("part", pa.int32()),
        required("p2p", pa.bool_()),
        required("record", pa.int64()),
        required("operation", NAME),
        #: of Send and Recv the other side, in the group's ranks
        pa.field("peer", pa.int32()),
        #: lists of shapes and of types, as JSON
        required("input_sizes", NAME),
        required("output_sizes", NAME),
        required("input_types", NAME),
        required("output_types", NAME),
        pa.field("bytes", pa.int64()),
        required("enqueue_ns", pa.int64()),
        #: completed, or given up by its backend: gloo's state stays `scheduled`
        required("finished", pa.bool_()),
        pa.field("duration_ns", pa.int64()),
        #: after how long the backend gives up
        pa.field("timeout_ns", pa.int64()),
        #: `file:line function` of the innermost frame outside of torch and Python, where recorded
        pa.field("frame", NAME),
    ]
)

#: Bytes, unpacked: an entry takes 0.5 kB as JSON, a pickled one with a deep stack 2 kB; this
#: holds thirty thousand of those, fifteen times what the recorder keeps unless asked for more.
_LARGEST = 64 << 20

#: `flight.json.gz` of a run, and `flight.2.json.gz` of a second process in the rank
OF_A_RUN = re.compile(r"(flight|hang)(?:\.(\d{1,6}))?\.(?:json|pickle)\.gz")

#: what unpacking a damaged file raises
_DAMAGES = (EOFError, lzma.LZMAError, zlib.error)
#: gzip's own format, by zlib
_GZIP = 31

#: torch names a dump by a prefix and the rank (`nccl_trace_rank_3`)
_RANK = re.compile(r"(\d{1,10})$")
_PACKED = re.compile(r"(\.(json|pickle|pkl|gz|xz))+$")
_PEER = re.compile(r"send \d{1,9}->(\d{1,9})|recv \d{1,9}<-(\d{1,9})")

#: the version that is said of the dumps that have none: of torch 2.2
_OF_A_LIST = "1.0"

#: the operation of an entry that ends a batch
_MARK = "Coalesced"

#: what repeats from step to step is looked at once for each of its values
_REPEATED = (
    "process_group", "profiling_name", "is_p2p", "input_sizes", "output_sizes",
    "input_dtypes", "output_dtypes", "state", "retired", "timeout_ms",
)  # fmt: skip
_repeated = itemgetter(*_REPEATED)
#: older versions leave these out
_DEFAULTS: dict[str, Any] = {
    "is_p2p": None, "input_sizes": [], "output_sizes": [], "input_dtypes": [], "output_dtypes": [],
    "state": "", "retired": False, "p2p_seq_id": 0,
    "timeout_ms": None,
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """A process group: `ranks` are its members in ascending order, None where no dump lists them.

    `size` is their number, where the sizes of an AllGather or a ReduceScatter tell it. Once all
    dumps are joined `ranks` are those that are known, and `complete` says whether they are all.
    """

    name: str
    description: str
    ranks: tuple[int, ...] | None = None
    size: int | None = None
    complete: bool = False

    @property
    def is_world(self) -> bool:
        """Whether it is the group of all ranks that torch makes first."""
        return self.description == "default_pg"


@dataclass(frozen=True)
class FlightDump:
    """One rank's entries (`ENTRIES`), and the groups that they are of."""

    source: Path
    rank: int
    version: str
    groups: tuple[Group, ...]
    entries: pa.Table
    warnings: tuple[str, ...] = ()
    #: whose recorder it is: nccl, gloo; "" where it holds nothing
    backend: str = ""
    #: when the last call was made or, where it says that, seen to have ended; 0 without entries
    until_ns: int = 0
    #: how many ranks the job has at least, by the ranks that are listed of a group of any name:
    #: gloo lists those of the group of all without its name
    world_size: int = 0


def read_dump(path: Path, rank: int | None = None) -> FlightDump:
    """Return what a rank's flight recorder held. Raises `ReportError`.

    `rank` is what the run or the user says. None: the number at the end of the file's name, as
    torch writes it, or the only rank that all groups of the dump have in common.
    """
    collecting = gc.isenabled()
    gc.disable()  # of half a million fresh objects none is garbage: looking doubles the time
    try:
        return _read(path, _document(path), rank)
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError) as error:
        raise ReportError(
            f"{path} is no dump of a flight recorder that can be read",
            f"{type(error).__name__}: {error}",
            "dump it again; if torch itself wrote it so, please report it",
        ) from error
    finally:
        if collecting:
            gc.enable()


def is_dump(path: Path) -> bool:
    """Whether a file looks like a dump: a pickle as torch writes them, or JSON with entries."""
    try:
        with opened(path) as file:
            begin = file.read(1)
        if begin == b"\x80":
            return True
        with opened(path) as file:
            return begin == b"{" and {"entries"} <= {*(keys_of(file) or ())}
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ReportError):
        return False


def stem_of(path: Path) -> str:
    """Return a dump's name without what says how it is packed."""
    return _PACKED.sub("", path.name)


def named_rank(path: Path) -> int | None:
    """Return the rank at the end of a dump's name; None without one."""
    named = _RANK.search(stem_of(path))
    return int(named[1]) if named else None


def _document(path: Path) -> Mapping[str, Any]:
    check_regular(path)
    try:
        content = _content(path)
    except _DAMAGES as error:
        raise ReportError(f"{path} is cut short or damaged", str(error), "copy it again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > _LARGEST:
        raise ReportError(
            f"{path} holds more than {_LARGEST >> 20} MB, which no flight recorder does",
            "set TORCH_FR_BUFFER_SIZE to fewer entries and dump it again",
        )
    if not content:
        raise ReportError(f"{path} is empty", "copy it again, or dump it again")
    try:
        found = unpickled(content) if content[:1] == b"\x80" else orjson.loads(content)
    except (PickleError, orjson.JSONDecodeError) as error:
        raise ReportError(
            f"{path} is neither JSON nor a pickle of numbers, strings and containers alone",
            str(error),
            "where it is cut short, copy it again; nothing of it was executed",
        ) from error
    if isinstance(found, list) and found:
        found = {"version": _OF_A_LIST, "entries": found}
    if isinstance(found, dict) and "entries" not in found and "pg_config" in found:
        raise ReportError(
            f"the program has made no collective that torch's flight recorder records ({path})",
            "it records those of process groups, none of symmetric memory",
        )
    if not isinstance(found, dict) or not isinstance(found.get("entries"), (list, tuple)):
        raise ReportError(f"{path} is no dump of a flight recorder: it has no entries")
    version = found.get("version")
    if not isinstance(version, str) or not version.startswith(("1.", "2.")):
        raise ReportError(
            f"{path} is of version {str(version)[:20]!r} of the flight recorder's dumps",
            "versions 1.x and 2.x are read, which torch 2.2 and later write",
        )
    return found


def _content(path: Path) -> bytes:
    """Return what a file holds, unpacked, with a byte more than may be if it is more.

    Raises OSError, EOFError, lzma.LZMAError, zlib.error.
    """
    if path.suffix == ".gz":  # most often whole and one piece: at once, in half a stream's time
        with files.opened(path, links=True) as file:
            packed = file.read(_LARGEST)
        unpacker = zlib.decompressobj(_GZIP)
        content = unpacker.decompress(packed, _LARGEST + 1)
        if unpacker.eof and not unpacker.unused_data:
            return content
    with opened(path) as file:
        return file.read(_LARGEST + 1)


def _read(path: Path, document: Mapping[str, Any], rank: int | None) -> FlightDump:
    older: list[str] = []
    if document["version"].startswith("1."):
        document, older = as_version_2(path, document)
    entries = sorted(document["entries"], key=itemgetter("record_id"))
    if any(name not in each for each in entries[:1] + entries[-1:] for name in _DEFAULTS):
        entries = [{**_DEFAULTS, **each} for each in entries]
    beside, bad = _listed_beside(path)
    listed = {**beside, **_listed_ranks(document.get("pg_config"))}
    groups, columns, warnings = _columns(entries, listed)
    own, doubt = _own_rank(path, rank, groups)
    columns["rank"] = np.full(len(entries), own)
    arrays = [pa.array(columns[field.name], field.type) for field in ENTRIES]
    table = _without_marks(pa.table(arrays, schema=ENTRIES), entries)
    backend = str(entries[0]["profiling_name"]).partition(":")[0] if entries else ""
    every = (*bad, *older, *warnings, *doubt)
    return FlightDump(
        path,
        own,
        document["version"],
        groups,
        table,
        every,
        backend,
        until_ns=max(map(_last_sign, entries), default=0),
        world_size=max((ranks[-1] + 1 for _, ranks in listed.values()), default=0),
    )


def _last_sign(entry: Mapping[str, Any]) -> int:
    """Return when an entry was made or seen to have ended."""
    return int(max(entry["time_created_ns"], entry.get("time_discovered_completed_ns") or 0))


def _without_marks(table: pa.Table, entries: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the table without the entries that end a batch of sends and receives.

    NCCL's recorder gives a batch's end and duration to that entry alone: its parts get them here.
    """
    if _MARK not in table["operation"].chunk(0).dictionary.to_pylist():
        return table
    marks = np.flatnonzero(pc.equal(table["operation"].cast(pa.string()), _MARK).to_numpy())
    direct = _numbers(entries, "p2p_seq_id")
    group, finished = table["group"].to_numpy(), table["finished"].to_numpy().copy()
    durations = table["duration_ns"].to_pylist()
    ends = {(group[mark], direct[mark]): mark for mark in marks.tolist()}
    for row in np.flatnonzero(table["p2p"].to_numpy() & ~finished).tolist():
        if (mark := ends.get((group[row], direct[row]))) is not None:
            finished[row], durations[row] = finished[mark], durations[mark]
    for name, values in (("finished", finished), ("duration_ns", durations)):
        at = ENTRIES.get_field_index(name)
        table = table.set_column(at, ENTRIES.field(at), pa.array(values, ENTRIES.field(at).type))
    return table.filter(pc.not_equal(table["operation"].cast(pa.string()), _MARK))


#: of a group's name its description, where it is given, and its ranks
_Listed = Mapping[str, tuple[str | None, tuple[int, ...]]]


def _listed_ranks(config: object) -> _Listed:
    """Return the ranks of those groups that the dump lists."""
    found = {}
    for name, group in (config if isinstance(config, dict) else {}).items():
        ranks = group.get("ranks", "") if isinstance(group, dict) else ""
        listed = orjson.loads(ranks) if isinstance(ranks, str) and ranks else ranks
        if listed and all(type(each) is int and 0 <= each <= HIGHEST_RANK for each in listed):
            text = group.get("desc")
            found[str(name)] = (None if text is None else str(text)), tuple(sorted(set(listed)))
    return found


def _listed_beside(path: Path) -> tuple[_Listed, list[str]]:
    """Return what the agent has listed beside a dump of a run, and a warning if that is damaged."""
    match = OF_A_RUN.fullmatch(path.name)
    beside = path.with_name(paths.numbered(paths.GROUPS, int(match[2] or 1))) if match else None
    if beside is None or not beside.is_file():
        return {}, []
    try:
        return _listed_ranks(orjson.loads(_content(beside))["pg_config"]), []
    except (*_DAMAGES, OSError, TypeError, KeyError, ValueError) as error:
        return {}, [f"{paths.GROUPS}, the ranks of its process groups, cannot be read: {error}"]


def _columns(
    entries: Sequence[Mapping[str, Any]], listed: _Listed
) -> tuple[tuple[Group, ...], dict[str, Any], list[str]]:
    """Return the groups, the columns of `ENTRIES` but for the rank, and warnings."""
    places: dict[bytes, int] = {}  # dictionary_encode() of long texts takes as long as the rest
    keys = map(orjson.dumps, map(_repeated, entries))
    kind_of = np.array([places.setdefault(key, len(places)) for key in keys], np.int32)
    kinds, codes = [_Kind.of(key) for key in places], pa.array(kind_of)
    groups = _groups(kinds, listed)
    place_of = {(group.name, group.description): n for n, group in enumerate(groups)}

    def of_kind(name: str) -> pa.Array:
        values = [getattr(kind, name) for kind in kinds]
        return pa.array(values, ENTRIES.field(name).type).take(codes)

    group = np.array([place_of[kind.group] for kind in kinds], np.int32)[kind_of]
    p2p = np.array([kind.p2p for kind in kinds], bool)[kind_of]
    collective, direct = (_numbers(entries, name) for name in ("collective_seq_id", "p2p_seq_id"))
    sequence = np.where(p2p, direct, collective)
    restarts, part = _restarts(group, p2p, sequence)
    same = {name: of_kind(name) for name in _Kind.COLUMNS}
    columns: dict[str, Any] = same | {
        "group": group,
        "restarts": restarts,
        "sequence": sequence,
        "part": part,
        "p2p": p2p,
        "record": _numbers(entries, "record_id"),
        "enqueue_ns": _numbers(entries, "time_created_ns"),
        "duration_ns": _durations(entries),
        "frame": _frames(entries),
    }
    anew = sorted({groups[each].name for each in np.unique(group[restarts > 0])})
    return (
        groups,
        columns,
        [f"the sequence numbers of process group {name} begin anew" for name in anew],
    )


def _numbers(entries: Sequence[Mapping[str, Any]], name: str) -> Ints:
    """Return one number of each entry. Raises ValueError for what is no count or time."""
    found = pa.array(list(map(itemgetter(name), entries)), pa.int64())
    if found.null_count:
        raise ValueError(f"{name} is missing")
    values: Ints = np.asarray(found.to_numpy(), np.int64)
    if values.size and not (values.min() >= 0 and values.max() < FARTHEST):
        raise ValueError(f"{name} is no count or time")
    return values


def _durations(entries: Sequence[Mapping[str, Any]]) -> pa.Array:
    given = [each.get("duration_ms") for each in entries]
    ms = pa.array(given, pa.float64()).to_numpy(zero_copy_only=False)
    known = np.isfinite(ms) & (ms >= 0) & (ms < FARTHEST / 1e6)
    return pa.array(np.where(known, ms * 1e6, 0).round().astype(np.int64), mask=~known)


def _frames(entries: Sequence[Mapping[str, Any]]) -> pa.Array:
    given = [each.get("frames") for each in entries]
    if not any(given):
        return pa.nulls(len(given), NAME)
    known: dict[bytes, str | None] = {}
    lines: list[str | None] = []
    for frames in given:
        if not frames:
            lines.append(None)
            continue
        key = orjson.dumps(frames)
        if key not in known:
            known[key] = users_line(
                (str(one["filename"]), one["line"], one["name"]) for one in frames
            )
        lines.append(known[key])
    return pa.array(lines, pa.string()).dictionary_encode()


def _restarts(
    group: npt.NDArray[np.int32], p2p: npt.NDArray[np.bool_], sequence: Ints
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return how often each entry's numbers begin anew after it, and its part of its number."""
    order = np.lexsort((np.arange(group.size), p2p, group))
    lane, number = (group.astype(np.int64) * 2 + p2p)[order], sequence[order]
    same = np.diff(lane, prepend=-1) == 0
    fell = same & (np.diff(number, prepend=0) < 0)
    after = np.cumsum(fell[::-1])[::-1] - fell
    _, last = np.unique(lane[::-1], return_index=True)
    beyond = after[lane.size - 1 - last] if lane.size else after
    restarts, part = np.zeros(group.size, np.int32), np.zeros(group.size, np.int32)
    where = np.searchsorted(np.unique(lane), lane)
    restarts[order] = after - (beyond[where] if lane.size else 0)
    begins = ~same | (np.diff(number, prepend=-1) != 0)
    first = np.maximum.accumulate(np.where(begins, np.arange(lane.size), 0))
    part[order] = np.arange(lane.size) - first
    return restarts, part


#: `_REPEATED` as JSON
_Packed = bytes


@dataclass(frozen=True)
class _Kind:
    """What many entries have in common: everything but numbers, times and frames."""

    COLUMNS: ClassVar = (
        "operation", "peer", "input_sizes", "output_sizes", "input_types", "output_types",
        "bytes", "finished", "timeout_ns",
    )  # fmt: skip

    group: tuple[str, str]
    operation: str
    p2p: bool
    peer: int | None
    input_sizes: str
    output_sizes: str
    input_types: str
    output_types: str
    bytes: int | None
    #: how many members the group has, by what is gathered of each
    members: int | None
    finished: bool
    timeout_ns: int | None

    @classmethod
    @functools.lru_cache(maxsize=4096)  # the ranks of a job call the same
    def of(cls, packed: _Packed) -> _Kind:
        values = orjson.loads(packed)
        group, name, p2p, inputs, outputs, input_types, output_types, *rest = values
        state, retired, timeout_ms = rest
        called = name.rpartition(":")[2]
        one = _MARK if called == "coalesced" else operation(name)
        peer = _PEER.search(called)
        sent, got = _count(inputs), _count(outputs)
        handed = (got, output_types) if one in ("Scatter", "Recv") else (sent, input_types)
        each = DTYPE_BYTES.get(str(handed[1][0]).lower()) if len({*handed[1]}) == 1 else None
        texts = [orjson.dumps(each).decode() for each in values[3:7]]
        return cls(
            group=(str(group[0]), "" if group[1] == "undefined" else str(group[1])),
            operation=one,
            p2p=one in ("Send", "Recv") if p2p is None else bool(p2p),
            peer=int(peer[1] or peer[2]) if peer else None,
            input_sizes=texts[0],
            output_sizes=texts[1],
            input_types=texts[2],
            output_types=texts[3],
            bytes=handed[0] * each if each and handed[0] * each < FARTHEST else None,
            members=_members(one, sent, got),
            finished=bool(retired) or state == "completed",
            timeout_ns=timeout_ms * 1_000_000 if _is_time(timeout_ms) else None,
        )


def _is_time(ms: object) -> bool:
    return isinstance(ms, int) and 0 < ms < FARTHEST // 1_000_000


def _count(shapes: Sequence[Sequence[int]]) -> int:
    if not all(type(n) is int and n >= 0 for shape in shapes for n in shape):
        raise ValueError("a size is no list of numbers")
    return sum(prod(shape) for shape in shapes)


def _members(one: str, sent: int, got: int) -> int | None:
    most, least = (got, sent) if one == "AllGather" else (sent, got)
    known = one in ("AllGather", "ReduceScatter") and least > 0 and most % least == 0
    return most // least if known and most // least <= HIGHEST_RANK else None


def _groups(kinds: Sequence[_Kind], listed: _Listed) -> tuple[Group, ...]:
    """Return the groups. Of two that share a name torch lists the ranks of one alone."""
    sizes: dict[tuple[str, str], int | None] = {}
    for kind in kinds:
        sizes[kind.group] = kind.members or sizes.get(kind.group)
    groups = []
    for (name, text), size in sizes.items():
        text_there, ranks = listed.get(name, (None, None))
        here = ranks if text_there in (None, text) else None
        groups.append(Group(name, text, here, len(here) if here else size))
    return tuple(groups)


def _own_rank(path: Path, given: int | None, groups: Sequence[Group]) -> tuple[int, list[str]]:
    """Return whose dump it is, and a warning where its name says otherwise."""
    rank = named_rank(path) if given is None else given
    common = (
        set.intersection(*known) if (known := [{*g.ranks} for g in groups if g.ranks]) else None
    )
    if common is not None and len(common) == 1 and rank not in common:
        (only,) = common
        taken = f"it was taken for rank {rank}'s" if rank is not None else "its name says no rank"
        return only, [f"{path}: {taken}, but its groups have only rank {only} in common"]
    if rank is None:
        raise ReportError(
            f"{path} does not say whose dump it is",
            "name it by its rank, as torch does: nccl_trace_rank_3; or give --rank FILE=N",
        )
    if rank > HIGHEST_RANK or (common is not None and rank not in common):
        raise ReportError(f"{path} is not rank {rank}'s: its groups are of other ranks")
    return rank, []
