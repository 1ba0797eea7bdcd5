"""All finding modules of this package, the codes that their findings carry, and all findings.

A module of this package is a finding module if it has `CODES` (what its findings are called),
`TIER` (what they are weighed after), and one or both of

- `repairs(dataset, lengths, before)`: the `Repair`s that it proposes in `lengths`, which the
  repairs `before` leave;
- `find(dataset, earlier)`: findings that nothing is replayed for, after those of modules before.

Nothing else lists the modules: the study, `clusterprof explain` and `docs/findings.md` all read
them here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from clusterprof.analysis import findings
from clusterprof.analysis.findings import all_ranks, profiler_overhead, undisturbed, unprofiled
from clusterprof.analysis.findings.finding import (
    Code,
    Repair,
    Tier,
    above_info,
    finding_of_repair,
    job_of,
)
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved, WhatIfs, what_ifs
from clusterprof.results import Combined, Finding

#: a finding's code and ranks, and what its repair saves
_Weighed = tuple[tuple[str, tuple[int, ...]], Saved]
#: the finding modules in the order in which they run
MODULES: list[Any] = []
#: those of a rank that was profiled
STRAGGLERS = ("straggler.host", "straggler.gpu")
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
    steady, warnings, modules = len(dataset.steady_steps), list[str](), MODULES
    few, every = steady < LEAST_STEADY and bool(dataset.ranks), list[Finding]()
    if few and dataset.timelines.has_steps.any():
        warnings.append(
            f"not enough steady-state steps ({steady}; the first step of a window shows the "
            "profiler's start): lengthen the window by "
            f"{profiler_overhead.missing(dataset)} steps or more (--steps)"
        )
    if few or what_ifs(dataset) is None:
        modules = [all_ranks, profiler_overhead]
    else:
        for repair, saved in weigh(dataset):
            words = repair.words(saved)
            every.append(finding_of_repair(dataset, repair.code, repair.ranks, words, saved))
    for module in modules:
        every += module.find(dataset, every) if hasattr(module, "find") else []
    every = _by_recorders(every)
    return sorted(every, key=lambda f: -f["saved_ns_per_step"]), warnings


def _by_recorders(every: list[Finding]) -> list[Finding]:
    """Flight recorders show better than reports which unprofiled rank it is that is waited for."""
    same = unprofiled.CODES[0].code
    shown = [f for f in above_info(every) if f["code"] == all_ranks.CODE]
    if not shown:
        return every
    left = [f for f in every if f["code"] != same]
    for repaired in (r for f in left if f["saving"] for r in f["saving"]["net_of"]):
        if repaired["code"] == same:
            repaired["code"], repaired["ranks"] = all_ranks.CODE, shown[0]["ranks"]
    return left


def weigh(dataset: Dataset) -> list[tuple[Repair, Saved]]:
    """Return what is to be repaired, in order, and what each repair saves where it comes then.

    Tier by tier, the modules propose what they find in what the tiers before leave. Of a tier comes
    first what saves most for certain: what may be nothing takes nothing away from what is not. What
    saves enough when its turn comes is a finding, however little others leave of it then.
    """
    job, weighed = job_of(dataset), list[tuple[Repair, Saved]]()
    lengths, turn = job.base, attrgetter("turn")
    for tier in Tier:
        before = [repair for repair, _ in weighed]
        modules = [m for m in MODULES if m.TIER is tier and hasattr(m, "repairs")]
        proposed = [repair for m in modules for repair in m.repairs(dataset, lengths, before)]
        for _, repairs in groupby(sorted(proposed, key=turn), key=turn):
            lengths = _weigh_against_each_other(dataset, [*repairs], lengths, weighed)
    job.repaired = lengths.repaired
    return [(repair, _by_looks(dataset, repair, saved)) for repair, saved in weighed]


def _weigh_against_each_other(
    dataset: Dataset, repairs: list[Repair], lengths: Lengths, weighed: list[tuple[Repair, Saved]]
) -> Lengths:
    """Add those that save enough to `weighed`, in order; returns what they leave of `lengths`."""
    job, enough = job_of(dataset), set[Repair]()
    step_ns = max(dataset.step_ns, 1.0)  # impossible times may leave none of it
    while repairs:
        saved = {r: job.saved(r.apply(lengths), lengths, r.ranks) for r in repairs}
        enough |= {r for r in repairs if saved[r].most_ns >= r.least * step_ns}
        # first what is too little to change anything for the others
        best = max(repairs, key=lambda r: (r not in enough, r in enough and saved[r].certain_ns))
        repairs.remove(best)
        if best not in enough:
            continue
        alone = job.saved(best.apply(job.base), job.base, best.ranks)
        weighed.append((best, replace(saved[best], alone=alone)))
        # what the job hardly has outside the window leaves the others what they are
        if not saved[best].rare:
            repaired = (*lengths.repaired, (best.code.code, best.ranks))
            lengths = replace(saved[best].without, repaired=repaired)
    return lengths


def _by_looks(dataset: Dataset, repair: Repair, saved: Saved) -> Saved:
    """What a repair saves, by the looks at the running job where they tell it of its one rank."""
    if repair.code.code not in STRAGGLERS or len(repair.ranks) != 1:
        return saved
    looks = undisturbed.lateness_in_looks(dataset, job_of(dataset), repair.ranks[0], saved)
    alone = saved.by_looks(looks, saved.alone) if saved.alone else None
    return replace(saved.by_looks(looks), alone=alone)


def combined(dataset: Dataset, findings: Sequence[Finding]) -> Combined | None:
    """The step that each choice of the findings that save most leaves: one replay for each.

    None where no finding above severity info saves anything. After what is chosen with it and comes
    before it a repair saves what is left of it; else what it saves alone.
    """
    job = what_ifs(dataset)
    if job is None or not (repairs := _largest(job, findings)):
        return None
    # queued work would hide in the window what one of them costs
    long_run, remaining_ns = any(saved.long_run for _, saved in repairs), []
    for choice in range(1 << len(repairs)):
        chosen, saves = [r for k, r in enumerate(repairs) if choice >> k & 1], list[Saved]()
        for _, saved in chosen:
            others = {name for name, other in chosen if other is not saved}
            saves.append(saved if others & {*saved.base.repaired} else saved.alone or saved)
        remaining_ns.append(round(job.remaining_ns(saves, long_run, repairs[0][1].ranks)))
    return {
        "view": "long_run" if long_run else "window",
        "findings": [{"code": code, "ranks": list(ranks)} for (code, ranks), _ in repairs],
        "remaining_ns": remaining_ns,
    }


def _largest(job: WhatIfs, findings: Sequence[Finding]) -> list[_Weighed]:
    """The repairs of the findings above severity info, of the same steps and no more than `FEW`.

    Of four there are 16 replays, of which some are known already.
    """
    keys = [(f["code"], tuple(f["ranks"]), f["saved_ns_per_step"]) for f in above_info(findings)]
    repairs = [(key[:2], job.weighed[key]) for key in keys if key in job.weighed]
    # those of ranks that nothing ties to the first one's make other steps shorter
    alike = [r for r in repairs if np.array_equal(r[1].ranks, repairs[0][1].ranks)]
    return alike[: limits.FEW]


def explain(code: str) -> str:
    """Describe a finding code in full."""
    _, title, meaning, when_wrong, recommendation = CODES[code]
    parts = (f"{code}: {title}", meaning, f"When it is wrong: {when_wrong}")
    return "\n\n".join((*parts, f"Recommendation: {recommendation}"))


def explained(findings: Sequence[Finding]) -> dict[str, dict[str, str]]:
    """What the codes of `findings` mean, in their order: `title`, `meaning` and the like."""
    codes = dict.fromkeys(f["code"] for f in findings)
    return {code: CODES[code]._asdict() for code in codes if code in CODES}


load()
