"""The results as GitHub's and GitLab's Markdown: for an issue, a pull request, a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterprof import words
from clusterprof.report import summary
from clusterprof.report.summary import Summary
from clusterprof.results import Finding, Results

#: the first line: by it a file is known as ours
MARK = "<!-- written by clusterprof -->"


def render(results: Results) -> str:
    """Verdict, findings and what was measured; the step's account folded. Ends in a newline."""
    run = Summary(results)
    lines = [MARK, f"**{escaped(results['verdict'])}**", ""]
    if findings := results["findings"]:
        head = ("finding", "", "whom", "saves per step", "of the step", "confidence")
        lines += [*pipes(head, [_row(finding) for finding in findings], left=3), ""]
    for finding in findings:
        lines += _finding(finding, results["verdict"])
    lines += [f"- {label}: {escaped(text)}" for label, text in run.measured]
    lines += [f"- missing: {escaped(summary.missing(entry))}" for entry in results["missing"]]
    lines += [f"- warning: {escaped(warning)}" for warning in results["warnings"]]
    if rows := run.account_rows:
        every = len(run.averages)
        some = f", {len(rows)} of {every} ranks" if len(rows) < every else ""
        title = f"Step time breakdown: ms and share, mean of {run.averaged_over}{some}"
        table = pipes(summary.ACCOUNT_COLUMNS, rows, left=0)
        lines += ["", f"<details><summary>{title}</summary>", "", *table, "", "</details>"]
    return "\n".join([*lines, ""])


def _row(finding: Finding) -> list[str]:
    share = words.percent(finding["share_of_step"]) if finding["share_of_step"] > 0 else "-"
    saved, confidence = summary.saved_cell(finding), words.confidence(finding["confidence"])
    return [finding["code"], finding["severity"], summary.whom(finding), saved, share, confidence]


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
    marks = ["---" if column < left or not name else "--:" for column, name in enumerate(head)]
    lines = [head, marks, *([escaped(cell.strip()) for cell in row] for row in table)]
    return [f"| {' | '.join(line)} |" for line in lines]


def escaped(text: str) -> str:
    """Text of a report that Markdown shows as it is: it can begin no link, tag or mention."""
    plain = words.plain(text)
    return re.sub(r"([\\`*_\[\]<>|~@#&])", r"\\\1", plain).replace("\\@", "@\u200b")
