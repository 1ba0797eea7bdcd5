"""`--fail-on`: what fails a pipeline. One parser and one type for merge, launching and compare.

    critical        a finding of this severity or above (info, warning, critical)
    straggler.*     a finding above severity info with this code; * and ? as in file names
    saved>5%        a finding whose repair saves more than 5% of the step, of any severity
    gpu.*>5%        the same of findings with such a code
    step>+3%        the step is longer by more than 3%, beyond the noise: compare only

Several are separated by commas, or given by several `--fail-on`: any of them fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, get_args

from clusterprof import words
from clusterprof.console import say
from clusterprof.errors import UsageError
from clusterprof.results import ComparedFinding, Finding, Severity

_SEVERITIES: tuple[Severity, ...] = tuple(reversed(get_args(Severity)))
_CODE = re.compile(r"[a-z_*?]+(\.[a-z_*?]+)*")
_LIMIT = re.compile(r"(?P<what>[^>]+)>(?P<sign>\+?)(?P<percent>[0-9]{1,3}(\.[0-9]{1,6})?)%")


@dataclass(frozen=True)
class Condition:
    """One thing that fails: a finding, or with `step_frac` a step that got longer."""

    text: str
    codes: str = "*"
    least: Severity = "info"
    #: findings whose repair saves more than this share of the step; None: whatever it saves
    saved_frac: float | None = None
    #: a step longer by more than this share of it
    step_frac: float | None = None

    def met_by(self, finding: Finding | ComparedFinding) -> bool:
        """Whether this finding fails."""
        if self.step_frac is not None or not fnmatchcase(finding["code"], self.codes):
            return False
        if self.saved_frac is not None and finding["share_of_step"] <= self.saved_frac:
            return False
        return finding["severity"] in _SEVERITIES[_SEVERITIES.index(self.least) :]


def parse(text: str, *, compares: bool = False) -> list[Condition]:
    """The conditions of one `--fail-on`; `step>+3%` only where it `compares`. Raises UsageError."""
    return [_condition(condition.strip(), compares) for condition in text.split(",")]


def _condition(text: str, compares: bool) -> Condition:
    if text in _SEVERITIES:
        return Condition(text, least=text)
    limit = _LIMIT.fullmatch(text)
    subject, frac = (limit["what"], float(limit["percent"]) / 100) if limit else (text, None)
    if limit and subject == "step":
        if not compares:
            raise UsageError(
                f"--fail-on {text!r} compares two runs", "use it with clusterprof compare A B"
            )
        return Condition(text, step_frac=frac)
    codes = "*" if limit and subject == "saved" else subject
    if not _CODE.fullmatch(codes) or (limit and limit["sign"]):
        raise UsageError(
            f"--fail-on: cannot read {text!r}",
            f"expected a severity ({', '.join(_SEVERITIES)}), a finding's code (straggler.*), a "
            "saving (saved>5%, straggler.*>5%)"
            f"{' or a longer step (step>+3%)' if compares else ''}",
        )
    return Condition(text, codes, "info" if limit else "warning", saved_frac=frac)


def add_option(
    add: Callable[..., object], *, compares: bool = False, status: str = "status 1"
) -> None:
    """Give a verb its `--fail-on`, a list of conditions, by its parser's `add_argument`."""
    longer = ", or a step longer than before (step>+3%%)" if compares else ""
    add("--fail-on", type=partial(parse, compares=compares), action="extend", default=[],
        metavar="CONDITION",
        help=f"end with {status} on such a finding: by severity (critical, warning, info), code "
        f"(straggler.*) or saving (saved>5%%, straggler.*>5%%){longer}; several by commas or by "
        "several --fail-on")  # fmt: skip


def check_codes(conditions: Sequence[Condition]) -> None:
    """Raise UsageError for a code that no finding has: it would never fail. Loads the analysis."""
    if not conditions:
        return
    from clusterprof.analysis.findings.registry import CODES

    for condition in conditions:
        if not any(fnmatchcase(code, condition.codes) for code in CODES):
            raise UsageError(
                f"--fail-on {condition.text}: no finding has such a code",
                "clusterprof explain lists the codes",
            )


def fails(
    conditions: Iterable[Condition],
    findings: Sequence[Any],
    step: tuple[float, float] = (0.0, 0.0),
    figures: Callable[[Any], str] | None = None,
) -> bool:
    """Whether any condition is met, each with a message of the finding that saves most of those.

    `findings` are those of a run, or of a comparison; `figures` puts one's numbers into words.
    `step` is by which share the step got longer, and the noise of that (half-width): a change
    within it meets no condition.
    """
    from clusterprof.report import summary

    failed, (longer_frac, noise_frac) = False, step
    for condition in conditions:
        message, met = "", [finding for finding in findings if condition.met_by(finding)]
        if condition.step_frac is not None and longer_frac > max(condition.step_frac, noise_frac):
            message = f"the step is {words.percent(longer_frac)} longer"
        elif met:
            top = max(met, key=lambda finding: finding["share_of_step"])
            who = f", {words.ranks(top['ranks'])}" if top["rank"] is not None else ""
            others = f", and {len(met) - 1} more" if len(met) > 1 else ""
            message = f"{top['code']}{who}: {(figures or summary.saved)(top)}{others}"
        if message:
            say(f"--fail-on {condition.text}: {message}")
            failed = True
    return failed
