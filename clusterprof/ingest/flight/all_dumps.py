"""The flight recorders of all ranks of one job as one table; what cannot be read is a missing one.

A group is its name and its members: torch may give several groups one name. Where no dump lists
the members (gloo), a group is its name and description, and those that called something in it.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.agent.contracts import paths
from clusterprof.errors import ReportError
from clusterprof.ingest.apart import Lost, Readers, limit_s
from clusterprof.ingest.flight.dump import (
    ENTRIES,
    OF_A_RUN,
    FlightDump,
    Group,
    is_dump,
    named_rank,
    read_dump,
    stem_of,
)
from clusterprof.ingest.kineto.json_stream import keys_of
from clusterprof.ingest.opening import opened, unreadable
from clusterprof.ingest.operations import SYNCHRONISING
from clusterprof.ingest.sources import KINETO_MARKS, OUR_OWN
from clusterprof.results import MissingRank

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: After this, at the soonest, the processes of an attempt call something: they import torch first,
#: which takes seconds. Hosts' clocks lie closer: ntpd sets one that is 128 ms wrong.
_APART_NS = 1_000_000_000
#: torch's own, of process groups whose dumps do not say it
_USUAL_TIMEOUT_NS = 1_800_000_000_000
_SYNCHRONISING = pa.array(SYNCHRONISING)

#: A process starts in the time in which forty dumps of 2,000 entries are read (0.4 s), and as long
#: as that its share is to take at least. A share is what one process reads at a time.
_WORTH_A_PROCESS, _SHARE, _MOST_WORKERS = 40, 16, 8


@dataclass(frozen=True)
class Flight:
    """What all ranks called, by rank and record: `ENTRIES`, with `group` as index into `groups`."""

    entries: pa.Table
    groups: tuple[Group, ...]
    #: those with a dump, in ascending order
    ranks: tuple[int, ...]
    #: how many ranks the job has at least: no dump says it where no group of all is listed
    world_size: int
    missing: list[MissingRank]
    warnings: list[str]
    #: nccl, gloo
    backends: frozenset[str] = frozenset()

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks of the job that left no dump, as far as is known."""
        return tuple(sorted({*range(self.world_size)} - {*self.ranks}))


def find_dumps(folder: Path, *, hang: bool = False) -> list[tuple[Path, int | None]]:
    """Return the dumps in a folder, with their ranks in a run directory. Raises `ReportError`.

    Of several processes of one rank it is the last one's. `hang`: of a run directory those taken
    while the job hung, not those of its window.
    """
    try:
        ranks = folder / paths.RANKS
        if ranks.is_dir():
            numbered = sorted(each for each in ranks.iterdir() if each.name.isdecimal())
            found = [
                (_last_of_rank(each, "hang" if hang else "flight"), int(each.name))
                for each in numbered
                if each.is_dir()
            ]
            return [(path, rank) for path, rank in found if path is not None]
        there = sorted(each for each in folder.iterdir() if each.name not in OUR_OWN)
        dumps = {each for each in there if each.is_file() and is_dump(each)}
        series = {_series(each) for each in dumps}
        return [
            (each, None)
            for each in there
            if each in dumps or (_series(each) in series and _is_lost(each))
        ]
    except OSError as error:
        raise unreadable(folder, error) from error


def _last_of_rank(folder: Path, name: str) -> Path | None:
    found = [
        (int(match[2] or 1), each)
        for each in folder.iterdir()
        if (match := OF_A_RUN.fullmatch(each.name)) and match[1] == name
    ]
    return max(found)[1] if found else None


def _series(path: Path) -> str:
    """Return what the names of a job's dumps have in common; the name itself without a rank."""
    return path.name if named_rank(path) is None else stem_of(path).rstrip("0123456789") + "#"


