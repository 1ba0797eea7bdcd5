"""What finished results say that cannot be true beside what else they say.

Each kind was seen in reports of other people's jobs. A report that is right has none,
whatever the job: so every recording and every simulated job is asked (`tests/science`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from clusterprof.analysis.findings.finding import severity
from clusterprof.report import text
from clusterprof.report.summary import Summary
from clusterprof.results import Finding, Results, Severity

#: findings that compare ranks by their matched collectives
_COMPARED = ("straggler.host", "straggler.gpu")
#: the job does not cause it, so that its repair saves nothing
_NO_SAVING = "profiler.perturbation"
_UNKNOWN = re.compile(r"(?i)\b(stragglers?|who (was|is) late)\b[^.]*cannot be determined")
_SHARE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)%")
_ONLY_POSSIBLE = re.compile(r"\bmay delay\b")
_IDLE = re.compile(r"GPUs idle up to ([\d.]+) ms")
#: the most severe first
_LEVELS = get_args(Severity)
#: what differs by a smaller part of the step is the same
_SAME = 0.01


def contradictions(results: Results) -> list[str]:
    """Return a sentence for each contradiction; [] for results without any."""
    loud = [found for found in results["findings"] if found["severity"] != "info"]
    return [
        *_open(loud),
        *_too_severe(results, loud),
        *_unmatched(results),
        *_for_a_rank_without_report(results, loud),
        *_known_and_not(results, loud),
        *_unknown_and_matched(results),
        *_of_nothing(results),
        *_beyond_all(results),
        *_more_than_all(results),
        *_other_than_drawn(results),
        *_idle_beyond_all(results),
        *(["the headline says who may delay"] if _ONLY_POSSIBLE.search(results["verdict"]) else []),
    ]


def _open(loud: list[Finding]) -> Iterator[str]:
    """Findings above severity info that may save nothing."""
    for found in loud:
        least, most = found["saved_least_ns"], found["saved_most_ns"]
        if found["code"] != _NO_SAVING and least <= 0:
            yield f"{found['code']} is {found['severity']} and saves {least} to {most} ns"


def _too_severe(results: Results, loud: list[Finding]) -> Iterator[str]:
    """Findings whose severity is above that of the least that their repair saves."""
    for found in loud:
        least = found["saved_least_ns"] / max(_step_ns(results, found), 1)
        if found["saving"] and _LEVELS.index(found["severity"]) < _LEVELS.index(severity(least)):
            yield f"{found['code']} is {found['severity']} and saves at least {least:.1%}"


def _step_ns(results: Results, found: Finding) -> int:
    """The step that a finding's saving is of."""
    saving, pace = found["saving"], results["pace"]
    if saving and saving["stated"] == "long_run" and not (pace and pace["without_profiler"]):
        return saving["long_run"]["step_ns"]
    return pace["step_ns"] if pace else 0


def _unmatched(results: Results) -> Iterator[str]:
    """Stragglers among ranks of which no collective is matched."""
    matched = {rank for each in results["collectives"]["by_operation"] for rank in each["ranks"]}
    for found in results["findings"]:
        compared = found["code"] in _COMPARED
        if compared and not (results["collectives"]["matched"] and {*found["ranks"]} <= matched):
            yield f"{found['code']} of ranks {found['ranks']} without a matched collective"


def _for_a_rank_without_report(results: Results, loud: list[Finding]) -> Iterator[str]:
    """Transfers that are no waiting, among ranks of which one that they may wait for is unknown."""
    partly = {
        group["communicator"]
        for group in results["topology"]["groups"]
        if group["size"] is not None and group["size"] > len(group["ranks"])
    }
    for found in loud:
        used = {row.get("communicator") for row in found["evidence"]}
        if "waiting excluded" in found["summary"] and used & partly:
            yield f"{found['code']} excludes waiting, and members of {used & partly} are unknown"


def _known_and_not(results: Results, loud: list[Finding]) -> Iterator[str]:
    """Sentences by which no straggler can be named, beside one that is."""
    if not any(found["code"].startswith("straggler.") for found in loud):
        return
    for sentence in (results["verdict"], *results["warnings"], *(f["summary"] for f in loud)):
        if _UNKNOWN.search(sentence):
            yield f"beside a straggler: {sentence}"


