"""What every rank's tables must hold before they meet those of other ranks, whoever made them.

Behind this point a rank is a number that no other table overflows on, its times lie so near to
each other that sums and differences of them are exact, and its warnings are few: one rank's odd
report can then cost that rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.errors import ReportError
from clusterprof.tables import HIGHEST_RANK, SCHEMAS, RankTables, ReportInfo

#: ns, 2116: the difference of any two times from 1970 on fits into 64 bits
_FARTHEST_NS = 1 << 62
#: ns, 104 days: a double holds every nanosecond of it; captures last seconds
_LONGEST_NS = 1 << 53
#: bytes, a petabyte: of more than any memory, and a million of them fit into 64 bits
_LARGEST = 1 << 50
#: step numbers and message counts are used as list places and in products
_HIGHEST_STEP = 1 << 40
#: of a rank, with the characters of each; nsys' own diagnostics may be tens of thousands
_MOST_WARNINGS, _LONGEST_WARNING = 50, 1000


class RankUnknown(ReportError):  # noqa: N818 - a state, not a fault
    """A report does not name its rank."""


def checked(tables: RankTables, rank: int | None) -> RankTables:
    """Return `tables` as those of `rank` (None: the report's own), with a warning of whatever
    contradicts it. Raises ReportError for a rank, time or size that is impossible.
    """
    for name in SCHEMAS:
        _check_columns(tables.info, name, getattr(tables, name))
    tables = _sized(tables)
    info = _identified(tables.info, rank)
    return replace(tables, info=replace(info, warnings=_few(info.warnings)))


def _identified(info: ReportInfo, given: int | None) -> ReportInfo:
    """Return `info` with its rank; what the report itself states is a claim until it is checked."""
    rank, world, local = info.rank, info.world_size, info.local_rank
    odd = []
    if rank is not None and not _is_rank(rank):
        wrong = f"gives its rank as {_shown(rank)}, which is not a rank"
        if given is None:
            raise ReportError(f"{info.source} {wrong}", f"give it: --rank {info.source}=N")
        odd.append(f"the report {wrong}")
        rank = None
    if world is not None and not (_is_rank(world) and world > 0):
        odd.append(f"the report gives the job {_shown(world)} ranks, which is left out")
        world = None
    if local is not None and not _is_rank(local):
        local = None
    if rank is None and given is None:
        raise RankUnknown(
            f"{info.source} does not name its rank",
            "looked for RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, ... in its environment, for its"
            " rank in NCCL's communicators, and for distributedInfo in a trace",
            f"give it: --rank {info.source}=N",
        )
    if given is not None and given != rank:
        if world is not None and given >= world:
            odd.append(f"no rank {given}: by {info.source} its job has ranks 0 to {world - 1}")
        if rank is not None:
            odd.append(f"{info.source} is of rank {rank} by itself, and read as rank {given}")
        rank = given
    return replace(
        info, rank=rank, world_size=world, local_rank=local, warnings=(*info.warnings, *odd)
    )


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value <= HIGHEST_RANK


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_columns(info: ReportInfo, name: str, table: pa.Table) -> None:
    for field in table.schema:
        limit = _limit(field.name)
        if limit is None or not table.num_rows:
            continue
        low, high = pc.min_max(table[field.name]).as_py().values()
        if low is None:
            continue
        first, last = limit
        near = not field.name.endswith("_ns") or (
            low >= info.begin_ns - _LONGEST_NS and high <= info.begin_ns + _LONGEST_NS
        )
        if low < first or high > last or not near:
            worst = low if low < first or low < info.begin_ns - _LONGEST_NS else high
            raise ReportError(
                f"{info.source} cannot be read: {worst} is no {field.name} of {name}",
                "record or copy it again; if the profiler itself wrote it so, please report it",
            )


def _limit(column: str) -> tuple[int, int] | None:
    """The least and the most that a column may hold; None for one that is in no sum."""
    if column.endswith("_ns"):
        return -_LONGEST_NS, _FARTHEST_NS
    return {"step": (0, _HIGHEST_STEP), "communicator_size": (0, HIGHEST_RANK)}.get(column)


def _sized(tables: RankTables) -> RankTables:
    """Return `tables` without the sizes that can be none: they are added up."""
    for name, column in (("activity", "size_bytes"), ("collective_calls", "message_bytes")):
        table = getattr(tables, name)
        sizes = table[column]
        odd = pc.fill_null(pc.or_(pc.less(sizes, 0), pc.greater(sizes, _LARGEST)), False)
        if count := pc.sum(odd).as_py():
            place = table.schema.get_field_index(column)
            kept = pc.if_else(odd, pa.scalar(None, pa.int64()), sizes)
            changed = table.set_column(place, table.schema.field(place), kept)
            tables = replace(tables, **{name: changed}).warned(
                f"{count} sizes of more than a petabyte, or less than none, were left out"
            )
    return tables


def _few(warnings: Sequence[str]) -> tuple[str, ...]:
    kept = [
        each if len(each) <= _LONGEST_WARNING else f"{each[:_LONGEST_WARNING]}..."
        for each in dict.fromkeys(warnings)
    ]
    if len(kept) > _MOST_WARNINGS:
        more = len(kept) - _MOST_WARNINGS
        kept = [*kept[:_MOST_WARNINGS], f"and {more} further warnings of this report"]
    return tuple(kept)
