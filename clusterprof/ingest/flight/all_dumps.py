"""The flight recorders of all ranks of one job as one table; what cannot be read is a missing one.

A group is its name and its members: torch may give several groups one name. Where no dump lists
the members (gloo), a group is its name and description, and those that called something in it.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.agent.contracts import paths
from clusterprof.columns import Ints, first_by, integers
from clusterprof.errors import ReportError
from clusterprof.ingest.engines import Lost, Readers, limit_s
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
from clusterprof.ingest.rank_windows import in_time
from clusterprof.ingest.recording import said_by_ranks
from clusterprof.ingest.sources import KINETO_MARKS, OUR_OWN
from clusterprof.results import MissingRank

#: After this, at the soonest, the processes of an attempt call something: they import torch first,
#: which takes seconds. Hosts' clocks lie closer: ntpd sets one that is 128 ms wrong.
_APART_NS = 1_000_000_000
#: torch's own, of process groups whose dumps do not say it
_USUAL_TIMEOUT_NS = 1_800_000_000_000
_NEVER = np.iinfo(np.int64).max

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
    def timeout_ns(self) -> int | None:
        """After how long the first process group gives up; None where no dump says it."""
        shortest: int | None = pc.min(self.entries["timeout_ns"]).as_py()
        return shortest

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks of the job that left no dump, as far as is known."""
        return tuple(sorted({*range(self.world_size)} - {*self.ranks}))


def find_dumps(folder: Path, which: str = "flight") -> list[tuple[Path, int | None]]:
    """Return the dumps in a folder, with their ranks in a run directory. Raises `ReportError`.

    Of several processes of one rank it is the last one's. `which`: of a run directory those of its
    window ("flight"), those taken while the job hung ("hang"), or the watch's newest ("watch").
    """
    try:
        if (folder / paths.RANKS).is_dir():
            return _of_ranks(folder / paths.RANKS, which)
        files = sorted(path for path in folder.iterdir() if path.name not in OUR_OWN)
        dumps = {path for path in files if path.is_file() and is_dump(path)}
        series = {_series(path) for path in dumps}
        return [
            (path, None)
            for path in files
            if path in dumps or (_series(path) in series and _is_lost(path))
        ]
    except OSError as error:
        raise unreadable(folder, error) from error


def _of_ranks(ranks: Path, which: str) -> list[tuple[Path, int | None]]:
    folders = sorted(entry for entry in ranks.iterdir() if entry.name.isdecimal())
    last_dumps: list[tuple[Path, int | None]] = []
    for folder in (folder for folder in folders if folder.is_dir()):
        matches = [match for path in folder.iterdir() if (match := OF_A_RUN.fullmatch(path.name))]
        numbered = [(int(match[2] or 1), match[0]) for match in matches if match[1] == which]
        if numbered:
            last_dumps.append((folder / max(numbered)[1], int(folder.name)))
    return last_dumps


def _series(path: Path) -> str:
    """Return what the names of a job's dumps have in common; the name itself without a rank."""
    return path.name if named_rank(path) is None else stem_of(path).rstrip("0123456789") + "#"