def _is_lost(path: Path) -> bool:
    """Whether a file that is called as the dumps beside it holds nothing else that is known."""
    if not path.is_file():
        return path.is_symlink()  # to a dump that is gone
    try:
        with opened(path) as file:
            return not KINETO_MARKS & {*(keys_of(file) or ())}
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ReportError):
        return True


def read_dumps(
    sources: Iterable[tuple[Path, int | None]],
    given: Mapping[Path, int] | None = None,
    workers: int | None = None,
) -> Flight:
    """Return what the dumps hold together; `given` are ranks that the user named for files.

    One that cannot be read, or is of another job, is a missing one with a warning. Raises
    `ReportError` where none can be read. `workers`: how many processes read; None for as many as
    pay. What is returned is the same for any number.
    """
    named = [(path, (given or {}).get(path, rank)) for path, rank in sources]
    dumps: list[FlightDump] = []
    missing: list[MissingRank] = []
    warnings = []
    errors: list[ReportError] = []
    for (path, rank), outcome in zip(named, _attempts(named, workers), strict=True):
        if isinstance(outcome, FlightDump):
            dumps.append(outcome)
            continue
        errors.append(outcome)
        warnings.append(str(outcome).replace("\n ", ";"))
        whose = named_rank(path) if rank is None else rank
        missing.append(MissingRank(rank=whose, source=str(path), reason=outcome.what))
    if not dumps:
        raise errors[0] if errors else ReportError("no dumps of flight recorders were given")
    joined = join(dumps)
    return replace(
        joined, missing=[*missing, *joined.missing], warnings=[*warnings, *joined.warnings]
    )


