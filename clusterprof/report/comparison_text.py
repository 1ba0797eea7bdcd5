"""A comparison as text for a terminal, as Markdown for a pull request, and as one HTML page.

The page loads nothing from anywhere and has no script.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof import console, words
from clusterprof.report.text import escaped, pipes
from clusterprof.results import Change, ComparedFinding, Comparison

#: longer names are cut: paths of 200 letters fit into no table
_NAME_LENGTH = 80
#: parts of the part before them
_INNER = {"waiting for a later rank", "blocking compute"}
COLUMNS = ("per step", "A", "B", "change", "noise", "")
FINDING_COLUMNS = ("finding", "", "A saves", "B saves", "change", "noise")


def render(comparison: Comparison, width: int = 100) -> str:
    """The comparison as text of `width` columns (from 60 on), the verdict first, a newline last."""
    lines = heading(comparison["verdict"], comparison["a"], comparison["b"], width)
    lines += ["", *_table([COLUMNS, *map(row, changes(comparison))], 1, width)]
    for sentence in basis(comparison):
        lines += console.wrapped(f"  {sentence}", width, " " * 2)
    if rows := finding_rows(comparison):
        lines += ["", *_table([FINDING_COLUMNS, *rows], 2, width)]
        lines.append("  saves: what its repair saves per step once those before it are repaired")
    lines += [""] * bool(remarks(comparison))
    for remark in remarks(comparison):
        lines += console.wrapped(f"warning  {remark}", width, " " * 9)
    return "\n".join(lines) + "\n"


def heading(verdict: str, a: Sequence[str], b: Sequence[str], width: int) -> list[str]:
    """The verdict on two sides, and the names of their runs, as lines of text."""
    lines = [*console.wrapped(words.plain(verdict), width), ""]
    for side, names in (("A", a), ("B", b)):
        lines += console.wrapped(f"{side}  {names_of(names)}", width, " " * 3)
    return lines


def markdown(comparison: Comparison) -> str:
    """The comparison as GitHub's and GitLab's Markdown: verdict, changes, and the rest folded."""
    changed = [part for part in comparison["parts"][1:] if part["direction"] != "none"]
    lines = [
        f"**{escaped(comparison['verdict'])}**", "",
        *pipes(COLUMNS, [row(change) for change in (comparison["step"], *changed)], left=1), "",
    ]  # fmt: skip
    if rows := finding_rows(comparison):
        lines += [*pipes(FINDING_COLUMNS, rows, left=2), ""]
    lines += ["<details><summary>All parts of the step, and what is compared</summary>", ""]
    lines += [*pipes(COLUMNS, [row(change) for change in changes(comparison)], left=1), ""]
    sides = [f"{side}: {names_of(comparison[side.lower()])}" for side in "AB"]  # type: ignore[literal-required]
    texts = [*sides, *basis(comparison), *remarks(comparison)]
    return "\n".join([*lines, *(f"- {escaped(text)}" for text in texts), "", "</details>", ""])


def page(comparison: Comparison) -> str:
    """The comparison as a page; the same comparison gives the same page."""
    from clusterprof.report import html

    shown = changes(comparison)
    # a bar is a change and its noise about the middle of a drawing, %; all are on one scale: half
    # of a drawing is the largest change or noise
    largest = max(max(abs(change["change_ns"]), change["noise_ns"]) for change in shown)
    scale = 50 / max(largest, 1)
    bars = []
    for change in shown:
        length, noise = change["change_ns"] * scale, change["noise_ns"] * scale
        places = {"left": min(50.0, 50 + length), "width": abs(length)}
        places |= {"noise_left": 50 - noise, "noise_width": 2 * noise}
        bars.append({name: round(place, 2) for name, place in places.items()})
    template = html.environment().get_template("comparison.html.j2")
    return template.render(
        comparison=comparison,
        title="comparison",
        columns=COLUMNS,
        changes=list(zip(shown, map(row, shown), bars, strict=True)),
        finding_columns=FINDING_COLUMNS,
        findings=finding_rows(comparison),
        sides=[("A", names_of(comparison["a"])), ("B", names_of(comparison["b"]))],
        basis=basis(comparison),
        remarks=remarks(comparison),
    )


def changes(comparison: Comparison) -> list[Change]:
    """The step, unless it is the window's, then the window's and its parts."""
    step = [] if comparison["steps_from"] == "window" else [comparison["step"]]
    return [*step, *comparison["parts"]]


def row(change: Change) -> list[str]:
    """One row: A, B, the change and its noise, and what may be said of it."""
    remark = "within the noise" if change["direction"] == "none" else change["direction"]
    values = [words.ms(change["a_ns"]), words.ms(change["b_ns"]), _signed(change["change_ns"])]
    indent = "  " if change["what"] in _INNER else ""
    return [indent + change["what"], *values, words.bound(change["noise_ns"]), remark]


def finding_rows(comparison: Comparison) -> list[list[str]]:
    """The findings that came, went or changed first; those that stay as they are behind them."""
    findings = sorted(comparison["findings"], key=lambda finding: finding["state"] == "same")
    rows = []
    for finding in findings[:12]:
        saves = [_saves(comparison, finding, side) for side in ("a", "b")]
        state: str = finding["state"]
        if state == "same":
            # a side that does not have it may lack it by chance
            state = "within the noise" if "-" in saves else "as before"
        name = words.plain(f"{finding['code']} {words.ranks(finding['ranks'], 4)}")
        growth = _signed(finding["b_saved_ns"] - finding["a_saved_ns"])
        rows.append([state, name, *saves, growth, words.bound(finding["noise_ns"])])
    return rows


def figures(comparison: Comparison, finding: ComparedFinding) -> str:
    """What its repair saves in the runs of B and of A, and how much more that is of the step."""
    a, b = (_saves(comparison, finding, side) for side in ("a", "b"))
    more = f"{words.percent(finding['share_of_step'])} of the step more"
    return f"repair saves per step {b} (in A {'nothing' if a == '-' else a}), {more}"


def _saves(comparison: Comparison, finding: ComparedFinding, side: str) -> str:
    """What its repair saves in a side's runs, and alone: `3.70 ms, 20.3 ms alone`; or `-`."""
    ns, alone_ns = finding["a_saved_ns"], finding["a_alone_ns"]
    if side == "b":
        ns, alone_ns = finding["b_saved_ns"], finding["b_alone_ns"]
    if not ns and not alone_ns:
        return "-"
    step_ns = comparison["step"]["a_ns" if side == "a" else "b_ns"]
    return ", ".join(filter(None, (words.ms(ns), words.alone(ns, alone_ns, step_ns))))


