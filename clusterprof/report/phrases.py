"""The phrases that the terminal and the page share, so that both read the same."""

from __future__ import annotations

from clusterprof.agent.contracts import words
from clusterprof.report.summary import evidence_steps, is_measurable
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

#: so many groups of one kind are listed in a line
_MOST_GROUPS = 4


def ranks(results: Results) -> str:
    """Which ranks were profiled, of how many, where and with what, in which steps."""
    entries = results["ranks"]
    if not entries:
        return "no rank has a report"
    world = max(entry["world_size"] or 0 for entry in entries)
    text = words.spans((entry["rank"] for entry in entries), limit=12)
    text += f" of {world}" if world else ""
    hosts = sorted({words.plain(entry["host"]) for entry in entries} - {""})
    if hosts:
        text += f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
    devices = sorted({words.plain(entry["device"]) for entry in entries} - {""})
    profilers = sorted({words.plain(entry["profiler"]) for entry in entries} - {""})
    return ", ".join([text, *devices, words.listed(profilers), steps(results)])


def steps(results: Results) -> str:
    """How many steps the numbers rest on."""
    evidence, steady = evidence_steps(results)
    if not evidence:
        return "no steps"
    if not steady:
        return f"{words.counted(len(evidence), 'step')}, none in steady state"
    every = words.counted(len(results["steps"]), "step")
    return f"{len(evidence)} of {every} in steady state ({words.spans(evidence, limit=6)})"


def clock(results: Results) -> str:
    """Which rank's clock is used, and how far any other rank's aligned times may be off."""
    entry = results["clock"]
    bounds = [c["uncertainty_ns"] for c in entry["ranks"] if c["rank"] != entry["reference_rank"]]
    if not bounds:
        return f"rank {entry['reference_rank']}'s own (no other rank to align)"
    method = f" ({words.plain(entry['method'])})" if entry["method"] else ""
    within = words.bound(max(bounds))
    return f"aligned to rank {entry['reference_rank']} within {within}{method}"


def capture(cost: CaptureCost) -> str:
    """How long profiling stalled the training, and its steps before, inside and after."""
    stalled = (
        f"profiled ranks stalled for up to {words.duration(cost['stall_start_ns'])} at the start"
    )
    if cost["stall_stop_ns"] is not None:
        stalled += f", {words.duration(cost['stall_stop_ns'])} at the stop"
    groups = [("profiled ranks", cost["profiled"]), ("unprofiled ranks", cost["unprofiled"])]
    paces = [(whose, _step_times(times)) for whose, times in groups]
    return "; ".join([stalled, *(f"{whose}: {pace}" for whose, pace in paces if pace)])


def _step_times(times: StepTimes | None) -> str:
    if times is None:
        return ""
    named = [
        ("before", times["before_ns"]),
        ("inside", times["inside_ns"]),
        ("after", times["after_ns"]),
    ]
    known = [f"{words.ms(ns)} {when}" for when, ns in named if ns is not None]
    return "steps of " + ", ".join(known) if known else ""


def groups(results: Results) -> str:
    """Which groups the ranks form, by kind; nothing where there is no communicator."""
    kinds: dict[str, list[GroupEntry]] = {}
    for entry in results["topology"]["groups"]:
        kinds.setdefault(entry["kind"], []).append(entry)
    return "; ".join(_of_kind(kind, entries) for kind, entries in kinds.items())


def _of_kind(kind: str, entries: list[GroupEntry]) -> str:
    listed = ", ".join("{" + members(entry) + "}" for entry in entries[:_MOST_GROUPS])
    more = f" and {len(entries) - _MOST_GROUPS} more" if len(entries) > _MOST_GROUPS else ""
    confidence = words.confidence(min(entry["confidence"] for entry in entries))
    return f"{kind} {listed}{more}" + ("" if kind == "unknown" else f" ({confidence})")


def members(entry: GroupEntry) -> str:
    """A group's profiled ranks, a pipeline's in order, and of how many where some are not."""
    if entry["kind"] == "pipeline":
        text = "→".join(map(str, entry["ranks"][:8])) + ("→…" if len(entry["ranks"]) > 8 else "")
    else:
        text = words.spans(entry["ranks"], limit=4)
    unprofiled = entry["size"] is not None and entry["size"] > len(entry["ranks"])
    return f"{text} of {entry['size']}" if unprofiled else text


def offset(entry: RankClock | None) -> str:
    """A clock's offset with its sign; one smaller than its own bound is not a number."""
    if entry is None:
        return "-"
    if abs(entry["offset_ns"]) <= entry["uncertainty_ns"]:
        return "none measurable"
    sign = "+" if entry["offset_ns"] > 0 else ""
    return sign + words.duration(entry["offset_ns"])


def missing(entry: MissingRank) -> str:
    """A rank without a report, and why."""
    name = "a rank" if entry["rank"] is None else f"rank {entry['rank']}"
    source = f" ({words.plain(entry['source'])})" if entry["source"] else ""
    return f"{name}: {words.plain(entry['reason'])}{source}"


def whom(finding: Finding) -> str:
    """The rank or ranks that a finding names, or nothing."""
    named = finding["ranks"] if finding["rank"] is None else [finding["rank"]]
    return words.ranks(named) if named else ""


def cost(finding: Finding) -> str:
    """The cost per step with its uncertainty, or that there is none to be measured."""
    if finding["cost_ns_per_step"] <= 0:
        return "no cost of its own"
    if not is_measurable(finding):
        return f"cost per step within the uncertainty ({words.bound(finding['uncertainty_ns'])})"
    return f"{words.with_bound(finding['cost_ns_per_step'], finding['uncertainty_ns'])} per step"


def facts(finding: Finding) -> list[str]:
    """Its share of the step, if that can be measured, its recurrence and its confidence."""
    known = is_measurable(finding) and finding["share_of_step"] > 0
    share = [f"{words.percent(finding['share_of_step'])} of the step"] if known else []
    return [*share, recurrence(finding), f"confidence {words.confidence(finding['confidence'])}"]


def recurrence(finding: Finding) -> str:
    """How often it recurs, and in which steps."""
    numbers = finding["steps"]
    if not numbers:
        return finding["recurrence"]
    noun = "step" if len(set(numbers)) == 1 else "steps"
    return f"{finding['recurrence']} ({noun} {words.spans(numbers, limit=6)})"


def collectives(results: Results) -> str:
    """How many collectives were matched over all their profiled members."""
    counts = results["collectives"]
    return (
        f"{counts['matched']:,} matched, {counts['incomplete']:,} incomplete, "
        f"{counts['unmatched']:,} unmatched"
    )


def operation_cells(entry: OperationEntry, floor_ns: int) -> list[str]:
    """Calls, bytes, exposed, wait and transfer; a wait below the clocks' error is a bound."""
    # no call can wait longer than it lasts, however large the clocks' error
    floor = min(floor_ns * entry["calls"], entry["wait_ns"] + entry["transfer_ns"])
    measurable = entry["wait_ns"] == 0 or entry["wait_ns"] > floor_ns * entry["calls"]
    return [
        f"{entry['calls']:,}",
        # a report without sizes adds up to 0, which is not a size
        words.size(entry["message_bytes"] or None),
        words.duration(entry["exposed_ns"]),
        words.duration(entry["wait_ns"]) if measurable else f"<{words.bound(floor)[1:]}",
        words.duration(entry["transfer_ns"]),
    ]