def _is_lost(path: Path) -> bool:
    """Whether a file that is called as the dumps beside it holds nothing else that is known."""
    if not path.is_file():
        return path.is_symlink()  # to a dump that is gone
    try:
        with opened(path) as file:
            return not KINETO_MARKS & {*(keys_of(file, KINETO_MARKS) or ())}
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
    if workers is None:
        workers = min(os.cpu_count() or 1, _MOST_WORKERS, len(named) // _WORTH_A_PROCESS)
    outcomes = _read(named) if workers < 2 else _read_apart(named, workers)
    dumps = [outcome for outcome in outcomes if isinstance(outcome, FlightDump)]
    missing, warnings = [], []
    for (path, rank), outcome in zip(named, outcomes, strict=True):
        if isinstance(outcome, ReportError):
            if not dumps:
                raise outcome
            warnings.append(str(outcome).replace("\n ", ";"))
            whose = named_rank(path) if rank is None else rank
            missing.append(MissingRank(rank=whose, source=str(path), reason=outcome.what))
    if not dumps:
        raise ReportError("no dumps of flight recorders were given")
    flight = join(dumps)
    missing, warnings = [*missing, *flight.missing], [*warnings, *flight.warnings]
    return replace(flight, missing=missing, warnings=warnings)


def _read(named: Sequence[tuple[Path, int | None]]) -> list[FlightDump | ReportError]:
    """Return each dump, or what is wrong with it, so that it stops no other."""

    def outcome(path: Path, rank: int | None) -> FlightDump | ReportError:
        try:
            return read_dump(path, rank)
        except ReportError as error:
            return error

    return [outcome(*dump) for dump in named]


def _read_apart(
    named: Sequence[tuple[Path, int | None]], workers: int
) -> list[FlightDump | ReportError]:
    """Return the same by several processes; what one of them loses is read here."""
    shares = [named[n : n + _SHARE] for n in range(0, len(named), _SHARE)]
    limited = [(share, limit_s(path for path, _ in share)) for share in shares]
    answers = Readers().read_each(_read, limited, workers, "shares of the dumps")
    return [
        outcome
        for share, answer in zip(shares, answers, strict=True)
        for outcome in (_read(share) if isinstance(answer, Lost) else answer)
    ]


def join(dumps: Sequence[FlightDump]) -> Flight:
    """Return one job's dumps as one table, without those of other jobs or of a rank twice."""
    kept, missing, warnings = list(dumps), [], []
    for others_of, reason, text in _SEPARATIONS:
        others = others_of(kept)
        kept = _without(kept, others)
        missing += [
            MissingRank(rank=dump.rank, source=str(dump.source), reason=reason) for dump in others
        ]
        if others:
            warnings.append(f"the dumps of {_shown(others)} are left out: {text}")
    warnings += _doubts(kept)
    kept.sort(key=lambda dump: dump.rank)
    groups, entries = _grouped(kept)
    worlds = [group.size or 0 for group in groups if group.is_world]
    worlds += [1 + max(group.ranks) for group in groups if group.ranks]
    world = max([*worlds, *(max(dump.world_size, dump.rank + 1) for dump in kept)], default=0)
    with_members, mixed = _with_members(groups, entries, world)
    if mixed:
        names = {words.group(groups[place].name, groups[place].description) for place in mixed}
        warnings.append(
            f"process groups of the name {words.listed(sorted(names))} are left out: more ranks"
            " called in them than they have members, and no dump says which of several groups each"
            " rank is in"
        )
        entries = entries.filter(pc.invert(pc.is_in(entries["group"], pa.array(mixed, pa.int32()))))
    return Flight(
        entries,
        tuple(with_members),
        tuple(dump.rank for dump in kept),
        world,
        missing,
        [*warnings, *_common_warnings(kept)],
        frozenset(dump.backend for dump in kept if dump.backend),
    )


def _shown(dumps: Sequence[FlightDump]) -> str:
    files = words.listed((dump.source.name for dump in dumps), 3)
    return f"{words.ranks(dump.rank for dump in dumps)} ({files})"


def _of_other_worlds(dumps: Sequence[FlightDump]) -> list[FlightDump]:
    """Return the dumps of another world than most are of."""
    worlds: dict[tuple[int, ...], list[FlightDump]] = {}
    for dump in dumps:
        if world := next((group.ranks for group in dump.groups if group.is_world), None):
            worlds.setdefault(world, []).append(dump)
    parts = [*worlds.values()]
    return _without([*chain(*parts)], _chosen(parts))


def _chosen(parts: Sequence[list[FlightDump]]) -> list[FlightDump]:
    """Return the newest part that has half of the ranks: with fewer a hang is not diagnosed."""
    ranks = [{dump.rank for dump in period} for period in parts]
    half = len(set().union(*ranks)) / 2
    newest = [max(dump.until_ns for dump in period) for period in parts]
    places = sorted(range(len(parts)), key=lambda n: (len(ranks[n]) >= half, newest[n]))
    return parts[places[-1]] if parts else []


def _without(dumps: Sequence[FlightDump], others: Sequence[FlightDump]) -> list[FlightDump]:
    gone = {id(dump) for dump in others}
    return [dump for dump in dumps if id(dump) not in gone]


def _of_other_attempts(dumps: Sequence[FlightDump]) -> list[FlightDump]:
    """Return the dumps that cannot be of the attempt of the job that most are of."""
    parts = _in_time(dumps)
    kept = parts.index(_chosen(parts)) if parts else 0
    contradicting = [
        period
        for n, period in enumerate(parts)
        if n != kept and _contradict(parts[min(n, kept)], parts[max(n, kept)])
    ]
    return [*chain(*contradicting)]


def _in_time(dumps: Sequence[FlightDump]) -> list[list[FlightDump]]:
    """Return the dumps with calls, in parts between which none was made: earlier parts first.

    An attempt's processes are started when those of the one before it have ended, so that each
    attempt is a part, or several: a rank may stop long before the others' recorders begin. In a run
    directory each attempt has a folder of its own: clocks may differ by more there, and only what
    lies further apart than ranks wait for each other is of another time.
    """
    of_a_run = all(OF_A_RUN.fullmatch(dump.source.name) for dump in dumps)
    apart_ns = _USUAL_TIMEOUT_NS if of_a_run else _APART_NS
    times = {
        n: (_since(dump), dump.until_ns) for n, dump in enumerate(dumps) if dump.entries.num_rows
    }
    parts: dict[int, list[FlightDump]] = {}
    for n, number in in_time(times, apart_ns).items():
        parts.setdefault(number, []).append(dumps[n])
    return [*parts.values()]


def _since(dump: FlightDump) -> int:
    """Return when a rank first called something since its numbers last began anew."""
    earlier = pc.filter(dump.entries["enqueue_ns"], pc.greater(dump.entries["restarts"], 0))
    enqueue = dump.entries["enqueue_ns"]
    if len(earlier):
        enqueue = pc.filter(enqueue, pc.greater(enqueue, pc.max(earlier)))
    return int(pc.min(enqueue).as_py() or dump.until_ns)


def _contradict(dumps: Sequence[FlightDump], later: Sequence[FlightDump]) -> bool:
    """Whether calls and later calls cannot be of one attempt, at one time.

    A call that ended before `later` began was joined by all members: none comes to it, or to one of
    a lower number, later. And one that ended later was joined by those here.
    """
    calls, later_calls = _collectives(dumps), _collectives(later)
    since = min(map(_since, later))
    for key in calls.keys() & later_calls.keys():
        (numbers, ended_ns), (others, others_ended_ns) = calls[key], later_calls[key]
        joined = numbers[ended_ns < since].max(initial=-1)
        joined_later = others[others_ended_ns < _NEVER].max(initial=-1)
        if joined >= others.min() or joined_later > numbers.max():
            return True
    return False


def _collectives(dumps: Sequence[FlightDump]) -> dict[Hashable, Ints]:
    """Return of each group the calls since its numbers last began anew, [2, n].

    These are their numbers, and when they had ended (ns) after all members had joined them.
    """
    calls: dict[Hashable, list[Ints]] = {}
    for dump in dumps:
        is_last = pc.equal(dump.entries["restarts"], 0)
        entries = dump.entries.filter(pc.and_not(is_last, dump.entries["p2p"]))
        columns = ("group", "sequence", "enqueue_ns")
        of_group, number, time = (integers(entries, name) for name in columns)
        timeout = integers(entries, "timeout_ns", _USUAL_TIMEOUT_NS)
        waits_for_all = pc.is_in(entries["operation"].cast(pa.string()), pa.array(SYNCHRONISING))
        joined = pc.and_(entries["finished"], waits_for_all).to_numpy()
        for place, group in enumerate(dump.groups):
            rows = np.flatnonzero(of_group == place)
            if rows.size and (group.ranks or group.is_world):
                rows = rows[first_by(number[rows])]
                # a rank calls again when its last call has ended, or it was given up
                ended = np.append(time[rows[1:]], time[rows[-1]] + timeout[rows[-1]])
                ended = np.where(joined[rows], ended, _NEVER)
                calls.setdefault(_identity(group), []).append(np.stack([number[rows], ended]))
    return {key: np.concatenate(of_ranks, axis=1) for key, of_ranks in calls.items()}


def _doubts(dumps: Sequence[FlightDump]) -> list[str]:
    """Return a warning where other dumps may be of another attempt and nothing tells."""
    parts = _in_time(dumps)
    others = _without([*chain(*parts)], _chosen(parts))
    whose = words.ranks(dump.rank for dump in others)
    text = "no collective tells whether they are of the same attempt of the job"
    doubt = f"{whose} called nothing while the other ranks did, and {text}: the dumps are merged"
    return [doubt] if others else []


def _older(dumps: Sequence[FlightDump]) -> list[FlightDump]:
    """Return all dumps of each rank but its newest."""
    oldest_first = sorted(dumps, key=lambda dump: (dump.until_ns, dump.entries.num_rows))
    return _without(dumps, [*{dump.rank: dump for dump in oldest_first}.values()])


_OTHER_ATTEMPT = (
    "they are of another attempt of the job, or of another job, since the times and numbers of"
    " their calls contradict the other ranks'; or their hosts' clocks are seconds wrong"
)
_OLDER = "another dump of the same rank is as new or newer"
#: which dumps are not to be joined with the others, why they are not, and what is said of them
_SEPARATIONS = (
    (_of_other_worlds, "of a job of another size", "they are of a job of another size"),
    (_of_other_attempts, "of another attempt of the job, or of another job", _OTHER_ATTEMPT),
    (_older, "another dump of its rank is as new or newer", _OLDER),
)


def _identity(group: Group) -> Hashable:
    return group.name, group.ranks or group.description


def _grouped(dumps: Sequence[FlightDump]) -> tuple[list[Group], pa.Table]:
    """Return all groups, and all entries with the places of their groups among them."""
    listed: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for group in (group for dump in dumps for group in dump.groups if group.ranks):
        listed.setdefault((group.name, group.description), set()).add(group.ranks or ())
    groups: dict[Hashable, Group] = {}
    places: dict[Hashable, int] = {}
    tables = [ENTRIES.empty_table()]
    for dump in dumps:
        place_of = []
        for group in dump.groups:
            # others of its ranks may have listed them
            lists = listed.get((group.name, group.description), ()) if group.ranks is None else ()
            for ranks in sorted(ranks for ranks in lists if dump.rank in ranks):
                group = replace(group, ranks=ranks, size=len(ranks))
            key = _identity(group)
            place_of.append(places.setdefault(key, len(places)))
            first = groups.setdefault(key, group)
            groups[key] = replace(first, size=first.size or group.size)
        column = pa.array(place_of, pa.int32()).take(dump.entries["group"].combine_chunks())
        place = ENTRIES.get_field_index("group")
        tables.append(dump.entries.set_column(place, ENTRIES.field(place), column))
    return [*groups.values()], pa.concat_tables(tables).unify_dictionaries()


def _with_members(
    groups: Sequence[Group], entries: pa.Table, world: int
) -> tuple[list[Group], list[int]]:
    """Return the groups with their members: of all ranks every one, else those that took part.

    And the places of those in which more took part than they have members.
    """
    callers = entries.group_by("group").aggregate([("rank", "distinct")]).to_pydict()
    ranks_in = dict(zip(callers["group"], callers["rank_distinct"], strict=True))
    whole, mixed = [], []
    for place, group in enumerate(groups):
        ranks = group.ranks or tuple(range(world) if group.is_world else ())
        observed = tuple(sorted(ranks_in.get(place, ())))
        if not (group.ranks or group.is_world):
            if group.size and len(observed) > group.size:
                mixed.append(place)
            else:
                ranks = observed
        size = max(len(ranks), group.size or 0)
        stated = group.ranks is not None or group.is_world or group.size is not None
        whole.append(replace(group, ranks=ranks, size=size, complete=stated and len(ranks) == size))
    return whole, mixed


def _common_warnings(dumps: Sequence[FlightDump]) -> list[str]:
    """Return the dumps' own warnings, each once with its ranks, and in what the dumps differ."""
    lines = said_by_ranks((dump.rank, dump.warnings) for dump in dumps)
    versions = Counter(dump.version for dump in dumps).most_common()
    if len(versions) > 1:
        most, _ = versions[0]
        others = words.ranks(dump.rank for dump in dumps if dump.version != most)
        lines.append(f"{others}: dumps of another version than the other ranks' {most}")
    # without members these may be two groups, or one that two ranks describe: no dump tells
    described = {(g.name, g.ranks, g.description) for dump in dumps for g in dump.groups}
    descriptions = Counter((name, ranks) for name, ranks, _ in described)
    double = sorted(name for (name, _), count in descriptions.items() if count > 1)
    if double:
        text = "process groups of one name have several descriptions"
        lines.append(f"{text}: {words.listed(double)}")
    return lines
