"""The page's first look: the answer in four boxes, and all ranks and steps in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from clusterprof import words
from clusterprof.report import summary
from clusterprof.results import Finding, Results


class Tile(NamedTuple):
    """One box: a name, the answer in a few letters, and what it is of."""

    name: str
    value: str
    more: str
    bound: str = ""
    hurt: bool = False


def tiles(results: Results) -> list[Tile]:
    """Who it is, what it costs, what its repair saves, and how well that is known.

    All four are about the finding that the verdict begins with.
    """
    top = summary.leading(results)
    return [_who(results, top), _cost(results, top), _saving(results, top), _known(results, top)]


def _who(results: Results, top: Finding | None) -> Tile:
    profiled = len(results["ranks"])
    if top is not None:
        everyone = profiled > 1 and len(top["ranks"]) == profiled
        is_straggler = top["code"].startswith("straggler.") and not everyone
        hosts = _hosts(results, top["ranks"])
        where = f" on {words.plain(hosts.pop())}" if len(hosts) == 1 and not everyone else ""
        alone = "no single straggler" if profiled > 1 else "the only profiled rank"
        kind = "straggler" if is_straggler else alone
        every = f"all {profiled} {'profiled ' if summary.world(results) > profiled else ''}ranks"
        who = every if everyone else summary.whom(top) or "an unprofiled rank"
        more = f"{kind}{where}, {top['code']}"
        return Tile("Who", who, more, hurt=is_straggler)
    if profiled < 2 or not results["collectives"]["matched"]:
        why = "needs collectives of at least two profiled ranks"
    elif not summary.evidence_steps(results)[1]:
        why = "no step is free of the profiler's own start and stop"
    else:
        return Tile("Who", "none", f"no straggler among {profiled} profiled ranks")
    return Tile("Who", "cannot be determined", why)


def _cost(results: Results, top: Finding | None) -> Tile:
    name, pace = "What it costs", results["pace"]
    if top is None:
        if pace is None:
            return Tile(name, "cannot be determined", "no steady-state step")
        return Tile(name, "none", f"steps of {words.ms(pace['window_step_ns'])}")
    share = top["share_of_step"]
    # all ranks wait for a straggler; what else costs time is known of the profiled ranks only
    everyone = top["code"].startswith("straggler.")
    ranks = summary.world(results) if everyone else len(results["ranks"])
    if not share:
        late, shallow = _lateness(results, top), results["shallow"]
        if late and shallow and shallow["step_ns"]:
            most = words.percent(min(late / shallow["step_ns"], 1))
            return Tile(name, f"at most {most}", f"others wait {words.ms(late)} per step for it")
        return Tile(name, "unknown", "no replay without its cause", hurt=_hurts(top))
    what = "GPUs" if any(each["device"] for each in results["ranks"]) else "ranks"
    few = f"{_few_digits(share * ranks)} of {ranks:,} {what}"
    lost = f"as much as losing {few}" if ranks > 1 else ""
    more = lost or summary.recurrence(top)
    return Tile(name, f"{words.percent(share)} of each step", more, hurt=_hurts(top))


def _saving(results: Results, top: Finding | None) -> Tile:
    name, pace, shallow = "What its repair saves", results["pace"], results["shallow"]
    if top is None and pace is None:
        return Tile(name, "cannot be determined", "no steady-state step")
    if top is None:
        return Tile(name, "none", "no finding saves a twentieth of a step")
    ns = top["saved_ns_per_step"]
    step_ns = pace["step_ns"] if pace else shallow["step_ns"] if shallow else None
    if ns <= 0 or not step_ns:
        why = "a profile of the rank would tell" if _lateness(results, top) else summary.saved(top)
        return Tile(name, "unknown", why)
    saved = words.with_bound(ns, top["saved_uncertainty_ns"])
    value, _, bound = saved.removesuffix("ms").partition(" ")
    saving = top["saving"]
    if pace and saving and saving["stated"] == "long_run" and not pace["without_profiler"]:
        # queued work hides it in the window, whose step is shorter than those to come
        step_ns = saving["long_run"]["step_ns"]
    before, after = words.ms(step_ns), words.ms(max(step_ns - ns, 0))
    return Tile(name, f"{value} ms", f"per step: {before} → {after}", bound=bound.strip())


def _hosts(results: Results, ranks: Sequence[int]) -> set[str]:
    """The hosts of these ranks, by their reports, else by flight recorders."""
    found = {each["host"] for each in results["ranks"] if each["rank"] in ranks} - {""}
    suspects = results["shallow"]["suspects"] if results["shallow"] else []
    return found or {e["host"] for e in suspects if e["rank"] in ranks and e["host"]}


def _lateness(results: Results, finding: Finding) -> int:
    """How long others wait per step for the ranks of a finding from flight recorders alone."""
    shallow = results["shallow"]
    if shallow is None or finding["code"] != "straggler.shallow":
        return 0
    mine = [e["lateness_ns"] for e in shallow["suspects"] if e["rank"] in finding["ranks"]]
    return max(mine, default=0)


def _known(results: Results, top: Finding | None) -> Tile:
    steps, steady = summary.evidence_steps(results)
    shallow = results["shallow"]
    if top and _lateness(results, top) and not steps and shallow:
        of = f"flight recorders of {words.counted(len(shallow['ranks']), 'rank')}"
        more = f"{of}, steps {words.spans(shallow['steps'], limit=3)}"
        return Tile("Confidence", words.confidence(top["confidence"]), more)
    span = f" ({words.spans(steps, limit=3)})" if steps else ""
    count = words.counted(len(steps), "steady-state step" if steady else "step")
    where = f"{count}{span}" if top else f"in steady state{span}" if steady else span.strip(" ()")
    where += "" if steady or not steps else ", none in steady state"
    floor = summary.pair_bound_ns(results)
    bound = summary.bound(floor) if floor else "one clock"
    clocks = {"one clock": "one clock only", "unknown": "not all clocks can be aligned"}
    profiled, missing = len(results["ranks"]), len(results["missing"])
    reports = f"{profiled} of {profiled + missing} reports" if missing else ""
    more = ", ".join(filter(None, (reports, where, clocks.get(bound, f"between clocks {bound}"))))
    confident = words.confidence(top["confidence"]) if top else words.counted(len(steps), "step")
    return Tile("Confidence", confident, more)


def _few_digits(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _hurts(finding: Finding) -> bool:
    return finding["severity"] == "critical"


def what_if(results: Results) -> dict[str, Any] | None:
    """The findings that can be ticked off, and the step that each choice of them leaves.

    None for fewer than two: the first boxes say what one saves.
    """
    found = results["combined"]
    if found is None or len(found["findings"]) < 2:
        return None
    remaining = found["remaining_ns"]
    carded = [f for f in summary.cards(results) if f["saved_ns_per_step"] > 0]
    more = len(carded) - len(found["findings"])
    view = "the window's steady-state steps"
    return {
        "findings": [
            {
                "code": one["code"],
                "whom": words.ranks(one["ranks"]) if one["ranks"] else "",
                "alone": words.ms(remaining[1 << bit]),
            }
            for bit, one in enumerate(found["findings"])
        ],
        "now": words.ms(remaining[0]),
        "all": words.ms(remaining[-1]),
        "of": view if found["view"] == "window" else f"{view}, again and again",
        "more": words.counted(more, "finding") if more > 0 else "",
        "remaining_ns": remaining,
    }


def ticked(shown: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the panel's script needs of `what_if`."""
    if shown is None:
        return None
    steps = shown["remaining_ns"]
    return {"remaining_ns": steps, "texts": [words.ms(ns) for ns in steps]}
