"""All finding modules of this package, the codes that their findings carry, and all findings.

A module of this package is a finding module if it has `CODES` (what its findings are called),
`TIER` (what they are weighed after), and `repairs`, which proposes what may be repaired, or `find`,
which returns findings that nothing is replayed for. Nothing else lists the modules: the study,
`clusterprof explain` and `docs/findings.md` all read them here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from clusterprof.analysis import findings
from clusterprof.analysis.findings import all_ranks, profiler_overhead, unprofiled
from clusterprof.analysis.findings.finding import Code, Repair, Tier, finding, job_of
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved, what_ifs
from clusterprof.errors import UsageError
from clusterprof.results import Finding


@runtime_checkable
class RepairModule(Protocol):
    """A module of this package whose findings are causes that can be repaired."""

    CODES: tuple[Code, ...]
    TIER: Tier

    def repairs(
        self, dataset: Dataset, lengths: Lengths, before: Sequence[Repair]
    ) -> Sequence[Repair]:
        """What may be repaired in `lengths`, which the repairs `before` leave; by turns."""


@runtime_checkable
class FindingModule(Protocol):
    """A module of this package whose findings nothing is replayed for."""

    CODES: tuple[Code, ...]
    TIER: Tier

    def find(self, dataset: Dataset, found: Sequence[Finding]) -> list[Finding]:
        """Return the module's findings; `found` are those of the modules before it."""


#: in `docs/findings.md`, before what `page` returns
WRITTEN = "<!-- from here on written by `make readme`: CODES in clusterprof/analysis/findings -->"

#: the finding modules in the order in which they run
MODULES: list[FindingModule | RepairModule] = []
#: every code that a finding can carry
CODES: dict[str, Code] = {}


def load() -> None:
    """Fill MODULES and CODES from the package's modules (once more: after one was added)."""
    names = sorted(m.name for m in pkgutil.iter_modules(findings.__path__) if m.name != "registry")
    every: list[Any] = [import_module(f"{findings.__name__}.{name}") for name in names]
    MODULES[:] = sorted(
        (m for m in every if hasattr(m, "CODES")), key=lambda m: [*Tier].index(m.TIER)
    )
    CODES.clear()
    CODES.update({code.code: code for module in MODULES for code in module.CODES})


def all_findings(dataset: Dataset) -> tuple[list[Finding], list[str]]:
    """Return the findings of all modules, sorted by saving per step, and warnings.

    With too few steady-state steps there is only the profiler's overhead, and a warning says by how
    much to lengthen the window: a guess would name whom the profiler's start has made late.
    """
    steady, found = len(dataset.steady_steps), list[Finding]()
    if steady < LEAST_STEADY and dataset.ranks:
        warning = (
            f"not enough steady-state steps ({steady}; the first step of a window shows the "
            "profiler's start): lengthen the window by "
            f"{profiler_overhead.missing(dataset)} steps or more (--steps)"
        )
        return [*all_ranks.find(dataset), *profiler_overhead.find(dataset)], [warning]
    if what_ifs(dataset):
        found = [
            finding(dataset, repair.code, repair.ranks, repair.words(saved), saved)
            for repair, saved in weigh(dataset)
        ]
    for module in MODULES if what_ifs(dataset) else [all_ranks, profiler_overhead]:
        if isinstance(module, FindingModule):
            found += module.find(dataset, found)
    return sorted(_each_once(found), key=lambda f: -f["saved_ns_per_step"]), []


def _each_once(found: list[Finding]) -> list[Finding]:
    """The findings without what flight recorders show better: the rank that is waited for."""
    shown = [f for f in found if f["code"] == all_ranks.CODE and f["severity"] != "info"]
    if not shown:
        return found
    same = unprofiled.CODES[0].code
    for saving in filter(None, (each["saving"] for each in found)):
        saving["net_of"] = [
            {"code": all_ranks.CODE, "ranks": shown[0]["ranks"]} if one["code"] == same else one
            for one in saving["net_of"]
        ]
    return [each for each in found if each["code"] != same]


def weigh(dataset: Dataset) -> list[tuple[Repair, Saved]]:
    """Return what is to be repaired, in order, and what each repair saves where it comes then.

    Tier by tier, the modules propose what they find in what the tiers before leave. Of a tier comes
    first what saves most for certain: what may be nothing takes nothing away from what is not. What
    saves enough when its turn comes is a finding, however little others leave of it then.
    """
    job, out = job_of(dataset), list[tuple[Repair, Saved]]()
    lengths = job.base
    for tier in Tier:
        before, enough = [repair for repair, _ in out], dict[Repair, bool]()
        modules = [m for m in MODULES if m.TIER is tier and isinstance(m, RepairModule)]
        left = [[*module.repairs(dataset, lengths, before)] for module in modules]
        while any(left):
            ready = [one for of in left for one in of if one.turn == of[0].turn]
            saved = {one: job.saved(one.apply(lengths), lengths) for one in ready}
            enough = {one: saved[one].most_ns >= one.least_ns for one in ready} | enough
            # first what is too little to change anything for the others
            small = [one for one in ready if not enough[one]]
            best = small[0] if small else max(ready, key=lambda one: saved[one].certain_ns)
            left = [[one for one in of if one is not best] for of in left]
            if enough[best]:
                alone = job.saved(best.apply(job.base), job.base)
                out.append((best, replace(saved[best], alone=alone)))
                lengths = replace(saved[best].without, repaired=(*lengths.repaired, best.name))
    job.repaired = lengths.repaired
    return out


def explain(code: str) -> str:
    """Describe a finding code in full. Raises UsageError for a code that does not exist."""
    if code not in CODES:
        raise UsageError(f"no finding code {code!r}", "the codes are: " + ", ".join(CODES))
    one = CODES[code]
    parts = (f"{code}: {one.title}", one.meaning, f"When it is wrong: {one.when_wrong}")
    return "\n\n".join((*parts, f"Recommendation: {one.recommendation}"))


def explained(findings: Sequence[Finding]) -> dict[str, dict[str, str]]:
    """What the codes of `findings` mean, in their order: `title`, `meaning` and the like."""
    codes = dict.fromkeys(each["code"] for each in findings)
    return {code: asdict(CODES[code]) for code in codes if code in CODES}


def page() -> str:
    """The text of `docs/findings.md` from `WRITTEN` on; what stands before it is hand-written."""
    text = f"{WRITTEN}\n\n## Codes\n\n`clusterprof explain CODE` prints the same in a terminal.\n"
    for one in CODES.values():
        text += (
            f"\n### {one.code}\n\n**{one.title}.** {one.meaning}\n\n"
            f"- When it is wrong: {one.when_wrong}\n- Recommendation: {one.recommendation}\n"
        )
    return text


load()
