"""Many reports at once, by whatever engine; one that cannot be read is a missing report."""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.agent.contracts import paths
from clusterprof.errors import ClusterprofError, MergeError, ReportError
from clusterprof.ingest.assembler import RankUnknown, checked, combine
from clusterprof.ingest.engines import Engine, Processes, Rank
from clusterprof.ingest.rank_windows import apart, in_time, nccl_ids, one_window
from clusterprof.ingest.recording import said_by_ranks
from clusterprof.ingest.reports import read_ranks, read_report
from clusterprof.ingest.sources import Source, find_sources, resolved, stem_of
from clusterprof.results import MissingRank
from clusterprof.tables import RankTables

#: Captures of one job's window overlap; clocks of a cluster's hosts lie closer than this.
_APART_NS = 5_000_000_000

#: how files are called after their rank, not after that on their node
_CALLED = re.compile(r"(?i)(?<!local)(?<!local[ _.-])rank[ _.-]?(\d{1,9})(?!\d)")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gathered:
    """All ranks that gave a readable report, by rank, and the missing reports."""

    ranks: list[RankTables]
    missing: list[MissingRank]
    warnings: list[str]


def gather(
    paths: Sequence[Path | Source],
    *,
    ranks: Mapping[Path, int] | None = None,
    engine: Engine | None = None,
    world_size: int | None = None,
) -> Gathered:
    """Read all reports in `paths`: files, folders, or sources that a run directory names.

    `ranks` maps reports that do not name their rank to it; `engine` reads them, by default
    processes of this host; `world_size` is the job's, where reports do not say it. Whatever is
    wrong with one report becomes a `MissingRank` and a warning, and the others go on. Raises
    `ReportError` where no report can be read at all, `MergeError` where one rank comes twice or the
    reports are of different jobs.
    """
    sources = _ranked(find_sources(paths), ranks or {})
    if not sources:
        raise ReportError("no reports were given", "name files or folders of reports")
    outcomes = (engine or Processes()).read(_attempt, sources)
    if len(sources) == 1 and isinstance(outcomes[0][0], RankUnknown):
        match _attempt(replace(sources[0], rank=0)):
            case [RankTables() as tables] if not tables.collective_calls.num_rows:
                text = "the report does not name its rank: the only one is rank 0"
                outcomes = [[tables.warned(text)]]
    profiled: list[RankTables] = []
    missing: list[MissingRank] = []
    errors: list[ClusterprofError] = []
    for source, ranks_of in zip(sources, outcomes, strict=True):
        is_only = len(ranks_of) == 1
        for outcome in ranks_of:
            if isinstance(outcome, RankTables):
                profiled.append(_named_otherwise(outcome) if is_only else outcome)
                continue
            _LOG.debug("%s", outcome.trace)
            errors.append(outcome)
            rank = source.rank if is_only else None
            missing.append(MissingRank(rank=rank, source=str(source.path), reason=outcome.what))
    if not profiled:
        raise _none_readable(errors)
    profiled, left_out = one_window(sorted(profiled, key=lambda tables: tables.rank))
    _check_one_job(profiled)
    profiled = _with_world(profiled, world_size)
    unread = [str(error).replace("\n ", ";") for error in errors]
    common = said_by_ranks((tables.rank, tables.warnings) for tables in profiled)
    doubts = [*_unlike(profiled), *_ambiguous(profiled), *apart(profiled)]
    return Gathered(profiled, missing, [*unread, *left_out, *common, *doubts])


def _none_readable(errors: Sequence[ClusterprofError]) -> ClusterprofError:
    if len(errors) == 1:
        return errors[0]
    text = f"none of the {len(errors)} reports can be read"
    return ReportError(text, *(error.what for error in errors[:8]), *errors[0].details)


def _named_otherwise(tables: RankTables) -> RankTables:
    """Return one report's rank, with a warning where its file or folder is called after another."""
    source = tables.info.source
    numbers = [int(number) for number in _CALLED.findall(source.name)]
    if not numbers and source.parent.parent.name == paths.RANKS and source.parent.name.isdecimal():
        numbers = [int(source.parent.name)]
    if len(numbers) != 1 or tables.rank in numbers:
        return tables
    return tables.warned(f"{source} is called after rank {numbers[0]}, and read as {tables.rank}")


