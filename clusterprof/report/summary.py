"""What the terminal and the page share, so that both say the same: means, bounds and phrases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain

from clusterprof import words
from clusterprof.results import (
    UNBOUNDED_NS,
    CaptureCost,
    CriticalPath,
    Finding,
    GroupEntry,
    MissingRank,
    OperationEntry,
    RankAccount,
    RankClock,
    Results,
    Suspect,
)

#: a smaller part of a step is not worth a line
_LEAST_PART = 0.01
#: in `net_of`: what a pipeline's bubble is weighed on, hosts that launch at once
_ALL_HOSTS = "host"
#: so many steps' savings are listed
_MOST_STEPS = 24
#: so many groups of one kind are listed in a line
_MOST_GROUPS = 4
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z0-9])")
#: what the verdict may leave out of a finding's sentence, and puts before it
_LEFT_OUT, _ALSO = re.compile(r" \([^()]*\)(?=\.$)"), "also, "


# --- numbers


@dataclass(frozen=True)
class Average:
    """A rank's means over some steps, ns; the parts are those of `RankAccount`."""

    rank: int
    duration_ns: float
    compute_ns: float
    exposed_communication_ns: float
    exposed_wait_ns: float
    exposed_copy_ns: float
    idle_ns: float

    @property
    def exposed_transfer_ns(self) -> float:
        """The exposed communication after the last rank's arrival."""
        return self.exposed_communication_ns - self.exposed_wait_ns


def average(rank: int, accounts: Sequence[RankAccount]) -> Average:
    """The mean of a rank's accounts of some steps."""

    def mean(key: str) -> float:
        return sum(account[key] for account in accounts) / len(accounts)  # type: ignore[literal-required]

    return Average(rank, *(mean(field.name) for field in fields(Average)[1:]))


def evidence_steps(results: Results) -> tuple[list[int], bool]:
    """The steps to average over, and whether they are steady-state steps.

    Where the profiler's own start or stop shows in every step there is none; the averages are
    then of all steps, and whoever shows them has to say so.
    """
    steady = [step["step"] for step in results["steps"] if step["settled"]]
    return (steady, True) if steady else ([step["step"] for step in results["steps"]], False)


def averages(results: Results) -> list[Average]:
    """One `Average` per rank that has an account in the evidence steps, sorted by rank."""
    evidence = set(evidence_steps(results)[0])
    by_rank: dict[int, list[RankAccount]] = {}
    for step in results["steps"]:
        if step["step"] in evidence:
            for account in step["ranks"]:
                by_rank.setdefault(account["rank"], []).append(account)
    return [average(rank, by_rank[rank]) for rank in sorted(by_rank)]


def worth_showing(results: Results, rows: list[Average], most: int) -> list[Average]:
    """All rows, or of many the ranks that findings name and those that wait least and most."""
    if len(rows) <= most:
        return rows
    named = {rank for finding in results["findings"] for rank in finding["ranks"][:4]}
    named |= {finding["rank"] for finding in results["findings"] if finding["rank"] is not None}
    by_wait = sorted(rows, key=lambda row: row.exposed_wait_ns)
    extremes = chain.from_iterable(zip(by_wait, reversed(by_wait), strict=True))
    first = sorted(named & {row.rank for row in rows})
    chosen = list(dict.fromkeys([*first, *(row.rank for row in extremes)]))[:most]
    return [row for row in rows if row.rank in chosen]


def by_saving(results: Results) -> list[Finding]:
    """The findings, first those whose repair saves most."""
    return sorted(results["findings"], key=lambda finding: -finding["saved_ns_per_step"])


def cards(results: Results) -> list[Finding]:
    """The findings to act on or to know of: what the profiler cost stands with its provenance."""
    own = ("profiler.perturbation", "info")
    return [each for each in by_saving(results) if (each["code"], each["severity"]) != own]


def sentences(text: str) -> list[str]:
    """The sentences of a verdict or a summary."""
    return _SENTENCE_END.split(text)


def _as_said(sentence: str) -> str:
    """A sentence as it can be compared, in the verdict or in the summary that it is from."""
    return _LEFT_OUT.sub("", sentence).lower().removeprefix(_ALSO)


def leading(results: Results) -> Finding | None:
    """The finding that the verdict begins with; else that above severity info which saves most."""
    found = by_saving(results)
    in_verdict = [_as_said(sentence) for sentence in sentences(results["verdict"])]
    firsts = [(_as_said(sentences(finding["summary"])[0]), finding) for finding in found]
    named = [finding for one in in_verdict for first, finding in firsts if first == one]
    weighty = [finding for finding in found if finding["severity"] != "info"]
    return next(iter([*named, *weighty]), None)


