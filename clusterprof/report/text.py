"""The verdict for a terminal: the answer first, then what it rests on.

Plain text of `width` columns; colour is SGR codes around words and never changes the
layout. A number that is not larger than the clock's own error is not said.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from clusterprof.report import format as show
from clusterprof.report.averages import Average, averages, evidence_steps
from clusterprof.report.precision import pair_bound_ns
from clusterprof.results import Finding, Results

_SGR = {"critical": "1;31", "warning": "1;33", "info": "1;36", "strong": "1", "quiet": "2"}
_MOST_RANKS = 16
_MOST_OPERATIONS = 8


def wants_colour(stream: TextIO) -> bool:
    """Colour for people only: a terminal, not a dumb one, and NO_COLOR not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def render(results: Results, *, colour: bool = False, width: int = 100) -> str:
    """The whole verdict, ending in a newline; the first line is its one sentence.

    `width` columns are kept by all sentences and tables down to 80; commands to copy and
    names that cannot be broken may be longer.
    """
    page = _Page(colour=colour, width=max(width, 40))
    page.sentence(show.plain(results["verdict"]), style="strong")
    page.blank()
    _measured(page, results)
    _holes(page, results)
    _findings(page, results)
    _account(page, results)
    _collectives(page, results)
    _warnings(page, results["warnings"])
    return page.text()


