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
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from clusterprof.analysis import findings
from clusterprof.analysis.findings import all_ranks, profiler_overhead, undisturbed, unprofiled
from clusterprof.analysis.findings.finding import Code, Repair, Tier, finding, job_of
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.what_if import Saved, what_ifs
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
    steady, warnings = len(dataset.steady_steps), list[str]()
    few = steady < LEAST_STEADY and bool(dataset.ranks)
    if few and dataset.timelines.has_steps.any():
        warnings.append(
            f"not enough steady-state steps ({steady}; the first step of a window shows the "
            "profiler's start): lengthen the window by "
            f"{profiler_overhead.missing(dataset)} steps or more (--steps)"
        )
    job = None if few else what_ifs(dataset)
    every = [
        finding(dataset, repair.code, repair.ranks, repair.words(saved), saved)
        for repair, saved in (weigh(dataset) if job else ())
    ]
    for module in MODULES if job else [all_ranks, profiler_overhead]:
        if hasattr(module, "find"):
            every += module.find(dataset, every)
    # flight recorders show better than reports which rank it is that is waited for
    shown = [f for f in every if f["code"] == all_ranks.CODE and f["severity"] != "info"]
    same = unprofiled.CODES[0].code
    if shown:
        every = [f for f in every if f["code"] != same]
        for repaired in (r for f in every if f["saving"] for r in f["saving"]["net_of"]):
            if repaired["code"] == same:
                repaired["code"], repaired["ranks"] = all_ranks.CODE, shown[0]["ranks"]
    return sorted(every, key=lambda f: -f["saved_ns_per_step"]), warnings


@dataclass
class _Waiting:
    """Repairs of a tier that are not weighed yet, those of each module in a list."""

    by_module: list[list[Repair]]

    def ready(self) -> list[Repair]:
        """Those whose turn it is: of each module those of its earliest turn."""
        return [
            repair for repairs in self.by_module for repair in repairs
            if repair.turn == min(waiting.turn for waiting in repairs)
        ]  # fmt: skip

    def remove(self, weighed: Repair) -> None:
        """Leave the others waiting."""
        self.by_module = [[r for r in repairs if r is not weighed] for repairs in self.by_module]


def weigh(dataset: Dataset) -> list[tuple[Repair, Saved]]:
    """Return what is to be repaired, in order, and what each repair saves where it comes then.

    Tier by tier, the modules propose what they find in what the tiers before leave. Of a tier comes
    first what saves most for certain: what may be nothing takes nothing away from what is not. What
    saves enough when its turn comes is a finding, however little others leave of it then.
    """
    job, weighed = job_of(dataset), list[tuple[Repair, Saved]]()
    # impossible times may leave none of it
    lengths, step_ns = job.base, max(dataset.step_ns, 1.0)
    for tier in Tier:
        before, enough = [repair for repair, _ in weighed], dict[Repair, bool]()
        modules = [m for m in MODULES if m.TIER is tier and hasattr(m, "repairs")]
        waiting = _Waiting([[*m.repairs(dataset, lengths, before)] for m in modules])
        while ready := waiting.ready():
            saved = {r: job.saved(r.apply(lengths), lengths, r.ranks) for r in ready}
            enough = {r: saved[r].most_ns >= r.least * step_ns for r in ready} | enough
            # first what is too little to change anything for the others
            small = [r for r in ready if not enough[r]]
            best = small[0] if small else max(ready, key=lambda r: saved[r].certain_ns)
            waiting.remove(best)
            if not enough[best]:
                continue
            alone = job.saved(best.apply(job.base), job.base, best.ranks)
            weighed.append((best, replace(saved[best], alone=alone)))
            # what the job hardly has outside the window leaves the others what they are
            if not saved[best].rare:
                repaired = (*lengths.repaired, (best.code.code, best.ranks))
                lengths = replace(saved[best].without, repaired=repaired)
    job.repaired = lengths.repaired
    return [(repair, _by_looks(dataset, repair, saved)) for repair, saved in weighed]


def _by_looks(dataset: Dataset, repair: Repair, saved: Saved) -> Saved:
    """What a repair saves, by the looks at the running job where they tell it of its one rank."""
    if repair.code.code not in STRAGGLERS or len(repair.ranks) != 1:
        return saved
    looks = undisturbed.lateness_in_looks(dataset, job_of(dataset), repair.ranks[0], saved)
    alone = saved.by_looks(looks, saved.alone) if saved.alone else None
    return replace(saved.by_looks(looks), alone=alone)


def combined(dataset: Dataset, findings: Sequence[Finding]) -> Combined | None:
    """The step that each choice of the findings that save most leaves: one replay for each.

    None where no finding above severity info saves anything.
    """
    job = what_ifs(dataset)
    if job is None:
        return None
    worth = [f for f in findings if f["severity"] != "info"]
    keys = [(f["code"], tuple(f["ranks"]), f["saved_ns_per_step"]) for f in worth]
    # of four there are 16 replays, of which some are known already
    repairs = [(key[:2], job.weighed[key]) for key in keys if key in job.weighed]
    if not repairs:
        return None
    # those of ranks that nothing ties to the first one's make other steps shorter
    tied = repairs[0][1].ranks
    repairs = [repair for repair in repairs if np.array_equal(repair[1].ranks, tied)][: limits.FEW]
    # queued work would hide in the window what one of them costs
    long_run = any(saved.long_run for _, saved in repairs)
    steps = []
    for choice in range(1 << len(repairs)):
        chosen = [repair for k, repair in enumerate(repairs) if choice >> k & 1]
        steps.append(job.remaining_ns([_after(r, chosen) for r in chosen], long_run, tied))
    return {
        "view": "long_run" if long_run else "window",
        "findings": [{"code": code, "ranks": list(ranks)} for (code, ranks), _ in repairs],
        "remaining_ns": [round(ns) for ns in steps],
    }


def _after(repair: _Weighed, chosen: Sequence[_Weighed]) -> Saved:
    """What a repair saves after those before it, where one of these is chosen too; else alone."""
    saved, others = repair[1], {name for name, other in chosen if other is not repair[1]}
    return saved if saved.alone is None or others.intersection(saved.base.repaired) else saved.alone


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
