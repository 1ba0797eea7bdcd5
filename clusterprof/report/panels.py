"""The page's panels of words and tables: the first look, where the time goes, where it is from."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import gzip
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from clusterprof import pauses as of_run, words
from clusterprof.report import results_json, summary
from clusterprof.report.summary import Average, Summary
from clusterprof.report.whole_job import Job
from clusterprof.results import (
    SHALLOW_STRAGGLER,
    Finding,
    Results,
    ShallowResults,
    compared_step_ns,
)

_UNKNOWN = "cannot be determined"
#: names of boxes
_COST, _SAVING = "What it costs", "What its repair saves"
#: rows of a table that are shown at first: so many of either end
ENDS = 8
_DATE = "%Y-%m-%d %H:%M UTC"

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
    """Who it is, what it costs, what its repair saves, and how well that is known: four boxes."""
    top, profiled, pace = run.leading, len(run.results["ranks"]), run.results["pace"]
    if top is not None:
        return [_who(run, top), _cost(run, top), _saving(run, top), _confidence(run, top)]
    if profiled < 2 or not run.results["collectives"]["matched"]:
        who = Tile("Who", _UNKNOWN, "needs collectives of at least two profiled ranks")
    elif not run.has_steady_steps:
        who = Tile("Who", _UNKNOWN, "no step is free of the profiler's own start and stop")
    elif why := [entry["text"] for entry in run.results["headline"] if entry["code"] == "unknown"]:
        who = Tile("Who", _UNKNOWN, why[0])
    else:
        who = Tile("Who", "none", f"no straggler among {profiled} profiled ranks")
    cost = saving = (_UNKNOWN, "no steady-state step")
    if pace is not None:
        cost = ("none", f"steps of {words.ms(pace['window_step_ns'])}")
        saving = ("none", "no finding saves a twentieth of a step")
    return [who, Tile(_COST, *cost), Tile(_SAVING, *saving), _confidence(run, None)]


def _who(run: Summary, top: Finding) -> Tile:
    profiled, shallow = len(run.results["ranks"]), run.results["shallow"]
    if profiled > 1 and len(top["ranks"]) == profiled:
        everyone = f"all {profiled} {'profiled ' if run.world > profiled else ''}ranks"
        return Tile("Who", everyone, f"no single straggler, {top['code']}")
    hosts = {run.hosts.get(rank) for rank in top["ranks"]} - {None}
    if not hosts and shallow:
        suspects = [s for s in shallow["suspects"] if s["rank"] in top["ranks"]]
        hosts = {suspect["host"] for suspect in suspects} - {None, ""}
    where = f" on {words.plain(hosts.pop() or '')}" if len(hosts) == 1 else ""
    is_straggler = top["code"].startswith("straggler.")
    alone = "no single straggler" if profiled > 1 else "the only profiled rank"
    more = f"{'straggler' if is_straggler else alone}{where}, {top['code']}"
    return Tile("Who", summary.whom(top) or "an unprofiled rank", more, hurt=is_straggler)


def _cost(run: Summary, top: Finding) -> Tile:
    share, hurt = top["share_of_step"], top["severity"] == "critical"
    if not share:
        return _most_cost(run, top, hurt=hurt)
    # all ranks wait for a straggler; what else costs time is known of the profiled ranks only
    everyone = top["code"].startswith("straggler.")
    ranks = run.world if everyone else len(run.results["ranks"])
    noun = "GPUs" if any(entry["device"] for entry in run.results["ranks"]) else "ranks"
    lost = share * ranks
    few = f"{lost:.2g}" if lost < 10 else f"{lost:,.0f}"
    more = f"as much as losing {few} of {ranks:,} {noun}" if ranks > 1 else summary.recurrence(top)
    value = run.share(top)
    return Tile(_COST, f"{value} of each step" if value.endswith("%") else value, more, hurt=hurt)


def _most_cost(run: Summary, top: Finding, *, hurt: bool) -> Tile:
    """What a finding costs at most of which nothing is replayed."""
    late, shallow = _lateness_ns(run, top), run.results["shallow"]
    if late and shallow and (step_ns := compared_step_ns(shallow)):
        most = words.percent(min(late / step_ns, 1))
        return Tile(_COST, f"at most {most}", f"others wait {words.ms(late)} per step for it")
    return Tile(_COST, "unknown", "no replay without its cause", hurt=hurt)


def _saving(run: Summary, top: Finding) -> Tile:
    ns, step_ns = top["saved_ns_per_step"], run.step_ns(top)
    if ns <= 0 or not step_ns:
        why = summary.saved(top)
        if _lateness_ns(run, top):
            why = "a profile of the rank would tell"
        return Tile(_SAVING, "unknown", why)
    # the bound stands behind it in small letters
    value, *bound = re.split(r" (?=[(±])", summary.saved_text(top).replace(" ms", ""), maxsplit=1)
    before, after = words.ms(step_ns), words.ms(max(step_ns - ns, 0))
    more = summary.net_of(top) + summary.alone(top) or f": {before} → {after}"
    hours = f"; {run.hours_saved} GPU hours of this run" if run.hours_saved else ""
    return Tile(_SAVING, f"{value} ms", f"per step{more}{hours}", bound="".join(bound))


def _confidence(run: Summary, top: Finding | None) -> Tile:
    steps, steady, shallow = run.evidence_steps, run.has_steady_steps, run.results["shallow"]
    confidence = summary.certainty(top) if top else words.counted(len(steps), "step")
    if top and _lateness_ns(run, top) and not steps and shallow:
        return Tile("Confidence", confidence, _by_recorders(shallow))
    profiled, missing = len(run.results["ranks"]), len(run.results["missing"])
    texts = [f"{profiled} of {profiled + missing} reports"] if missing else []
    span = f" ({words.spans(steps, limit=3)})" if steps else ""
    if top:
        texts.append(words.counted(len(steps), "steady-state step" if steady else "step") + span)
    else:
        texts.append(f"in steady state{span}" if steady else span.strip(" ()"))
    if steps and not steady:
        texts.append("none in steady state")
    bound = summary.bound(run.pair_bound_ns) if run.pair_bound_ns else ""
    clocks = {"": "one clock only", "unknown": "not all clocks can be aligned"}
    texts.append(clocks.get(bound, f"between clocks {bound}"))
    return Tile("Confidence", confidence, ", ".join(filter(None, texts)))


def _by_recorders(shallow: ShallowResults) -> str:
    """How many ranks' flight recorders tell, and of which steps."""
    more = f"steps {words.spans(shallow['steps'], limit=3)}"
    if watch := shallow.get("watch"):
        looks = words.counted(watch["looks"], "look")
        more = f"{looks} at steps {watch['first_step']}–{watch['last_step']}"
    return f"flight recorders of {words.counted(len(shallow['ranks']), 'rank')}, {more}"


