"""All finding modules of this package, and the codes that their findings carry.

A module of this package is a finding module if it has `CODES` (what its findings are called),
`ORDER` (its place: those of lower ORDER run first) and `find(dataset, found)`, which returns its
findings; `found` are those of the modules before it. Nothing else names the modules: the ranking,
`clusterprof explain` and `docs/findings.md` all read them here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from clusterprof.analysis import findings
from clusterprof.analysis.findings.finding import Code
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.errors import UsageError
from clusterprof.results import Finding


class FindingModule(Protocol):
    """What a module of this package must have to be asked for findings."""

    CODES: tuple[Code, ...]
    ORDER: int

    def find(self, dataset: Dataset, found: Sequence[Finding]) -> list[Finding]:
        """Return the module's findings; `found` are those of the modules before it."""


#: the finding modules in the order in which they run
MODULES: list[FindingModule] = []
#: every code that a finding can carry
CODES: dict[str, Code] = {}


def load() -> None:
    """Fill MODULES and CODES from the package's modules (once more: after one was added)."""
    names = sorted(m.name for m in pkgutil.iter_modules(findings.__path__) if m.name != "registry")
    every: list[Any] = [import_module(f"{findings.__name__}.{name}") for name in names]
    MODULES[:] = sorted((m for m in every if hasattr(m, "CODES")), key=lambda m: m.ORDER)
    CODES.clear()
    CODES.update({code.code: code for module in MODULES for code in module.CODES})


def explain(code: str) -> str:
    """Describe a finding code in full. Raises UsageError for a code that does not exist."""
    if code not in CODES:
        raise UsageError(f"no finding code {code!r}", "the codes are: " + ", ".join(CODES))
    one = CODES[code]
    return (
        f"{one.code}: {one.title}\n\n{one.meaning}\n\nWhen it is wrong: {one.when_wrong}\n\n"
        f"Recommendation: {one.recommendation}\n"
    )


def page() -> str:
    """The text of `docs/findings.md`."""
    lines = [
        "# Findings",
        "",
        "<!-- written by `make readme` from the CODES in clusterprof/analysis/findings -->",
        "",
        "`clusterprof explain CODE` prints the same in a terminal.",
    ]
    for one in CODES.values():
        lines += [
            "",
            f"## {one.code}",
            "",
            f"**{one.title}.** {one.meaning}",
            "",
            f"- When it is wrong: {one.when_wrong}",
            f"- Recommendation: {one.recommendation}",
        ]
    return "\n".join(lines) + "\n"


load()
