"""A rank's account averaged over the settled steps: the table that every renderer shows."""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.results import RankAccount, Results


@dataclass(frozen=True)
class Average:
    """Means over steps, ns; the five parts after `duration_ns` add up to it.

    `exposed_wait_ns` and `exposed_transfer_ns` are the two halves of the exposed
    communication: waiting for a later rank, and what follows the last arrival.
    """

    rank: int
    steps: int
    duration_ns: float
    compute_ns: float
    exposed_wait_ns: float
    exposed_transfer_ns: float
    exposed_copy_ns: float
    idle_ns: float

    @property
    def exposed_communication_ns(self) -> float:
        """Both halves: communication that no compute hides."""
        return self.exposed_wait_ns + self.exposed_transfer_ns


def evidence_steps(results: Results) -> tuple[list[int], bool]:
    """The steps to average over, and whether they are settled.

    Where the capture's own start or stop shows in every step there is no settled one;
    the averages are then of all steps, and whoever shows them has to say so.
    """
    settled = [step["step"] for step in results["steps"] if step["settled"]]
    return (settled, True) if settled else ([step["step"] for step in results["steps"]], False)


def averages(results: Results) -> list[Average]:
    """One `Average` per rank that has an account in the evidence steps, sorted by rank."""
    chosen = set(evidence_steps(results)[0])
    by_rank: dict[int, list[RankAccount]] = {}
    for step in results["steps"]:
        if step["step"] in chosen:
            for account in step["ranks"]:
                by_rank.setdefault(account["rank"], []).append(account)
    return [_average(rank, by_rank[rank]) for rank in sorted(by_rank)]


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


def _average(rank: int, accounts: list[RankAccount]) -> Average:
    count = len(accounts)
    wait = sum(a["exposed_wait_ns"] for a in accounts) / count
    exposed = sum(a["exposed_communication_ns"] for a in accounts) / count
    return Average(
        rank=rank,
        steps=count,
        duration_ns=sum(a["duration_ns"] for a in accounts) / count,
        compute_ns=sum(a["compute_ns"] for a in accounts) / count,
        exposed_wait_ns=wait,
        exposed_transfer_ns=exposed - wait,
        exposed_copy_ns=sum(a["exposed_copy_ns"] for a in accounts) / count,
        idle_ns=sum(a["idle_ns"] for a in accounts) / count,
    )
