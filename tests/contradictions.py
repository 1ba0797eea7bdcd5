"""What finished results say that cannot be true beside what else they say.

Each kind was seen in reports of other people's jobs. A report that is right has none,
whatever the job: so every recording and every simulated job is asked (`tests/science`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from clusterprof.report import text
from clusterprof.results import Finding, Results

#: findings that compare ranks by their matched collectives
_COMPARED = ("straggler.host", "straggler.gpu")
#: the job does not cause it, so that its repair saves nothing
_NO_SAVING = "profiler.perturbation"
_UNKNOWN = re.compile(r"(?i)\b(stragglers?|who (was|is) late)\b[^.]*cannot be determined")
_SHARE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)%")
_ONLY_POSSIBLE = re.compile(r"\bmay delay\b")


def contradictions(results: Results) -> list[str]:
    """Return a sentence for each contradiction; [] for results without any."""
    loud = [found for found in results["findings"] if found["severity"] != "info"]
    return [
        *_open(loud),
        *_unmatched(results),
        *_known_and_not(results, loud),
        *_beyond_all(results),
        *_more_than_all(results),
        *(["the headline says who may delay"] if _ONLY_POSSIBLE.search(results["verdict"]) else []),
    ]


def _open(loud: list[Finding]) -> Iterator[str]:
    """Findings above severity info that may save nothing."""
    for found in loud:
        least, most = found["saved_least_ns"], found["saved_most_ns"]
        if found["code"] != _NO_SAVING and least <= 0:
            yield f"{found['code']} is {found['severity']} and saves {least} to {most} ns"


def _unmatched(results: Results) -> Iterator[str]:
    """Stragglers among ranks of which no collective is matched."""
    matched = {rank for each in results["collectives"]["by_operation"] for rank in each["ranks"]}
    for found in results["findings"]:
        compared = found["code"] in _COMPARED
        if compared and not (results["collectives"]["matched"] and {*found["ranks"]} <= matched):
            yield f"{found['code']} of ranks {found['ranks']} without a matched collective"


def _known_and_not(results: Results, loud: list[Finding]) -> Iterator[str]:
    """Sentences by which no straggler can be named, beside one that is."""
    if not any(found["code"].startswith("straggler.") for found in loud):
        return
    for sentence in (results["verdict"], *results["warnings"], *(f["summary"] for f in loud)):
        if _UNKNOWN.search(sentence):
            yield f"beside a straggler: {sentence}"


def _more_than_all(results: Results) -> Iterator[str]:
    """Savings that add up to more than the step, or that are net of what no rank is told of."""
    savings = [(f["saving"], f["saved_ns_per_step"]) for f in results["findings"] if f["saving"]]
    # in the long run a step is longer where queued work hides something in the window
    steps = [s[view]["step_ns"] for s, _ in savings for view in ("window", "long_run")]
    total = sum(max(ns, 0) for _, ns in savings)
    if savings and total > 1.001 * max(steps):
        yield f"all repairs save {total} ns of a step of {max(steps)} ns"
    names = [(f["code"], f["ranks"]) for f in results["findings"]]
    for one in (one for saving, _ in savings if saving for one in saving["net_of"]):
        if (one["code"], one["ranks"]) not in names:
            yield f"a saving is net of {one['code']}, which is not among the findings"


def _beyond_all(results: Results) -> Iterator[str]:
    """Shares above 100%, in numbers or in the text of the whole report."""
    for found in results["findings"]:
        if found["share_of_step"] > 1:
            yield f"{found['code']} is {found['share_of_step']:.0%} of the step"
    for share in _SHARE.findall(text.render(results)):
        if float(share) > 100:
            yield f"the report says {share}%"
