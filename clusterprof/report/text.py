"""The results for a terminal: the answer first, then what it rests on.

Plain text of `width` columns; colour is SGR codes around words and never changes the
layout. A number that is not larger than the clock's own error is not given.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from clusterprof import console, words
from clusterprof.report import summary
from clusterprof.report.summary import Summary
from clusterprof.results import Results

_SGR = {"critical": "1;31", "warning": "1;33", "info": "1;36", "strong": "1", "quiet": "2"}
#: every code that a page may have in it, if it has colours
CODES = ["\x1b[0m", *(f"\x1b[{code}m" for code in _SGR.values())]
#: a share of the step behind a time
_SHARE = re.compile(r" +[\d.<]+%$")
_MOST_OPERATIONS = 8
_OPERATION_COLUMNS = (
    "operation", "communicator", "ranks", "calls", "bytes", "time", "exposed", "waiting",
)  # fmt: skip
#: columns of the labels in front of what was measured
_LABEL = 10
_MODEL_LABEL = 15


def render(results: Results, *, colour: bool = False, width: int = 100) -> str:
    """The whole report, ending in a newline; the first line is the verdict.

    `width` columns are kept by all that follows down to 60; commands to copy and names that
    cannot be broken may be longer.
    """
    page, run = _Page(colour=colour, width=max(width, 40)), Summary(results)
    # one line however long it is: `head -1` of a log is the whole verdict
    page.line(words.plain(results["verdict"]), style="strong")
    page.paragraph()
    for label, text in run.measured:
        page.sentence(text, _LABEL, label)
    for entry in results["missing"]:
        page.sentence(summary.missing(entry), _LABEL, "missing", style="warning")
    _findings(page, run)
    _account(page, run)
    if results["ranks"]:
        _collectives(page, run)
    if run.suspects:
        page.paragraph()
        page.line("late by the flight recorders of all ranks")
        # lines of programs are long, and in the findings
        rows = [row[:-1] for row in run.suspects[: summary.MOST_RANKS]]
        page.table(summary.SUSPECT_COLUMNS[:-1], rows, left=3)
    page.paragraph()
    for warning in results["warnings"]:
        page.sentence(words.plain(warning), 9, "warning", style="warning")
    return page.text()


class _Page:
    """Paragraphs of lines so far, and the two things that every line depends on."""

    def __init__(self, *, colour: bool, width: int) -> None:
        self._colour = colour
        self._width = width
        self._paragraphs: list[list[str]] = [[]]

    def paragraph(self) -> None:
        self._paragraphs.append([])

    def line(self, text: str, style: str = "") -> None:
        self._paragraphs[-1].append(self.styled(text.rstrip(), style))

    def sentence(self, text: str, indent: int = 0, lead: str = "", style: str = "") -> None:
        """Wrapped text; `lead` fills the indentation of its first line."""
        width = max(self._width - indent, 20)
        wrapped = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(wrapped or [""]):
            margin = (lead if number == 0 else "").ljust(indent)
            self.line(margin + self.styled(line, style))

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{_SGR[style]}m{text}\x1b[0m" if self._colour and style and text else text

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        left: int,
        spare: Collection[str] = (),
    ) -> None:
        """Columns as wide as their widest cell; the first `left` are set to the left.

        Where they are too wide for the page, shares (` 48%` behind a number) and the columns
        `spare` are left out.
        """
        body = [[*header], *map(list, rows)]
        lines = console.table(body, right=range(left, len(header)))
        if 4 + max(map(len, lines)) > self._width:
            kept = [column for column, name in enumerate(header) if name not in spare]
            body = [[_SHARE.sub("", row[column]) for column in kept] for row in body]
            left = sum(column < left for column in kept)
            lines = console.table(body, right=range(left, len(kept)))
        for number, line in enumerate(lines):
            self.line(f"  {line}", style="" if number else "quiet")

    def text(self) -> str:
        return "\n\n".join("\n".join(lines) for lines in self._paragraphs if lines) + "\n"


def _findings(page: _Page, run: Summary) -> None:
    page.paragraph()
    findings = run.results["findings"]
    page.line("findings, those that save most first" if findings else "findings  none")
    for number, finding in enumerate(findings, 1):
        page.paragraph()
        whom = summary.whom(finding)
        severity = page.styled(finding["severity"], finding["severity"])
        code = page.styled(finding["code"], "strong")
        page.line(f"{number:>2}  {severity}  {code}" + (f"  {whom}" if whom else ""))
        page.sentence(summary.figures(finding), 4)
        # the verdict stands above the first one
        if text := run.not_in_verdict(finding) if number == 1 else finding["summary"]:
            page.sentence(words.plain(text), 4)
        if finding["advice"]:
            page.sentence(f"recommendation: {words.plain(finding['advice'])}", 4)
        if finding["next"]:
            page.line(f"    next: {words.plain(finding['next'])}")
    page.paragraph()
    if findings:
        explain = "what a finding means and when it is wrong: clusterprof explain CODE"
        page.sentence(explain, style="quiet")


def _account(page: _Page, run: Summary) -> None:
    rows = run.account_rows
    if not rows:
        return
    page.paragraph()
    disturbed = ", none of which is free of the profiler's own start and stop"
    steps = run.averaged_over + ("" if run.has_steady_steps else disturbed)
    page.sentence(f"step time breakdown: ms and share of the step, mean of {steps}")
    page.table(summary.ACCOUNT_COLUMNS, rows, left=0)
    if len(rows) < len(run.averages):
        page.sentence(f"{len(run.averages) - len(rows)} more ranks are in results.json", 2)
    page.sentence(
        "exposed: communication not overlapped with compute; waiting: the part of it before the "
        "last rank arrives",
        2,
        style="quiet",
    )
    page.paragraph()
    for label, line in (("critical path", run.critical_path), ("unevenness", run.uneven)):
        if line:
            page.sentence(line, _MODEL_LABEL, label)


def _collectives(page: _Page, run: Summary) -> None:
    page.paragraph()
    page.line(f"collectives  {run.collectives}")
    operations = run.results["collectives"]["by_operation"]
    rows = [
        [
            words.plain(entry["operation"]),
            words.communicator(entry["communicator"]),
            words.spans(entry["ranks"], limit=3),
            *(cell for cell, _ in summary.operation_cells(entry, run.pair_bound_ns)),
        ]
        for entry in operations[:_MOST_OPERATIONS]
    ]
    if rows:
        page.table(_OPERATION_COLUMNS, rows, left=3, spare=("communicator", "bytes"))
        page.sentence("per step; times: the mean over all profiled ranks", 2, style="quiet")
    if len(operations) > len(rows):
        page.sentence(f"and {len(operations) - len(rows)} more, with less exposed time", 2)
