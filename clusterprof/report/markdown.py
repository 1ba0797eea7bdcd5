"""The results as GitHub's and GitLab's Markdown: for an issue, a pull request, a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterprof import words
from clusterprof.report import summary
from clusterprof.results import Finding, Results

#: the first line: by it a file is known as ours
MARK = "<!-- written by clusterprof -->"
_MOST_RANKS = 16


def render(results: Results) -> str:
    """Verdict, findings and what was measured; the step's account folded. Ends in a newline."""
    lines = [MARK, f"**{escaped(results['verdict'])}**", ""]
    findings = summary.by_saving(results)
    if findings:
        head = ("finding", "", "whom", "saves per step", "of the step", "confidence")
        lines += [*pipes(head, [_row(each) for each in findings], left=3), ""]
    for each in findings:
        lines += _finding(each, results["verdict"])
    lines += [f"- {label}: {escaped(text)}" for label, text in summary.measured(results)]
    lines += [f"- missing: {escaped(summary.missing(each))}" for each in results["missing"]]
    lines += [f"- warning: {escaped(each)}" for each in results["warnings"]]
    rows = summary.averages(results)
    if rows:
        steps, steady = summary.evidence_steps(results)
        which = f"{'steady-state steps' if steady else 'steps'} {words.spans(steps, limit=6)}"
        shown = summary.worth_showing(results, rows, _MOST_RANKS)
        columns = ("rank", "step", "compute", "exposed", "waiting", "copies", "idle")
        cells = [
            [str(row.rank), *(words.milliseconds(ns) for ns in (
                row.duration_ns, row.compute_ns, row.exposed_communication_ns, row.exposed_wait_ns,
                row.exposed_copy_ns, row.idle_ns))]
            for row in shown
        ]  # fmt: skip
        more = f", {len(shown)} of {len(rows)} ranks" if len(shown) < len(rows) else ""
        lines += ["", f"<details><summary>Where a step goes: ms, mean of {which}{more}</summary>",
                  "", *pipes(columns, cells, left=0), "", "</details>"]  # fmt: skip
    return "\n".join([*lines, ""])


def _row(finding: Finding) -> list[str]:
    saved = finding["saved_ns_per_step"]
    return [
        finding["code"],
        finding["severity"],
        summary.whom(finding),
        words.with_bound(saved, finding["saved_uncertainty_ns"]) if saved > 0 else "-",
        words.percent(finding["share_of_step"]) if finding["share_of_step"] > 0 else "-",
        words.confidence(finding["confidence"]),
    ]


def _finding(finding: Finding, verdict: str) -> list[str]:
    above = finding["summary"] == verdict  # the first line is it
    lines = [f"**{finding['code']}**" + ("" if above else f": {escaped(finding['summary'])}"), ""]
    if finding["advice"]:
        lines += [f"Recommendation: {escaped(finding['advice'])}", ""]
    if finding["next"]:
        # Longer than any fence in it, so that no name in it ends the block.
        command = words.plain(finding["next"])
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
        lines += [f"{fence}sh", command, fence, ""]
    return lines


def pipes(head: Sequence[str], table: Sequence[Sequence[str]], left: int) -> list[str]:
    """A table's lines; the first `left` columns are set to the left."""
    marks = ["---" if place < left or not each else "--:" for place, each in enumerate(head)]
    lines = [head, marks, *([escaped(cell.strip()) for cell in each] for each in table)]
    return [f"| {' | '.join(each)} |" for each in lines]


def escaped(text: str) -> str:
    """Text of a report that Markdown shows as it is: it can begin no link, tag or mention."""
    plain = words.plain(text)
    return re.sub(r"([\\`*_\[\]<>|~@#&])", r"\\\1", plain).replace("\\@", "@\u200b")
