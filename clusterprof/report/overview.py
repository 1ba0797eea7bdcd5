"""The page's first look: the answer in four boxes, and what several repairs would leave."""

from __future__ import annotations

from typing import Any, NamedTuple

from clusterprof import words
from clusterprof.report import summary
from clusterprof.report.summary import Summary
from clusterprof.results import Finding

_UNKNOWN = "cannot be determined"


class Tile(NamedTuple):
    """One box: a name, the answer in a few letters, and what it is of."""

    name: str
    value: str
    more: str
    bound: str = ""
    hurt: bool = False


def tiles(run: Summary) -> list[Tile]:
    """Who it is, what it costs, what its repair saves, and how well that is known.

    All four are about the finding that the verdict begins with.
    """
    if run.leading is None:
        return [*_nothing(run), _confidence(run, None)]
    return [_who(run, run.leading), _cost(run, run.leading), _saving(run, run.leading),
            _confidence(run, run.leading)]  # fmt: skip


def _nothing(run: Summary) -> list[Tile]:
    """The first three boxes where there is nothing to act on, or too little to tell."""
    profiled, pace = len(run.results["ranks"]), run.results["pace"]
    if profiled < 2 or not run.results["collectives"]["matched"]:
        who = Tile("Who", _UNKNOWN, "needs collectives of at least two profiled ranks")
    elif not run.has_steady_steps:
        who = Tile("Who", _UNKNOWN, "no step is free of the profiler's own start and stop")
    elif why := [entry["text"] for entry in run.results["headline"] if entry["code"] == "unknown"]:
        who = Tile("Who", _UNKNOWN, why[0])
    else:
        who = Tile("Who", "none", f"no straggler among {profiled} profiled ranks")
    cost, saving = "What it costs", "What its repair saves"
    if pace is None:
        return [who, *(Tile(name, _UNKNOWN, "no steady-state step") for name in (cost, saving))]
    steps = f"steps of {words.ms(pace['window_step_ns'])}"
    nothing = "no finding saves a twentieth of a step"
    return [who, Tile(cost, "none", steps), Tile(saving, "none", nothing)]


def _who(run: Summary, top: Finding) -> Tile:
    profiled = len(run.results["ranks"])
    if profiled > 1 and len(top["ranks"]) == profiled:
        everyone = f"all {profiled} {'profiled ' if run.world > profiled else ''}ranks"
        return Tile("Who", everyone, f"no single straggler, {top['code']}")
    is_straggler = top["code"].startswith("straggler.")
    shallow = run.results["shallow"]
    hosts = {run.hosts.get(rank, "") for rank in top["ranks"]} - {""} or {
        suspect["host"]
        for suspect in (shallow["suspects"] if shallow else ())
        if suspect["rank"] in top["ranks"] and suspect["host"]
    }
    where = f" on {words.plain(hosts.pop() or '')}" if len(hosts) == 1 else ""
    alone = "no single straggler" if profiled > 1 else "the only profiled rank"
    more = f"{'straggler' if is_straggler else alone}{where}, {top['code']}"
    return Tile("Who", summary.whom(top) or "an unprofiled rank", more, hurt=is_straggler)


def _cost(run: Summary, top: Finding) -> Tile:
    name, hurt = "What it costs", top["severity"] == "critical"
    share = top["share_of_step"]
    if not share:
        late, shallow = _lateness_ns(run, top), run.results["shallow"]
        if late and shallow and shallow["step_ns"]:
            most = words.percent(min(late / shallow["step_ns"], 1))
            return Tile(name, f"at most {most}", f"others wait {words.ms(late)} per step for it")
        return Tile(name, "unknown", "no replay without its cause", hurt=hurt)
    # all ranks wait for a straggler; what else costs time is known of the profiled ranks only
    everyone = top["code"].startswith("straggler.")
    ranks = run.world if everyone else len(run.results["ranks"])
    noun = "GPUs" if any(entry["device"] for entry in run.results["ranks"]) else "ranks"
    lost = share * ranks
    few = f"{lost:.2g}" if lost < 10 else f"{lost:,.0f}"
    more = f"as much as losing {few} of {ranks:,} {noun}" if ranks > 1 else summary.recurrence(top)
    return Tile(name, f"{words.percent(share)} of each step", more, hurt=hurt)


