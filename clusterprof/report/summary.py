"""What a person reads of a run: one `Summary` behind the terminal, the page and Markdown.

Whatever stands in several of them is computed and worded here, so that they say the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from clusterprof import hardware, pauses, words
from clusterprof.results import (
    SHALLOW_STRAGGLER,
    UNBOUNDED_NS,
    EvidenceRow,
    Finding,
    GroupEntry,
    HardwareEntry,
    MissingRank,
    OperationEntry,
    PauseEntry,
    RankClock,
    Results,
    Sampled,
    Sentence,
    evidence_steps,
    finding_key,
    steady_steps,
    usual_step_ns,
)

#: why no finding names a rank that stands out in a measure
NOT_NAMED = "its repair saves too little, or not for certain, or a finding of all ranks has it"
#: so many ranks are listed in a table that all of them can be in
MOST_RANKS = 16
#: so many kinds of pauses are listed
MOST_PAUSES = 12
#: a smaller part of a step is not worth a line
_LEAST_PART = 0.01
#: so many steps' savings are listed
_MOST_STEPS = 24
#: so many groups of one kind are listed in a line
_MOST_GROUPS = 4
#: the columns of `Summary.suspects`
SUSPECT_COLUMNS = ("rank", "host", "group", "late per step", "since", "effect", "line")
#: the columns of `Summary.hardware_rows`, and their units
HARDWARE_COLUMNS = (
    ("rank", ""), ("host", ""), ("GPU", ""), ("SM clock", "MHz, of its most"),
    ("memory clock", "MHz"), ("clocks limited by", "samples"), ("power", "W, of its limit"),
    ("energy", "J per step"), ("hottest", "°C"), ("PCIe", ""), ("new ECC errors", ""), ("load", ""),
    ("steal", ""), ("memory pressure", ""), ("CPU clock", "MHz"), ("samples", "under load, all"),
)  # fmt: skip
#: fewer GPU hours are not worth a line, unless the user asks for their price
_LEAST_HOURS = 0.01
_HOUR_NS = 3_600_000_000_000
#: the columns of `Summary.account_rows`
ACCOUNT_COLUMNS = ("rank", "step", "compute", "exposed", "waiting", "copies", "idle")


class Average(NamedTuple):
    """A rank's means over some steps, ns; the parts are those of `RankAccount`."""

    rank: int
    duration_ns: float
    compute_ns: float
    exposed_communication_ns: float
    exposed_wait_ns: float
    exposed_copy_ns: float
    idle_ns: float

    @property
    def step(self) -> str:
        """The step in ms, as a column of a table has it."""
        return words.milliseconds(self.duration_ns, words.column_decimals(self.duration_ns))


