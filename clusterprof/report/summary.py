"""What every renderer shows beside the findings: mean accounts, and what the clocks can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.results import Finding, OperationEntry, RankAccount, Results


@dataclass(frozen=True)
class Average:
    """Means over steps, ns; the five parts after `duration_ns` add up to it.

    `exposed_wait_ns` and `exposed_transfer_ns` are the two halves of the exposed
    communication: waiting for a later rank, and what follows the last arrival.
    """

    rank: int
    duration_ns: float
    compute_ns: float
    exposed_wait_ns: float
    exposed_transfer_ns: float
    exposed_copy_ns: float
    idle_ns: float

    @property
    def exposed_communication_ns(self) -> float:
        """Both halves: communication that is not overlapped with compute."""
        return self.exposed_wait_ns + self.exposed_transfer_ns


def average(rank: int, accounts: Sequence[RankAccount]) -> Average:
    """The mean of a rank's accounts of some steps."""

    def mean(*keys: str) -> float:
        return sum(a[key] for a in accounts for key in keys) / len(accounts)  # type: ignore[literal-required]

    wait = mean("exposed_wait_ns")
    return Average(
        rank=rank,
        duration_ns=mean("duration_ns"),
        compute_ns=mean("compute_ns"),
        exposed_wait_ns=wait,
        exposed_transfer_ns=mean("exposed_communication_ns") - wait,
        exposed_copy_ns=mean("exposed_copy_ns"),
        idle_ns=mean("idle_ns"),
    )


def evidence_steps(results: Results) -> tuple[list[int], bool]:
    """The steps to average over, and whether they are steady-state steps.

    Where the profiler's own start or stop shows in every step there is none; the averages are
    then of all steps, and whoever shows them has to say so.
    """
    steady = [step["step"] for step in results["steps"] if step["settled"]]
    return (steady, True) if steady else ([step["step"] for step in results["steps"]], False)


def averages(results: Results) -> list[Average]:
    """One `Average` per rank that has an account in the evidence steps, sorted by rank."""
    evidence = set(evidence_steps(results)[0])
    by_rank: dict[int, list[RankAccount]] = {}
    for step in results["steps"]:
        if step["step"] in evidence:
            for account in step["ranks"]:
                by_rank.setdefault(account["rank"], []).append(account)
    return [average(rank, by_rank[rank]) for rank in sorted(by_rank)]


def worth_showing(results: Results, rows: list[Average], most: int) -> list[Average]:
    """All rows, or of many the ranks that findings name and those that wait least and most."""
    if len(rows) <= most:
        return rows
    named = {rank for finding in results["findings"] for rank in finding["ranks"][:4]}
    named |= {finding["rank"] for finding in results["findings"] if finding["rank"] is not None}
    chosen = sorted(named & {row.rank for row in rows})[:most]
    by_wait = sorted(rows, key=lambda row: row.exposed_wait_ns)
    for pair in zip(by_wait, reversed(by_wait), strict=True):
        for row in pair:
            if len(chosen) < most and row.rank not in chosen:
                chosen.append(row.rank)
    return [row for row in rows if row.rank in set(chosen)]


def by_cost(results: Results) -> list[Finding]:
    """The findings, the costliest first."""
    return sorted(results["findings"], key=lambda finding: -finding["cost_ns_per_step"])


def by_exposed(results: Results) -> list[OperationEntry]:
    """The operations, those with the most exposed time first."""
    return sorted(results["collectives"]["by_operation"], key=lambda entry: -entry["exposed_ns"])


def rank_uncertainties(results: Results) -> dict[int, int]:
    """Each rank's bound, ns, on its offset from the reference rank over the whole window."""
    return {entry["rank"]: entry["uncertainty_ns"] for entry in results["clock"]["ranks"]}


def pair_bound_ns(results: Results) -> int:
    """The largest error, ns, of a difference between two ranks' aligned times.

    The sum of the two largest uncertainties. A wait shorter than this says nothing.
    """
    worst = sorted(rank_uncertainties(results).values())[-2:]
    return sum(worst) if len(worst) > 1 else 0


def is_measurable(finding: Finding) -> bool:
    """Whether the cost is larger than what the clocks may err by."""
    return finding["cost_ns_per_step"] > finding["uncertainty_ns"]