def _ranked(sources: Sequence[Source], ranks: Mapping[Path, int]) -> list[Source]:
    """Return the sources with the ranks given for files, in any form. Raises `ReportError`."""
    if not ranks:
        return list(sources)
    given = {_report_key(path): (path, rank) for path, rank in ranks.items()}
    used, ranked = set(), []
    for source in sources:
        keys = [_report_key(path) for path in (source.path, source.beside) if path is not None]
        for key in (key for key in keys if key in given):
            source = replace(source, rank=given[key][1])
            used.add(key)
        ranked.append(source)
    for path, rank in (given[key] for key in given if key not in used):
        raise ReportError(
            f"rank {rank} was given for {path}, which is not among the reports",
            f"the reports: {', '.join(str(source.path) for source in sources[:8])}",
        )
    return ranked


def _report_key(path: Path) -> Path:
    return resolved(path).parent / stem_of(path)


def _with_trace(source: Source) -> Sequence[Rank]:
    """Return the ranks of one source, combined with the Kineto trace beside it."""
    ranks = read_ranks(source)
    tables = ranks[0]
    if source.beside is None or isinstance(tables, ClusterprofError):
        return ranks
    if len(ranks) > 1:
        left_out = "the trace beside the report of several ranks was left out"
        return [tables.warned(left_out), *ranks[1:]]
    try:
        beside = read_report(source.beside, rank=tables.rank, steps=source.steps)
    except ReportError as error:
        return [tables.warned(f"the trace beside the report was left out: {error.what}")]
    return [checked(combine(tables, beside), tables.rank)]


def _attempt(source: Source) -> list[Rank]:
    """Read one source; what is wrong with it is a value, so that it stops no other."""
    try:
        ranks = [*_with_trace(source)]
    except ClusterprofError as error:
        ranks = [error]
    for outcome in ranks:
        if isinstance(outcome, ClusterprofError):
            outcome.trace = "".join(traceback.format_exception(outcome))
    return ranks


def _check_one_job(profiled: Sequence[RankTables]) -> None:
    """Raise `MergeError` where a rank comes twice, or where the reports name different jobs,
    worlds, or far-apart windows.
    """
    for first, second in pairwise(profiled):
        if first.rank == second.rank:
            raise MergeError(
                f"rank {first.rank} has two reports",
                f"one: {first.info.source}",
                f"other: {second.info.source}",
                "leave one out, or give its rank: --rank FILE=N",
            )
    _refuse_groups(profiled, "different jobs", lambda tables: tables.info.job)
    _refuse_groups(profiled, "jobs of different world sizes", lambda tables: tables.info.world_size)
    captures = {tables.rank: (tables.info.begin_ns, tables.info.end_ns) for tables in profiled}
    windows = in_time(captures, _APART_NS)
    if len(set(windows.values())) > 1 and _of_other_jobs(profiled, windows):
        _refuse_groups(profiled, "captures of different times", lambda tables: windows[tables.rank])


def _refuse_groups(
    profiled: Sequence[RankTables], difference: str, key: Callable[[RankTables], Hashable]
) -> None:
    groups: dict[Hashable, list[str]] = {}
    for tables in profiled:
        if (job := key(tables)) is not None:
            groups.setdefault(job, []).append(f"{tables.info.source} (rank {tables.rank})")
    if len(groups) > 1:
        lines = (f"job {n}: {', '.join(files)}" for n, files in enumerate(groups.values(), 1))
        next_step = "give the reports of one job at a time"
        raise MergeError(f"the reports are of {difference}", *lines, next_step)