def _attempts(
    named: Sequence[tuple[Path, int | None]], workers: int | None
) -> list[FlightDump | ReportError]:
    """Return each dump, or what is wrong with it, by several processes where that pays."""
    if workers is None:
        workers = min(os.cpu_count() or 1, _MOST_WORKERS, len(named) // _WORTH_A_PROCESS)
    if workers < 2:
        return [_attempt(*each) for each in named]
    shares = [named[n : n + _SHARE] for n in range(0, len(named), _SHARE)]
    limited = [(share, limit_s(path for path, _ in share)) for share in shares]
    found = Readers().read_each(_share, limited, workers, "shares of the dumps")
    return [
        each
        for share, dumps in zip(shares, found, strict=True)
        for each in (_share(share) if isinstance(dumps, Lost) else dumps)
    ]


def _share(named: Sequence[tuple[Path, int | None]]) -> list[FlightDump | ReportError]:
    return [_attempt(*each) for each in named]


def _attempt(path: Path, rank: int | None) -> FlightDump | ReportError:
    """Return a dump, or what is wrong with it, so that it stops no other."""
    try:
        return read_dump(path, rank)
    except ReportError as error:
        return error


def join(dumps: Sequence[FlightDump]) -> Flight:
    """Return one job's dumps as one table, without those of other jobs or of a rank twice."""
    kept, missing, warnings = list(dumps), [], []
    for separated, reason, text in _SEPARATIONS:
        kept, others = separated(kept)
        missing += [
            MissingRank(rank=each.rank, source=str(each.source), reason=reason) for each in others
        ]
        if others:
            files = words.listed((each.source.name for each in others), 3)
            whose = words.ranks(each.rank for each in others)
            warnings.append(f"the dumps of {whose} ({files}) are left out: {text}")
    warnings += _doubts(kept)
    kept.sort(key=lambda each: each.rank)
    groups, tables = _grouped(kept)
    entries = pa.concat_tables(tables).unify_dictionaries() if tables else ENTRIES.empty_table()
    ranks_of = tuple(each.rank for each in kept)
    world = max([_world_size(groups, ranks_of), *(each.world_size for each in kept)])
    members = _observed(entries, len(groups))
    mixed = [
        place
        for place, (group, ranks) in enumerate(zip(groups, members, strict=True))
        if not (group.is_world or group.ranks) and len(ranks) > (group.size or len(ranks))
    ]
    if mixed:
        names = sorted(
            {words.group(groups[place].name, groups[place].description) for place in mixed}
        )
        warnings.append(
            f"process groups of the name {words.listed(names)} are left out: more ranks called in"
            " them than they have members, and no dump says which of several groups each rank is in"
        )
        own = pc.is_in(entries["group"], pa.array(mixed, pa.int32()))
        entries = entries.filter(pc.invert(own))
        members = [() if place in mixed else each for place, each in enumerate(members)]
    groups = [_with_members(*pair, world) for pair in zip(groups, members, strict=True)]
    return Flight(
        entries,
        tuple(groups),
        ranks_of,
        world,
        missing,
        [*warnings, *_common_warnings(kept)],
        frozenset(each.backend for each in kept if each.backend),
    )


_Separated = tuple[list[FlightDump], list[FlightDump]]


def _of_one_world(dumps: Sequence[FlightDump]) -> _Separated:
    """Return the dumps of one world, and those of others."""
    worlds: dict[tuple[int, ...], list[FlightDump]] = {}
    for each in dumps:
        if world := next((group.ranks for group in each.groups if group.is_world), None):
            worlds.setdefault(world, []).append(each)
    kept = _chosen([*worlds.values()])
    others = [each for some in worlds.values() if some is not kept for each in some]
    return _without(dumps, others), others


def _chosen(parts: Sequence[list[FlightDump]]) -> list[FlightDump]:
    """Return the newest part that has half of the ranks: with fewer a hang is not diagnosed."""
    ranks = [{each.rank for each in part} for part in parts]
    half = len(set().union(*ranks)) / 2
    newest = [max(each.until_ns for each in part) for part in parts]
    places = sorted(range(len(parts)), key=lambda n: (len(ranks[n]) >= half, newest[n]))
    return parts[places[-1]] if parts else []


def _without(dumps: Sequence[FlightDump], others: Sequence[FlightDump]) -> list[FlightDump]:
    gone = {id(each) for each in others}
    return [each for each in dumps if id(each) not in gone]


def _of_one_attempt(dumps: Sequence[FlightDump]) -> _Separated:
    """Return the dumps of one attempt of one job, and those that cannot be its."""
    parts = _in_time(dumps)
    if len(parts) < 2:
        return list(dumps), []
    kept = _chosen(parts)
    calls = [_Calls.of(part) for part in parts]
    place = parts.index(kept)
    others = [
        each
        for n, part in enumerate(parts)
        if n != place and calls[min(n, place)].contradict(calls[max(n, place)])
        for each in part
    ]
    return _without(dumps, others), others


def _in_time(dumps: Sequence[FlightDump]) -> list[list[FlightDump]]:
    """Return the dumps with calls, in parts between which none was made: earlier parts first.

    An attempt's processes are started when those of the one before it have ended, so that each
    attempt is a part, or several: a rank may stop long before the others' recorders begin. In a run
    directory each attempt has a folder of its own: clocks may differ by more there, and only what
    lies further apart than ranks wait for each other is of another time.
    """
    of_a_run = all(OF_A_RUN.fullmatch(each.source.name) for each in dumps)
    apart_ns = _USUAL_TIMEOUT_NS if of_a_run else _APART_NS
    spans = [(_since(each), n) for n, each in enumerate(dumps) if each.entries.num_rows]
    parts: list[list[FlightDump]] = []
    until = 0
    for since, n in sorted(spans):
        if not parts or since > until + apart_ns:
            parts.append([])
        parts[-1].append(dumps[n])
        until = max(until, dumps[n].until_ns)
    return parts


def _since(dump: FlightDump) -> int:
    """Return when a rank first called something since its numbers last began anew."""
    earlier = pc.filter(dump.entries["enqueue_ns"], pc.greater(dump.entries["restarts"], 0))
    enqueue = dump.entries["enqueue_ns"]
    if len(earlier):
        enqueue = pc.filter(enqueue, pc.greater(enqueue, pc.max(earlier)))
    return int(pc.min(enqueue).as_py() or dump.until_ns)


@dataclass(frozen=True)
class _Calls:
    """The collectives of some dumps, by group, since its numbers last began anew."""

    #: their numbers, which of them all members joined, and when those had ended
    of_group: Mapping[Hashable, tuple[Ints, Bools, Ints]]
    since: int

    @classmethod
    def of(cls, dumps: Sequence[FlightDump]) -> _Calls:
        found: dict[Hashable, list[tuple[Ints, Bools, Ints]]] = {}
        for dump in dumps:
            rows = pc.and_(pc.equal(dump.entries["restarts"], 0), pc.invert(dump.entries["p2p"]))
            entries = dump.entries.filter(rows)
            group, number, time, timeout = (
                np.asarray(pc.fill_null(entries[name], usual).to_numpy(), np.int64)
                for name, usual in (
                    ("group", -1),
                    ("sequence", -1),
                    ("enqueue_ns", 0),
                    ("timeout_ns", _USUAL_TIMEOUT_NS),
                )
            )
            waits_for_all = pc.is_in(entries["operation"].cast(pa.string()), _SYNCHRONISING)
            ended = np.asarray(pc.and_(entries["finished"], waits_for_all).to_numpy(), bool)
            for place, each in enumerate(dump.groups):
                mine = np.flatnonzero(group == place)
                if mine.size and (each.ranks or each.is_world):
                    mine = mine[np.unique(number[mine], return_index=True)[1]]
                    # a rank calls again when its last call has ended, or it was given up
                    until = np.append(time[mine[1:]], time[mine[-1]] + timeout[mine[-1]])
                    found.setdefault(_identity(each), []).append((number[mine], ended[mine], until))
        joined = {
            key: (np.concatenate(numbers), np.concatenate(ended), np.concatenate(until))
            for key, some in found.items()
            for numbers, ended, until in [zip(*some, strict=True)]
        }
        return cls(joined, min(map(_since, dumps)))

    def contradict(self, later: _Calls) -> bool:
        """Whether these and later calls cannot be of one attempt, at one time.

        A call that ended before `later` began was joined by all members: none comes to it, or to
        one of a lower number, later. And one that ended later was joined by those here.
        """
        for key in self.of_group.keys() & later.of_group.keys():
            numbers, ended, until = self.of_group[key]
            others, their_ended, _ = later.of_group[key]
            before = ended & (until < later.since)
            if numbers[before].max(initial=-1) >= others.min():
                return True
            if others[their_ended].max(initial=-1) > numbers.max():
                return True
        return False


def _doubts(dumps: Sequence[FlightDump]) -> list[str]:
    """Return a warning where other dumps may be of another attempt and nothing tells."""
    parts = _in_time(dumps)
    others = _without([each for part in parts for each in part], _chosen(parts))
    if not others:
        return []
    whose = words.ranks(each.rank for each in others)
    text = "no collective tells whether they are of the same attempt of the job"
    return [f"{whose} called nothing while the other ranks did, and {text}: the dumps are merged"]


def _last_of_each(dumps: Sequence[FlightDump]) -> _Separated:
    """Return the newest dump of each rank, and the others."""
    last: dict[int, FlightDump] = {}
    for each in sorted(dumps, key=lambda each: (each.until_ns, each.entries.num_rows)):
        last[each.rank] = each
    kept = [*last.values()]
    return kept, _without(dumps, kept)


#: how dumps that are not to be joined are told, why they are not, and what is said of them
_SEPARATIONS = (
    (_of_one_world, "of a job of another size", "they are of a job of another size"),
    (
        _of_one_attempt,
        "of another attempt of the job, or of another job",
        (
            "they are of another attempt of the job, or of another job, since the times and numbers"
            " of their calls contradict the other ranks'; or their hosts' clocks are seconds wrong"
        ),
    ),
    (
        _last_of_each,
        "another dump of its rank is as new or newer",
        "another dump of the same rank is as new or newer",
    ),
)


def _identity(group: Group) -> Hashable:
    return group.name, group.ranks or group.description


def _grouped(dumps: Sequence[FlightDump]) -> tuple[list[Group], list[pa.Table]]:
    """Return all groups, and the tables with their places among them."""
    places: dict[Hashable, int] = {}
    groups: list[Group] = []
    tables = []
    known: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for group in (group for dump in dumps for group in dump.groups if group.ranks):
        known.setdefault((group.name, group.description), set()).add(group.ranks or ())
    for dump in dumps:
        where = []
        for group in dump.groups:
            if group.ranks is None:  # others of its ranks may have listed them
                for ranks in sorted(known.get((group.name, group.description), ())):
                    if dump.rank in ranks:
                        group = replace(group, ranks=ranks, size=len(ranks))
            key = _identity(group)
            if key not in places:
                places[key] = len(groups)
                groups.append(group)
            place = places[key]
            groups[place] = replace(groups[place], size=groups[place].size or group.size)
            where.append(place)
        column = pa.array(where, pa.int32()).take(dump.entries["group"].combine_chunks())
        at = ENTRIES.get_field_index("group")
        tables.append(dump.entries.set_column(at, ENTRIES.field(at), column))
    return groups, tables


def _world_size(groups: Sequence[Group], ranks: Sequence[int]) -> int:
    listed = [max(group.ranks) + 1 for group in groups if group.ranks]
    world_sizes = [group.size for group in groups if group.size and group.is_world]
    return max([*listed, *world_sizes, *(rank + 1 for rank in ranks)], default=0)


def _observed(entries: pa.Table, count: int) -> list[tuple[int, ...]]:
    """Return of each group the ranks that called something in it."""
    pairs = entries.select(["group", "rank"]).group_by(["group", "rank"]).aggregate([])
    found: list[list[int]] = [[] for _ in range(count)]
    for group, rank in zip(pairs["group"].to_pylist(), pairs["rank"].to_pylist(), strict=True):
        found[group].append(rank)
    return [tuple(sorted(ranks)) for ranks in found]


def _with_members(group: Group, observed: tuple[int, ...], world: int) -> Group:
    """Return the group with its members: of all ranks every one, else those that took part."""
    ranks = group.ranks or (tuple(range(world)) if group.is_world else observed)
    size = max(len(ranks), group.size or 0)
    known = group.ranks is not None or group.is_world or group.size is not None
    return replace(group, ranks=ranks, size=size, complete=known and len(ranks) == size)


def _common_warnings(dumps: Sequence[FlightDump]) -> list[str]:
    """Return each warning once, with the ranks that gave it."""
    by: dict[str, list[int]] = {}
    for dump in dumps:
        for warning in dump.warnings:
            by.setdefault(warning, []).append(dump.rank)
    lines = [f"{words.ranks(ranks)}: {warning}" for warning, ranks in by.items()]
    lines += _unlike(dumps, "version", lambda each: each.version)
    names: dict[tuple[str, tuple[int, ...] | None], set[str]] = {}
    for group in (group for each in dumps for group in each.groups):
        names.setdefault((group.name, group.ranks), set()).add(group.description)
    double = sorted(name for (name, _), texts in names.items() if len(texts) > 1)
    if double:
        lines.append(f"process groups of one name are described otherwise: {words.listed(double)}")
    return lines


def _unlike(dumps: Sequence[FlightDump], what: str, key: Callable[[FlightDump], str]) -> list[str]:
    kinds = Counter(map(key, dumps))
    if len(kinds) < 2:
        return []
    ((most, _),) = kinds.most_common(1)
    other = words.ranks(each.rank for each in dumps if key(each) != most)
    return [f"{other}: dumps of another {what} than the other ranks' {most}"]
