"""The results as text: for a terminal, as Markdown, as CSV; and what a job hangs in.

The answer first, then what it rests on. A number that is not larger than the clock's own error is
not given.
"""

import csv
import io
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from clusterprof import console, pauses, words
from clusterprof.report import summary
from clusterprof.report.summary import Summary
from clusterprof.results import CalledEntry, Finding, HangEntry, HangResults, RankAccount, Results

_SGR = {"critical": "1;31", "warning": "1;33", "info": "1;36", "strong": "1", "quiet": "2"}
#: every code that a page may have in it, if it has colours
CODES = ["\x1b[0m", *(f"\x1b[{code}m" for code in _SGR.values())]
_OPERATION_COLUMNS = (
    "operation", "communicator", "ranks", "calls", "bytes", "time", "exposed", "waiting",
)  # fmt: skip
#: columns of the labels in front of what was measured
_LABEL = 10
#: the first line of Markdown: by it a file is known as ours
MARKDOWN_MARK = "<!-- written by clusterprof -->"
#: members of each row of CSV after its step and rank; times in ns
_PARTS = [name for name in RankAccount.__annotations__ if name != "rank"]
CSV_COLUMNS = ["step", "steady_state", "rank", "host", "step_begin_ns", *_PARTS]


def render(results: Results, *, colour: bool = False, width: int = 100) -> str:
    """The whole report as plain text, ending in a newline; the first line is the verdict.

    Colour is SGR codes around words and never changes the layout. `width` columns are kept by all
    that follows down to 60; commands to copy and names that cannot be broken may be longer.
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
    if run.pauses:
        page.paragraph()
        page.line(f"pauses  {run.paused}")
        for pause in run.pauses:
            page.sentence(pauses.sentence(pause), 4, "  ")
    page.paragraph()
    for warning in results["warnings"]:
        page.sentence(words.plain(warning), 9, "warning", style="warning")
    page.paragraph()
    if evidence := results.get("evidence_table"):
        sources = words.listed(dict.fromkeys(row["source"] for row in evidence))
        where = "at the end of the page, and in results.json (evidence_table)"
        page.sentence(
            f"evidence by {sources}: {words.counted(len(evidence), 'row')} {where}", style="quiet"
        )
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
        """Columns, the first `left` to the left; without shares and `spare` on a narrow page."""
        body = [[*header], *map(list, rows)]
        lines = console.table(body, right=range(left, len(header)))
        if 4 + max(map(len, lines)) > self._width:
            kept = [column for column, name in enumerate(header) if name not in spare]
            body = [[re.sub(r" +[\d.<]+%$", "", row[column]) for column in kept] for row in body]
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
        page.sentence(run.figures(finding), 4)
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
            page.sentence(line, 15, label)


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
        for entry in operations[:8]
    ]
    if rows:
        page.table(_OPERATION_COLUMNS, rows, left=3, spare=("communicator", "bytes"))
        page.sentence("per step; times: the mean over all profiled ranks", 2, style="quiet")
    if len(operations) > len(rows):
        page.sentence(f"and {len(operations) - len(rows)} more, with less exposed time", 2)


def markdown(results: Results) -> str:
    """Markdown for an issue, pull request or chat, the step's account folded; ends in a newline."""
    run = Summary(results)
    lines = [MARKDOWN_MARK, f"**{escaped(results['verdict'])}**", ""]
    if findings := results["findings"]:
        rows = [
            [finding["code"], finding["severity"], summary.whom(finding),
             summary.saved_cell(finding), run.share(finding) or "-", summary.certainty(finding)]
            for finding in findings
        ]  # fmt: skip
        head = ("finding", "", "whom", "saves per step", "of the step", "confidence")
        lines += [*pipes(head, rows, left=3), ""]
    for finding in findings:
        lines += _markdown_finding(finding, results["verdict"])
    lines += [f"- {label}: {escaped(text)}" for label, text in run.measured]
    lines += [f"- pause: {escaped(pauses.sentence(entry))}" for entry in run.pauses]
    lines += [f"- missing: {escaped(summary.missing(entry))}" for entry in results["missing"]]
    lines += [f"- warning: {escaped(warning)}" for warning in results["warnings"]]
    if rows := run.account_rows:
        every = len(run.averages)
        some = f", {len(rows)} of {every} ranks" if len(rows) < every else ""
        title = f"Step time breakdown: ms and share, mean of {run.averaged_over}{some}"
        table = pipes(summary.ACCOUNT_COLUMNS, rows, left=0)
        lines += ["", f"<details><summary>{title}</summary>", "", *table, "", "</details>"]
    return "\n".join([*lines, ""])


