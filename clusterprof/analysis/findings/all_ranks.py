"""Ranks that delay the others by the flight recorders of all ranks, profiled or not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import hypot

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
from clusterprof.analysis.model.joint_suspects import joint_group, joint_suspects, late_steps
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
        "and whether that delays their work cannot be determined from flight recorders alone. Late "
        "ranks of one node or one group are one finding, with those that follow them.",
        "Flight recorders show when ranks call, not what they do. Batches of different length, or "
        "experts with more tokens, look like a slow rank if it is always the same one.",
        "Profile the rank and a peer of its group (--ranks): the command is in the finding.",
    ),
)


def find(dataset: Dataset, earlier: Sequence[Finding] = ()) -> list[Finding]:
    """Return the stragglers of all ranks, and who may be one: those that are late together at once.

    Those that are named already are left out, with those that only follow them, and those that were
    profiled beside others: of them their reports tell more. But not of what began after the window.
    """
    shallow = dataset.shallow
    if shallow is None:
        return []
    stragglers = {r for f in earlier if f["code"].startswith("straggler.") for r in f["ranks"]}
    findings, last_step = [], max(dataset.steps, default=0)
    for late in joint_suspects(shallow):
        named_too = {s["rank"] for s in late if (s["since_step"] or 0) <= last_step} & stragglers
        unknown = [s for s in late if s["rank"] not in named_too and not _captured(dataset, s)]
        follow = late[0]["rank"] in named_too and not any(s["delays"] for s in unknown)
        if unknown and not follow:
            findings.append(_finding(dataset, shallow, unknown))
    return findings


def _captured(dataset: Dataset, suspect: Suspect) -> bool:
    """Whether reports of a rank and of others have steps in which it was late: they tell more."""
    if len(dataset.ranks) < 2 or suspect["rank"] not in dataset.ranks:
        return False
    since, until = suspect["since_step"] or 0, suspect["until_step"]
    return any(since <= step <= (step if until is None else until) for step in dataset.steps)


def _finding(dataset: Dataset, shallow: ShallowResults, late: list[Suspect]) -> Finding:
    """Make one finding of suspects that are late together, the first one first.

    Nothing is replayed: what is saved is the first one's lateness, by its share of the steps of a
    watched run, of the run's mean step, and `bound` is how far that may be wrong. It is 0 where the
    suspects may not delay their peers' work. Those that follow ranks which delay the others are in
    the summary and the evidence alone.
    """
    first = late[0]
    step_ns = step_while_late_ns(shallow, first)
    ranks = [suspect["rank"] for suspect in late if suspect["delays"] or not first["delays"]]
    of_run = _share_of_run(shallow, first) if first["delays"] else 0.0
    lost_ns = min(first["lateness_ns"], step_ns)
    if first["delays"]:
        step_ns = round(step_ns - lost_ns * (1 - of_run))
    saved = round(lost_ns * of_run)
    bound = round(first["bound_ns"] * of_run)
    say = _words(dataset, shallow, late, ranks)
    return finding(dataset, CODES[0], sorted(ranks), say) | {
        "severity": severity((saved - bound) / max(step_ns, 1)),
        # those of the looks are not the window's; from when until when is said
        "steps": [] if first.get("looked_steps") else late_steps(first, shallow),
        "cost_ns_per_step": saved,
        "share_of_step": round(saved / max(step_ns, 1), 4),
        "saved_ns_per_step": saved,
        "saved_alone_ns": saved,
        "saved_least_ns": max(saved - bound, 0),
        "saved_most_ns": min(saved + bound, step_ns),
        "saved_uncertainty_ns": bound,
    }


def _words(
    dataset: Dataset, shallow: ShallowResults, late: list[Suspect], ranks: list[int]
) -> Words:
    """What a finding says of suspects that are late together; `ranks` are those that it is about.

    `late_steps` None: late in all from `since_step` to `until_step`.
    """
    first = late[0]
    differences = _hardware(dataset, first["rank"])
    whose = f"rank {first['rank']}: " if len(late) > 1 else ""
    texts = [f"{words.capitalised(whose + difference.text)}." for difference in differences]
    is_persistent = first["until_step"] is None and first["late_steps"] is None
    return Words(
        summary=" ".join([_summary(shallow, late, ranks), *texts]),
        evidence=[
            *({k: v for k, v in s.items() if v is not None} for s in late),
            *(difference.evidence for difference in differences),
        ],
        confidence=limits.MEASURED if first["delays"] else limits.ASSUMED,
        rank=ranks[0] if len(ranks) == 1 else None,
        advice=" ".join([CODES[0].recommendation, *(d.advice for d in differences if d.advice)]),
        follow_up=capture(dataset, _to_profile(shallow, late, ranks), profiler=lighter(dataset)),
        recurrence="persistent" if is_persistent else "intermittent",
    )


def _hardware(dataset: Dataset, rank: int) -> list[Difference]:
    """What the worst rank's GPU and node say: flight recorders do not tell which of them it is."""
    compared = Compared(dataset.hardware)
    gpu = compared.of_gpu(rank)
    return [*([gpu] if gpu else []), *compared.of_errors(rank), *compared.of_node(rank)]


