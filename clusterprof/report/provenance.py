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
from clusterprof.report.summary import Summary
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


def facts(run: Summary, job: Job) -> list[tuple[str, str]]:
    """Names and texts, of what is known only."""
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
    if began := _moment(job.began):
        ended = _moment(job.ended)
        lasted = f", {words.age((ended - began).total_seconds())}" if ended else ""
        return f"{_date(began)}{lasted}"
    middle_ns = run.results["clock"]["middle_ns"]
    try:
        window = dt.datetime.fromtimestamp(middle_ns / 1e9, dt.timezone.utc)
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
    return words.listed(names, _MOST)


def embedded(results: Results) -> dict[str, Any]:
    """results.json whole, packed: what the page's downloads are made of."""
    packed = gzip.compress(results_json.dumps(results), 9, mtime=0)
    return {"name": "results.json", "gzip": base64.b64encode(packed).decode()}
