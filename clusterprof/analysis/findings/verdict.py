"""The verdict's first line: at most two sentences of at most `SENTENCE_LENGTH` characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.analysis.findings import all_ranks
from clusterprof.analysis.findings.finding import (
    SENTENCE_LENGTH,
    above_info,
    another_pace,
    pace_ns,
    severity,
)
from clusterprof.analysis.findings.straggler import delays, hidden_by_profilers, longer_batches
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import LEAST_STEADY, Dataset
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.columns import count_by, row_of, sum_by
from clusterprof.results import NODES, Finding, Sentence
from clusterprof.words import counted, ms, ranks as rank_list

_ASIDE = re.compile(r" \([^()]*\)(?=\.$)")
_OPEN = "cannot be determined"
#: the parts of a step's account, as a single step is described by them
_PARTS = {
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed communication",
    "exposed_copy_ns": "copies",
    "idle_ns": "idle",
}


def verdict(dataset: Dataset, findings: Sequence[Finding]) -> list[Sentence]:
    """Who delays the other ranks and why; else that no rank does, and what saves most."""
    count = len(dataset.steady_steps)
    if count >= LEAST_STEADY:
        return _of_findings(dataset, findings)
    if by_look := [f for f in above_info(findings) if f["code"] == all_ranks.CODE]:
        return headline(by_look[0], 2)
    if not dataset.ranks:
        return _looked_at(dataset)
    few = f"Not enough steady-state steps ({count} of {LEAST_STEADY})."
    if not dataset.timelines.has_steps.any():
        few = f"No report has steps, so stragglers {_OPEN}."
    return _plain("unknown", few, *_single_step(dataset))


def _of_findings(dataset: Dataset, findings: Sequence[Finding]) -> list[Sentence]:
    """The first line by what findings save."""
    weighty, late = above_info(findings), delays(findings)
    most_ns = max((f["saved_ns_per_step"] for f in weighty), default=0)
    unseen = _unseen(dataset, most_ns)
    start = unseen or _no_straggler(dataset, named=bool(late))
    leading = [] if unseen else above_info(late)
    if leading and leading[0]["saved_ns_per_step"] >= limits.HALF * most_ns:
        return headline(leading[0], 2)
    unsure = _unsure(dataset, findings)
    worth = [*unsure, *weighty]
    if not worth:
        return [*start, *_nothing(dataset, findings, bool(start))]
    # the straggler comes first, but not where something else saves many times as much
    if also := leading or (weighty if unsure else [] if start else late):
        (second,) = headline(also[0], 1)
        second["text"] = f"Also, {second['text'][0].lower()}{second['text'][1:]}"
        return [*headline(worth[0], 1), second]
    return [*(start or _too_few(dataset, worth[0])), *headline(worth[0], 1)]


def _unsure(dataset: Dataset, findings: Sequence[Finding]) -> list[Finding]:
    """The first finding whose least saving is large, if it is below warning all the same.

    So is what no step log tells the frequency of, or what may be waiting for unprofiled ranks.
    """
    step_ns = pace_ns(dataset)
    large = [f for f in findings if severity(f["saved_least_ns"] / step_ns) != "info"]
    return [f for f in large[:1] if f["severity"] == "info"]


def _nothing(dataset: Dataset, findings: Sequence[Finding], is_beside: bool) -> list[Sentence]:
    """That no step has findings, or none beside what another sentence is about."""
    none = "findings above severity info" if findings else "findings"
    steps = f"in {len(dataset.steady_steps)} steady-state steps of {ms(dataset.step_ns)}"
    job, unprofiled = what_ifs(dataset), ""
    if another_pace(dataset):
        which = "without the profiler" if job is not None and job.paced else "in the replay"
        unprofiled = f" ({ms(pace_ns(dataset))} {which})"
    return _plain("none", f"No {'other findings' if is_beside else none} {steps}{unprofiled}.")


def _unseen(dataset: Dataset, most_ns: float) -> list[Sentence]:
    """That the window shows too little of a step, where that is more than the findings save."""
    job, step_ns = what_ifs(dataset), pace_ns(dataset)
    if job is None or job.unseen_ns <= max(limits.WARNING_FRAC * step_ns, most_ns):
        return []
    shown = f"The window shows {ms(dataset.step_ns)} of each {ms(step_ns)} step"
    return _plain("unknown", f"{shown}: the rest {_OPEN}.")


def _plain(code: Literal["unknown", "none"], *texts: str) -> list[Sentence]:
    """Sentences of the verdict that are of no finding."""
    return [{"code": code, "ranks": [], "text": text} for text in texts]


def headline(finding: Finding, most: int) -> list[Sentence]:
    """The first `most` sentences of a finding, without what is in parentheses where too long."""
    sentences = words.sentences(finding["summary"])[:most]
    texts = [text if len(text) <= SENTENCE_LENGTH else _ASIDE.sub("", text) for text in sentences]
    return [{"code": finding["code"], "ranks": finding["ranks"], "text": text} for text in texts]


def _looked_at(dataset: Dataset) -> list[Sentence]:
    """The first line where no rank was profiled."""
    shallow, unknown = dataset.shallow, f"Stragglers {_OPEN}"
    if shallow is None:
        return _plain("unknown", "No report could be read.")
    if shallow["by"] == "nothing" or not shallow["steps"]:
        return _plain("unknown", f"{unknown}: no call is known of all members of its group.")
    number, step_ns, watch = len(shallow["steps"]), shallow["step_ns"], shallow.get("watch")
    if watch and watch["steps"] > number:
        number, step_ns = watch["steps"], watch["step_ns"]
    count = f"({len(shallow['ranks'])} ranks, {counted(number, 'step')} of {ms(step_ns)})."
    if late := [suspect["rank"] for suspect in shallow["suspects"]]:
        advice = f"Profile {rank_list(late, 4)} and a peer (--ranks)."
        return _plain("unknown", f"{unknown} from flight recorders alone {count}", advice)
    if shallow["by"] == "clock":
        return _plain("none", f"No rank delays the other ranks by their flight recorders {count}")
    some = " in most steps" if watch and watch.get("late") else ""
    waits = f"No rank keeps its group waiting{some} {count}"
    return _plain("unknown", f"{unknown} from flight recorders alone.", waits)


def _too_few(dataset: Dataset, finding: Finding) -> list[Sentence]:
    """No straggler; but one rank's pause in so few steps leaves open whether it pauses often."""
    steps, some = len(dataset.steady_steps), len(dataset.ranks) < (dataset.world_size or 0)
    # the pace before the window tells that what was seen once recurs
    enough = steps >= limits.FEW and finding["severity"] == "info"
    if enough or len(finding["ranks"]) != 1 or finding["recurrence"] != "once":
        return _plain("none", f"No stragglers{' among the profiled ranks' if some else ''}.")
    why = f"from {steps} steady-state steps; profile more (--steps)."
    return _plain("unknown", f"Stragglers {_OPEN} {why}")