def names_of(names: Sequence[str]) -> str:
    """The runs of a side in one line."""
    plain = map(words.plain, names)
    short = [name if len(name) <= _NAME_LENGTH else f"…{name[-_NAME_LENGTH:]}" for name in plain]
    return words.listed(short, 4)


def basis(comparison: Comparison) -> list[str]:
    """Which steps were compared, and what the noise is."""
    of_a, of_b = (words.counted(comparison[key], "step") for key in ("a_steps", "b_steps"))
    if comparison["steps_from"] == "window":
        which = f"steady-state steps of the windows: {of_a} of A, {of_b} of B"
    else:
        which = f"step: {of_a} of A and {of_b} of B outside the windows, by step logs"
    noise = "noise: half-width of the change's 95% interval"
    if len(comparison["a"]) == len(comparison["b"]) == 1:
        noise += "; that runs differ by 0.8% is assumed, a baseline of several runs measures it"
    return [which, noise]


def remarks(comparison: Comparison) -> list[str]:
    """What makes the comparison doubtful."""
    other = [f"these are no runs of one job: {why}" for why in comparison["other_job"]]
    return [words.plain(text) for text in (*other, *comparison["warnings"])]


def _signed(ns: int) -> str:
    return f"{'+' if ns > 0 else '-' if ns < 0 else ''}{words.ms(abs(ns))}"


def _table(rows: Sequence[Sequence[str]], names: int, width: int) -> list[str]:
    """A table of `names` columns, then four with numbers; where it is too wide these are below."""
    lines = [f"  {line}" for line in console.table(rows, right=range(names, names + 4))]
    if max(map(len, lines)) <= width:
        return lines
    lines = []
    below = console.table([row[names:] for row in rows], right=range(4))
    for number, (cells, numbers) in enumerate(zip(rows, below, strict=True)):
        lines += [f"  {'  '.join(cells[:names])}"] if number else []
        lines.append(f"      {numbers}")
    return lines
