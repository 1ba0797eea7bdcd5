"""How a finding is made: severity from its share of the step, recurrence from its steps."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterprof.agent.contracts import words
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.what_if import Saved
from clusterprof.results import Finding, Recurrence, Saving, Severity

#: share of the steady-state steps from which on a finding is persistent
_PERSISTENT_FRAC = 0.75
#: a sentence of the verdict's first line is at most this long, and a name in it
SENTENCE_LENGTH, _NAME_LENGTH = 100, 40
_GPU = re.compile(r"\bGPU(s?)\b")
_NSYS = re.compile(r"nsys (\d+)\.(\d+)")
#: the first nsys that has --pytorch
_MARKS_OPERATORS = (2025, 3)
_LEVELS: tuple[Severity, ...] = ("info", "warning", "critical")
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z0-9])")

Evidence = list[dict[str, Any]]


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
    return _LEVELS[(share >= limits.WARNING_FRAC) + (share >= limits.CRITICAL_FRAC)]


def recurrence(hit: int, of: int) -> Recurrence:
    """How often in the steady-state steps: three in four is persistent, a single one is once."""
    if hit >= _PERSISTENT_FRAC * of:
        return "persistent"
    return "once" if hit <= 1 else "intermittent"


def finding(
    dataset: Dataset,
    code: str,
    *,
    ranks: Sequence[int],
    cost: Sequence[float] | np.ndarray,
    summary: str,
    advice: str,
    evidence: Evidence,
    confidence: float,
    rank: int | None = None,
    uncertainty_ns: float = 0.0,
    floor_ns: float = 0.0,
    at_most: Severity = "critical",
    at_least: Severity = "info",
    follow_up: str = "",
    saved: Saved | None = None,
) -> Finding:
    """Make a finding from its cost in each steady-state step (ns).

    `floor_ns` is what a step must cost to count as one of the finding's; the severity lies between
    `at_least` and `at_most`; `follow_up` is the command that shows more, if any. The summary's
    first sentence must make sense alone: it may become the verdict. `saved` is the what-if behind
    it: without one, its repair is taken to save its cost.
    """
    each = np.nan_to_num(np.asarray(cost, dtype=float))
    if len(each) == len(dataset.durations):
        # no step can cost more than it lasts
        each = np.minimum(each, dataset.durations)
    hit = np.flatnonzero(each > max(floor_ns, 0.0))
    per_step = float(each.mean()) if len(each) else 0.0
    share = per_step / dataset.step_ns if dataset.step_ns else 0.0
    saved_ns, unsure_ns = (saved.ns, saved.uncertainty_ns) if saved else (per_step, uncertainty_ns)
    # nor can its repair save more than the step where one rank's times are wrong
    saved_ns = min(saved_ns, dataset.step_ns)
    worth = saved.most_ns / dataset.step_ns if saved and dataset.step_ns else share
    level = min(severity(worth), at_most, key=_LEVELS.index)
    return {
        "code": code,
        "severity": max(level, at_least, key=_LEVELS.index),
        "rank": rank,
        "ranks": [int(r) for r in ranks],
        "steps": [int(dataset.steady_steps[k]) for k in hit],
        "recurrence": recurrence(len(hit), len(each)),
        "cost_ns_per_step": round(per_step),
        "share_of_step": round(share, 4),
        "saved_ns_per_step": round(saved_ns),
        "saved_uncertainty_ns": round(unsure_ns),
        "saving": _saving(saved) if saved else None,
        "uncertainty_ns": round(uncertainty_ns),
        "confidence": round(float(min(max(confidence, 0.0), 1.0)), 2),
        "summary": _worded(dataset, summary),
        "evidence": [
            {**row, "what": _worded(dataset, str(row["what"]))} if "what" in row else row
            for row in evidence
        ],
        "advice": _worded(dataset, advice),
        "next": follow_up,
    }


def _saving(saved: Saved) -> Saving:
    """Where a saving is from."""
    base, long = saved.base_ns, saved.base_long_ns
    return {
        "window": {"step_ns": round(base), "without_ns": round(base - saved.window_ns)},
        "long_run": {"step_ns": round(long), "without_ns": round(long - saved.long_ns)},
        "stated": "long_run" if saved.without_profiler else "window",
        "each_ns": [round(ns) for ns in saved.each.tolist()],
        "net_of": [{"code": code, "ranks": list(ranks)} for code, ranks in saved.net_of],
    }


def _worded(dataset: Dataset, text: str) -> str:
    """A sentence about GPUs as it is; for a job without any, about what it computes on."""
    if not dataset.on_host:
        return text
    return _GPU.sub(r"processor\1", text).replace("its kernels", "its operators")


def sentences(text: str, most: int) -> str:
    """The first `most` sentences of a summary, each without what is in parentheses if too long."""
    kept = _SENTENCE_END.split(text)[:most]
    return " ".join(
        one if len(one) <= SENTENCE_LENGTH else re.sub(r" \([^()]*\)(?=\.$)", "", one)
        for one in kept
    )


def named(name: object) -> str:
    """A name from a report (a call, a range, a host), short enough for a sentence."""
    text = words.plain(str(name))
    return text if len(text) <= _NAME_LENGTH else text[: _NAME_LENGTH - 1] + "…"


def of_step(dataset: Dataset, ns: float) -> str:
    """A cost as text: `16.9 ms of each step (35%)`."""
    return f"{words.ms(ns)} of each step ({words.percent(ns / dataset.step_ns)})"


def capture(dataset: Dataset, ranks: Sequence[int], *options: str) -> str:
    """The command line that profiles `ranks` again, with `options` that show more.

    With the launcher of the run; where that is unknown, the one that its hosts suggest. Empty
    where `options` are wanted and the profiler of the reports has none of them.
    """
    several = len({t.info.host for t in dataset.tables}) > 1
    launcher = dataset.launcher or ("srun" if several else "torchrun")
    if options and all(t.info.profiler == "torch.profiler" for t in dataset.tables):
        return ""
    argv = ["clusterprof", launcher, "--ranks", ",".join(map(str, ranks)), *options]
    return shlex.join(argv) + " ... -- PROGRAM..."


def operators(dataset: Dataset) -> tuple[str, str]:
    """The option that shows PyTorch's operators with the nsys of the reports.

    nsys 2025.3 marks them itself; 2024.2 refuses the option, and torch can do it.
    """
    matches = [_NSYS.search(t.info.profiler) for t in dataset.tables]
    versions = [(int(m[1]), int(m[2])) if m else (0, 0) for m in matches]
    by_nsys = min(versions, default=(0, 0)) >= _MARKS_OPERATORS
    return "--pytorch", "autograd-nvtx" if by_nsys else "emit-nvtx"