def _lateness_ns(run: Summary, finding: Finding) -> int:
    """How long others wait per step for the ranks of a finding from flight recorders alone."""
    shallow = run.results["shallow"]
    if shallow is None or finding["code"] != SHALLOW_STRAGGLER:
        return 0
    suspects = [s for s in shallow["suspects"] if s["rank"] in finding["ranks"]]
    return max((suspect["lateness_ns"] for suspect in suspects), default=0)


def account(run: Summary) -> list[dict[str, Any]]:
    """Each rank's mean step; of many ranks those that wait least and most stand at the ends."""
    averages, stragglers = run.averages, run.stragglers()
    if len(averages) > 2 * ENDS:
        averages = sorted(averages, key=lambda row: row.exposed_wait_ns)
    longest = max((row.duration_ns for row in averages), default=0)
    hosts = {entry["rank"]: entry["host"] for entry in run.results["ranks"]}
    return [
        {
            "rank": row.rank,
            "host": hosts.get(row.rank, ""),
            "named": row.rank in stragglers,
            "step": row.step,
            **_account_row(row, longest, run.pair_bound_ns),
        }
        for row in averages
    ]


def _account_row(row: Average, longest_ns: float, floor_ns: int) -> dict[str, Any]:
    """A cell for each part of a rank's step, and a bar (tone, left, width) in % of the longest."""
    parts = (
        # the style sheet knows the bar's tones by a letter
        ("compute", "c", "compute", row.compute_ns),
        ("wait", "w", "exposed wait", row.exposed_wait_ns),
        ("transfer", "t", "exposed transfer", row.exposed_communication_ns - row.exposed_wait_ns),
        ("copies", "m", "exposed copies", row.exposed_copy_ns),
        ("soft", "", "idle", row.idle_ns),
    )
    total = min(row.duration_ns / longest_ns, 1.0) * 100 if longest_ns else 0.0
    left, cells, bars, texts = 0.0, [], [], []
    for tone, letter, name, ns in parts:
        frac = ns / row.duration_ns if row.duration_ns else 0.0
        ms, percent = summary.part_cells(row, ns, floor_ns if tone == "wait" else 0)
        # compute is what one hopes for: the shade is for what costs
        shade = round(max(frac, 0.0), 2) if percent and tone != "compute" else 0
        cells.append({"tone": tone, "share": shade, "ms": ms, "percent": percent})
        if frac:
            texts.append(f"{name} {words.percent(frac)}")
        if frac * total > 0 and letter:
            bars.append((letter, round(left, 2), round(frac * total, 2)))
        left += frac * total
    label = f"{words.ms(row.duration_ns)}: {', '.join(texts)}"
    return {"cells": cells, "bar": {"parts": bars, "total": round(total, 2), "label": label}}


