"""Where a page's numbers are from: when, what, on what, and what the profiler cost."""

from __future__ import annotations

import base64
import datetime as dt
import gzip
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from clusterprof import words
from clusterprof.report import results_json, summary
from clusterprof.report.whole_job import Job
from clusterprof.results import Results

#: the finding that says what the profiler did to the window's steps
PERTURBATION = "profiler.perturbation"
_OWN_NAME = re.compile("^Profiler overhead: ")
#: a part of it that says how long ranks stalled, which is said before where it is known
_STALL = re.compile(r"a profiled rank stalled once for [^;.]*(; |\.?$)")
#: clocks that stand before this year are set to no date
_FIRST_YEAR = 2015
#: so many versions of one kind are listed
_MOST = 4


def facts(results: Results, job: Job) -> list[tuple[str, str]]:
    """Names and texts, of what is known only."""
    found = [
        ("recorded", _recorded(results, job)),
        ("command", job.command),
        ("launched by", job.launcher),
        ("ran on", _machines(results, job)),
        ("layout", summary.groups(results) if results["topology"]["groups"] else ""),
        ("versions", ", ".join(_versions(results, job))),
        ("profiled ranks", summary.ranks(results)),
        ("profiler overhead", " ".join(_overhead(results))),
    ]
    return [(name, text) for name, text in found if text]


def _recorded(results: Results, job: Job) -> str:
    """When, and for how long; of reports alone when the window was."""
    if began := _moment(job.began):
        ended = _moment(job.ended)
        lasted = f", {words.age((ended - began).total_seconds())}" if ended else ""
        return f"{_date(began)}{lasted}"
    middle = results["clock"]["middle_ns"]
    try:
        window = dt.datetime.fromtimestamp(middle / 1e9, dt.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{_date(window)} (the window)" if window.year >= _FIRST_YEAR else ""


def _moment(text: str) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(text).astimezone(dt.timezone.utc)
    except (ValueError, OverflowError):
        return None


def _date(moment: dt.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _machines(results: Results, job: Job) -> str:
    """Hosts × GPUs, as far as hosts are known."""
    hosts = {**{e["rank"]: e["host"] for e in results["ranks"] if e["host"]}, **job.hosts}
    devices = _listed(entry["device"] for entry in results["ranks"])
    names = {*hosts.values()}
    world = summary.world(results)
    what = f"{words.counted(world, 'rank')}, {devices}" if devices else words.counted(world, "rank")
    if not names:
        return what if world else ""
    if len(hosts) < world:
        return f"{what}; {words.counted(len(names), 'host')} known ({_listed(names)})"
    each = {*Counter(hosts.values()).values()}
    even = f" × {each.pop()} ranks" if len(each) == 1 else f", {words.counted(world, 'rank')}"
    return (
        f"{words.counted(len(names), 'host')}{even}"
        + (f", {devices}" if devices else "")
        + (f" ({_listed(names)})")
    )


def _versions(results: Results, job: Job) -> list[str]:
    """Of torch, NCCL, CUDA, the driver, profilers and clusterprof; several where ranks differ."""
    found = [f"torch {_listed(job.torch)}"] if job.torch else []
    kinds: dict[str, set[str]] = {}
    for entry in results["ranks"]:
        for name, version in entry["versions"].items():
            if version != "0":  # a driver that is not there
                kinds.setdefault(words.plain(name), set()).add(version)
    found += [f"{name} {_listed(versions)}" for name, versions in sorted(kinds.items())]
    if profilers := _listed(entry["profiler"] for entry in results["ranks"]):
        found.append(profilers)
    return [*found, f"clusterprof {results['clusterprof_version']}"]


def _overhead(results: Results) -> list[str]:
    """What the profiler cost, by the step logs and by the window."""
    found = [each["summary"] for each in results["findings"] if each["code"] == PERTURBATION]
    # its name stands before it
    texts = [_OWN_NAME.sub("", each) for each in found]
    if results["capture"] is not None:
        texts = [f"{summary.capture(results['capture'])}.", *(_STALL.sub("", e) for e in texts)]
    return [text[:1].upper() + text[1:] for text in texts if text]


def _listed(values: Iterable[str]) -> str:
    names = sorted({words.plain(each) for each in values} - {""}, key=summary.natural)
    return words.listed(names, _MOST)


def embedded(results: Results) -> dict[str, Any]:
    """results.json whole, packed: what the page's downloads are made of."""
    packed = gzip.compress(results_json.dumps(results), 9, mtime=0)
    return {"name": "results.json", "gzip": base64.b64encode(packed).decode()}
