"""NVTX ranges of one process: the domains (NCCL, Python's GIL), the names, begin and end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from clusterprof.columns import Bools, Ints
from clusterprof.ingest.nsys import schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.recording import matching, with_names


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
    names: list[str]
    #: (process, domain id) -> the domain's name; ids are per process
    domains: dict[tuple[int, int], str]

    def where(self, chosen: Bools | Ints) -> Ranges:
        """Return the ranges for which `chosen` is true, or those at the places `chosen`."""
        columns = ("start", "end", "process", "thread", "domain", "row", "name")
        return replace(self, **{column: getattr(self, column)[chosen] for column in columns})

    def in_domains(self, *wanted: str) -> Bools:
        """Return for each range whether its domain has one of the names."""
        is_wanted = np.zeros(self.start.size, bool)
        for (process, domain), name in self.domains.items():
            if name in wanted:
                is_wanted |= (self.process == process) & (self.domain == domain)
        return is_wanted

    def named(self, pattern: str) -> Bools:
        """Return for each range whether its name has the regular expression `pattern` in it."""
        return with_names(matching(self.names, pattern), self.name)


def read(export: Export) -> Ranges:
    """Return all NVTX ranges of the report, of every process."""
    if not export.has(schema.NVTX, "start", "end", "eventType", "globalTid"):
        none = np.empty(0, np.int64)
        return Ranges(none, none, none, none, none, none, none, [], {})
    has_domains = export.has(schema.NVTX, "domainId")
    domain = 'coalesce(n."domainId", 0)' if has_domains else "0"
    text, join = export.text(schema.NVTX, "text", "textId")
    # Not joined: each of a million ranges would have its name's text.
    reference = 'coalesce(n."textId", -1)' if export.has(schema.NVTX, "textId") else "-1"
    result = export.arrow(
        f'SELECT n.rowid AS row, n.start AS start, coalesce(n."end", -1) AS "end",'
        f' n."globalTid" AS tid, {domain} AS domain, {reference} AS named,'
        f" CAST(coalesce(n.text, '') AS BLOB) AS name, n.text IS NULL AS elsewhere FROM {{0}} n"
        f' WHERE n."eventType" IN ({schema.PUSH_POP_RANGE}, {schema.START_END_RANGE})'
        f" AND n.start IS NOT NULL ORDER BY n.start",
        schema.NVTX,
    )
    tid, start, end, of_domain, row, named, elsewhere = (
        export.integers(result, column)
        for column in ("tid", "start", "end", "domain", "row", "named", "elsewhere")
    )
    name, names = _names(export, result.column("name"), np.where(elsewhere, named, -1))
    created = export.rows(
        f'SELECT n."globalTid", {domain}, {text} FROM {{0}} n {join}'
        f' WHERE {int(has_domains)} AND n."eventType" = {schema.DOMAIN_CREATE}',
        schema.NVTX,
        schema.STRINGS,
    )
    return Ranges(
        start=start,
        end=end,
        process=schema.process_of(tid),
        thread=schema.thread_of(tid),
        domain=of_domain,
        row=row,
        name=name,
        names=names,
        domains={(schema.process_of(tid), int(number)): str(name) for tid, number, name in created},
    )


def _names(export: Export, own: pa.ChunkedArray, ids: Ints) -> tuple[Ints, list[str]]:
    """Return each range's name, as a code in the order in which names first appear, and the names.

    It is the range's own text, or with an id (not -1) that of the strings.
    """
    texts = own.cast(pa.binary()).combine_chunks().dictionary_encode()
    codes = texts.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    # A program may name its ranges in any encoding.
    both = [text.decode(errors="replace") for text in texts.dictionary.to_pylist()]
    of_strings, more = export.names(ids)
    codes = np.where(ids >= 0, of_strings + len(both), codes)
    numbers: dict[str, int] = {}
    same = np.array([numbers.setdefault(text, len(numbers)) for text in (*both, *more)], np.int64)
    in_order = pa.array(same[codes]).dictionary_encode()
    texts_of = [*numbers]
    names = [texts_of[number] for number in in_order.dictionary.to_pylist()]
    return in_order.indices.to_numpy().astype(np.int64), names
