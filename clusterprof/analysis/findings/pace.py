"""The pace of the savings, that of the job without the profiler where its step logs tell it, and
what a saving is of it, in words.
"""

from __future__ import annotations

import numpy as np

from clusterprof import words
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.what_if import Saved, WhatIfs, what_ifs
from clusterprof.results import Pace, Recurrence


def job_of(dataset: Dataset) -> WhatIfs:
    """The job's what-ifs: the registry asks for findings only where there are any."""
    job = what_ifs(dataset)
    assert job is not None
    return job


def pace_ns(dataset: Dataset) -> float:
    """The step (ns) that all savings are of."""
    job = what_ifs(dataset)
    return job.step_ns if job is not None else dataset.step_ns


def pace(dataset: Dataset) -> Pace | None:
    """Both paces of the job; None without steady-state steps."""
    job = what_ifs(dataset)
    if job is None or not dataset.step_ns:
        return None
    return {
        "step_ns": round(job.step_ns),
        "without_profiler": job.paced,
        "window_step_ns": round(dataset.step_ns),
    }


def of_the_window(dataset: Dataset) -> list[str]:
    """Warnings of a window that shows little of a step, or steps that the job has less often."""
    job, warnings = what_ifs(dataset), list[str]()
    if job is None:
        return warnings
    paces = f"steps take {words.ms(job.step_ns)} outside the window and "
    paces += f"{words.ms(dataset.step_ns)} in it, "
    if job.unseen_ns > limits.WARNING_FRAC * job.step_ns:
        warnings.append(
            f"{paces}and nothing recorded explains the rest (such as batches that were fetched "
            "ahead while the profiler started): profile more steps (--steps)"
        )
    shares = np.ones(1) if job.shares is None else job.shares
    if len(seldom := np.flatnonzero(shares < limits.HALF / len(shares))):
        steps = words.numbers([dataset.steady_steps[k] for k in seldom])
        warnings.append(
            f"{paces}more than the profiler's overhead explains: savings count its longer steps "
            f"({steps}) less often, so that the mean is the step outside"
        )
    return warnings


def another_pace(dataset: Dataset) -> bool:
    """Whether the window's steps are another pace than that of the savings."""
    return abs(dataset.step_ns - pace_ns(dataset)) > limits.LEAST_FRAC * pace_ns(dataset)


def of_step(dataset: Dataset, saved: Saved) -> str:
    """A saving as text: `16.9 ms of each 47.5 ms step (35%)`, or `(35%; 20.1 ms alone)`."""
    step_ns = pace_ns(dataset)
    alone = words.alone(saved.ns, saved.alone_ns, step_ns)
    return _of(saved.ns, step_ns, f"; {alone}" if alone else "")


def of_saving(dataset: Dataset, saved: Saved) -> str:
    """The same; of what the window has in few steps, how long in those."""
    hit, count = np.flatnonzero(saved.hit), len(saved.by_step_ns)
    if saved.paced or not len(hit) or recurrence(len(hit), count) == "persistent":
        return of_step(dataset, saved)
    much = words.ms(min(float(saved.by_step_ns[hit].mean()), float(dataset.durations[hit].mean())))
    if len(hit) == 1:
        return f"{much} in step {dataset.steady_steps[hit[0]]} alone"
    share = words.percent(saved.ns / pace_ns(dataset))
    return f"{much} in {_often(dataset, hit)}, {share} of all time"


def of_window(dataset: Dataset, ns: float) -> str:
    """A time that was measured in the window as text, with the window's own step."""
    text = _of(ns, dataset.step_ns)
    return f"{text} under the profiler" if another_pace(dataset) else text


def _of(ns: float, step_ns: float, more: str = "") -> str:
    return f"{words.ms(ns)} of each {words.ms(step_ns)} step ({words.percent(ns / step_ns)}{more})"


def recurrence(hit: int, steps: int) -> Recurrence:
    """How often it is what is in `hit` of so many steps."""
    if hit >= limits.STEADY_FRAC * steps:
        return "persistent"
    return "once" if hit <= 1 else "intermittent"


def when(dataset: Dataset, costs_ns: np.ndarray, hit: np.ndarray) -> str:
    """In which steps of the window it is, where not in all: at one stretch, or how many."""
    if not 0 < len(hit) < len(costs_ns):
        return ""
    much = words.ms(float(costs_ns[hit].mean()))
    return f" It happens in {_often(dataset, hit)}, {much} each."


def _often(dataset: Dataset, hit: np.ndarray) -> str:
    """In how many steps it is; the first and last where they are one stretch of the window."""
    often = f"{len(hit)} of {len(dataset.steady_steps)} steady-state steps"
    if len(hit) < limits.FEW or hit[-1] - hit[0] + 1 > len(hit):
        return often
    return f"{often} ({dataset.steady_steps[hit[0]]} to {dataset.steady_steps[hit[-1]]})"
