"""The page's panels of words and tables: the first look, where the time goes, where it is from."""

from __future__ import annotations

import base64
import datetime as dt
import gzip
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from clusterprof import pauses as of_run, words
from clusterprof.report import results_json, summary
from clusterprof.report.summary import Average, Summary
from clusterprof.report.whole_job import Job
from clusterprof.results import Finding, Results, compared_step_ns

_UNKNOWN = "cannot be determined"
#: rows of a table that are shown at first: so many of either end
ENDS = 8
#: the finding that says what the profiler did to the window's steps
PERTURBATION = "profiler.perturbation"
_OWN_NAME = re.compile("^Profiler overhead: ")
#: a part of it that says how long ranks stalled, which is said before where it is known
_STALL = re.compile(r"a profiled rank stalled once for [^;.]*(; |\.?$)")
#: clocks that stand before this year are set to no date
_FIRST_YEAR = 2015
#: so many versions of one kind are listed
_MOST_LISTED = 4

# -- what interrupted the run


def pauses(run: Summary) -> dict[str, Any] | None:
    """The pauses of the run as the rows of a table, and what they are together."""
    if not run.pauses:
        return None
    rows = [of_run.cells(entry) for entry in run.pauses]
    return {"head": of_run.COLUMNS, "rows": rows, "share": run.paused}


# -- the first look: the answer in four boxes, and what several repairs would leave


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
        if late and shallow and (step_ns := compared_step_ns(shallow)):
            most = words.percent(min(late / step_ns, 1))
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
    step_ns = pace["step_ns"] if pace else compared_step_ns(shallow) if shallow else None
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
        if watch := shallow.get("watch"):
            looks = words.counted(watch["looks"], "look")
            more = f"{recorders}, {looks} at steps {watch['first_step']}–{watch['last_step']}"
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


# -- where the steps' time goes, rank by rank


class Ends(NamedTuple):
    """A long table's rows: the first and the last ones, and those between, shown on request."""

    first: Sequence[Any]
    between: Sequence[Any]
    last: Sequence[Any]


def ends(rows: Sequence[Any], first: int = ENDS, last: int = ENDS) -> Ends:
    """Split rows for a table; few ones stay together."""
    if len(rows) <= first + last:
        return Ends(rows, [], [])
    end = len(rows) - last
    return Ends(rows[:first], rows[first:end], rows[end:])


def account(run: Summary) -> dict[str, Any] | None:
    """Each rank's mean step; of many ranks those that wait least and most stand at the ends."""
    averages = run.averages
    if not averages:
        return None
    if len(averages) > 2 * ENDS:
        averages = sorted(averages, key=lambda row: row.exposed_wait_ns)
    longest = max(row.duration_ns for row in averages)
    stragglers = run.stragglers()
    hosts = {entry["rank"]: entry["host"] for entry in run.results["ranks"]}
    rows = ends([
        {
            "rank": row.rank,
            "host": hosts.get(row.rank, ""),
            "named": row.rank in stragglers,
            "step": row.step,
            **_account_row(row, longest, run.pair_bound_ns),
        }
        for row in averages
    ])  # fmt: skip
    return {
        "which": words.spans(run.evidence_steps, 6),
        "count": words.counted(len(run.evidence_steps), "steady-state step"),
        "steady": run.has_steady_steps,
        "rows": rows,
        "hosts": len({*hosts.values()}) > 1,
    }


def critical_path(results: Results) -> list[list[str]]:
    """The critical path by what binds it: on it, its share, the mean per rank, GPU time lost."""
    critical = results["critical_path"]
    if critical is None or not critical["step_ns"]:
        return []
    return [
        [
            part["what"],
            words.milliseconds(part["path_ns"], 2),
            words.percent(part["path_ns"] / critical["step_ns"]),
            words.milliseconds(part["mean_ns"], 2) if part["what"] != "idle" else "-",
            words.milliseconds(part["imbalance_gpu_ns"], 2) if part["imbalance_gpu_ns"] else "-",
        ]
        for part in critical["parts"]
    ]


