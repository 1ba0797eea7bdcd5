"""How a finding is made: severity from its share of the step, recurrence from its steps."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.results import Finding, Recurrence, Severity

#: shares of the settled steps: from there on a finding is persistent
_PERSISTENT_FRAC = 0.75
_GPU = re.compile(r"\bGPU(s?)\b")
_NSYS = re.compile(r"nsys (\d+)\.(\d+)")
#: the first nsys seen to have --pytorch
_MARKS_OPERATORS = (2025, 3)


@dataclass(frozen=True)
class Code:
    """A finding code in words: what it means, when it is wrong, what to do in general."""

    code: str
    title: str
    meaning: str
    when_wrong: str
    recommendation: str


def severity(share: float) -> Severity:
    """Critical from 15 % of the step on, a warning from 5 %, else information."""
    return (
        "critical"
        if share >= limits.CRITICAL_FRAC
        else "warning"
        if share >= limits.WARNING_FRAC
        else "info"
    )


def recurrence(hit: int, of: int) -> Recurrence:
    """How often in the settled steps: three in four is persistent, a single one is once."""
    if hit >= _PERSISTENT_FRAC * of:
        return "persistent"
    return "once" if hit <= 1 else "intermittent"


def finding(
    dataset: Dataset,
    code: str,
    *,
    rank: int | None,
    ranks: Sequence[int],
    cost: Sequence[float] | np.ndarray,
    summary: str,
    advice: str,
    evidence: list[dict[str, Any]],
    confidence: float,
    uncertainty_ns: float = 0.0,
    floor_ns: float = 0.0,
    at_most: Severity | None = None,
    at_least: Severity = "info",
    follow_up: str = "",
) -> Finding:
    """Make a finding from its cost in each settled step (ns).

    `floor_ns` is what a step must cost to count as one of the finding's; `at_most` caps the
    severity of what no one is to blame for, `at_least` is what it has in any case. `follow_up` is
    the command that tells more, if any.
    """
    each = np.nan_to_num(np.asarray(cost, dtype=float))
    if len(each) == len(dataset.durations):
        # no step can cost more than it lasts
        each = np.minimum(each, dataset.durations)
    hit = np.flatnonzero(each > max(floor_ns, 0.0))
    per_step = float(each.mean()) if len(each) else 0.0
    share = per_step / dataset.step_ns if dataset.step_ns else 0.0
    level = severity(share)
    order: tuple[Severity, ...] = ("info", "warning", "critical")
    if at_most is not None and order.index(level) > order.index(at_most):
        level = at_most
    if order.index(level) < order.index(at_least):
        level = at_least
    return {
        "code": code,
        "severity": level,
        "rank": rank,
        "ranks": [int(r) for r in ranks],
        "steps": [int(dataset.steady_steps[k]) for k in hit],
        "recurrence": recurrence(len(hit), len(each)),
        "cost_ns_per_step": round(per_step),
        "share_of_step": round(share, 4),
        "uncertainty_ns": round(uncertainty_ns),
        "confidence": round(float(min(max(confidence, 0.0), 1.0)), 2),
        "summary": _worded(dataset, summary),
        "evidence": [
            {**each, "what": _worded(dataset, str(each["what"]))} if "what" in each else each
            for each in evidence
        ],
        "advice": _worded(dataset, advice),
        "next": follow_up,
    }


def _worded(dataset: Dataset, text: str) -> str:
    """Return a sentence about GPUs as it is; of a job without any, about what it computes on."""
    if not dataset.on_host:
        return text
    return _GPU.sub(r"processor\1", text).replace("its kernels", "its operators")


def capture(dataset: Dataset, ranks: Sequence[int], *options: str) -> str:
    """The command line that captures `ranks` anew, with `options` that tell more.

    By the launcher that the run was started with; where nobody knows it, by the one that its hosts
    suggest. Empty where `options` are wanted and the profiler of the reports knows none of them.
    """
    several = len({t.info.host for t in dataset.tables}) > 1
    launcher = dataset.launcher or ("srun" if several else "torchrun")
    known = [option for option in options if not _by_torch(dataset)]
    if options and not known:
        return ""
    chosen = ",".join(map(str, ranks))
    return shlex.join(["clusterprof", launcher, "--ranks", chosen, *known]) + " ... -- PROGRAM..."


def operators(dataset: Dataset) -> tuple[str, str]:
    """The option that shows PyTorch's operators with the nsys of the reports.

    nsys 2025.3 marks them itself; 2024.2 refuses to be asked, and torch can do it.
    """
    versions = [_NSYS.search(t.info.profiler) for t in dataset.tables]
    told = [(int(v[1]), int(v[2])) for v in versions if v is not None]
    by_nsys = len(told) == len(versions) and min(told, default=(0, 0)) >= _MARKS_OPERATORS
    return "--pytorch", "autograd-nvtx" if by_nsys else "emit-nvtx"


def _by_torch(dataset: Dataset) -> bool:
    """Whether the reports are torch.profiler's, which takes none of nsys' options."""
    return all(t.info.profiler == "torch.profiler" for t in dataset.tables)


def ms(ns: float) -> str:
    """Nanoseconds as the text of milliseconds, in three or so digits."""
    value = ns / 1e6
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def percent(share: float) -> str:
    """A share as the text of percent."""
    return f"{100 * share:.0f}%"


def straggler_ns(found: Sequence[Finding]) -> int:
    """What the stragglers among `found` cost a step; information costs nothing."""
    late = [f for f in found if f["code"].startswith("straggler.") and f["severity"] != "info"]
    return sum(f["cost_ns_per_step"] for f in late)
