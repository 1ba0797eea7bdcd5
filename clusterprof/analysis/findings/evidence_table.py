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

    def __init__(self, settled: Sequence[int]) -> None:
        self.rows: list[EvidenceRow] = []
        #: the window's steps in steady state, in which the profiler is
        self.settled = settled
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
        return number

    def add_of_all(
        self, source: EvidenceSource, ranks: Sequence[int], steps: Sequence[int], step_ns: int,
        *, profiler: bool, count: int | None = None, what: str = "step",
    ) -> None:  # fmt: skip
        """Add how long a step is, which compares all these ranks."""
        row = self.add(source, what, ranks, steps, step_ns, profiler=profiler, count=count)
        self.of_all.append(row)

    def step_by(self, source: EvidenceSource) -> list[int]:
        """The rows that tell by this source how long a step is."""
        return [number for number in self.of_all if self.rows[number - 1]["source"] == source]

    def is_disturbed(self, steps: Sequence[int]) -> bool:
        """Whether any of these steps is one of the window's, with the profiler there."""
        return not set(self.settled).isdisjoint(steps)


def add_to(results: Results) -> None:
    """Add the table to the results, and name its rows in findings and in the verdict's sentences.

    Of reports alone all rows are of their window, with the profiler there.
    """
    settled = [entry["step"] for entry in results["steps"] if entry["settled"]]
    table, shallow = _Table(settled), results["shallow"]
    _steps(table, results)
    if shallow is not None:
        _compared_steps(table, shallow)
        _lateness(table, shallow)
    for finding in results["findings"]:
        finding["rows"] = _rows_of(table, results, finding) or table.of_all
    for sentence in results["headline"]:
        named = (
            finding["rows"] for finding in results["findings"]
            if finding["code"] == sentence["code"] and finding["ranks"] == sentence["ranks"]
        )  # fmt: skip
        sentence["rows"] = next(named, table.of_all)
    results["evidence_table"] = table.rows


def _steps(table: _Table, results: Results) -> None:
    """Add how long a step is by reports and step logs; one alone where none is in steady state."""
    pace, shallow = results["pace"], results["shallow"]
    profiled = [entry["rank"] for entry in results["ranks"]]
    if pace and table.settled:
        table.add_of_all("window", profiled, table.settled, pace["window_step_ns"], profiler=True)
    elif results["steps"]:  # the one that the verdict describes
        shown, what = results["steps"][-1], "step, not in steady state"
        length_ns = shown["duration_ns"]
        table.add_of_all("window", profiled, [shown["step"]], length_ns, profiler=True, what=what)
    if pace and pace["without_profiler"]:
        logged = shallow["ranks"] if shallow else profiled
        table.add_of_all("step logs", logged, (), pace["step_ns"], profiler=False)


def _compared_steps(table: _Table, shallow: ShallowResults) -> None:
    """Add how long the steps are in which all ranks were compared."""
    if steps := shallow["steps"]:
        table.add_of_all(
            "flight recorders", shallow["ranks"], steps, shallow["step_ns"],
            profiler=table.is_disturbed(steps),
        )  # fmt: skip
    if watch := shallow.get("watch"):
        between = watch["first_step"], watch["last_step"]
        table.add_of_all(
            "looks", shallow["ranks"], between, watch["step_ns"], profiler=False,
            count=watch["steps"],
        )  # fmt: skip


def _lateness(table: _Table, shallow: ShallowResults) -> None:
    """Add how late each suspect is, by looks or by flight recorders around the window."""
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
            profiler=not by_looks and table.is_disturbed(steps), count=count,
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
    if finding["saving"]:
        numbers += _saving(table, finding)
        if pace := results["pace"]:
            numbers += table.step_by("step logs" if pace["without_profiler"] else "window")
    if finding["code"].startswith("straggler."):
        of_ranks = [n for rank in finding["ranks"] for n in table.of_rank.get(rank, ())]
        # that no look shows them late is evidence as well
        numbers += of_ranks or table.step_by("looks")
    return sorted(set(numbers))


def _saving(table: _Table, finding: Finding) -> list[int]:
    """Add what the cause of a finding costs, and what its repair saves."""
    ends = finding["saved_least_ns"], finding["saved_most_ns"]
    ranks, steps = finding["ranks"], finding["steps"]
    cost, saved = finding["cost_ns_per_step"], finding["saved_ns_per_step"]
    return [
        table.add("window", "cost", ranks, steps, cost, profiler=True),
        table.add("replay", "saving", ranks, steps, saved, ends, profiler=True),
    ]
