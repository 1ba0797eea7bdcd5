"""All finding modules of this package, the codes that their findings carry, and all findings.

A module of this package is a finding module if it has `CODES` (what its findings are called),
`ORDER` (its place: those of lower ORDER run first) and `find(dataset, found)`, which returns its
findings; `found` are those of the modules before it. Nothing else lists the modules: the study,
`clusterprof explain` and `docs/findings.md` all read them here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any, Protocol

from clusterprof.analysis import findings
from clusterprof.analysis.findings import all_ranks, profiler_overhead
from clusterprof.analysis.findings.finding import Code, Repair, job_of
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved, what_ifs
from clusterprof.errors import UsageError
from clusterprof.results import Finding


class RepairModule(Protocol):
    """A module of this package whose findings are causes that can be repaired."""

    CODES: tuple[Code, ...]
    ORDER: int

    def repairs(
        self, dataset: Dataset, lengths: Lengths, before: Sequence[Repair]
    ) -> Sequence[Repair]:
        """What may be repaired in `lengths`, which the repairs `before` leave."""


class FindingModule(Protocol):
    """A module of this package whose findings nothing is replayed for."""

    CODES: tuple[Code, ...]
    ORDER: int

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
    MODULES[:] = sorted((m for m in every if hasattr(m, "CODES")), key=lambda m: m.ORDER)
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
        found = [repair.words(saved) for repair, saved in weigh(dataset)]
    for module in MODULES if what_ifs(dataset) else [all_ranks, profiler_overhead]:
        if hasattr(module, "find"):
            found += module.find(dataset, found)
    if any(each["code"] == all_ranks.CODE and each["severity"] != "info" for each in found):
        # the same waiting, seen without the rank that it is for
        found = [each for each in found if each["code"] != "straggler.unprofiled"]
    return sorted(found, key=lambda f: -f["saved_ns_per_step"]), []


def weigh(dataset: Dataset) -> list[tuple[Repair, Saved]]:
    """Return what is to be repaired and what it saves."""
    job, out = job_of(dataset), list[tuple[Repair, Saved]]()
    lengths, before = job.base, list[Repair]()
    for module in MODULES:
        if not hasattr(module, "repairs"):
            continue
        base, weighed = lengths, list[tuple[Repair, Saved]]()
        for repair in module.repairs(dataset, lengths, before):
            saved = job.saved(repair.apply(base), base)
            enough = saved.most_ns >= repair.least_ns
            if module.ORDER >= 60:
                enough = enough and saved.ns > 0
            if enough:
                before.append(repair)
            if enough or repair.always:
                weighed.append((repair, saved))
                job.weighed[repair.name] = saved
            if enough and module.ORDER <= 20:
                base = replace(saved.without, repaired=(*base.repaired, repair.name))
        if module.ORDER >= 60:
            weighed.sort(key=lambda each: -each[1].most_ns)
        if module.ORDER < 20:
            lengths = base
        out += weighed[: limits.MOST]
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