def _saving(run: Summary, top: Finding) -> Tile:
    name, pace, shallow = "What its repair saves", run.results["pace"], run.results["shallow"]
    ns = top["saved_ns_per_step"]
    step_ns = pace["step_ns"] if pace else shallow["step_ns"] if shallow else None
    if ns <= 0 or not step_ns:
        late = _lateness_ns(run, top)
        why = "a profile of the rank would tell" if late else summary.saved(top)
        return Tile(name, "unknown", why)
    value, _, bound = summary.saved_text(top).removesuffix("ms").partition(" ")
    saving = top["saving"]
    if pace and saving and saving["stated"] == "long_run" and not pace["without_profiler"]:
        # queued work hides it in the window, whose step is shorter than those to come
        step_ns = saving["long_run"]["step_ns"]
    before, after = words.ms(step_ns), words.ms(max(step_ns - ns, 0))
    more = summary.net_of(top) + summary.alone(top) or f": {before} → {after}"
    return Tile(name, f"{value} ms", f"per step{more}", bound=bound.strip())


def _confidence(run: Summary, top: Finding | None) -> Tile:
    steps, steady, shallow = run.evidence_steps, run.has_steady_steps, run.results["shallow"]
    confidence = words.confidence(top["confidence"]) if top else words.counted(len(steps), "step")
    if top and _lateness_ns(run, top) and not steps and shallow:
        recorders = f"flight recorders of {words.counted(len(shallow['ranks']), 'rank')}"
        more = f"{recorders}, steps {words.spans(shallow['steps'], limit=3)}"
        return Tile("Confidence", confidence, more)
    span = f" ({words.spans(steps, limit=3)})" if steps else ""
    count = words.counted(len(steps), "steady-state step" if steady else "step")
    where = f"{count}{span}" if top else f"in steady state{span}" if steady else span.strip(" ()")
    where += "" if steady or not steps else ", none in steady state"
    bound = summary.bound(run.pair_bound_ns) if run.pair_bound_ns else "one clock"
    clocks = {"one clock": "one clock only", "unknown": "not all clocks can be aligned"}
    profiled, missing = len(run.results["ranks"]), len(run.results["missing"])
    reports = f"{profiled} of {profiled + missing} reports" if missing else ""
    more = ", ".join(filter(None, (reports, where, clocks.get(bound, f"between clocks {bound}"))))
    return Tile("Confidence", confidence, more)


def _lateness_ns(run: Summary, finding: Finding) -> int:
    """How long others wait per step for the ranks of a finding from flight recorders alone."""
    shallow = run.results["shallow"]
    if shallow is None or finding["code"] != "straggler.shallow":
        return 0
    suspects = [s for s in shallow["suspects"] if s["rank"] in finding["ranks"]]
    return max((suspect["lateness_ns"] for suspect in suspects), default=0)


def what_if(run: Summary) -> dict[str, Any] | None:
    """The findings that can be ticked off, and the step that each choice of them leaves.

    None for fewer than two: the first boxes say what one saves.
    """
    combined = run.results["combined"]
    if combined is None or len(combined["findings"]) < 2:
        return None
    remaining = combined["remaining_ns"]
    saving = [finding for finding in run.cards if finding["saved_ns_per_step"] > 0]
    left_out = len(saving) - len(combined["findings"])
    view = "the window's steady-state steps"
    return {
        "findings": [
            {
                "code": repaired["code"],
                "whom": words.ranks(repaired["ranks"]) if repaired["ranks"] else "",
                "alone": words.ms(remaining[1 << bit]),
            }
            for bit, repaired in enumerate(combined["findings"])
        ],
        "now": words.ms(remaining[0]),
        "all": words.ms(remaining[-1]),
        "of": view if combined["view"] == "window" else f"{view}, again and again",
        "more": words.counted(left_out, "finding") if left_out > 0 else "",
        # what the panel's script needs
        "script": {"remaining_ns": remaining, "texts": [words.ms(ns) for ns in remaining]},
    }