def _to_profile(shallow: ShallowResults, late: list[Suspect], ranks: list[int]) -> list[int]:
    """The first rank, another that delays the others as well, and a peer that waits for the first.

    One that is not late at all is the better peer.
    """
    first, following = late[0], [suspect["rank"] for suspect in late]
    peers = [
        rank
        for group in shallow["groups"]
        if first["rank"] in group["ranks"]
        and words.group(group["name"], group["description"]) == first["group"]
        for rank in group["ranks"]
        if rank not in ranks
    ]
    peers.sort(key=lambda rank: rank in following)
    return [*ranks[:1], *sorted(ranks[1:])[:1], *peers[:1]]


def _share_of_run(shallow: ShallowResults, late: Suspect) -> float:
    """In what share of the steps of a watched run a rank was late; 1 where that is not known."""
    watch = shallow.get("watch")
    if watch is None or late["until_step"] is None:
        return 1.0
    first = watch["first_step"] if late["since_step"] is None else late["since_step"]
    return (late["until_step"] + 1 - first) / (watch["last_step"] + 1 - watch["first_step"])


def _summary(shallow: ShallowResults, suspects: list[Suspect], ranks: list[int]) -> str:
    """Suspects that are late together in words; `ranks` are those that the finding is about."""
    first, *others = suspects
    step = step_while_late_ns(shallow, first)
    # who is behind by more than a step is waited for no longer than that
    late = min(first["lateness_ns"], step or first["lateness_ns"])
    share = f" ({percent(late / step)})" if step else ""
    much = f"{ms(late)} of each {ms(step)} step{share}"
    when = _when(shallow, first)
    text = f"The other ranks wait {much} for {rank_list(ranks, 4)}{when}."
    text += " Whether that delays their work cannot be determined from flight recorders."
    if first["delays"]:
        verb = "delay" if len(ranks) > 1 else "delays"
        verb = "delayed" if first["until_step"] is not None else verb
        text = f"{rank_list(ranks, 4).capitalize()} {verb} the other ranks by {much}{when}."
        text += " Cause: cannot be determined from flight recorders; profile it."
    hosts = listed(sorted({named(s["host"]) for s in suspects if s["host"] and s["rank"] in ranks}))
    text += f" Group {named(first['group'])} waits" + (f" for host {hosts}" if hosts else "")
    text += f", in {named(first['line'])}." if first["line"] else "."
    text += _late_with(shallow, first, others) if others else ""
    return text + _late_nodes(shallow, suspects)


def _when(shallow: ShallowResults, late: Suspect) -> str:
    """From when until when a rank is late, and in how many steps."""
    begin, end = late["since_step"], late["until_step"]
    when = {
        (True, True): "",
        (False, True): f", since step {begin}",
        (True, False): f", until step {end}",
        (False, False): f", in the steps {begin} to {end}",
    }[begin is None, end is None]
    some_steps = words.in_some(late["late_steps"], shallow["steps"])
    return when + (f", {some_steps}" if some_steps else "")


def _late_with(shallow: ShallowResults, first: Suspect, others: list[Suspect]) -> str:
    """Which other ranks are late with the first one: of its node, or since they wait for it."""
    # of ranks without a cost each other one may follow the first, if that one stands out
    alike = [s for s in others if s["delays"] and first["delays"]]
    following = [s for s in others if not s["delays"]]
    if all(map(partial(_later, first), alike or following)):
        text = f" {_at([first]).capitalize()} comes latest"
        if alike:
            text += f"; {_at(alike)} {'is' if len(alike) == 1 else 'are'} late as well"
    else:
        if not alike:
            alike, following = following, []
        text = f" {_at([first, *alike]).capitalize()} are late together"
    if following:
        text += f"; {_follow(shallow, first, following)}"
    return f"{text}."


def _late_nodes(shallow: ShallowResults, suspects: list[Suspect]) -> str:
    """The nodes most of whose ranks are late, where all of those are among the suspects."""
    ranks = {suspect["rank"] for suspect in suspects}
    nodes = [named(n["host"]) for n in shallow["nodes"] if {*n["suspects"]} <= ranks]
    return f" Most ranks of {listed(nodes)} are late." if nodes else ""


def _later(first: Suspect, other: Suspect) -> bool:
    """Whether one is late by more than another beyond what both may be wrong by.

    Who delays its peers is later than who only waits with them.
    """
    apart = first["lateness_ns"] - other["lateness_ns"]
    return first["delays"] > other["delays"] or apart > hypot(first["bound_ns"], other["bound_ns"])


def _at(suspects: list[Suspect]) -> str:
    """`ranks 16–18 of node2 and rank 42 of node5`."""
    by_host: dict[str, list[int]] = {}
    for suspect in suspects:
        by_host.setdefault(suspect["host"] or "", []).append(suspect["rank"])
    return listed(
        rank_list(ranks, 4) + (f" of {named(host)}" if host else "")
        for host, ranks in by_host.items()
    )


def _follow(shallow: ShallowResults, first: Suspect, following: list[Suspect]) -> str:
    """Which ranks follow the first one, and in which group if it is one."""
    ranks = [suspect["rank"] for suspect in following]
    group = joint_group(shallow, [first, *following])
    verb = "follows" if len(ranks) == 1 else "follow"
    where = f" in group {named(words.group(group['name'], group['description']))}" if group else ""
    return f"{rank_list(ranks, 4)} {verb}{where}"
