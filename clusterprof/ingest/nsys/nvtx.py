"""NVTX ranges of one process: the domains (NCCL, Python's GIL), the names, begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa

from clusterprof.ingest.columns import Bools, Ints
from clusterprof.ingest.nsys.database import Export

PUSH_POP_RANGE, START_END_RANGE, DOMAIN_CREATE = 59, 60, 75

#: `globalTid` is 8 bits of hardware, 8 of VM, 24 of process and 24 of thread id
_THREAD_BITS = 24
_MASK = (1 << _THREAD_BITS) - 1

_Numbers = TypeVar("_Numbers", Ints, int)


def process_of(global_id: _Numbers) -> _Numbers:
    """Return the process ids inside nsys's `globalTid` or `globalPid`."""
    return (global_id >> _THREAD_BITS) & _MASK


def of_process(column: str, process: int | None) -> str:
    """Return the SQL condition that the global id in `column` is of `process`; none for None."""
    return "" if process is None else f'("{column}" >> {_THREAD_BITS}) & {_MASK} = {process}'


def thread_of(global_id: Ints) -> Ints:
    """Return the thread ids inside nsys's `globalTid`."""
    return global_id & _MASK


@dataclass(frozen=True)
class Ranges:
    """NVTX ranges sorted by begin; times as in the report (ns since its session start).

    `end` is -1 for a range that was still open when the capture ended. `name` holds codes
    into `names`; `row` is the row in NVTX_EVENTS, by which a payload is found.
    """

    start: Ints
    end: Ints
    process: Ints
    thread: Ints
    domain: Ints
    row: Ints
    name: Ints
    names: pa.Array
    #: (process, domain id) -> the domain's name; ids are per process
    domains: dict[tuple[int, int], str]

    def where(self, chosen: Bools | Ints) -> Ranges:
        """Return the ranges for which `chosen` is true, or those at the places `chosen`."""
        return Ranges(
            self.start[chosen],
            self.end[chosen],
            self.process[chosen],
            self.thread[chosen],
            self.domain[chosen],
            self.row[chosen],
            self.name[chosen],
            self.names,
            self.domains,
        )

    def of_process(self, process: int) -> Ranges:
        """Return the ranges of one process."""
        return self.where(self.process == process)

    def in_domains(self, *wanted: str) -> Bools:
        """Return for each range whether its domain has one of the names."""
        found = np.zeros(self.start.size, bool)
        for (process, domain), name in self.domains.items():
            if name in wanted:
                found |= (self.process == process) & (self.domain == domain)
        return found

    def named(self, of_name: Bools) -> Bools:
        """Return for each range what `of_name` says of its name (one value per name)."""
        if not of_name.size:
            return np.zeros(self.start.size, bool)
        chosen: Bools = of_name[self.name]
        return chosen


def read(export: Export) -> Ranges:
    """Return all NVTX ranges of the report, of every process."""
    if not export.has("NVTX_EVENTS", "start", "end", "eventType", "globalTid"):
        nothing = np.empty(0, np.int64)
        no_names = pa.array([], pa.string())
        return Ranges(nothing, nothing, nothing, nothing, nothing, nothing, nothing, no_names, {})
    there = export.columns("NVTX_EVENTS")
    domain = 'coalesce(n."domainId", 0)' if "domainId" in there else "0"
    text = "coalesce(n.text, s.value, '')" if "textId" in there else "coalesce(n.text, '')"
    join = "LEFT JOIN {1} s ON s.id = n.textId" if "textId" in there else ""
    result = export.arrow(
        f'SELECT n.rowid AS row, n.start AS start, coalesce(n."end", -1) AS "end",'
        f' n."globalTid" AS tid, {domain} AS domain,'
        f" CAST({text} AS BLOB) AS name FROM {{0}} n {join}"
        f' WHERE n."eventType" IN ({PUSH_POP_RANGE}, {START_END_RANGE}) AND n.start IS NOT NULL'
        f" ORDER BY n.start",
        "NVTX_EVENTS",
        "StringIds",
    )
    name = result.column("name").cast(pa.binary()).combine_chunks().dictionary_encode()
    if isinstance(name, pa.ChunkedArray):
        name = name.combine_chunks()
    # A program may name its ranges in any encoding.
    names = [each.decode(errors="replace") for each in name.dictionary.to_pylist()]
    tid = export.integers(result, "tid")
    return Ranges(
        start=export.integers(result, "start"),
        end=export.integers(result, "end"),
        process=process_of(tid),
        thread=thread_of(tid),
        domain=export.integers(result, "domain"),
        row=export.integers(result, "row"),
        name=name.indices.to_numpy(zero_copy_only=False).astype(np.int64),
        names=pa.array(names, pa.string()),
        domains=_domains(export, there),
    )


def _domains(export: Export, there: frozenset[str]) -> dict[tuple[int, int], str]:
    if "domainId" not in there:
        return {}
    text = "coalesce(n.text, s.value, '')" if "textId" in there else "n.text"
    join = "LEFT JOIN {1} s ON s.id = n.textId" if "textId" in there else ""
    created = export.rows(
        f'SELECT n."globalTid", n."domainId", {text} FROM {{0}} n {join}'
        f' WHERE n."eventType" = {DOMAIN_CREATE}',
        "NVTX_EVENTS",
        "StringIds",
    )
    return {
        ((tid >> _THREAD_BITS) & _MASK, int(domain or 0)): str(name)
        for tid, domain, name in created
    }
