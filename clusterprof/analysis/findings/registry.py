"""All finding modules of this package, the codes that their findings carry, and all findings.

A module of this package is a finding module if it has `CODES` (what its findings are called),
`TIER` (what they are weighed after), and one or both of

- `repairs(dataset, lengths, before)`: the `Repair`s that it proposes in `lengths`, which the
  repairs `before` leave;
- `find(dataset, found)`: findings that nothing is replayed for, after those of the modules before.

Nothing else lists the modules: the study, `clusterprof explain` and `docs/findings.md` all read
them here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from clusterprof.analysis import findings
from clusterprof.analysis.findings import all_ranks, profiler_overhead, unprofiled
from clusterprof.analysis.findings.finding import Code, Repair, Tier, finding
from clusterprof.analysis.findings.pace import job_of
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.what_if import Saved, what_ifs
from clusterprof.results import Combined, Finding

#: a finding's code and ranks, and what its repair saves
_Weighed = tuple[tuple[str, tuple[int, ...]], Saved]
#: the finding modules in the order in which they run
MODULES: list[Any] = []
#: every code that a finding can carry
CODES: dict[str, Code] = {}


def load() -> None:
    """Fill MODULES and CODES from the package's modules (once more: after one was added)."""
    names = sorted(m.name for m in pkgutil.iter_modules(findings.__path__) if m.name != "registry")
    every = [import_module(f"{findings.__name__}.{name}") for name in names]
    MODULES[:] = sorted((m for m in every if hasattr(m, "CODES")), key=lambda m: m.TIER)
    CODES.clear()
    CODES.update({code.code: code for module in MODULES for code in module.CODES})


def all_findings(dataset: Dataset) -> tuple[list[Finding], list[str]]:
    """Return the findings of all modules, sorted by saving per step, and warnings.

    With too few steady-state steps there is only the profiler's overhead, and a warning says by how
    much to lengthen the window: a guess would name whom the profiler's start has made late. Where
    no report has steps, no window is long enough.
    """
    steady, warnings = len(dataset.steady_steps), list[str]()
    few = steady < LEAST_STEADY and bool(dataset.ranks)
    if few and dataset.timelines.has_steps.any():
        warnings.append(
            f"not enough steady-state steps ({steady}; the first step of a window shows the "
            "profiler's start): lengthen the window by "
            f"{profiler_overhead.missing(dataset)} steps or more (--steps)"
        )
    job = None if few else what_ifs(dataset)
    found = [
        finding(dataset, repair.code, repair.ranks, repair.words(saved), saved)
        for repair, saved in (weigh(dataset) if job else ())
    ]
    for module in MODULES if job else [all_ranks, profiler_overhead]:
        if hasattr(module, "find"):
            found += module.find(dataset, found)
    return sorted(_each_once(found), key=lambda f: -f["saved_ns_per_step"]), warnings


def _each_once(found: list[Finding]) -> list[Finding]:
    """The findings without what flight recorders show better: the rank that is waited for."""
    shown = [f for f in found if f["code"] == all_ranks.CODE and f["severity"] != "info"]
    same = unprofiled.CODES[0].code
    if not shown:
        return found
    for repaired in (one for each in found if each["saving"] for one in each["saving"]["net_of"]):
        if repaired["code"] == same:
            repaired["code"], repaired["ranks"] = all_ranks.CODE, shown[0]["ranks"]
    return [each for each in found if each["code"] != same]


def weigh(dataset: Dataset) -> list[tuple[Repair, Saved]]:
    """Return what is to be repaired, in order, and what each repair saves where it comes then.

    Tier by tier, the modules propose what they find in what the tiers before leave. Of a tier comes
    first what saves most for certain: what may be nothing takes nothing away from what is not. What
    saves enough when its turn comes is a finding, however little others leave of it then.
    """
    job, out = job_of(dataset), list[tuple[Repair, Saved]]()
    # impossible times may leave none of it
    lengths, step_ns = job.base, max(dataset.step_ns, 1.0)
    for tier in Tier:
        before, enough = [repair for repair, _ in out], dict[Repair, bool]()
        modules = [m for m in MODULES if m.TIER is tier and hasattr(m, "repairs")]
        left: list[list[Repair]] = [[*m.repairs(dataset, lengths, before)] for m in modules]
        while any(left):
            ready = [one for of in left for one in of if one.turn == min(rest.turn for rest in of)]
            saved = {one: job.saved(one.apply(lengths), lengths, one.ranks) for one in ready}
            enough = {one: saved[one].most_ns >= one.least * step_ns for one in ready} | enough
            # first what is too little to change anything for the others
            small = [one for one in ready if not enough[one]]
            best = small[0] if small else max(ready, key=lambda one: saved[one].certain_ns)
            left = [[one for one in of if one is not best] for of in left]
            if not enough[best]:
                continue
            alone = job.saved(best.apply(job.base), job.base, best.ranks)
            out.append((best, replace(saved[best], alone=alone)))
            # what the job hardly has outside the window leaves the others what they are
            if not saved[best].rare:
                repaired = (*lengths.repaired, (best.code.code, best.ranks))
                lengths = replace(saved[best].without, repaired=repaired)
    job.repaired = lengths.repaired
    return out


def combined(dataset: Dataset, found: Sequence[Finding]) -> Combined | None:
    """The step that each choice of the findings that save most leaves: one replay for each.

    None where no finding above severity info saves anything.
    """
    job = what_ifs(dataset)
    if job is None:
        return None
    worth = [each for each in found if each["severity"] != "info"]
    keys = [(f["code"], tuple(f["ranks"]), f["saved_ns_per_step"]) for f in worth]
    # of four there are 16 replays, of which some are known already
    repairs = [(key[:2], job.weighed[key]) for key in keys if key in job.weighed]
    if not repairs:
        return None
    # those of ranks that nothing ties to the first one's make other steps shorter
    of = repairs[0][1].ranks
    repairs = [each for each in repairs if np.array_equal(each[1].ranks, of)][: limits.FEW]
    # queued work would hide in the window what one of them costs
    long_run = any(each.long_run for _, each in repairs)
    steps = []
    for choice in range(1 << len(repairs)):
        chosen = [one for k, one in enumerate(repairs) if choice >> k & 1]
        steps.append(job.remaining_ns([_after(one, chosen) for one in chosen], long_run, of))
    return {
        "view": "long_run" if long_run else "window",
        "findings": [{"code": code, "ranks": list(ranks)} for (code, ranks), _ in repairs],
        "remaining_ns": [round(ns) for ns in steps],
    }


def _after(one: _Weighed, chosen: Sequence[_Weighed]) -> Saved:
    """What a repair saves after those before it, where one of these is chosen too; else alone."""
    saved, others = one[1], {name for name, other in chosen if other is not one[1]}
    return saved if saved.alone is None or others.intersection(saved.base.repaired) else saved.alone


def explain(code: str) -> str:
    """Describe a finding code in full."""
    one = CODES[code]
    parts = (f"{code}: {one.title}", one.meaning, f"When it is wrong: {one.when_wrong}")
    return "\n\n".join((*parts, f"Recommendation: {one.recommendation}"))


def explained(findings: Sequence[Finding]) -> dict[str, dict[str, str]]:
    """What the codes of `findings` mean, in their order: `title`, `meaning` and the like."""
    codes = dict.fromkeys(each["code"] for each in findings)
    return {code: CODES[code]._asdict() for code in codes if code in CODES}


load()