def provenance(run: Summary, job: Job) -> list[tuple[str, str]]:
    """When, what and on what, and what the profiler cost: names and texts of what is known."""
    texts = [
        ("recorded", _recorded(run, job)),
        ("command", job.command),
        ("launched by", job.launcher),
        ("ran on", _machines(run, job)),
        ("layout", run.groups),
        ("versions", _versions(run, job)),
        ("profiled ranks", run.ranks),
        ("profiler overhead", _overhead(run)),
    ]
    return [(name, text) for name, text in texts if text]


def _recorded(run: Summary, job: Job) -> str:
    """When, and for how long; of reports alone when the window was."""
    if began := _time(job.began):
        ended = _time(job.ended)
        lasted = f", {words.age((ended - began).total_seconds())}" if ended else ""
        return f"{began:{_DATE}}{lasted}"
    with contextlib.suppress(OverflowError, ValueError, OSError):
        seconds = run.results["clock"]["middle_ns"] / 1e9
        window = dt.datetime.fromtimestamp(seconds, dt.timezone.utc)
        # clocks that stand before this year are set to no date
        if window.year >= 2015:
            return f"{window:{_DATE}} (the window)"
    return ""


def _time(text: str) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(text).astimezone(dt.timezone.utc)
    except (ValueError, OverflowError):
        return None


def _machines(run: Summary, job: Job) -> str:
    """Hosts × GPUs, as far as hosts are known."""
    hosts = {**run.hosts, **job.hosts}
    names, ranks = {*hosts.values()}, words.counted(run.world, "rank")
    devices = _listed(entry["device"] for entry in run.results["ranks"])
    of_devices = f", {devices}" if devices else ""
    if not hosts:
        return f"{ranks}{of_devices}" if run.world else ""
    count = words.counted(len(names), "host")
    if len(hosts) < run.world:
        return f"{ranks}{of_devices}; {count} known ({_listed(names)})"
    per_host = {*Counter(hosts.values()).values()}
    even = f" × {per_host.pop()} ranks" if len(per_host) == 1 else f", {ranks}"
    return f"{count}{even}{of_devices} ({_listed(names)})"


def _versions(run: Summary, job: Job) -> str:
    """Of torch, NCCL, CUDA, the driver, profilers and clusterprof; several where ranks differ."""
    kinds: dict[str, set[str]] = {}
    for entry in run.results["ranks"]:
        for name, version in entry["versions"].items():
            if version != "0":  # a driver that is not there
                kinds.setdefault(words.plain(name), set()).add(version)
    named = [("torch", {*job.torch}), *sorted(kinds.items())]
    texts = [f"{name} {_listed(versions)}" for name, versions in named if versions]
    texts.append(_listed(entry["profiler"] for entry in run.results["ranks"]))
    texts.append(f"clusterprof {run.results['clusterprof_version']}")
    return ", ".join(filter(None, texts))


def _overhead(run: Summary) -> str:
    """What the profiler cost, by the step logs and by the window."""
    findings = [f for f in run.results["findings"] if f["code"] == "profiler.perturbation"]
    # its name stands before it
    texts = [finding["summary"].removeprefix("Profiler overhead: ") for finding in findings]
    if run.capture:
        # that says how long ranks stalled
        stall = r"a profiled rank stalled once for [^;.]*(; |\.?$)"
        texts = [f"{run.capture}.", *(re.sub(stall, "", text) for text in texts)]
    return " ".join(text[:1].upper() + text[1:] for text in texts if text)


def _listed(values: Iterable[str]) -> str:
    names = sorted({words.plain(value) for value in values} - {""}, key=summary.natural)
    return words.listed(names, 4)


def packed_results(results: Results) -> dict[str, Any]:
    """results.json whole, packed: what the page's downloads are made of."""
    packed = gzip.compress(results_json.dumps(results), 9, mtime=0)
    return {"name": "results.json", "gzip": base64.b64encode(packed).decode()}
