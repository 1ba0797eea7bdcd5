"""One rank's dump of PyTorch's flight recorder, as a table of what it called.

The format is that of `torch.distributed.flight_recorder`, versions 2.x of the dump (torch 2.4 on;
`dump_file` brings older ones into it): pickles as torch writes them on a timeout
(`TORCH_FR_DUMP_TEMP_FILE`), or JSON. gloo records every collective and no point-to-point operation,
and names no group's ranks: in a run these are in `groups.json.gz` beside the dump.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import paths
from clusterprof.agent.contracts.messages import users_line
from clusterprof.columns import Ints, begins, first_of
from clusterprof.errors import ReportError
from clusterprof.ingest.flight.dump_file import DAMAGES, content_of, read_document
from clusterprof.ingest.kineto.collectives import DTYPE_BYTES
from clusterprof.ingest.kineto.json_stream import keys_of
from clusterprof.ingest.opening import FARTHEST, opened
from clusterprof.ingest.operations import operation
from clusterprof.ingest.recording import nullable
from clusterprof.tables import HIGHEST_RANK, NAME, required

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

#: `flight.json.gz` of a run, and `flight.2.json.gz` of a second process in the rank
OF_A_RUN = re.compile(r"(flight|hang|watch)(?:\.(\d{1,6}))?\.(?:json|pickle)\.gz")

#: torch names a dump by a prefix and the rank (`nccl_trace_rank_3`)
_RANK = re.compile(r"(\d{1,10})$")
_PACKED = re.compile(r"(\.(json|pickle|pkl|gz|xz))+$")
_PEER = re.compile(r"send \d{1,9}->(\d{1,9})|recv \d{1,9}<-(\d{1,9})")

#: the operation of an entry that ends a batch
_MARK = "Coalesced"

#: what many entries have in common: everything but numbers, times and frames
_ALIKE = pa.schema(
    ENTRIES.field(name)
    for name in (
        "p2p", "operation", "peer", "input_sizes", "output_sizes", "input_types", "output_types",
        "bytes", "finished", "timeout_ns",
    )
)  # fmt: skip
#: where it stands in the dump; it repeats from step to step, and is looked at once for each value
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
        return _read(path, *read_document(path), rank)
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
            return begin == b"{" and "entries" in (keys_of(file, {"entries"}) or ())
    except (OSError, ReportError, *DAMAGES):
        return False


def stem_of(path: Path) -> str:
    """Return a dump's name without what says how it is packed."""
    return _PACKED.sub("", path.name)


def named_rank(path: Path) -> int | None:
    """Return the rank at the end of a dump's name; None without one."""
    named = _RANK.search(stem_of(path))
    return int(named[1]) if named else None


def _read(
    path: Path, document: Mapping[str, Any], older: Sequence[str], rank: int | None
) -> FlightDump:
    entries = sorted(document["entries"], key=itemgetter("record_id"))
    if any(name not in entry for entry in entries[:1] + entries[-1:] for name in _DEFAULTS):
        entries = [{**_DEFAULTS, **entry} for entry in entries]
    places: dict[bytes, int] = {}  # dictionary_encode() of long texts takes as long as the rest
    keys = map(orjson.dumps, map(_repeated, entries))
    kind = np.array([places.setdefault(key, len(places)) for key in keys], np.int32)
    kinds = [_kind(key) for key in places]
    beside, damage = _listed_beside(path)
    listed = {**beside, **_listed_ranks(document.get("pg_config"))}
    groups = _groups(kinds, listed)
    own, doubt = _own_rank(path, rank, groups)
    table = _table(entries, kinds, kind, groups, own)
    again = pc.unique(table["group"].filter(pc.greater(table["restarts"], 0))).to_pylist()
    restarted = sorted({groups[place].name for place in again})
    anew = (f"the sequence numbers of process group {name} begin anew" for name in restarted)
    times = ("time_created_ns", "time_discovered_completed_ns")
    signs = (entry.get(time) or 0 for entry in entries for time in times)
    return FlightDump(
        path,
        own,
        document["version"],
        groups,
        _without_marks(table, entries),
        (*damage, *older, *anew, *doubt),
        backend=str(entries[0]["profiling_name"]).partition(":")[0] if entries else "",
        until_ns=int(max(signs, default=0)),
        world_size=max((ranks[-1] + 1 for _, ranks in listed.values()), default=0),
    )