def _of_other_jobs(profiled: Sequence[RankTables], windows: Mapping[int, int]) -> bool:
    """Return whether captures of different times are of different jobs.

    A communicator of NCCL's in common proves one job: a host's clock may be far off. (Names of
    process groups are alike in all jobs.) Without one the jobs differ where every rank has
    such communicators, or where one host's clock gave both times.
    """
    owned: dict[str, int] = {}
    hosts: dict[str, set[int]] = {}
    silent = False
    for tables in profiled:
        window, names = windows[tables.rank], nccl_ids(tables)
        if any(owned.setdefault(name, window) != window for name in names):
            return False
        silent = silent or not names
        if tables.collective_calls.num_rows:  # of ranks without any nothing can be matched wrongly
            hosts.setdefault(tables.info.host, set()).add(window)
    one_clock = any(len(times) > 1 for host, times in hosts.items() if host)
    return one_clock or not silent


def _unlike(profiled: Sequence[RankTables]) -> list[str]:
    """Return a warning of ranks whose reports name communicators otherwise than most, or not."""
    kinds: dict[str, list[int]] = {}
    for tables in profiled:
        names = tables.collective_calls["communicator"].drop_null()
        if tables.collective_calls.num_rows:
            kind = "" if not len(names) else "0x" if str(names[0]).startswith("0x") else "group"
            kinds.setdefault(kind, []).append(tables.rank)
    if len(kinds) < 2:
        return []
    most = max(kinds, key=lambda kind: (bool(kind), len(kinds[kind])))
    others = sorted(rank for kind, ranks in kinds.items() if kind != most for rank in ranks)
    odd = "communicators are named otherwise than in most reports, or not at all"
    matched = "their collectives are matched with the other ranks' by order and times"
    return [f"{words.ranks(others)}: {odd}: {matched}"]


def _with_world(profiled: Sequence[RankTables], world_size: int | None) -> list[RankTables]:
    """Return the ranks of one job with its size, `world_size` where their reports do not say it.

    It has as many ranks as its largest communicator has members: a warning names that where the
    reports state none or too few.
    """
    stated = [tables.info.world_size or world_size for tables in profiled]
    implied = [_implied_size(tables) for tables in profiled]
    largest, most = int(np.argmax(implied)), max(size or 0 for size in stated)
    warnings: list[str] = []
    if implied[largest] > max(most, len(profiled)):
        stated = [implied[largest]] * len(profiled)
        by = "ranks at least, as the size or members of its communicator tell"
        doubt = f": the report that gives it {most} is wrong" if most else ", which no report says"
        warnings = [f"the job has {implied[largest]} {by}{doubt}"]
    return [
        replace(tables, info=replace(tables.info, world_size=size)).warned(
            *(warnings if place == largest else [])
        )
        for place, (tables, size) in enumerate(zip(profiled, stated, strict=True))
    ]


def _implied_size(tables: RankTables) -> int:
    """The ranks that communicators tell of: their size, or the highest of their members; else 0."""
    calls = tables.collective_calls
    size = pc.max(calls["communicator_size"]).as_py() or 0
    highest = pc.max(pc.list_flatten(calls["members"])).as_py()
    return max(size, 0 if highest is None else highest + 1)


def _ambiguous(profiled: Sequence[RankTables]) -> list[str]:
    """Return a warning of communicators of one name that more ranks have than members, or fewer."""
    ranks: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for tables in profiled:
        calls = tables.collective_calls.filter(pc.is_null(tables.collective_calls["members"]))
        for name in calls["communicator"].unique().drop_null().to_pylist():
            stated = calls.filter(pc.equal(calls["communicator"], name))["communicator_size"]
            ranks.setdefault(name, []).append(tables.rank)
            sizes[name] = max(sizes.get(name, 0), pc.max(stated).as_py() or 0)
    unprofiled = max((t.info.world_size or math.inf for t in profiled), default=0) - len(profiled)
    ids = any(name.startswith("0x") for name in ranks)
    unprofiled = math.inf if ids else unprofiled
    split = [name for name, having in ranks.items() if sizes[name] - len(having) > unprofiled]
    several = words.listed((words.plain(name.removesuffix("[]")) for name in split), 4)
    differently = (
        f"reports name one communicator differently ({several}): who belongs together is inferred "
        "from times"
    )
    return [differently][: len(split)] + [
        f"communicator {words.plain(name)} has {sizes[name]} members, and {words.ranks(having)}"
        " have one of that name: they are several, and who belongs together is inferred from times"
        for name, having in ranks.items()
        if 1 < sizes[name] < len(having)
    ]