@dataclass(frozen=True)
class Summary:
    """What people are told of a run, as means over `evidence_steps`; empty where it is nothing."""

    results: Results

    # --- what the numbers rest on

    @cached_property
    def has_steady_steps(self) -> bool:
        """Whether any step is free of the profiler's own start and stop."""
        return bool(steady_steps(self.results))

    @cached_property
    def evidence_steps(self) -> list[int]:
        """The steps to average over."""
        return evidence_steps(self.results)

    @cached_property
    def averaged_over(self) -> str:
        """`evidence_steps` in words."""
        kind = "steady-state steps" if self.has_steady_steps else "steps"
        return f"{kind} {words.spans(self.evidence_steps, limit=6)}"

    @cached_property
    def averages(self) -> list[Average]:
        """One `Average` per rank that has an account in the evidence steps, sorted by rank."""
        evidence, names = set(self.evidence_steps), Average._fields[1:]
        by_rank: dict[int, list[list[int]]] = {}
        for step in self.results["steps"]:
            for account in step["ranks"] if step["step"] in evidence else ():
                times = [account[name] for name in names]  # type: ignore[literal-required]
                by_rank.setdefault(account["rank"], []).append(times)
        return [
            Average(rank, *(sum(ns) / len(ns) for ns in zip(*times, strict=True)))
            for rank, times in sorted(by_rank.items())
        ]

    @cached_property
    def account_rows(self) -> list[list[str]]:
        """A row of `ACCOUNT_COLUMNS`, ms and shares, for at most `MOST_RANKS` ranks."""
        rows = []
        for row in self._told_apart() if len(self.averages) > MOST_RANKS else self.averages:
            cells = [str(row.rank), row.step]
            for name, ns in zip(Average._fields[2:], row[2:], strict=True):
                floor_ns = self.pair_bound_ns if name == "exposed_wait_ns" else 0
                ms, share = part_cells(row, ns, floor_ns)
                cells.append(f"{ms} {share:>5}" if share else ms)
            rows.append(cells)
        return rows

    def _told_apart(self) -> list[Average]:
        """Of many ranks those that findings name, and those that wait least and most."""
        findings = self.results["findings"]
        named = {rank for finding in findings for rank in finding["ranks"][:4]}
        named |= {finding["rank"] for finding in findings if finding["rank"] is not None}
        by_wait = [row.rank for row in sorted(self.averages, key=lambda row: row.exposed_wait_ns)]
        extremes = chain.from_iterable(zip(by_wait, reversed(by_wait), strict=True))
        chosen = list(dict.fromkeys([*sorted(named & {*by_wait}), *extremes]))[:MOST_RANKS]
        return [row for row in self.averages if row.rank in chosen]

    @cached_property
    def world(self) -> int:
        """How many ranks the job has, as far as any report says."""
        entries, shallow = self.results["ranks"], self.results["shallow"]
        largest = max((entry["world_size"] or 0 for entry in entries), default=0)
        recorded = len(shallow["ranks"]) + len(shallow["missing"]) if shallow else 0
        return max(largest, len(entries), recorded)

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each profiled rank that names one."""
        return {entry["rank"]: entry["host"] for entry in self.results["ranks"] if entry["host"]}

    @cached_property
    def begins(self) -> dict[int, int]:
        """When each step began, ns on the reference rank's clock."""
        return {step["step"]: step["begin_ns"] for step in self.results["steps"]}

    @cached_property
    def uncertainties(self) -> dict[int, int]:
        """Each rank's bound, ns, on its offset from the reference rank over the whole window."""
        return {clock["rank"]: clock["uncertainty_ns"] for clock in self.results["clock"]["ranks"]}

    @cached_property
    def pair_bound_ns(self) -> int:
        """The largest error, ns, of two ranks' aligned times: a shorter wait says nothing."""
        worst = sorted(self.uncertainties.values())[-2:]
        return sum(worst) if len(worst) > 1 else 0

    # --- the findings, and the verdict made of them

    @cached_property
    def cards(self) -> list[Finding]:
        """The findings to act on or know of: what the profiler cost stands with its provenance."""
        own = ("profiler.perturbation", "info")
        return [f for f in self.results["findings"] if (f["code"], f["severity"]) != own]

    def stragglers(self, *, unprofiled: bool = False) -> list[int]:
        """The ranks that findings name as stragglers; `unprofiled`: by flight recorders too."""
        codes = ["straggler.host", "straggler.gpu", *([SHALLOW_STRAGGLER] if unprofiled else [])]
        named = [f for f in self.results["findings"] if f["code"] in codes]
        weighty = [finding["ranks"] for finding in named if finding["severity"] != "info"]
        return list(dict.fromkeys(chain.from_iterable(weighty)))

    def is_named(self, rank: int) -> bool:
        """Whether a finding is of this rank and not of all profiled ones."""
        profiled = len(self.results["ranks"])
        findings = self.results["findings"]
        return any(rank in f["ranks"] and len(f["ranks"]) < profiled for f in findings)

    @cached_property
    def leading(self) -> Finding | None:
        """The finding that the verdict begins with; else the weighty one which saves most."""
        findings, headline = self.results["findings"], self.results["headline"]
        named = [f for sentence in headline for f in findings if _is_of(sentence, f)]
        return next(iter([*named, *(f for f in findings if f["severity"] != "info")]), None)

    @cached_property
    def verdict_lines(self) -> list[str]:
        """The verdict's sentences, that of the leading finding first: no straggler is no news."""
        leading, headline = self.leading, self.results["headline"]
        if leading is not None:
            headline = sorted(headline, key=lambda sentence: not _is_of(sentence, leading))
        return [sentence["text"] for sentence in headline]

    @property
    def verdict_rows(self) -> list[int]:
        """The numbers of the evidence's rows that the verdict rests on; [] where there are none."""
        return sorted(
            {n for sentence in self.results["headline"] for n in sentence.get("rows", ())}
        )

    @property
    def evidence_rows(self) -> list[dict[str, object]]:
        """The rows of the evidence as texts; [] where there are none."""
        return [_evidence_row(row) for row in self.results.get("evidence_table", ())]

    def not_in_verdict(self, finding: Finding) -> str:
        """A finding's summary without the sentences that the verdict has."""
        above = sum(_is_of(sentence, finding) for sentence in self.results["headline"])
        return " ".join(words.sentences(finding["summary"])[above:])

    def figures(self, finding: Finding) -> str:
        """What a finding's repair saves, and its facts, in one line."""
        return ", ".join([saved(finding), *self.facts(finding)])

    def facts(self, finding: Finding) -> list[str]:
        """Which part of which step its saving is, if it is one, its recurrence and confidence."""
        share, confidence = self.share(finding), certainty(finding)
        of_step = [f"{share} of the step" if share.endswith("%") else share] if share else []
        confidence = f"confidence {confidence}" if confidence.endswith("%") else confidence
        return [*of_step, recurrence(finding), confidence]

    def share(self, finding: Finding) -> str:
        """The part of the step that a finding's repair saves: `14%`, of another step than most
        findings' `14% of 28.0 ms steps in the long run`; empty where it saves nothing.
        """
        share, step_ns, usual_ns = finding["share_of_step"], self.step_ns(finding), self.usual_ns
        if share <= 0:
            return ""
        if not step_ns or not usual_ns or abs(step_ns / usual_ns - 1) < _LEAST_PART:
            return words.percent(share)
        when = "in the long run" if finding["saving"] else "of the run"
        if finding["recurrence"] == "persistent" and not finding["saving"]:
            when = "in which it is late"
        return f"{words.percent(share)} of {words.ms(step_ns)} steps {when}"

    @cached_property
    def usual_ns(self) -> int | None:
        """The step that savings are of (ns), of those findings that name no other."""
        return usual_step_ns(self.results)

    def step_ns(self, finding: Finding) -> float | None:
        """The step (ns) that a finding's saving is a part of; None where that is not known."""
        entry, pace, shallow = finding["saving"], self.results["pace"], self.results["shallow"]
        if entry and pace and entry["stated"] == "long_run" and not pace["without_profiler"]:
            # queued work hides it in the window, whose step is shorter than those to come
            return entry["long_run"]["step_ns"]
        for suspect in shallow["suspects"] if shallow and entry is None else ():
            if suspect["rank"] in finding["ranks"][:1] and finding["share_of_step"] > 0:
                # it is late in steps that need not be those of a window; if for a time, its saving
                # is of the run's mean step
                is_over = suspect["until_step"] is not None
                of_run = round(finding["saved_ns_per_step"] / finding["share_of_step"])
                return of_run if is_over else suspect.get("step_ns") or of_run
        return self.usual_ns

    # --- what was measured

    @cached_property
    def measured(self) -> list[tuple[str, str]]:
        """What was measured, a label and a sentence each."""
        rows = [
            ("ranks", self.ranks),
            ("clock", self.clock if self.results["ranks"] else ""),
            ("groups", self.groups),
            ("pace", self.pace),
            ("overhead", self.capture),
            ("all ranks", self.all_ranks),
            ("hardware", self.hardware),
            ("GPU hours", self.gpu_hours),
        ]
        return [(label, text) for label, text in rows if text]

    @cached_property
    def ranks(self) -> str:
        """Which ranks were profiled, of how many, where and with what, in which steps."""
        entries = self.results["ranks"]
        if not entries:
            return "no rank was profiled"
        world = max(entry["world_size"] or 0 for entry in entries)
        text = words.spans((entry["rank"] for entry in entries), limit=12)
        text += f" of {world}" if world else ""
        if hosts := sorted({*map(words.plain, self.hosts.values())}):
            text += f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
        texts = [text, *sorted({words.plain(entry["device"]) for entry in entries} - {""})]
        by_profiler: dict[str, list[int]] = {}
        for entry in entries:
            by_profiler.setdefault(words.plain(entry["profiler"]), []).append(entry["rank"])
        by_profiler.pop("", None)
        for name, ranks in by_profiler.items():
            texts.append(f"{name} ({words.ranks(ranks)})" if len(by_profiler) > 1 else name)
        evidence, count = self.evidence_steps, words.counted(len(self.results["steps"]), "step")
        if self.has_steady_steps:
            spans = words.spans(evidence, limit=6)
            texts.append(f"{len(evidence)} of {count} in steady state ({spans})")
        else:
            texts.append(f"{count}, none in steady state" if evidence else "no steps")
        return ", ".join(texts)

    @cached_property
    def clock(self) -> str:
        """Which rank's clock is used, and how far any other rank's aligned times may be off."""
        entry = self.results["clock"]
        reference = entry["reference_rank"]
        bounds = {rank: ns for rank, ns in self.uncertainties.items() if rank != reference}
        unbounded = [rank for rank, ns in bounds.items() if ns >= UNBOUNDED_NS]
        known_ns = [ns for ns in bounds.values() if ns < UNBOUNDED_NS]
        if known_ns:
            method = f" ({words.plain(entry['method'])})" if entry["method"] else ""
            text = f"aligned to rank {reference} within {words.bound(max(known_ns))}{method}"
        else:
            text = f"rank {reference}'s own" + ("" if unbounded else " (no other rank to align)")
        return f"{text}; {words.ranks(unbounded)} cannot be aligned" if unbounded else text

    @cached_property
    def groups(self) -> str:
        """Which groups the ranks form, by what each is for, with the confidence in that."""
        kinds: dict[str, list[GroupEntry]] = {}
        for entry in self.results["topology"]["groups"]:
            kinds.setdefault(entry["kind"], []).append(entry)
        texts = []
        for kind, entries in kinds.items():
            named = [(entry["description"], members(entry)) for entry in entries]
            confidence = words.confidence(min(entry["confidence"] for entry in entries))
            remark = "" if kind == "unknown" else f" (confidence {confidence})"
            texts.append(f"{kind} {_first_names(named)}{remark}")
        return "; ".join(texts)

    @cached_property
    def pace(self) -> str:
        """The step that savings are of, where the window has another or nothing tells of others."""
        entry = self.results["pace"]
        if entry is None:
            return ""
        of_savings, under = words.ms(entry["step_ns"]), words.ms(entry["window_step_ns"])
        texts = []
        if abs(entry["window_step_ns"] / entry["step_ns"] - 1) >= _LEAST_PART:
            whose = "without the profiler" if entry["without_profiler"] else "in the replay"
            texts.append(
                f"{of_savings} per step {whose}, {under} in the window: savings and shares of "
                "findings are of the former, tables and timeline of the latter"
            )
        if self.is_window_alone:
            of_a_run = self.results["capture"] or self.results["shallow"]
            tells = "" if of_a_run else ": run the job under clusterprof, which logs the others"
            texts.append(
                f"{'' if texts else f'{under} per step under the profiler; '}no steps without the "
                f"profiler are known, so what it causes itself cannot be determined{tells}"
            )
        return "; ".join(texts)

    @property
    def is_window_alone(self) -> bool:
        """Whether a profiler was in all steps that anything rests on."""
        rows = self.results.get("evidence_table", ())
        return bool(rows) and all(row["profiler"] for row in rows)

    @cached_property
    def capture(self) -> str:
        """How long profiling stalled the training, and its steps before, inside and after."""
        cost = self.results["capture"]
        if cost is None:
            return ""
        start = words.duration(cost["stall_start_ns"])
        text = f"profiled ranks stalled for up to {start} at the start"
        if cost["stall_stop_ns"] is not None:
            text += f", {words.duration(cost['stall_stop_ns'])} at the stop"
        for whose, times in (("profiled", cost["profiled"]), ("unprofiled", cost["unprofiled"])):
            if times is None:
                continue
            steps = (times["before_ns"], times["inside_ns"], times["after_ns"])
            named = zip(steps, ("before", "inside", "after"), strict=True)
            medians = [f"{words.ms(ns)} {when}" for ns, when in named if ns is not None]
            text += f"; {whose} ranks: median steps of {', '.join(medians)}" if medians else ""
        return text

    @cached_property
    def all_ranks(self) -> str:
        """What all ranks were compared by, and their groups; nothing without flight recorders."""
        shallow = self.results["shallow"]
        if shallow is None:
            return ""
        text = f"flight recorders of {words.counted(len(shallow['ranks']), 'rank')}"
        text += f", {len(shallow['missing'])} missing" if shallow["missing"] else ""
        if shallow["steps"]:
            steps = words.spans(shallow["steps"], limit=4)
            text += f", steps {steps} of {words.ms(shallow['step_ns'])}"
        if watch := shallow.get("watch"):
            looks = words.counted(watch["looks"], "look")
            between = f"{watch['first_step']}–{watch['last_step']}"
            text += f", and {looks} at {watch['steps']} of the steps {between}"
            text += f" ({words.ms(watch['step_ns'])} in the last one)"
        named = [(g["description"] or g["name"], words.spans(g["ranks"], 4))
                 for g in shallow["groups"]]  # fmt: skip
        return f"{text}; groups {_first_names(named)}"

    @cached_property
    def suspects(self) -> list[list[str]]:
        """A row of `SUSPECT_COLUMNS` for each suspect of all ranks."""
        shallow = self.results["shallow"]
        if shallow is None:
            return []
        rows = []
        for suspect in shallow["suspects"]:
            begin, until = suspect["since_step"], suspect["until_step"]
            since = "always" if begin is None else f"step {begin}"
            if until is not None:
                since = f"until step {until}" if begin is None else f"steps {begin}–{until}"
            rows.append([
                str(suspect["rank"]),
                words.plain(suspect["host"] or "-"),
                words.plain(suspect["group"]),
                words.with_bound(suspect["lateness_ns"], suspect["bound_ns"]),
                words.in_some(suspect["late_steps"], shallow["steps"]) or since,
                "delays" if suspect["delays"] else "unknown",
                words.plain(suspect["line"] or "-"),
            ])  # fmt: skip
        return rows

    @cached_property
    def differing(self) -> dict[int, list[str]]:
        """By rank, how its GPU or its node differs from the others'."""
        return hardware.differing(self.results.get("hardware", []))

    @cached_property
    def hardware(self) -> str:
        """Whose GPU or node differs from the others', and what of them could not be read."""
        by_text: dict[str, list[int]] = {}
        for rank, differences in self.differing.items():
            for text in differences:
                by_text.setdefault(text, []).append(rank)
        differing, by_note = [*by_text.items()], dict[str, list[int]]()
        for entry in self.results.get("hardware", []):
            if entry["note"]:
                by_note.setdefault(words.plain(entry["note"]), []).append(entry["rank"])
        texts = [
            f"{words.ranks(ranks, 4)}: {text}"
            for text, ranks in (*differing[:_MOST_GROUPS], *[*by_note.items()][:_MOST_GROUPS])
        ]
        if len(differing) > _MOST_GROUPS:
            texts.append(f"{len(differing) - _MOST_GROUPS} more differences are in results.json")
        return "; ".join(texts)

    @cached_property
    def hardware_rows(self) -> list[list[str]]:
        """A row of `HARDWARE_COLUMNS` for each rank that was sampled, those that differ first."""
        entries = self.results.get("hardware", [])
        ordered = sorted(entries, key=lambda row: row["rank"] not in self.differing)
        return [hardware_cells(row) for row in ordered]

    @cached_property
    def _saved_hours(self) -> tuple[float, float, float] | None:
        """GPU hours of the run that the repair of the leading finding saves, and from where to
        where they lie; None where the run's size is not known, or nothing is saved that is worth
        a line.
        """
        size, top = self.results.get("run_size"), self.leading
        if size is None or top is None or top["saved_ns_per_step"] <= 0:
            return None
        hours = size["steps"] * size["gpus"] / _HOUR_NS
        least, most = top["saved_least_ns"] * hours, top["saved_most_ns"] * hours
        if most < _LEAST_HOURS and size["gpu_hour"] is None:
            return None
        return top["saved_ns_per_step"] * hours, least, most

    @cached_property
    def hours_saved(self) -> str:
        """The same in words."""
        return _with_ends(*self._saved_hours) if self._saved_hours else ""

    @cached_property
    def gpu_hours(self) -> str:
        """What that is of the whole run, and of its price where the user has said one."""
        size, step_ns = self.results.get("run_size"), usual_step_ns(self.results)
        if size is None or self.leading is None or not self._saved_hours or not step_ns:
            return ""
        whole = step_ns * size["steps"] * size["gpus"] / _HOUR_NS
        text = f"repair of {self.leading['code']} saves {self.hours_saved} of {_figures(whole)}"
        text += f" in a run of {size['steps']:,} steps on {size['gpus']:,} GPUs"
        if (price := size["gpu_hour"]) is None:
            return text
        money = _with_ends(*(hours * price for hours in self._saved_hours))
        return f"{text}: {money} at {price:g} per GPU hour"

    @cached_property
    def pauses(self) -> list[PauseEntry]:
        """What interrupted the run, the costliest of many, in the order in which they began."""
        return pauses.costliest(self.results.get("pauses"), MOST_PAUSES)

    @cached_property
    def paused(self) -> str:
        """Which share of the run all pauses are."""
        results = self.results.get("pauses")
        if results is None:
            return ""
        share = words.percent(sum(entry["share_of_run"] for entry in results["entries"]))
        text = f"{share} of the run of {words.age(results['run_ns'] / 1e9)}"
        if (left_out := len(results["entries"]) - len(self.pauses)) > 0:
            text += f"; {left_out} more kinds are in results.json"
        return text

    @cached_property
    def collectives(self) -> str:
        """How many collectives were matched over all their profiled members."""
        count = self.results["collectives"]
        matched = f"{count['matched']:,} matched, {count['incomplete']:,} incomplete"
        return f"{matched}, {count['unmatched']:,} unmatched"

    # --- what the steps are made of

    @cached_property
    def critical_path(self) -> str:
        """What binds the steps, over all ranks; nothing without steady-state steps."""
        path = self.results["critical_path"]
        if path is None or not path["step_ns"]:
            return ""
        step = path["step_ns"]
        texts = [
            f"{part['what']} {words.ms(part['path_ns'])} ({words.percent(part['path_ns'] / step)})"
            for part in sorted(path["parts"], key=lambda part: -part["path_ns"])
            if part["path_ns"] >= _LEAST_PART * step
        ]
        return f"{self.path_of}: {', '.join(texts)}; {self.on_path}"

    @cached_property
    def path_of(self) -> str:
        """Of which step the critical path is; nothing where there is none."""
        path = self.results["critical_path"]
        if path is None:
            return ""
        text = f"of {words.ms(path['step_ns'])} per step"
        text += " without the profiler" if path["without_profiler"] else ""
        if self.usual_ns and abs(path["step_ns"] / self.usual_ns - 1) >= _LEAST_PART:
            text += f" by the replay along it (savings are of {words.ms(self.usual_ns)})"
        if path["steps"] == self.evidence_steps:
            return text
        return f"{text} (steps {words.spans(path['steps'], limit=6)})"

    @cached_property
    def on_path(self) -> str:
        """Which rank the critical path runs through most, and what it loses by imbalance."""
        path = self.results["critical_path"]
        if path is None or not path["step_ns"]:
            return ""
        step, kinds = path["step_ns"], [f"{part['what']}_ns" for part in path["parts"]]
        by_rank = {e["rank"]: sum(e[kind] for kind in kinds) for e in path["ranks"]}  # type: ignore[literal-required]
        rank = max(by_rank, key=lambda rank: by_rank[rank])
        texts = [f"{words.percent(by_rank[rank] / step)} on rank {rank}"]
        if path["unexplained_ns"] >= _LEAST_PART * step:
            texts.append(f"{words.percent(path['unexplained_ns'] / step)} for no recorded reason")
        lost = sum(part["imbalance_gpu_ns"] for part in path["parts"]) / max(len(path["ranks"]), 1)
        if lost >= _LEAST_PART * step:
            per_step = f"{words.ms(lost)} per step"
            texts.append(f"its imbalance costs {per_step} and rank, the mean of all profiled ranks")
        return "; ".join(texts)

    @cached_property
    def uneven(self) -> str:
        """How much longer steps take than with even work on the profiled ranks, and by what."""
        what_if, profiled = self.results["what_if"], len(self.results["ranks"])
        if what_if["S"] is None:
            return ""
        is_even = what_if["S"] < 1 + _LEAST_PART
        much = "no longer than" if is_even else f"{what_if['S']:.2f} times as long as"
        whom = f"the {profiled} profiled ranks of {self.world}"
        text = f"steps take {much} with the same work on "
        text += "all ranks" if profiled == self.world else whom
        worst = max(what_if["S_t"], key=lambda kind: kind["slowdown"])
        if is_even or worst["slowdown"] < 1 + _LEAST_PART:
            return text
        text += f"; {worst['what']} alone {worst['slowdown']:.2f}"
        if what_if["S_w"]:
            slow = max(what_if["S_w"], key=lambda rank: rank["slowdown"])
            text += f", rank {slow['rank']} alone {slow['slowdown']:.2f}"
            if not self.is_named(slow["rank"]):
                text += f" (no finding is of it alone: {NOT_NAMED})"
        return text

    @cached_property
    def compute_absent(self) -> str:
        """Why GPUs do not compute: the mean over the profiled ranks."""
        entries = [e for e in self.results["compute_absent"] if e["launch_bound_ns"] is not None]
        if not entries:
            return ""
        names = ("compute_absent_ns", "launch_bound_ns", "blocking_ns", "dependency_stalled_ns")
        sums = [sum(entry[name] for entry in entries) for name in names]  # type: ignore[literal-required]
        absent, launch_bound, blocking, stalled = (words.ms(ns / len(entries)) for ns in sums)
        return (
            f"{absent} per step in the window, of which {launch_bound} until the next kernel is "
            f"launched, {blocking} blocked by communication, {stalled} for other dependencies "
            f"(the mean of {words.counted(len(entries), 'rank')})"
        )