def _unknown_and_matched(results: Results) -> Iterator[str]:
    """Stragglers that cannot be determined, where all calls of ranks of one profiler match."""
    calls, ranks = results["collectives"], results["ranks"]
    alike = len(ranks) > 1 and len({each["profiler"].partition(" ")[0] for each in ranks}) == 1
    whole = calls["matched"] and not calls["incomplete"] and not calls["unmatched"]
    if alike and whole and results["pace"] and _UNKNOWN.search(results["verdict"]):
        yield f"all collectives match: {results['verdict']}"


def _of_nothing(results: Results) -> Iterator[str]:
    """Sentences of the verdict of a finding that is none, or that no straggler is, beside one."""
    names = [(f["code"], f["ranks"]) for f in results["findings"]]
    loud = [f["code"] for f in results["findings"] if f["severity"] != "info"]
    for sentence in results["headline"]:
        if sentence["code"] not in ("unknown", "none"):
            if (sentence["code"], sentence["ranks"]) not in names:
                yield f"the verdict is of {sentence['code']}, which is not among the findings"
        elif "No stragglers" in sentence["text"] and any(c.startswith("straggler.") for c in loud):
            yield f"beside {loud}: {sentence['text']}"


def _more_than_all(results: Results) -> Iterator[str]:
    """Savings that add up to more than the step, or that are net of what no rank is told of."""
    savings = [(f["saving"], f["saved_ns_per_step"]) for f in results["findings"] if f["saving"]]
    # in the long run a step is longer where queued work hides something in the window
    steps = [s[view]["step_ns"] for s, _ in savings for view in ("window", "long_run")]
    total = sum(max(ns, 0) for _, ns in savings)
    if savings and total > 1.001 * max(steps):
        yield f"all repairs save {total} ns of a step of {max(steps)} ns"
    for found in results["findings"]:
        if found["saving"] and found["saved_alone_ns"] > 1.001 * max(steps):
            yield f"{found['code']} alone saves {found['saved_alone_ns']} ns of {max(steps)} ns"
    names = [(f["code"], f["ranks"]) for f in results["findings"]]
    for one in (one for saving, _ in savings if saving for one in saving["net_of"]):
        if (one["code"], one["ranks"]) not in names:
            yield f"a saving is net of {one['code']}, which is not among the findings"


def _beyond_all(results: Results) -> Iterator[str]:
    """Shares above 100%, in numbers or in the text of the whole report."""
    for found in results["findings"]:
        if found["share_of_step"] > 1:
            yield f"{found['code']} is {found['share_of_step']:.0%} of the step"
    for name in ("M_W", "M_S"):
        if (results["what_if"][name] or 0) > 1:  # type: ignore[literal-required]
            yield f"{name} is above all of the slowdown"
    for share in _SHARE.findall(text.render(results)):
        if float(share) > 100:
            yield f"the report says {share}%"


def _other_than_drawn(results: Results) -> Iterator[str]:
    """What the page's choice of one repair leaves, beside what the finding saves alone."""
    combined = results["combined"]
    for k, one in enumerate(combined["findings"] if combined else ()):
        assert combined is not None
        now, left = combined["remaining_ns"][0], combined["remaining_ns"][1 << k]
        alone = [
            f["saved_alone_ns"]
            for f in results["findings"]
            if (f["code"], f["ranks"]) == (one["code"], one["ranks"])
            and f["saving"]
            and f["saving"]["stated"] == combined["view"]
        ]
        if alone and min(abs(now - left - ns) for ns in alone) > _SAME * now:
            yield f"{one['code']} saves {alone[0]} ns alone, and {now - left} ns where it is chosen"


def _idle_beyond_all(results: Results) -> Iterator[str]:
    """GPUs that idle for longer in one cause than in the whole step."""
    most = max((row.idle_ns for row in Summary(results).averages), default=0.0)
    for found in results["findings"]:
        for idle in _IDLE.findall(found["summary"]):
            if float(idle) * 1e6 > (1 + _SAME) * most:
                yield f"beside {most / 1e6:.3g} ms in all: {found['summary']}"
