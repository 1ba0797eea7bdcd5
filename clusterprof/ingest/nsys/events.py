"""What the processes of a report did: NVTX ranges on the host, and work on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from clusterprof.columns import Bools, Ints, order_by
from clusterprof.ingest import recording
from clusterprof.ingest.nsys import schema
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.operations import exchanging_names
from clusterprof.ingest.rank_steps import ends_of_updates, updates
from clusterprof.ingest.recording import Calls, Column, Launched, encoded, matching, nullable
from clusterprof.tables import GRAPH


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

    def calls(self, kind: Column) -> Calls:
        """Return the ranges as calls of the host."""
        return Calls(kind, self.start, self.end, self.thread, self.name, self.names)

    def in_domains(self, *wanted: str) -> Bools:
        """Return for each range whether its domain has one of the names."""
        is_wanted = np.zeros(self.start.size, bool)
        for (process, domain), name in self.domains.items():
            if name in wanted:
                is_wanted |= (self.process == process) & (self.domain == domain)
        return is_wanted

    def named(self, pattern: str) -> Bools:
        """Return for each range whether its name has the regular expression `pattern` in it."""
        return matching(self.names, pattern)[self.name]


def read_ranges(export: Export) -> Ranges:
    """Return all NVTX ranges of the report, of every process."""
    if not export.has(schema.NVTX, "start", "end", "eventType", "globalTid"):
        none = np.empty(0, np.int64)
        return Ranges(none, none, none, none, none, none, none, [], {})
    has_domains = export.has(schema.NVTX, "domainId")
    domain = 'coalesce(n."domainId", 0)' if has_domains else "0"
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
    name, names = _range_names(export, result.column("name"), np.where(elsewhere, named, -1))
    text, join = export.text(schema.NVTX, "text", "textId")
    created = export.rows(
        f'SELECT n."globalTid", {domain}, {text} FROM {{0}} n {join}'
        f' WHERE {int(has_domains)} AND n."eventType" = {schema.DOMAIN_CREATE}',
        *(schema.NVTX, schema.STRINGS),
    )
    domains = {(schema.process_of(tid), int(number)): str(name) for tid, number, name in created}
    process, thread = schema.process_of(tid), schema.thread_of(tid)
    return Ranges(start, end, process, thread, of_domain, row, name, names, domains)


def _range_names(export: Export, own: pa.ChunkedArray, ids: Ints) -> tuple[Ints, list[str]]:
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


@dataclass(frozen=True)
class NcclKernels:
    """The kernels of a process that exchange data, NCCL's and others', by begin.

    `names[name[i]]` is the name of kernel i.
    """

    start: Ints
    end: Ints
    stream: Ints
    launched: Launched
    name: Ints
    names: list[str]


@dataclass(frozen=True)
class Activity:
    """The work of one process, and what follows from it."""

    #: ACTIVITY: kernels, whole CUDA graphs whose kernels were not traced, copies, memsets
    work: list[pa.Table]
    nccl: NcclKernels
    #: where the optimizer's kernels show that steps end
    step_ends: Ints


def kernels_by_process(export: Export) -> list[dict[str, int]]:
    """Return how many kernels every `process` ran on every `device`, in the order of both.

    `nccl_count` is their number, `nccl_sum` that of those that exchange data.
    """
    if not export.has(schema.KERNEL.name, "globalPid", "deviceId"):
        return []
    raw = export.kernels
    codes, names = export.names(_kernel_names(raw))
    process, device = schema.process_of(raw["globalPid"]), raw["deviceId"]
    columns = {"process": process, "device": device, "nccl": exchanging_names(names, codes)}
    keys = ["process", "device"]
    kernels = pa.table(columns).filter((raw["globalPid"] >= 0) & (device >= 0))
    counts = kernels.group_by(keys).aggregate([("nccl", "count"), ("nccl", "sum")])
    rows: list[dict[str, int]] = counts.sort_by([(key, "ascending") for key in keys]).to_pylist()
    return rows


def _kernel_names(raw: Mapping[str, Ints]) -> Ints:
    """Return the strings' ids of kernels' names, with namespaces where they have any."""
    return np.where(raw["demangledName"] >= 0, raw["demangledName"], raw["shortName"])


def read_work(export: Export, process: int | None, cuda: Calls) -> Activity:
    """Return kernels, graphs, copies and memsets of `process` (None: of all)."""
    raw = export.kernels
    whole = raw["end"] >= raw["start"]
    if process is not None:
        whole &= schema.process_of(raw[schema.KERNEL.owner]) == process
    raw = {name: values[whole] for name, values in raw.items()}
    launched = cuda.launching(raw["correlationId"])
    short, full = raw["shortName"], _kernel_names(raw)
    codes, names = export.names(np.where(short >= 0, short, raw["demangledName"]))
    # the short name of all of PyTorch's kernels for many tensors is one, and has no namespace
    full, full_names = export.names(full)
    is_nccl = exchanging_names(full_names, full)
    kinds = encoded(is_nccl.astype(np.int32), ["compute", "collective"])
    ours = np.flatnonzero(~is_nccl & launched.known)
    update = updates(full_names)[full[ours]]
    nccl = np.flatnonzero(is_nccl)
    nccl = nccl[order_by(raw["start"][nccl])]
    begin, end, stream = (raw[name][nccl] for name in ("start", "end", "streamId"))
    graphs, copies, memsets = (
        export.spans(table, process) for table in (schema.GRAPH, schema.MEMCPY, schema.MEMSET)
    )
    return Activity(
        work=[
            _work(raw, launched, kind=kinds, name=encoded(codes, names)),
            _work(graphs, cuda, kind="compute", name=GRAPH),
            _copies(copies, cuda),
            _work(memsets, cuda, kind="memset", name="memset"),
        ],
        nccl=NcclKernels(begin, end, stream, launched.at(nccl), full[nccl], full_names),
        step_ends=ends_of_updates(launched.start[ours], launched.end[ours], update),
    )


def _work(raw: Mapping[str, Ints], launching: Launched | Calls, **more: Column) -> pa.Table:
    ids, device, stream = (raw[name] for name in ("correlationId", "deviceId", "streamId"))
    launched = launching.launching(ids) if isinstance(launching, Calls) else launching
    begin, end, size = raw["start"], raw["end"], raw.get("bytes")
    return recording.activity(
        begin, end, device, stream, launched, correlation=ids, size=size, **more
    )


def _copies(raw: Mapping[str, Ints], cuda: Calls) -> pa.Table:
    direction_of = np.zeros(64, np.int32)
    direction_of[list(schema.DIRECTION_OF_KIND)] = list(schema.DIRECTION_OF_KIND.values())
    direction = direction_of[np.clip(raw["copyKind"], 0, 63)]
    host_memory = np.select([direction == 1, direction == 2], [raw["srcKind"], raw["dstKind"]], -1)
    stated = (host_memory == schema.PAGEABLE) | (host_memory == schema.PINNED)
    columns: dict[str, Column] = {
        "name": encoded(direction, [f"memcpy {label}" for label in schema.DIRECTIONS]),
        "direction": encoded(direction, schema.DIRECTIONS),
        "pageable": nullable(host_memory == schema.PAGEABLE, stated),
    }
    return _work(raw, cuda, kind="copy", **columns)