def _account_row(row: Average, longest_ns: float, floor_ns: int) -> dict[str, Any]:
    """A rank's step: a cell for each part, and a stacked bar in % of the longest step.

    The bar has (tone, left, width) of each part but idle, which is what the others leave.
    """
    parts = (
        ("compute", "compute", row.compute_ns),
        ("wait", "exposed wait", row.exposed_wait_ns),
        ("transfer", "exposed transfer", row.exposed_communication_ns - row.exposed_wait_ns),
        ("copies", "exposed copies", row.exposed_copy_ns),
        ("soft", "idle", row.idle_ns),
    )
    total = min(row.duration_ns / longest_ns, 1.0) * 100 if longest_ns else 0.0
    left, cells, bars, texts = 0.0, [], [], []
    for tone, name, ns in parts:
        frac = ns / row.duration_ns if row.duration_ns else 0.0
        ms, percent = summary.part_cells(row, ns, floor_ns if tone == "wait" else 0)
        # compute is what one hopes for: the shade is for what costs
        shade = round(max(frac, 0.0), 2) if percent and tone != "compute" else 0
        cells.append({"tone": tone, "share": shade, "ms": ms, "percent": percent})
        if frac:
            texts.append(f"{name} {words.percent(frac)}")
        if frac * total > 0 and name != "idle":
            # the style sheet knows these tones by their first letters, copies by m
            letter = "m" if tone == "copies" else tone[0]
            bars.append((letter, round(left, 2), round(frac * total, 2)))
        left += frac * total
    label = f"{words.ms(row.duration_ns)}: {', '.join(texts)}"
    return {"cells": cells, "bar": {"parts": bars, "total": round(total, 2), "label": label}}


# -- where the numbers are from


def provenance(run: Summary, job: Job) -> list[tuple[str, str]]:
    """When, what and on what, and what the profiler cost: names and texts of what is known."""
    texts = [
        ("recorded", _recorded(run, job)),
        ("command", job.command),
        ("launched by", job.launcher),
        ("ran on", _machines(run, job)),
        ("layout", run.groups),
        ("versions", ", ".join(_versions(run, job))),
        ("profiled ranks", run.ranks),
        ("profiler overhead", " ".join(_overhead(run))),
    ]
    return [(name, text) for name, text in texts if text]


def _recorded(run: Summary, job: Job) -> str:
    """When, and for how long; of reports alone when the window was."""
    if began := _time(job.began):
        ended = _time(job.ended)
        lasted = f", {words.age((ended - began).total_seconds())}" if ended else ""
        return f"{_date(began)}{lasted}"
    middle_ns = run.results["clock"]["middle_ns"]
    try:
        window = dt.datetime.fromtimestamp(middle_ns / 1e9, dt.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{_date(window)} (the window)" if window.year >= _FIRST_YEAR else ""


def _time(text: str) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(text).astimezone(dt.timezone.utc)
    except (ValueError, OverflowError):
        return None


def _date(moment: dt.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _machines(run: Summary, job: Job) -> str:
    """Hosts × GPUs, as far as hosts are known."""
    hosts = {**run.hosts, **job.hosts}
    devices = _listed(entry["device"] for entry in run.results["ranks"])
    ranks = words.counted(run.world, "rank")
    of_devices = f", {devices}" if devices else ""
    if not hosts:
        return f"{ranks}{of_devices}" if run.world else ""
    names = {*hosts.values()}
    count = words.counted(len(names), "host")
    if len(hosts) < run.world:
        return f"{ranks}{of_devices}; {count} known ({_listed(names)})"
    per_host = {*Counter(hosts.values()).values()}
    even = f" × {per_host.pop()} ranks" if len(per_host) == 1 else f", {ranks}"
    return f"{count}{even}{of_devices} ({_listed(names)})"


def _versions(run: Summary, job: Job) -> list[str]:
    """Of torch, NCCL, CUDA, the driver, profilers and clusterprof; several where ranks differ."""
    kinds: dict[str, set[str]] = {}
    for entry in run.results["ranks"]:
        for name, version in entry["versions"].items():
            if version != "0":  # a driver that is not there
                kinds.setdefault(words.plain(name), set()).add(version)
    torch = [f"torch {_listed(job.torch)}"] if job.torch else []
    others = [f"{name} {_listed(versions)}" for name, versions in sorted(kinds.items())]
    profilers = _listed(entry["profiler"] for entry in run.results["ranks"])
    own = f"clusterprof {run.results['clusterprof_version']}"
    return [*torch, *others, *([profilers] if profilers else []), own]


def _overhead(run: Summary) -> list[str]:
    """What the profiler cost, by the step logs and by the window."""
    findings = [f for f in run.results["findings"] if f["code"] == PERTURBATION]
    # its name stands before it
    texts = [_OWN_NAME.sub("", finding["summary"]) for finding in findings]
    if run.capture:
        texts = [f"{run.capture}.", *(_STALL.sub("", text) for text in texts)]
    return [text[:1].upper() + text[1:] for text in texts if text]


def _listed(values: Iterable[str]) -> str:
    names = sorted({words.plain(value) for value in values} - {""}, key=summary.natural)
    return words.listed(names, _MOST_LISTED)


def packed_results(results: Results) -> dict[str, Any]:
    """results.json whole, packed: what the page's downloads are made of."""
    packed = gzip.compress(results_json.dumps(results), 9, mtime=0)
    return {"name": "results.json", "gzip": base64.b64encode(packed).decode()}
