"""Ranks that delay the others by the flight recorders of all ranks, profiled or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clusterprof import words
from clusterprof.analysis.findings.finding import (
    Code,
    Tier,
    Words,
    capture,
    finding,
    lighter,
    named,
    severity,
)
from clusterprof.analysis.model import limits
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.hardware import Compared, Difference
from clusterprof.results import Finding, ShallowResults, Suspect, step_while_late_ns
from clusterprof.words import listed, ms, percent, ranks as rank_list

TIER = Tier.REST
CODE = "straggler.shallow"

CODES = (
    Code(
        CODE,
        "A rank delays the others, by all flight recorders",
        "In each step the members of a group wait for one rank (or several together), which was "
        "not profiled. Saved: at least what its peers wait for it in the longest of a step's "
        "calls. As information only: they wait for it in calls that may have been launched ahead, "
        "and whether that delays their work cannot be determined from flight recorders alone.",
        "Flight recorders show when ranks call, not what they do. Batches of different length, or "
        "experts with more tokens, look like a slow rank if it is always the same one.",
        "Profile the rank and a peer of its group (--ranks): the command is in the finding.",
    ),
)


def find(dataset: Dataset, earlier: Sequence[Finding] = ()) -> list[Finding]:
    """Return the stragglers of all ranks, and who may be one, of each group together.

    Those that were late until some step are apart from those that still are, and those that are
    late now and then in other steps from each other. Those that are named already are left out,
    and those that were profiled beside others: of them their reports tell more.
    """
    shallow = dataset.shallow
    if shallow is None:
        return []
    named = {*dataset.ranks} if len(dataset.ranks) > 1 else set[int]()
    named.update(*(f["ranks"] for f in earlier if f["code"].startswith("straggler.")))
    groups: dict[tuple[object, ...], list[Suspect]] = {}
    for suspect in shallow["suspects"]:
        if suspect["rank"] not in named:
            late = tuple(suspect["late_steps"] or ())
            key = (suspect["delays"], suspect["group"], suspect["until_step"], late)
            groups.setdefault(key, []).append(suspect)
    return [_finding(dataset, shallow, suspects) for suspects in groups.values()]


def _finding(dataset: Dataset, shallow: ShallowResults, suspects: list[Suspect]) -> Finding:
    """Make one finding of suspects that `find` put together, worst first.

    Nothing is replayed: what is saved is the worst one's lateness, by its share of the steps of a
    watched run, and `bound` is how far that may be wrong. It is 0 where the suspects may not delay
    their peers' work. `late_steps` None: late in all from `since_step` to `until_step`.
    """
    ranks, worst = [s["rank"] for s in suspects], suspects[0]
    step_ns = step_while_late_ns(shallow, worst)
    since, until, late_steps = worst["since_step"], worst["until_step"], worst["late_steps"]
    of_run = _share_of_run(shallow, worst) if worst["delays"] else 0.0
    saved = round(min(worst["lateness_ns"], step_ns) * of_run)
    bound = round(worst["bound_ns"] * of_run)
    peers = [rank for rank in _peers(shallow, worst) if rank not in ranks]
    differences = _hardware(dataset, worst["rank"])
    whose = f"rank {worst['rank']}: " if len(suspects) > 1 else ""
    texts = [f"{words.capitalised(whose + difference.text)}." for difference in differences]
    say = Words(
        summary=" ".join([_summary(shallow, suspects), *texts]),
        evidence=[
            *({k: v for k, v in s.items() if v is not None} for s in suspects),
            *(difference.evidence for difference in differences),
        ],
        confidence=limits.MEASURED if worst["delays"] else limits.ASSUMED,
        rank=ranks[0] if len(ranks) == 1 else None,
        advice=_advice(differences),
        follow_up=capture(dataset, [*sorted(ranks)[:2], *peers[:1]], profiler=lighter(dataset)),
        recurrence="persistent" if until is None and late_steps is None else "intermittent",
    )
    first, last = since or 0, math.inf if until is None else until
    steps = shallow["steps"] if late_steps is None else late_steps
    return finding(dataset, CODES[0], sorted(ranks), say) | {
        "severity": severity((saved - bound) / max(step_ns, 1)),
        "steps": [step for step in steps if first <= step <= last],
        "cost_ns_per_step": saved,
        "share_of_step": round(saved / max(step_ns, 1), 4),
        "saved_ns_per_step": saved,
        "saved_alone_ns": saved,
        "saved_least_ns": max(saved - bound, 0),
        "saved_most_ns": min(saved + bound, step_ns),
        "saved_uncertainty_ns": bound,
    }


def _hardware(dataset: Dataset, rank: int) -> list[Difference]:
    """What the worst rank's GPU and node say: flight recorders do not tell which of them it is."""
    compared = Compared(dataset.hardware)
    gpu = compared.of_gpu(rank)
    return [*([gpu] if gpu else []), *compared.of_node(rank)]


def _advice(differences: Sequence[Difference]) -> str:
    """The code's recommendation, and what to do about what differs; empty for the former alone."""
    own = [difference.advice for difference in differences if difference.advice]
    return " ".join([CODES[0].recommendation, *own]) if own else ""


def _share_of_run(shallow: ShallowResults, late: Suspect) -> float:
    """In what share of the steps of a watched run a rank was late; 1 where that is not known."""
    watch = shallow.get("watch")
    if watch is None or late["until_step"] is None:
        return 1.0
    first = watch["first_step"] if late["since_step"] is None else late["since_step"]
    return (late["until_step"] + 1 - first) / (watch["last_step"] + 1 - watch["first_step"])


def _peers(shallow: ShallowResults, late: Suspect) -> list[int]:
    """The members of the groups with the name of the one that waits for a rank."""
    return [
        rank for e in shallow["groups"]
        if late["rank"] in e["ranks"] and words.group(e["name"], e["description"]) == late["group"]
        for rank in e["ranks"]
    ]  # fmt: skip


def _summary(shallow: ShallowResults, suspects: list[Suspect]) -> str:
    worst, step = suspects[0], step_while_late_ns(shallow, suspects[0])
    ranks = [suspect["rank"] for suspect in suspects]
    # who is behind by more than a step is waited for no longer than that
    late = min(worst["lateness_ns"], step or worst["lateness_ns"])
    share = f" ({percent(late / step)})" if step else ""
    much = f"{ms(late)} of each {ms(step)} step{share}"
    begin, end = worst["since_step"], worst["until_step"]
    when = {
        (True, True): "",
        (False, True): f", since step {begin}",
        (True, False): f", until step {end}",
        (False, False): f", in the steps {begin} to {end}",
    }[begin is None, end is None]
    some_steps = words.in_some(worst["late_steps"], shallow["steps"])
    when += f", {some_steps}" if some_steps else ""
    text = f"The other ranks wait {much} for {rank_list(ranks, 4)}{when}."
    text += " Whether that delays their work cannot be determined from flight recorders."
    if worst["delays"]:
        verb = "delayed" if end is not None else "delays" if len(suspects) == 1 else "delay"
        text = f"{rank_list(ranks, 4).capitalize()} {verb} the other ranks by {much}{when}."
        text += " Cause: cannot be determined from flight recorders; profile it."
    hosts = listed(sorted({named(s["host"]) for s in suspects if s["host"]}))
    text += f" Group {named(worst['group'])} waits" + (f" for host {hosts}" if hosts else "")
    text += f", in {named(worst['line'])}." if worst["line"] else "."
    nodes = [named(n["host"]) for n in shallow["nodes"] if {*n["suspects"]} <= {*ranks}]
    return text + (f" Most ranks of {listed(nodes)} are late." if nodes else "")
