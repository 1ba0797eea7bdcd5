"""How fine the one clock is: what two ranks' times may differ by without meaning anything."""

from __future__ import annotations

from clusterprof.results import Results


def rank_uncertainties(results: Results) -> dict[int, int]:
    """Each rank's bound, ns, on its offset from the reference rank over the whole window."""
    return {entry["rank"]: entry["uncertainty_ns"] for entry in results["clock"]["ranks"]}


def pair_bound_ns(results: Results) -> int:
    """The largest error, ns, of a difference between two ranks' aligned times.

    Each rank is known to within its own uncertainty, so a difference of two is known to
    within the sum; this is the sum for the worst pair. A wait shorter than it says nothing.
    """
    worst = sorted(rank_uncertainties(results).values())[-2:]
    return sum(worst) if len(results["clock"]["ranks"]) > 1 else 0
