"""The sentences that the terminal and the page share, so that both say the same."""

from __future__ import annotations

from clusterprof.agent.contracts import words
from clusterprof.report.averages import evidence_steps
from clusterprof.results import (
    CaptureCost,
    Finding,
    GroupEntry,
    MissingRank,
    OperationEntry,
    RankClock,
    Results,
    StepTimes,
)

#: so many groups of one kind are told in a line
_MOST_GROUPS = 4


def by_cost(results: Results) -> list[Finding]:
    """The findings, the costliest first."""
    return sorted(results["findings"], key=lambda finding: -finding["cost_ns_per_step"])


def ranks(results: Results) -> str:
    """Which ranks were seen, of how many, where and with what."""
    entries = results["ranks"]
    if not entries:
        return "none gave a report"
    world = max((entry["world_size"] or 0 for entry in entries), default=0)
    numbers = words.numbers((entry["rank"] for entry in entries), limit=12)
    parts = [f"{numbers} of {world}" if world else numbers]
    hosts = sorted({words.plain(entry["host"]) for entry in entries} - {""})
    if hosts:
        parts.append(f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts")
    devices = sorted({words.plain(entry["device"]) for entry in entries} - {""})
    profilers = sorted({words.plain(entry["profiler"]) for entry in entries} - {""})
    return ", ".join([" ".join(parts), *devices, " and ".join(profilers), steps(results)])


def steps(results: Results) -> str:
    """How many steps the numbers rest on."""
    chosen, settled = evidence_steps(results)
    if not chosen:
        return "no steps"
    if not settled:
        return f"{words.counted(len(chosen), 'step')}, none settled"
    kind = "settled step" if len(chosen) == 1 else "settled steps"
    return f"{len(chosen)} {kind} of {len(results['steps'])} ({words.numbers(chosen, limit=6)})"


def clock(results: Results) -> str:
    """Whose clock is used and to within what the others are known on it."""
    entry = results["clock"]
    others = [rank for rank in entry["ranks"] if rank["rank"] != entry["reference_rank"]]
    if not others:
        return f"rank {entry['reference_rank']}'s own; no other rank to compare with"
    worst = max(rank["uncertainty_ns"] for rank in others)
    method = f" ({words.plain(entry['method'])})" if entry["method"] else ""
    whom = "the other rank" if len(others) == 1 else "every other rank"
    return (
        f"rank {entry['reference_rank']}'s; {whom} is known on it to {words.bound(worst)}{method}"
    )


def capture(cost: CaptureCost) -> str:
    """How long the training stood still for the capture, and its steps before, inside, after."""
    stood = f"a captured rank stood still {words.duration(cost['stall_start_ns'])} at the start"
    if cost["stall_stop_ns"] is not None:
        stood += f", {words.duration(cost['stall_stop_ns'])} at the stop"
    groups = [("captured ranks", cost["profiled"]), ("the others", cost["unprofiled"])]
    told = [(whose, _step_times(times)) for whose, times in groups]
    return "; ".join([stood, *(f"{whose}: {said}" for whose, said in told if said)])


def _step_times(times: StepTimes | None) -> str:
    if times is None:
        return ""
    named = [("before", times["before_ns"]), ("inside", times["inside_ns"])]
    named.append(("after", times["after_ns"]))
    known = [f"{words.milliseconds(ns)} ms {when}" for when, ns in named if ns is not None]
    return "steps of " + ", ".join(known) if known else ""


def groups(results: Results) -> str:
    """Which groups the ranks form, by kind; nothing where no communicator was seen."""
    kinds: dict[str, list[GroupEntry]] = {}
    for entry in results["topology"]["groups"]:
        kinds.setdefault(entry["kind"], []).append(entry)
    return "; ".join(_of_kind(kind, entries) for kind, entries in kinds.items())


def _of_kind(kind: str, entries: list[GroupEntry]) -> str:
    told = ", ".join("{" + members(entry) + "}" for entry in entries[:_MOST_GROUPS])
    more = f" and {len(entries) - _MOST_GROUPS} more" if len(entries) > _MOST_GROUPS else ""
    sure = words.confidence(min(entry["confidence"] for entry in entries))
    return f"{kind} {told}{more}" + ("" if kind == "unknown" else f" ({sure})")


def members(entry: GroupEntry) -> str:
    """The ranks of one group, a pipeline's in order, and of how many where some gave no report."""
    if entry["kind"] == "pipeline":
        told = "→".join(map(str, entry["ranks"][:8])) + ("→…" if len(entry["ranks"]) > 8 else "")
    else:
        told = words.numbers(entry["ranks"], limit=4)
    missing = entry["size"] is not None and entry["size"] > len(entry["ranks"])
    return f"{told} of {entry['size']}" if missing else told


def offset(entry: RankClock | None) -> str:
    """A clock's offset with its sign; one smaller than its own bound is not a number."""
    if entry is None:
        return "-"
    if abs(entry["offset_ns"]) <= entry["uncertainty_ns"]:
        return "none seen"
    sign = "+" if entry["offset_ns"] > 0 else ""
    return sign + words.duration(entry["offset_ns"])


def hole(missing: MissingRank) -> str:
    """A rank that is missing, and why."""
    name = "a rank" if missing["rank"] is None else f"rank {missing['rank']}"
    source = f" ({words.plain(missing['source'])})" if missing["source"] else ""
    return f"{name}: {words.plain(missing['reason'])}{source}"


def holes_title(results: Results) -> str:
    """How many reports are missing, as a sentence."""
    count = len(results["missing"])
    return f"{words.counted(count, 'report')} {'is' if count == 1 else 'are'} missing."


def whom(finding: Finding) -> str:
    """The rank or ranks that a finding names, or nothing."""
    if finding["rank"] is not None:
        return f"rank {finding['rank']}"
    if not finding["ranks"]:
        return ""
    noun = "rank" if len(set(finding["ranks"])) == 1 else "ranks"
    return f"{noun} {words.numbers(finding['ranks'], limit=8)}"


def cost(finding: Finding) -> str:
    """The cost per step with its uncertainty, or that there is none to be seen."""
    if finding["cost_ns_per_step"] <= 0:
        return "no cost of its own"
    if finding["cost_ns_per_step"] <= finding["uncertainty_ns"]:
        return f"cost per step within the uncertainty ({words.bound(finding['uncertainty_ns'])})"
    return f"{words.with_bound(finding['cost_ns_per_step'], finding['uncertainty_ns'])} per step"


def recurrence(finding: Finding) -> str:
    """In which steps it was seen."""
    numbers = finding["steps"]
    if not numbers:
        return finding["recurrence"]
    noun = "step" if len(set(numbers)) == 1 else "steps"
    return f"{finding['recurrence']} ({noun} {words.numbers(numbers, limit=6)})"


def collectives(results: Results) -> str:
    """How many collectives found all their profiled members."""
    counts = results["collectives"]
    return (
        f"{counts['matched']:,} matched, {counts['incomplete']:,} incomplete, "
        f"{counts['unmatched']:,} unmatched"
    )


def operation_cells(entry: OperationEntry, floor_ns: int) -> list[str]:
    """Calls, bytes, exposed, wait and transfer; a wait that the clocks cannot tell is a bound."""
    # no call can wait longer than it lasts, however little the clocks tell
    floor = min(floor_ns * entry["calls"], entry["wait_ns"] + entry["transfer_ns"])
    told = entry["wait_ns"] == 0 or entry["wait_ns"] > floor_ns * entry["calls"]
    return [
        f"{entry['calls']:,}",
        # A report without sizes adds up to nothing, which is not a size.
        words.size(entry["message_bytes"] or None),
        words.duration(entry["exposed_ns"]),
        words.duration(entry["wait_ns"]) if told else f"<{words.bound(floor)[1:]}",
        words.duration(entry["transfer_ns"]),
    ]