def _is_of(sentence: Sentence, finding: Finding) -> bool:
    """Whether a sentence of the verdict is one of a finding's."""
    return finding_key(sentence) == finding_key(finding)


def _figures(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _with_ends(value: float, least: float, most: float) -> str:
    """A number, and from where to where it lies."""
    return f"{_figures(value)} ({_figures(least)} to {_figures(most)})"


def _first_names(named: Sequence[tuple[str, str]]) -> str:
    """The first groups, each as its name and its ranks: `mesh_dp {0–3}`."""
    names = [f"{words.plain(name)} {{{ranks}}}".lstrip() for name, ranks in named[:_MOST_GROUPS]]
    rest = f" and {len(named) - _MOST_GROUPS} more" if len(named) > _MOST_GROUPS else ""
    return ", ".join(names) + rest


# --- one finding


def whom(finding: Finding) -> str:
    """The rank or ranks that a finding names, or nothing."""
    named = finding["ranks"] if finding["rank"] is None else [finding["rank"]]
    return words.ranks(named) if named else ""


def saved_text(finding: Finding) -> str:
    """What a finding's repair saves a step, and from where to where that lies."""
    least_ns, most_ns = finding["saved_least_ns"], finding["saved_most_ns"]
    return words.between(finding["saved_ns_per_step"], least_ns, most_ns)


def saved_cell(finding: Finding) -> str:
    """The same for a table, with what it saves alone: `3.70 ±0.21 ms, 20.3 ms alone`; or `-`."""
    return (saved_text(finding) if finding["saved_ns_per_step"] > 0 else "-") + alone(finding)


def saved(finding: Finding) -> str:
    """What the repair of a cause saves of a step, net of those before it and, if other, alone."""
    most_ns = finding["saved_most_ns"]
    if finding["saved_ns_per_step"] > 0:
        much = f"{saved_text(finding)} per step"
    elif finding["saving"] is None:
        return "saving unknown" if finding["code"] == SHALLOW_STRAGGLER else "no repair"
    else:
        much = f"at most {words.ms(most_ns)} per step" if most_ns > 0 else "nothing"
    return f"repair saves {much}{net_of(finding)}{alone(finding)}"


def saving(finding: Finding) -> list[str]:
    """What a finding's saving rests on, in sentences; nothing where it has none."""
    entry = finding["saving"]
    if entry is None:
        return []
    replayed = (
        "The graph of the steady-state steps is replayed with and without the cause. The "
        "uncertainty is of queued work, of the pace without the profiler, of how fast kernels are, "
        f"of chance, and of the ranks' alignment ({words.duration(entry['clocks_ns'])})."
    )
    sentences = [replayed]
    if looks := entry.get("looks"):
        late = words.with_bound(looks["lateness_ns"], looks["bound_ns"])
        share = f"{words.percent(looks['share'])} ±{words.percent(looks['share_uncertainty'])}"
        sentences.append(
            f"In {looks['steps']} steps without a profiler the rank was late by {late} per step; "
            f"of a lateness the step loses {share} by the replay, and as much is stated here."
        )
    if entry["net_of"]:
        names = [f"{cause['code']} ({words.ranks(cause['ranks'])})" for cause in entry["net_of"]]
        sentences.append(
            f"Both steps are those with {words.listed(names)} repaired: savings add up. "
            f"Alone it would save {words.ms(finding['saved_alone_ns'])}."
        )
    by_step = entry["each_ns"]
    count = f", … ({len(by_step)} steps)" if len(by_step) > _MOST_STEPS else ""
    numbers = ", ".join(map(words.milliseconds, by_step[:_MOST_STEPS]))
    return [*sentences, f"By steady-state step of the window: {numbers}{count} ms."]


def net_of(finding: Finding) -> str:
    """The findings that are repaired already in what this one saves, to stand behind it."""
    codes = [cause["code"] for cause in finding["saving"]["net_of"]] if finding["saving"] else []
    if len(codes) > 1:
        return f" once {len(codes)} other causes are repaired"
    return f" once {codes[0]} is repaired" if codes else ""


def alone(finding: Finding) -> str:
    """What a finding's repair alone saves: where others are before it, or noticeably else."""
    if finding["saving"] is None:
        return ""
    step_ns = finding["saving"]["window"]["step_ns"]
    text = words.alone(finding["saved_ns_per_step"], finding["saved_alone_ns"], step_ns)
    if not text and finding["saving"]["net_of"] and finding["saved_ns_per_step"] > 0:
        text = "as much alone"
    return f", {text}" if text else ""


def certainty(finding: Finding) -> str:
    """A finding's confidence in its cause; that it may save nothing, where it may."""
    open_ended = finding["saved_most_ns"] > 0 and words.reaches_zero(
        finding["saved_ns_per_step"], finding["saved_least_ns"]
    )
    return "may save nothing" if open_ended else words.confidence(finding["confidence"])


def recurrence(finding: Finding) -> str:
    """How often it recurs, and in which steps."""
    numbers = finding["steps"]
    if not numbers:
        return finding["recurrence"]
    noun = "step" if len(set(numbers)) == 1 else "steps"
    return f"{finding['recurrence']} ({noun} {words.spans(numbers, limit=6)})"


# --- cells of tables


def hardware_cells(row: HardwareEntry) -> list[str]:
    """A rank's cells of `HARDWARE_COLUMNS`; `-` for what is not known."""
    clock, reasons = row["sm_mhz"], row["clock_reasons"][:2]
    limited = ", ".join(f"{r['reason']} {words.percent(r['share'])}" for r in reasons)
    power = _plus_minus(row["power_w"], row["power_uncertainty_w"])
    pcie = f"{row['pcie_generation']} × {row['pcie_width']}" if row["pcie_width"] else "-"
    pressure = row["memory_pressure"]
    return [
        str(row["rank"]),
        words.plain(row["host"] or "-"),
        words.plain(row["name"] or "-"),
        _of_most(_sampled(clock), row["most_sm_mhz"]),
        _or_dash(row["memory_mhz"]),
        limited or "-",
        _of_most(power, row["power_limit_w"]),
        _plus_minus(row["energy_j_per_step"], row["energy_uncertainty_j"]),
        _or_dash(row["temperature_c"]),
        pcie,
        _or_dash(row["new_ecc_errors"]),
        _or_dash(row["load"]),
        words.percent(row["steal"]["median"]) if row["steal"] else "-",
        words.percent(pressure["median"] / 100) if pressure else "-",
        _sampled(row["cpu_mhz"]),
        f"{row['working_samples']}, {row['samples']}",
    ]


def _or_dash(value: float | None) -> str:
    return "-" if value is None else _figures(value)


def _sampled(value: Sampled | None) -> str:
    """The middle of some samples and how much they vary, in whole numbers."""
    return f"{value['median']:,.0f} ±{value['spread']:,.0f}" if value else "-"


def _plus_minus(value: float | None, uncertainty: float | None) -> str:
    text = _or_dash(value)
    return text if uncertainty is None else f"{text} ±{_figures(uncertainty)}"


def _of_most(text: str, most: float | None) -> str:
    return text if most is None or text == "-" else f"{text} of {_figures(most)}"


def missing(entry: MissingRank) -> str:
    """A rank without a report, and why."""
    name = "a rank" if entry["rank"] is None else f"rank {entry['rank']}"
    source = f" ({words.plain(entry['source'])})" if entry["source"] else ""
    return f"{name}: {words.plain(entry['reason'])}{source}"


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


def bound(ns: float) -> str:
    """An uncertainty; of an hour or more is none known."""
    return "unknown" if ns >= UNBOUNDED_NS else words.bound(ns)


def part_cells(row: Average, ns: float, floor_ns: int = 0) -> tuple[str, str]:
    """A part of a step: ms, and its share; a time up to `floor_ns` is a bound without a share."""
    if 0 < ns <= floor_ns:
        # no rank waits longer than its communication is exposed, however large the clocks' error
        return _below(min(floor_ns, row.exposed_communication_ns)), ""
    share = words.percent(ns / row.duration_ns) if row.duration_ns else "-"
    return words.milliseconds(ns, words.column_decimals(row.duration_ns)), share


def operation_cells(entry: OperationEntry, floor_ns: int) -> list[tuple[str, float]]:
    """Calls, bytes, time, exposed, waiting (a bound below the clocks' error), and their numbers."""
    time, exposed = entry["communication_ns_per_step"], entry["exposed_ns_per_step"]
    wait, calls = entry["exposed_wait_ns_per_step"], entry["calls_per_step"]
    # no call can wait longer than it is exposed, however large the clocks' error
    floor = min(floor_ns * calls, exposed)
    return [
        (f"{calls:,.3g}", calls),
        # a report without sizes adds up to 0, which is not a size
        (words.size(entry["bytes_per_step"] or None), entry["bytes_per_step"]),
        (words.duration(time), time),
        (words.duration(exposed), exposed),
        (words.duration(wait) if wait == 0 or wait > floor else _below(floor), wait),
    ]


def _below(bound_ns: float) -> str:
    """A time of which is known only that it is shorter than this."""
    return f"<{words.bound(bound_ns)[1:]}"


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in names by their value."""
    runs = re.findall(r"\d+|\D+", name)
    return [(int(run), "") if run.isdecimal() else (-1, run) for run in runs]


def _evidence_row(row: EvidenceRow) -> dict[str, object]:
    """One row of the evidence as texts."""
    steps = f"{row['steps']}" if row["steps"] else "all that are logged"
    if row["steps"] and row["first_step"] is not None:
        steps += f" ({row['first_step']} to {row['last_step']})"
    lies = ""
    if row["least_ns"] is not None and row["most_ns"] is not None:
        lies = f"{words.ms(row['least_ns'])} to {words.ms(row['most_ns'])}"
    return {
        "number": row["number"], "source": row["source"], "what": row["what"],
        "ranks": words.numbers(row["ranks"]), "steps": steps, "value": words.ms(row["value_ns"]),
        "lies": lies, "profiler": "yes" if row["profiler"] else "no",
    }  # fmt: skip
