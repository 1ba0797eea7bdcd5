"""One table of all that a run's sentences rest on: source, ranks, steps, interval, profiler or not.

Made once, of what the results hold already. Each finding and each sentence of the verdict names its
rows by their numbers; a sentence that names no finding rests on what compared the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.analysis.model.joint_suspects import late_steps
from clusterprof.results import (
    EvidenceRow,
    EvidenceSource,
    Finding,
    Results,
    ShallowResults,
    Suspect,
    WatchEntry,
)


class _Table:
    """The rows so far, and which of them a finding or a sentence can name."""

    def __init__(self) -> None:
        self.rows: list[EvidenceRow] = []
        #: what the looks and the flight recorders show of each rank
        self.of_rank: dict[int, list[int]] = {}
        #: what compares all ranks, and tells how long a step is
        self.of_all: list[int] = []

    def add(
        self, source: EvidenceSource, what: str, ranks: Sequence[int], steps: Sequence[int],
        value_ns: int, ends_ns: tuple[int, int] | None = None, *, profiler: bool,
        count: int | None = None,
    ) -> int:  # fmt: skip
        """Add a row; returns its number, from 1. `count`: how many steps, where not all between."""
        number = len(self.rows) + 1
        least_ns, most_ns = ends_ns or (None, None)
        self.rows.append({
            "number": number, "source": source, "what": what, "ranks": [*ranks],
            "first_step": min(steps, default=None), "last_step": max(steps, default=None),
            "steps": len(steps) if count is None else count,
            "value_ns": value_ns, "least_ns": least_ns, "most_ns": most_ns, "profiler": profiler,
        })  # fmt: skip
        if what == "step":
            self.of_all.append(number)
        return number


def add_to(results: Results) -> None:
    """Add the table to the results of a run whose ranks left flight recorders, and name its rows.

    Of reports alone there is none: all that they show is of their window.
    """
    shallow = results["shallow"]
    if shallow is None:
        return
    table = _Table()
    _steps(table, results, shallow)
    _lateness(table, results, shallow)
    for finding in results["findings"]:
        finding["rows"] = _rows_of(table, results, finding)
    for sentence in results["headline"]:
        named = (
            finding.get("rows", []) for finding in results["findings"]
            if finding["code"] == sentence["code"] and finding["ranks"] == sentence["ranks"]
        )  # fmt: skip
        sentence["rows"] = next(named, table.of_all)
    results["evidence_table"] = table.rows


def _steps(table: _Table, results: Results, shallow: ShallowResults) -> None:
    """Add how long a step is, by each source that tells it."""
    settled = [entry["step"] for entry in results["steps"] if entry["settled"]]
    profiled, pace = [entry["rank"] for entry in results["ranks"]], results["pace"]
    watch = shallow.get("watch")
    if pace and settled:
        length_ns = pace["window_step_ns"]
        table.add("window", "step", profiled, settled, length_ns, profiler=True)
    if pace and pace["without_profiler"]:
        table.add("step logs", "step", shallow["ranks"], (), pace["step_ns"], profiler=False)
    if shallow["steps"]:
        table.add(
            "flight recorders", "step", shallow["ranks"], shallow["steps"], shallow["step_ns"],
            profiler=not set(settled).isdisjoint(shallow["steps"]),
        )  # fmt: skip
    if watch:
        between = watch["first_step"], watch["last_step"]
        table.add(
            "looks", "step", shallow["ranks"], between, watch["step_ns"], profiler=False,
            count=watch["steps"],
        )  # fmt: skip


def _lateness(table: _Table, results: Results, shallow: ShallowResults) -> None:
    """Add how late each suspect is, by looks or by flight recorders around the window."""
    settled = {entry["step"] for entry in results["steps"] if entry["settled"]}
    for late in shallow["suspects"]:
        count = late.get("looked_steps")
        watch = None if count is None else shallow.get("watch")
        by_looks = watch is not None
        steps = late_steps(late, shallow) if watch is None else _looked_steps(late, watch)
        ns, bound = late["lateness_ns"], late["bound_ns"]
        number = table.add(
            "looks" if by_looks else "flight recorders",
            "lateness" if late["delays"] else "lateness, with what effect cannot be determined",
            [late["rank"]], steps, ns, (max(ns - bound, 0), ns + bound),
            profiler=not by_looks and not settled.isdisjoint(steps), count=count,
        )  # fmt: skip
        table.of_rank.setdefault(late["rank"], []).append(number)


def _looked_steps(late: Suspect, watch: WatchEntry) -> list[int]:
    """The first and the last step in which a suspect is late by the looks."""
    ends = watch["first_step"], watch["last_step"]
    first, last = late["since_step"], late["until_step"]
    return [min(ends) if first is None else first, max(ends) if last is None else last]


def _rows_of(table: _Table, results: Results, finding: Finding) -> list[int]:
    """Add what a finding itself shows; returns all rows that it rests on."""
    numbers: list[int] = []
    ends = finding["saved_least_ns"], finding["saved_most_ns"]
    ranks, steps = finding["ranks"], finding["steps"]
    if finding["saving"]:
        cost, saved = finding["cost_ns_per_step"], finding["saved_ns_per_step"]
        numbers.append(table.add("window", "cost", ranks, steps, cost, profiler=True))
        numbers.append(table.add("replay", "saving", ranks, steps, saved, ends, profiler=True))
        if pace := results["pace"]:
            tells = ("step logs",) if pace["without_profiler"] else ("window",)
            numbers += [n for n in table.of_all if table.rows[n - 1]["source"] in tells]
    if finding["code"].startswith("straggler."):
        of_ranks = [number for rank in ranks for number in table.of_rank.get(rank, ())]
        looked = [n for n in table.of_all if table.rows[n - 1]["source"] == "looks"]
        # that no look shows them late is evidence as well
        numbers += of_ranks or looked
    return sorted(set(numbers))