def verdict_lines(results: Results) -> list[str]:
    """The verdict's sentences, that of the leading finding first ("No stragglers." is no news)."""
    lines, top = sentences(results["verdict"]), leading(results)
    first = _as_said(sentences(top["summary"])[0]) if top else ""
    return sorted(lines, key=lambda line: _as_said(line) != first) if top else lines


def not_in_verdict(results: Results, finding: Finding) -> str:
    """A finding's summary without the sentences that the verdict has."""
    in_verdict = {_as_said(sentence) for sentence in sentences(results["verdict"])}
    own = sentences(finding["summary"])
    return " ".join(sentence for sentence in own if _as_said(sentence) not in in_verdict)


def world(results: Results) -> int:
    """How many ranks the job has, as far as any report says."""
    entries, found = results["ranks"], results["shallow"]
    most = max((each["world_size"] or 0 for each in entries), default=0)
    return max(most, len(entries), len(found["ranks"]) + len(found["missing"]) if found else 0)


def stragglers(results: Results, *, unprofiled: bool = False) -> list[int]:
    """The ranks that findings name as stragglers, alone or together, in the findings' order.

    Of profiled ranks; with `unprofiled` also those that flight recorders alone show.
    """
    codes = ["straggler.host", "straggler.gpu", *(["straggler.shallow"] if unprofiled else [])]
    found = [f for f in results["findings"] if f["code"] in codes]
    ranks = [
        rank for finding in found if finding["severity"] != "info" for rank in finding["ranks"]
    ]
    return list(dict.fromkeys(ranks))


def by_exposed(results: Results) -> list[OperationEntry]:
    """The operations, those with the most exposed time first."""
    entries = results["collectives"]["by_operation"]
    return sorted(entries, key=lambda entry: -entry["exposed_ns_per_step"])


def rank_uncertainties(results: Results) -> dict[int, int]:
    """Each rank's bound, ns, on its offset from the reference rank over the whole window."""
    return {entry["rank"]: entry["uncertainty_ns"] for entry in results["clock"]["ranks"]}


def pair_bound_ns(results: Results) -> int:
    """The largest error, ns, of a difference between two ranks' aligned times.

    The sum of the two largest uncertainties. A wait shorter than this says nothing.
    """
    worst = sorted(rank_uncertainties(results).values())[-2:]
    return sum(worst) if len(worst) > 1 else 0


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in names by their value."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


# --- the table cells


def bound(ns: float) -> str:
    """An uncertainty; of an hour or more is none known."""
    return "unknown" if ns >= UNBOUNDED_NS else words.bound(ns)


def below(bound_ns: float) -> str:
    """A time of which is known only that it is shorter than this."""
    return f"<{words.bound(bound_ns)[1:]}"


def part_cells(row: Average, ns: float, floor_ns: int = 0) -> tuple[str, str]:
    """A part of a step: ms, and its share; a time up to `floor_ns` is a bound without a share."""
    if 0 < ns <= floor_ns:
        # no rank waits longer than its communication is exposed, however large the clocks' error
        return below(min(floor_ns, row.exposed_communication_ns)), ""
    share = words.percent(ns / row.duration_ns) if row.duration_ns else "-"
    return words.milliseconds(ns, words.column_decimals(row.duration_ns)), share


def operation_cells(entry: OperationEntry, floor_ns: int) -> list[str]:
    """Calls, bytes, time, exposed time and the waiting in it; below the clocks' error a bound."""
    exposed, wait = entry["exposed_ns_per_step"], entry["exposed_wait_ns_per_step"]
    # no call can wait longer than it is exposed, however large the clocks' error
    floor = min(floor_ns * entry["calls_per_step"], exposed)
    return [
        f"{entry['calls_per_step']:,.3g}",
        # a report without sizes adds up to 0, which is not a size
        words.size(entry["bytes_per_step"] or None),
        words.duration(entry["communication_ns_per_step"]),
        words.duration(exposed),
        words.duration(wait) if wait == 0 or wait > floor else below(floor),
    ]


def operation_values(entry: OperationEntry, floor_ns: int) -> list[tuple[str, float]]:
    """The cells of `operation_cells`, each with the number that it is sorted by."""
    keys = ("calls_per_step", "bytes_per_step", "communication_ns_per_step")
    keys += ("exposed_ns_per_step", "exposed_wait_ns_per_step")  # type: ignore[assignment]
    values = [entry[key] for key in keys]  # type: ignore[literal-required]
    return list(zip(operation_cells(entry, floor_ns), values, strict=True))