def _markdown_finding(finding: Finding, verdict: str) -> list[str]:
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


def accounts_csv(results: Results) -> str:
    """Each rank's account in each step as CSV: ns, begins on the reference rank's clock."""
    hosts = {rank["rank"]: spreadsheet_cell(rank["host"]) for rank in results["ranks"]}
    page = io.StringIO()
    table = csv.writer(page, lineterminator="\n")
    table.writerow(CSV_COLUMNS)
    for step in results["steps"]:
        steady = int(step["settled"])
        for account in step["ranks"]:
            rank, parts = account["rank"], [account[name] for name in _PARTS]  # type: ignore[literal-required]
            host, begin_ns = hosts.get(rank, ""), step["begin_ns"]
            table.writerow([step["step"], steady, rank, host, begin_ns, *parts])
    return page.getvalue()


def spreadsheet_cell(value: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def hang_verdict(hang: list[HangEntry], waiting: list[int], *, whole: bool = True) -> str:
    """What a job hangs in, in one sentence; `whole`: there is a dump of each of its ranks."""
    if hang:
        return hang_sentence(hang[0])
    if waiting:
        return f"{words.ranks(waiting).capitalize()} had not ended a call when the dump was taken."
    if not whole:
        return "Of the ranks with a dump none waits for another; of the others nothing is known."
    return "No rank waits for another rank."


def hang_sentence(hang: HangEntry) -> str:
    """Return what is wrong with one call."""
    name = words.group(hang["group"], hang["description"] or "group")
    call = f"{hang['operation']} {hang['sequence']} of {words.plain(name)}"
    who = words.ranks(hang["ranks"])
    who = (f"one of {who}" if hang["one_of"] else who).capitalize() if hang["ranks"] else ""
    sentence = {
        "never_joined": f"{who} never joined {call}",
        "other_operation": f"{who} called another operation than {call}",
        "other_size": f"{who} called {call} with another size",
        "other_type": f"{who} called {call} with another data type",
        "no_receive": f"{who} never received what {call} sends",
        "no_send": f"{who} never sent what {call} receives",
        "no_dump": f"{who} left no dump, and {call} does not end",
        "stalled": f"All members joined {call}, and it does not end",
    }[hang["cause"]]
    verb = "waits" if len(hang["waiting"]) == 1 else "wait"
    waits = f"; {words.ranks(hang['waiting'])} {verb}" if hang["waiting"] else ""
    return f"{sentence}{waits}."


def _called(called: CalledEntry) -> str:
    """What a rank called, and where in the program."""
    if not called["operation"]:
        return f"  rank {called['rank']}: no call recorded"
    last = "" if called["joined"] else "last called "
    sizes = f"{called['input_sizes'] or called['output_sizes']} {called['input_types']}"
    line = f", {words.plain(called['line'])}" if called["line"] else ""
    call = f"{called['operation']} {called['sequence']} {sizes}{line}"
    return f"  rank {called['rank']}: {last}{call}"


def hang_page(results: HangResults) -> str:
    """Return what a job hangs in: each cause, who waits, and where in the program."""
    lines = [results["verdict"]]
    for number, hang in enumerate(results["hang"]):
        lines += ["", hang_sentence(hang)] if number else []
        odd = [called for called in hang["called"] if called["rank"] in hang["ranks"]]
        rest = [called for called in hang["called"] if called["rank"] not in hang["ranks"]]
        # results.json has the lines of all ranks
        lines += map(_called, (*odd[:4], *rest[:1]))
    lines += [""] * bool(results["missing"])
    for lost in results["missing"]:
        whose = "a dump" if lost["rank"] is None else f"rank {lost['rank']}"
        lines.append(f"missing: {whose}: {lost['reason']}")
    return "\n".join([*lines, *(f"warning: {text}" for text in results["warnings"]), ""])
