"""The verdict's first line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc

from clusterprof.analysis.findings.finding import ms, percent
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.results import Finding

#: a straggler is the verdict where it costs this part of what costs most
_LEADS_FRAC = 0.5
#: the parts of a step's account, as a single step is described by them
_PARTS = {
    "compute_ns": "compute takes",
    "exposed_communication_ns": "exposed communication",
    "exposed_copy_ns": "exposed copies",
    "idle_ns": "idle time",
}


def verdict(dataset: Dataset, findings: Sequence[Finding]) -> str:
    """One sentence: who holds up the others; else that nobody does, and what costs most."""
    if not dataset.ranks:
        return "nothing to say: no report could be read"
    if len(dataset.steady_steps) < LEAST_STEADY:
        few = f"not enough steady-state steps ({len(dataset.steady_steps)} of {LEAST_STEADY})"
        return f"{few}{_glimpse(dataset)}"
    blamed = [f for f in findings if f["code"].startswith("straggler.") and f["severity"] != "info"]
    costly = [f for f in findings if f["severity"] != "info"]
    if blamed:
        most = costly[0]
        if blamed[0]["cost_ns_per_step"] >= _LEADS_FRAC * most["cost_ns_per_step"]:
            return blamed[0]["summary"]
        # who is late is asked first, but not where something else costs many times as much
        return f"{most['summary']}; beside that {blamed[0]['summary']}"
    quiet = [f for f in findings if f["code"] == "straggler.host" and "comes last" in f["summary"]]
    start = f"no straggler that costs much: {quiet[0]['summary']}" if quiet else _nobody(dataset)
    if costly:
        return f"{start}; {costly[0]['summary']}"
    steps = f"{len(dataset.steady_steps)} settled steps"
    return f"{start}, and nothing else stands out in {steps} of {ms(dataset.step_ns)}"


def _nobody(dataset: Dataset) -> str:
    """That nobody is late, as far as the ranks can be compared; and who comes last all the same."""
    if len(dataset.ranks) < 2:
        return f"only rank {dataset.ranks[0]} has a report, so nobody can be called late"
    apart = incomparable(dataset)
    if len(apart) > len(dataset.ranks) - 2:
        return (
            "stragglers cannot be determined: no collectives of these ranks match those of "
            "another rank with a report"
        )
    if apart:
        others = f"rank{'s' if len(apart) > 1 else ''} {', '.join(map(str, apart[:8]))}"
        return (
            f"no stragglers among {len(dataset.ranks) - len(apart)} ranks; {others} cannot be "
            "compared, because their collectives match no other rank's"
        )
    last = always_last(dataset)
    if last is None:
        return "no stragglers"
    rank, wait = last
    return (
        f"rank {rank} comes last to nearly all collectives and the others wait {ms(wait)} of each "
        f"{ms(dataset.step_ns)} step for it, but hurrying it alone would save little"
    )


def incomparable(dataset: Dataset) -> list[int]:
    """Ranks that nothing ties to another rank's: no matched call, or no bound of the clock."""
    c = dataset.collectives
    several = c.matched & (np.bincount(c.collective, minlength=1)[c.collective] > 1)
    tied = set(np.unique(c.rank[several]).tolist())
    return [rank for rank in dataset.ranks if rank not in tied]


def always_last(dataset: Dataset) -> tuple[int, float] | None:
    """The rank that comes last wherever others wait, and how long they wait a step (ns).

    None where no single one does, or where they wait for less than a good third of the step.
    """
    c = dataset.collectives
    rows = np.flatnonzero(c.matched & c.synchronising & np.isin(c.step, dataset.steady_steps))
    waited = np.zeros(len(dataset.ranks))
    np.add.at(waited, np.searchsorted(dataset.ranks, c.last_rank[rows]), c.wait[rows])
    if not waited.any():
        return None
    k = int(np.argmax(waited))
    wait = float(np.nanmean(np.delete(dataset.account("exposed_wait_ns"), k, axis=0)))
    if waited[k] < limits.LAST_FRAC * waited.sum() or wait < limits.WAITED_FRAC * dataset.step_ns:
        return None
    return dataset.ranks[k], wait


def _glimpse(dataset: Dataset) -> str:
    """Where the time of a single step goes: no evidence, but better than nothing; else empty."""
    if not dataset.steps:
        return ""
    step = (*dataset.steps[-1:], *dataset.steady_steps)[-1]
    rows = dataset.accounts.filter(pc.equal(dataset.accounts["step"], step))
    whole = pc.sum(rows["duration_ns"]).as_py()
    if not whole:
        return ""
    said = [
        f"{what} {percent(pc.sum(rows[name]).as_py() / whole)}" for name, what in _PARTS.items()
    ]
    typical = ms(float(np.median(rows["duration_ns"].to_numpy())))
    stepped = any(line.has_steps for line in dataset.timelines)
    what = "one step" if stepped else "a window without steps"
    return f"; {what} of {typical} is no evidence, but in it {', '.join(said)}"