# --- phrases


def ranks(results: Results) -> str:
    """Which ranks were profiled, of how many, where and with what, in which steps."""
    entries = results["ranks"]
    if not entries:
        return "no rank was profiled"

    def distinct(key: str) -> list[str]:
        return sorted({words.plain(entry[key]) for entry in entries} - {""})  # type: ignore[literal-required]

    world = max(entry["world_size"] or 0 for entry in entries)
    text = words.spans((entry["rank"] for entry in entries), limit=12)
    text += f" of {world}" if world else ""
    hosts = distinct("host")
    if hosts:
        text += f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
    by: dict[str, list[int]] = {}
    for entry in entries:
        by.setdefault(words.plain(entry["profiler"]), []).append(entry["rank"])
    by.pop("", None)
    profilers = by if len(by) < 2 else [f"{name} ({words.ranks(by[name])})" for name in by]
    return ", ".join([text, *distinct("device"), *profilers, steps(results)])


def steps(results: Results) -> str:
    """How many steps the numbers rest on."""
    evidence, steady = evidence_steps(results)
    if not evidence:
        return "no steps"
    if not steady:
        return f"{words.counted(len(evidence), 'step')}, none in steady state"
    every = words.counted(len(results["steps"]), "step")
    return f"{len(evidence)} of {every} in steady state ({words.spans(evidence, limit=6)})"


def pace(results: Results) -> str:
    """The step that savings are of, where the window has another; else nothing."""
    entry = results["pace"]
    if entry is None or abs(entry["window_step_ns"] / entry["step_ns"] - 1) < _LEAST_PART:
        return ""
    without, under = words.ms(entry["step_ns"]), words.ms(entry["window_step_ns"])
    return (
        f"{without} per step without the profiler, {under} in the window: savings and shares of "
        "findings are of the former, tables and timeline of the latter"
    )


def clock(results: Results) -> str:
    """Which rank's clock is used, and how far any other rank's aligned times may be off."""
    entry = results["clock"]
    others = [c for c in entry["ranks"] if c["rank"] != entry["reference_rank"]]
    free = [c["rank"] for c in others if c["uncertainty_ns"] >= UNBOUNDED_NS]
    bounds = [c["uncertainty_ns"] for c in others if c["rank"] not in free]
    method = f" ({words.plain(entry['method'])})" if entry["method"] else ""
    own = f"rank {entry['reference_rank']}"
    if bounds:
        text = f"aligned to {own} within {words.bound(max(bounds))}{method}"
    else:
        text = f"{own}'s own" + ("" if free else " (no other rank to align)")
    return f"{text}; {words.ranks(free)} cannot be aligned" if free else text


def capture(cost: CaptureCost) -> str:
    """How long profiling stalled the training, and its steps before, inside and after."""
    stall = (
        f"profiled ranks stalled for up to {words.duration(cost['stall_start_ns'])} at the start"
    )
    if cost["stall_stop_ns"] is not None:
        stall += f", {words.duration(cost['stall_stop_ns'])} at the stop"
    parts = [stall]
    for whose, times in (("profiled", cost["profiled"]), ("unprofiled", cost["unprofiled"])):
        medians = {when: times and times[f"{when}_ns"] for when in ("before", "inside", "after")}  # type: ignore[literal-required]
        known = [f"{words.ms(ns)} {when}" for when, ns in medians.items() if ns is not None]
        if known:
            parts.append(f"{whose} ranks: median steps of " + ", ".join(known))
    return "; ".join(parts)


def groups(results: Results) -> str:
    """Which groups the ranks form, by kind; nothing where there is no communicator."""
    kinds: dict[str, list[GroupEntry]] = {}
    for entry in results["topology"]["groups"]:
        kinds.setdefault(entry["kind"], []).append(entry)
    parts = []
    for kind, entries in kinds.items():
        listed = ", ".join(
            f"{words.plain(entry['description'])} {{{members(entry)}}}".lstrip()
            for entry in entries[:_MOST_GROUPS]
        )
        more = f" and {len(entries) - _MOST_GROUPS} more" if len(entries) > _MOST_GROUPS else ""
        confidence = words.confidence(min(entry["confidence"] for entry in entries))
        parts.append(f"{kind} {listed}{more}" + ("" if kind == "unknown" else f" ({confidence})"))
    return "; ".join(parts)