class _Page:
    """Lines so far, and the two things that every line depends on."""

    def __init__(self, *, colour: bool, width: int) -> None:
        self._colour = colour
        self.width = width
        self._lines: list[str] = []

    def blank(self) -> None:
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def line(self, text: str, style: str = "") -> None:
        self._lines.append(self.styled(text.rstrip(), style))

    def sentence(self, text: str, indent: int = 0, lead: str = "", style: str = "") -> None:
        """A wrapped paragraph; `lead` fills the indentation of its first line."""
        wrapped = textwrap.wrap(
            text,
            max(self.width - indent, 20),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for number, part in enumerate(wrapped or [""]):
            margin = (lead if number == 0 else "").ljust(indent)
            self.line(margin + self.styled(part, style))

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{_SGR[style]}m{text}\x1b[0m" if self._colour and style and text else text

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> None:
        """Columns as wide as their widest cell; the first `left` are set to the left."""
        body = [list(header), *map(list, rows)]
        widths = [max(len(row[column]) for row in body) for column in range(len(header))]
        for number, row in enumerate(body):
            cells = [
                cell.ljust(wide) if column < left else cell.rjust(wide)
                for column, (cell, wide) in enumerate(zip(row, widths, strict=True))
            ]
            self.line("  " + "  ".join(cells), style="quiet" if number == 0 else "")

    def text(self) -> str:
        while self._lines and not self._lines[-1]:
            self._lines.pop()
        return "\n".join(self._lines) + "\n"


def _measured(page: _Page, results: Results) -> None:
    page.sentence(ranks_sentence(results), indent=7, lead="ranks")
    page.sentence(clock_sentence(results), indent=7, lead="clock")


def ranks_sentence(results: Results) -> str:
    """Which ranks were seen, of how many, where and with what."""
    entries = results["ranks"]
    if not entries:
        return "none gave a report"
    world = max((entry["world_size"] or 0 for entry in entries), default=0)
    numbers = show.numbers((entry["rank"] for entry in entries), limit=12)
    parts = [f"{numbers} of {world}" if world else numbers]
    hosts = sorted({show.plain(entry["host"]) for entry in entries} - {""})
    if hosts:
        parts.append(f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts")
    devices = sorted({show.plain(entry["device"]) for entry in entries} - {""})
    profilers = sorted({show.plain(entry["profiler"]) for entry in entries} - {""})
    steps, settled = evidence_steps(results)
    if settled:
        kind = "settled step" if len(steps) == 1 else "settled steps"
        seen = f"{len(steps)} {kind} of {len(results['steps'])} ({show.numbers(steps, limit=6)})"
    elif steps:
        seen = f"{show.counted(len(steps), 'step')}, none of them settled"
    else:
        seen = "no steps"
    return ", ".join([" ".join(parts), *devices, " and ".join(profilers), seen])


def clock_sentence(results: Results) -> str:
    """Whose clock is used and to within what the others are known on it."""
    clock = results["clock"]
    others = [entry for entry in clock["ranks"] if entry["rank"] != clock["reference_rank"]]
    if not others:
        return f"rank {clock['reference_rank']}'s own; no other rank to compare with"
    worst = max(entry["uncertainty_ns"] for entry in others)
    method = f" ({show.plain(clock['method'])})" if clock["method"] else ""
    whom = "the other rank" if len(others) == 1 else "every other rank"
    return f"rank {clock['reference_rank']}'s; {whom} is known on it to {show.bound(worst)}{method}"


def _holes(page: _Page, results: Results) -> None:
    for hole in results["missing"]:
        name = "a rank" if hole["rank"] is None else f"rank {hole['rank']}"
        source = f" ({show.plain(hole['source'])})" if hole["source"] else ""
        page.sentence(f"{name}: {show.plain(hole['reason'])}{source}", 7, "hole", style="warning")
    page.blank()


def _findings(page: _Page, results: Results) -> None:
    findings = sorted(results["findings"], key=lambda f: -f["cost_ns_per_step"])
    if not findings:
        page.line("findings  none")
        page.blank()
        return
    page.line("findings, the costliest first")
    page.blank()
    for number, finding in enumerate(findings, 1):
        _finding(page, number, finding)
        page.blank()


def _finding(page: _Page, number: int, finding: Finding) -> None:
    who = whom(finding)
    severity = page.styled(finding["severity"], finding["severity"])
    code = page.styled(finding["code"], "strong")
    page.line(f"{number:>2}  {severity}  {code}" + (f"  {who}" if who else ""))
    indent = 4
    facts = [cost(finding)]
    if finding["cost_ns_per_step"] > finding["uncertainty_ns"] and finding["share_of_step"] > 0:
        facts.append(f"{show.percent(finding['share_of_step'])} of the step")
    facts += [recurrence(finding), f"confidence {show.confidence(finding['confidence'])}"]
    page.sentence(", ".join(facts), indent)
    page.sentence(show.plain(finding["summary"]), indent)
    if finding["advice"]:
        page.sentence(show.plain(finding["advice"]), indent + 8, " " * indent + "advice")
    if finding["next"]:
        page.line(" " * indent + "next".ljust(8) + show.plain(finding["next"]))


def whom(finding: Finding) -> str:
    """The rank or ranks that a finding names, or nothing."""
    if finding["rank"] is not None:
        return f"rank {finding['rank']}"
    if not finding["ranks"]:
        return ""
    noun = "rank" if len(set(finding["ranks"])) == 1 else "ranks"
    return f"{noun} {show.numbers(finding['ranks'], limit=8)}"


def cost(finding: Finding) -> str:
    """The cost per step with its uncertainty, or that there is none to be seen."""
    if finding["cost_ns_per_step"] <= 0:
        return "no cost of its own"
    if finding["cost_ns_per_step"] <= finding["uncertainty_ns"]:
        return f"cost per step within the uncertainty ({show.bound(finding['uncertainty_ns'])})"
    return f"{show.with_bound(finding['cost_ns_per_step'], finding['uncertainty_ns'])} per step"


def recurrence(finding: Finding) -> str:
    """In how many steps it was seen."""
    steps = finding["steps"]
    if not steps:
        return finding["recurrence"]
    noun = "step" if len(set(steps)) == 1 else "steps"
    return f"{finding['recurrence']} ({noun} {show.numbers(steps, limit=6)})"


def _account(page: _Page, results: Results) -> None:
    rows = averages(results)
    if not rows:
        return
    steps, settled = evidence_steps(results)
    kind = "settled step" if settled else "step (none is settled: the capture itself shows)"
    which = show.numbers(steps, limit=6)
    page.sentence(f"where a {kind} goes, ms and share, mean over {which}")
    floor = pair_bound_ns(results)
    shown = _worth_showing(rows, results)
    header = ["rank", "step", "compute", "exposed", "waiting", "copies", "idle"]
    table = [_account_row(row, floor) for row in shown]
    page.table(header, table, left=0)
    if len(shown) < len(rows):
        page.sentence(
            f"{len(rows) - len(shown)} more ranks are in results.json and the HTML page", 2
        )
    page.sentence(
        "exposed: communication that no compute hides; waiting: the part of it before the last "
        "rank has arrived",
        2,
        style="quiet",
    )
    page.blank()


def _worth_showing(rows: list[Average], results: Results) -> list[Average]:
    """All ranks, or of many those that findings name and those that wait least and most."""
    if len(rows) <= _MOST_RANKS:
        return rows
    named = {rank for finding in results["findings"] for rank in finding["ranks"][:4]}
    named |= {finding["rank"] for finding in results["findings"] if finding["rank"] is not None}
    by_wait = sorted(rows, key=lambda row: row.exposed_wait_ns)
    ends = [row.rank for pair in zip(by_wait, reversed(by_wait), strict=True) for row in pair]
    chosen = sorted(named & {row.rank for row in rows})[:_MOST_RANKS]
    for rank in ends:
        if len(chosen) < _MOST_RANKS and rank not in chosen:
            chosen.append(rank)
    return [row for row in rows if row.rank in set(chosen)]


def _account_row(row: Average, floor: int) -> list[str]:
    decimals = 0 if row.duration_ns >= 1e9 else 1 if row.duration_ns >= 1e8 else 2

    def cell(ns: float) -> str:
        share = show.percent(ns / row.duration_ns) if row.duration_ns else "-"
        return f"{show.milliseconds(ns, decimals)} {share:>5}"

    tiny = 0 < row.exposed_wait_ns <= floor
    return [
        str(row.rank),
        show.milliseconds(row.duration_ns, decimals),
        cell(row.compute_ns),
        cell(row.exposed_communication_ns),
        f"<{show.bound(floor)[1:]}" if tiny else cell(row.exposed_wait_ns),
        cell(row.exposed_copy_ns),
        cell(row.idle_ns),
    ]


def _collectives(page: _Page, results: Results) -> None:
    counts = results["collectives"]
    page.line(
        f"collectives  {counts['matched']:,} matched, {counts['incomplete']:,} incomplete, "
        f"{counts['unmatched']:,} unmatched"
    )
    floor = pair_bound_ns(results)
    entries = sorted(counts["by_operation"], key=lambda e: -e["exposed_ns"])
    rows = [
        [
            show.plain(entry["operation"]),
            show.communicator(entry["communicator"]),
            show.numbers(entry["ranks"], limit=3),
            f"{entry['calls']:,}",
            show.size(entry["message_bytes"]),
            show.duration(entry["exposed_ns"]),
            show.duration(entry["wait_ns"]) if entry["wait_ns"] > floor * entry["calls"] else "-",
            show.duration(entry["transfer_ns"]),
        ]
        for entry in entries[:_MOST_OPERATIONS]
    ]
    if rows:
        header = ["operation", "communicator", "ranks", "calls", "bytes"]
        page.table([*header, "exposed", "wait", "transfer"], rows, left=3)
    if len(entries) > len(rows):
        page.sentence(f"and {len(entries) - len(rows)} more, with less exposed time", 2)
    page.blank()


def _warnings(page: _Page, warnings: Sequence[str]) -> None:
    for warning in warnings:
        page.sentence(show.plain(warning), 9, "warning", style="warning")