def _no_straggler(dataset: Dataset, *, named: bool) -> list[Sentence]:
    """Why none, or no other, is `named`, as far as ranks can be compared; nothing where all are."""
    if len(dataset.ranks) < 2:
        only = f"Only rank {dataset.ranks[0]} was profiled"
        return _plain("unknown", f"{only}, so stragglers {_OPEN}; profile two or more (--ranks).")
    c = dataset.collectives
    several = c.matched & (count_by(c.collective)[c.collective] > 1)
    # without a collective that is matched with another rank's
    apart = sorted({*dataset.ranks} - {*c.rank[several].tolist()})
    if len(apart) > len(dataset.ranks) - 2:
        why = "no collectives of these ranks match; profile ranks of one communicator."
        if dataset.activities.whole_graphs.any():
            why = f"CUDA graphs were recorded as wholes ({NODES} records what is in them)."
        return _plain("unknown", f"Stragglers {_OPEN}: {why}")
    if apart:
        return _plain(
            "unknown",
            f"No stragglers among {len(dataset.ranks) - len(apart)} ranks; {_OPEN} "
            f"for {rank_list(apart, 2)} (no matched collectives).",
        )
    if not named and hidden_by_profilers(dataset):
        why = "two profilers slow hosts differently; profile again by one (--profiler torch)."
        return _plain("unknown", f"Stragglers {_OPEN}: {why}")
    if not named and (longer := longer_batches(dataset)):
        why = f"rank {longer[0]}'s GPU takes {ms(longer[1])} longer, as longer batches would."
        return _plain("none", f"No straggler is certain: {why}")
    # of two profilers the slower one makes its ranks come last
    return [] if dataset.unlike_profilers else _always_last(dataset)


def _always_last(dataset: Dataset) -> list[Sentence]:
    """The rank that arrives last wherever others wait.

    Nothing where no single one does, or where they seldom wait for half of a step; nor where flight
    recorders tell of all ranks without the profiler, which may be what makes it last.
    """
    if dataset.shallow:
        return []
    c = dataset.collectives
    rows = np.flatnonzero(c.matched & c.synchronising & np.isin(c.step, dataset.steady_steps))
    latest = row_of(dataset.ranks, c.last_rank[rows])
    waited = sum_by(latest, c.wait[rows], len(dataset.ranks))
    k = int(np.argmax(waited))
    if not 0 < limits.STEADY_FRAC * waited.sum() <= waited[k]:
        return []
    # no rank may have an account of these steps: then the wait is not a number
    by_step = np.nanmean(np.delete(dataset.account("exposed_wait_ns"), k, axis=0), axis=0)
    if (by_step >= limits.HALF * dataset.step_ns).mean() < limits.STEADY_FRAC:
        return []
    last = f"most of a step is spent waiting for rank {dataset.ranks[k]}"
    return _plain("none", f"No stragglers: {last}, but fixing it saves little.")


def _single_step(dataset: Dataset) -> list[str]:
    """Where the time of a single step goes, which is no evidence; nothing where none is known."""
    if not dataset.steps:
        return []
    step = (*dataset.steps[-1:], *dataset.steady_steps)[-1]
    rows = dataset.accounts.filter(pc.equal(dataset.accounts["step"], step))
    whole = pc.sum(rows["duration_ns"]).as_py()
    if not whole:
        return []
    parts = [f"{part} {pc.sum(rows[name]).as_py() / whole:.0%}" for name, part in _PARTS.items()]
    typical = ms(float(np.median(rows["duration_ns"].to_numpy())))
    shown = "One step" if dataset.timelines.has_steps.any() else "The window"
    return [f"{shown} ({typical}, no evidence): {', '.join(parts)}."]