def all_ranks(results: Results) -> str:
    """What all ranks were compared by, and their groups; nothing without flight recorders."""
    found = results["shallow"]
    if found is None:
        return ""
    text = f"flight recorders of {words.counted(len(found['ranks']), 'rank')}"
    if found["missing"]:
        text += f", {len(found['missing'])} missing"
    if found["steps"]:
        text += f", steps {words.spans(found['steps'], limit=4)} of {words.ms(found['step_ns'])}"
    groups = [
        f"{words.plain(each['description'] or each['name'])} {{{words.spans(each['ranks'], 4)}}}"
        for each in found["groups"][:_MOST_GROUPS]
    ]
    left = len(found["groups"]) - len(groups)
    return f"{text}; groups {', '.join(groups)}" + (f" and {left} more" if left > 0 else "")


def suspects(results: Results) -> list[list[str]]:
    """A row for each suspect of all ranks: rank, host, group, lateness, since when, what it is."""
    found = results["shallow"]
    return [
        [
            str(each["rank"]),
            words.plain(each["host"] or "-"),
            words.plain(each["group"]),
            words.with_bound(each["lateness_ns"], each["bound_ns"]),
            _since(each),
            "delays" if each["delays"] else "unknown",
            words.plain(each["line"] or "-"),
        ]
        for each in (found["suspects"] if found else ())
    ]


def _since(one: Suspect) -> str:
    if one["until_step"] is not None:
        return f"until step {one['until_step']}"
    return "always" if one["since_step"] is None else f"step {one['since_step']}"


#: the columns of `suspects`
SUSPECT_COLUMNS = ("rank", "host", "group", "late per step", "since", "effect", "line")


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
    if entry["uncertainty_ns"] >= UNBOUNDED_NS:
        return "unknown"
    if abs(entry["offset_ns"]) <= entry["uncertainty_ns"]:
        return "none measurable"
    sign = "+" if entry["offset_ns"] > 0 else ""
    return sign + words.duration(entry["offset_ns"])


def measured(results: Results) -> list[tuple[str, str]]:
    """What was measured, a label and a sentence each."""
    rows = [
        ("ranks", ranks(results)),
        ("clock", clock(results) if results["ranks"] else ""),
        ("groups", groups(results) if results["topology"]["groups"] else ""),
        ("pace", pace(results)),
        ("overhead", capture(results["capture"]) if results["capture"] is not None else ""),
        ("all ranks", all_ranks(results)),
    ]
    return [row for row in rows if row[1]]


def missing(entry: MissingRank) -> str:
    """A rank without a report, and why."""
    name = "a rank" if entry["rank"] is None else f"rank {entry['rank']}"
    source = f" ({words.plain(entry['source'])})" if entry["source"] else ""
    return f"{name}: {words.plain(entry['reason'])}{source}"


def whom(finding: Finding) -> str:
    """The rank or ranks that a finding names, or nothing."""
    named = finding["ranks"] if finding["rank"] is None else [finding["rank"]]
    return words.ranks(named) if named else ""


def saved(finding: Finding) -> str:
    """What the repair of a finding's cause saves of a step, or that it saves nothing."""
    ns, unsure = finding["saved_ns_per_step"], finding["saved_uncertainty_ns"]
    if ns <= 0:
        if finding["code"] == "straggler.shallow":
            return "saving unknown"
        if finding["saving"] and ns + unsure > 0:
            return f"repair saves at most {words.ms(ns + unsure)} per step"
        return "repair saves nothing" if finding["saving"] else "no repair"
    return f"repair saves {words.with_bound(ns, unsure)} per step"


def saving(finding: Finding) -> list[str]:
    """What a finding's saving rests on, in sentences; nothing where it has none."""
    entry = finding["saving"]
    if entry is None:
        return []
    text = "The graph of the steady-state steps is replayed with and without the cause. The "
    text += "uncertainty is of queued work, of the pace without the profiler, of how fast kernels "
    out = [
        f"{text}are, of chance, and of the ranks' alignment ({words.duration(entry['clocks_ns'])})."
    ]
    if entry["net_of"]:
        names = [
            f"{_repaired(one['code'])} ({words.ranks(one['ranks'])})" for one in entry["net_of"]
        ]
        out.append(f"Both steps are those with {words.listed(names)} repaired: savings add up.")
    each = entry["each_ns"]
    more = f", … ({len(each)} steps)" if len(each) > _MOST_STEPS else ""
    numbers = ", ".join(words.milliseconds(ns) for ns in each[:_MOST_STEPS])
    out.append(f"By steady-state step of the window: {numbers}{more} ms.")
    return out