def _without_marks(table: pa.Table, entries: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the table without the entries that end a batch of sends and receives.

    NCCL's recorder gives a batch's end and duration to that entry alone: its parts get them here.
    """
    is_mark = pc.equal(table["operation"].cast(pa.string()), _MARK)
    if not pc.any(is_mark).as_py():
        return table
    batches = list(zip(table["group"].to_pylist(), _numbers(entries, "p2p_seq_id"), strict=True))
    ends = {batches[mark]: mark for mark in np.flatnonzero(is_mark).tolist()}
    of_part = np.arange(len(entries))
    for row in np.flatnonzero(pc.and_not(table["p2p"], table["finished"])).tolist():
        of_part[row] = ends.get(batches[row], row)
    for name in ("finished", "duration_ns"):
        place = ENTRIES.get_field_index(name)
        table = table.set_column(place, ENTRIES.field(place), table[name].take(pa.array(of_part)))
    return table.filter(pc.invert(is_mark))


#: of a group's name its description, where it is given, and its ranks
_Listed = Mapping[str, tuple[str | None, tuple[int, ...]]]


def _listed_ranks(config: object) -> _Listed:
    """Return the ranks of those groups that the dump lists."""
    groups = {}
    for name, group in (config if isinstance(config, dict) else {}).items():
        ranks = group.get("ranks", "") if isinstance(group, dict) else ""
        listed = orjson.loads(ranks) if isinstance(ranks, str) and ranks else ranks
        if listed and all(type(rank) is int and 0 <= rank <= HIGHEST_RANK for rank in listed):
            text = group.get("desc")
            groups[str(name)] = (None if text is None else str(text)), tuple(sorted(set(listed)))
    return groups


def _listed_beside(path: Path) -> tuple[_Listed, list[str]]:
    """Return what the agent has listed beside a dump of a run, and a warning if that is damaged."""
    match = OF_A_RUN.fullmatch(path.name)
    beside = path.with_name(paths.numbered(paths.GROUPS, int(match[2] or 1))) if match else None
    if beside is None or not beside.is_file():
        return {}, []
    try:
        return _listed_ranks(orjson.loads(content_of(beside))["pg_config"]), []
    except (*DAMAGES, OSError, TypeError, KeyError, ValueError) as error:
        return {}, [f"{beside.name}, the ranks of its process groups, cannot be read: {error}"]


def _table(
    entries: Sequence[Mapping[str, Any]],
    kinds: Sequence[Mapping[str, Any]],
    kind: npt.NDArray[np.int32],
    groups: Sequence[Group],
    rank: int,
) -> pa.Table:
    """Return the entries as `ENTRIES`; `kind` is the place of each one's kind among `kinds`."""
    place_of = {(group.name, group.description): place for place, group in enumerate(groups)}
    group = np.array([place_of[entry["called"]] for entry in kinds], np.int32)[kind]
    alike = pa.Table.from_pylist(kinds, schema=_ALIKE).take(pa.array(kind))
    p2p = alike["p2p"].to_numpy()
    collective, direct = (_numbers(entries, name) for name in ("collective_seq_id", "p2p_seq_id"))
    sequence = np.where(p2p, direct, collective)
    restarts, part_number = np.zeros_like(sequence), np.zeros_like(sequence)
    lanes = 2 * group.astype(np.int64) + p2p
    for lane in np.unique(lanes):
        rows = np.flatnonzero(lanes == lane)
        change = np.diff(sequence[rows], prepend=sequence[rows[0]])
        restarts[rows] = np.count_nonzero(change < 0) - np.cumsum(change < 0)
        part_number[rows] = np.arange(rows.size) - first_of(begins(sequence[rows]))
    given = [entry.get("duration_ms") for entry in entries]
    ms = pa.array(given, pa.float64()).to_numpy(zero_copy_only=False)
    timed = np.isfinite(ms) & (ms >= 0) & (ms < FARTHEST / 1e6)
    columns = {
        **{name: alike[name] for name in _ALIKE.names},
        "rank": np.full(len(entries), rank),
        "group": group,
        "restarts": restarts,
        "sequence": sequence,
        "part": part_number,
        "record": _numbers(entries, "record_id"),
        "enqueue_ns": _numbers(entries, "time_created_ns"),
        "duration_ns": nullable(np.where(timed, ms * 1e6, 0).round().astype(np.int64), timed),
        "frame": _frames(entries),
    }
    return pa.table(columns, schema=ENTRIES)


def _numbers(entries: Sequence[Mapping[str, Any]], name: str) -> Ints:
    """Return one number of each entry. Raises ValueError for what is no count or time."""
    column = pa.array(list(map(itemgetter(name), entries)), pa.int64())
    if column.null_count:
        raise ValueError(f"{name} is missing")
    values: Ints = np.asarray(column.to_numpy(), np.int64)
    if values.size and not (values.min() >= 0 and values.max() < FARTHEST):
        raise ValueError(f"{name} is no count or time")
    return values


def _frames(entries: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return the user's line in the stack of each entry; None where it was not recorded."""
    line_of: dict[bytes, str | None] = {}
    lines = []
    for frames in (entry.get("frames") or () for entry in entries):
        key = orjson.dumps(frames)
        if key not in line_of:
            line_of[key] = users_line(
                (str(frame["filename"]), frame["line"], frame["name"]) for frame in frames
            )
        lines.append(line_of[key])
    return lines


@functools.lru_cache(maxsize=4096)  # the ranks of a job call the same
def _kind(packed: bytes) -> Mapping[str, Any]:
    """Return what `_REPEATED`, packed as JSON, says of an entry: the columns of `_ALIKE`.

    And `called`, its group's name and description, and `members`, how many that has, by what is
    gathered of each.
    """
    group, name, p2p, inputs, outputs, *rest = orjson.loads(packed)
    input_types, output_types, state, retired, timeout_ms = rest
    step = name.rpartition(":")[2]
    kind = _MARK if step == "coalesced" else operation(name)
    peer = _PEER.search(step)
    sent, got = _count(inputs), _count(outputs)
    given = (got, output_types) if kind in ("Scatter", "Recv") else (sent, input_types)
    # how many times the smaller is gathered in the larger
    large, small = {"AllGather": (got, sent), "ReduceScatter": (sent, got)}.get(kind, (0, 0))
    members, odd = divmod(large, small) if small > 0 else (0, 1)
    is_time = isinstance(timeout_ms, int) and 0 < timeout_ms < FARTHEST // 1_000_000
    return {
        "called": (str(group[0]), "" if group[1] == "undefined" else str(group[1])),
        "members": members if not odd and members <= HIGHEST_RANK else None,
        "operation": kind,
        "p2p": kind in ("Send", "Recv") if p2p is None else bool(p2p),
        "peer": int(peer[1] or peer[2]) if peer else None,
        "input_sizes": orjson.dumps(inputs).decode(),
        "output_sizes": orjson.dumps(outputs).decode(),
        "input_types": orjson.dumps(input_types).decode(),
        "output_types": orjson.dumps(output_types).decode(),
        "bytes": _message_bytes(*given),
        "finished": bool(retired) or state == "completed",
        "timeout_ns": timeout_ms * 1_000_000 if is_time else None,
    }


def _message_bytes(elements: int, types: Sequence[str]) -> int | None:
    width = DTYPE_BYTES.get(str(types[0]).lower(), 0) if len({*types}) == 1 else 0
    return elements * width if width and elements * width < FARTHEST else None


def _count(shapes: Sequence[Sequence[int]]) -> int:
    if not all(type(n) is int and n >= 0 for shape in shapes for n in shape):
        raise ValueError("a size is no list of numbers")
    return sum(prod(shape) for shape in shapes)


def _groups(kinds: Sequence[Mapping[str, Any]], listed: _Listed) -> tuple[Group, ...]:
    """Return the groups. Of two that share a name torch lists the ranks of one alone."""
    sizes: dict[tuple[str, str], int | None] = {}
    for kind in kinds:
        sizes[kind["called"]] = kind["members"] or sizes.get(kind["called"])
    groups = []
    for (name, text), size in sizes.items():
        text_there, ranks = listed.get(name, (None, None))
        members = ranks if text_there in (None, text) else None
        groups.append(Group(name, text, members, len(members) if members else size))
    return tuple(groups)


def _own_rank(path: Path, given: int | None, groups: Sequence[Group]) -> tuple[int, list[str]]:
    """Return whose dump it is, and a warning where its name says otherwise."""
    rank = named_rank(path) if given is None else given
    members = [{*group.ranks} for group in groups if group.ranks]
    common = set.intersection(*members) if members else None
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