def net_of(finding: Finding) -> str:
    """The findings that are repaired already in what this one saves, to stand behind it."""
    entry = finding["saving"]
    others = [one["code"] for one in entry["net_of"]] if entry else []
    if len(others) > 1:
        return f" once {len(others)} other causes are repaired"
    verb = "are" if others == [_ALL_HOSTS] else "is"
    return f" once {_repaired(others[0])} {verb} repaired" if others else ""


def _repaired(code: str) -> str:
    """What a replay has repaired: a finding, or all hosts at once, which is none."""
    return "slow hosts" if code == _ALL_HOSTS else code


def share(finding: Finding) -> str:
    """Which part of the step its saving is."""
    known = finding["share_of_step"] > 0
    return f"{words.percent(finding['share_of_step'])} of the step" if known else ""


def facts(finding: Finding) -> list[str]:
    """Its recurrence and its confidence."""
    return [recurrence(finding), f"confidence {words.confidence(finding['confidence'])}"]


def recurrence(finding: Finding) -> str:
    """How often it recurs, and in which steps."""
    numbers = finding["steps"]
    if not numbers:
        return finding["recurrence"]
    noun = "step" if len(set(numbers)) == 1 else "steps"
    return f"{finding['recurrence']} ({noun} {words.spans(numbers, limit=6)})"


def collectives(results: Results) -> str:
    """How many collectives were matched over all their profiled members."""
    count = results["collectives"]
    known = f"{count['matched']:,} matched, {count['incomplete']:,} incomplete"
    return f"{known}, {count['unmatched']:,} unmatched"


def critical_path(results: Results) -> str:
    """What binds the steps, over all ranks; nothing without steady-state steps."""
    path = results["critical_path"]
    if path is None or not path["step_ns"]:
        return ""
    step = path["step_ns"]
    parts = [
        f"{part['what']} {words.ms(part['path_ns'])} ({words.percent(part['path_ns'] / step)})"
        for part in sorted(path["parts"], key=lambda part: -part["path_ns"])
        if part["path_ns"] >= _LEAST_PART * step
    ]
    return f"of {words.ms(step)} per step: {', '.join(parts)}; {on_path(path)}"


def on_path(path: CriticalPath) -> str:
    """Which rank the critical path runs through most, and what it loses by imbalance."""
    step = path["step_ns"]
    kinds = [f"{part['what']}_ns" for part in path["parts"]]
    by_rank = {e["rank"]: sum(e[kind] for kind in kinds) for e in path["ranks"]}  # type: ignore[literal-required]
    rank = max(by_rank, key=lambda one: by_rank[one])
    parts = [f"{words.percent(by_rank[rank] / step)} on rank {rank}"]
    if path["unexplained_ns"] >= _LEAST_PART * step:
        parts.append(f"{words.percent(path['unexplained_ns'] / step)} for no recorded reason")
    lost = sum(part["imbalance_gpu_ns"] for part in path["parts"])
    if lost >= _LEAST_PART * step:
        parts.append(f"its imbalance costs all ranks together {words.ms(lost)} per step")
    return "; ".join(parts)


def uneven(results: Results) -> str:
    """How much longer steps take than with even work, and which kind and rank make it so."""
    found = results["what_if"]
    if found["S"] is None:
        return ""
    text = f"steps take {found['S']:.2f} times as long as with the same work on all ranks"
    worst = max(found["S_t"], key=lambda entry: entry["slowdown"])
    if found["S"] < 1 + _LEAST_PART or worst["slowdown"] < 1 + _LEAST_PART:
        return text
    text += f"; {worst['what']} alone {worst['slowdown']:.2f}"
    if found["S_w"]:
        slow = max(found["S_w"], key=lambda entry: entry["slowdown"])
        text += f", rank {slow['rank']} alone {slow['slowdown']:.2f}"
    return text


def compute_absent(results: Results) -> str:
    """Why GPUs do not compute: the mean over the profiled ranks."""
    known = [e for e in results["compute_absent"] if e["launch_bound_ns"] is not None]
    if not known:
        return ""

    def mean(key: str) -> str:
        return words.ms(sum(entry[key] for entry in known) / len(known))  # type: ignore[literal-required]

    return (
        f"{mean('compute_absent_ns')} per step, of which {mean('launch_bound_ns')} until the next "
        f"kernel is launched, {mean('blocking_ns')} blocked by communication, "
        f"{mean('dependency_stalled_ns')} for other dependencies"
    )
