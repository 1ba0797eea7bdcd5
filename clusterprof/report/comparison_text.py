"""A comparison as text for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from clusterprof import console, words
from clusterprof.report.markdown import escaped, pipes
from clusterprof.results import Change, ComparedFinding, Comparison

#: longer names are cut: paths of 200 letters fit into no table
_NAME_LENGTH = 80
#: so many findings are listed
_MOST_FINDINGS = 12
#: parts of the part before them
_INNER = {"waiting for a later rank", "blocking compute"}
COLUMNS = ("per step", "A", "B", "change", "noise", "")
FINDING_COLUMNS = ("finding", "", "A saves", "B saves", "change", "noise")


def render(comparison: Comparison, width: int = 100) -> str:
    """The comparison as plain text of `width` columns, from 60 on.

    The first line is the verdict; it ends in a newline.
    """
    lines = [*_wrapped(words.plain(comparison["verdict"]), "", width), ""]
    for side, names in (("A", comparison["a"]), ("B", comparison["b"])):
        lines += _wrapped(names_of(names), f"{side}  ", width)
    lines += ["", *_table([COLUMNS, *rows(comparison)], 1, width)]
    lines += [line for each in basis(comparison) for line in _wrapped(each, "  ", width)]
    if found := finding_rows(comparison):
        lines += ["", *_table([FINDING_COLUMNS, *found], 2, width)]
        lines.append("  saves: what its repair saves per step")
    if messages := remarks(comparison):
        lines += ["", *(line for each in messages for line in _wrapped(each, "warning  ", width))]
    return "\n".join(lines) + "\n"


def markdown(comparison: Comparison) -> str:
    """The comparison as GitHub's and GitLab's Markdown: verdict, changes, and the rest folded."""
    shown = [comparison["step"], *_changed(comparison["parts"])]
    text = [
        f"**{escaped(comparison['verdict'])}**", "",
        *pipes(COLUMNS, [row(each) for each in shown], left=1), "",
    ]  # fmt: skip
    if found := finding_rows(comparison):
        text += [*pipes(FINDING_COLUMNS, found, left=2), ""]
    text += ["<details><summary>All parts of the step, and what is compared</summary>", ""]
    text += [*pipes(COLUMNS, rows(comparison), left=1), ""]
    for side, names in (("A", comparison["a"]), ("B", comparison["b"])):
        text.append(f"- {side}: {escaped(names_of(names))}")
    text += [f"- {escaped(each)}" for each in (*basis(comparison), *remarks(comparison))]
    return "\n".join([*text, "", "</details>", ""])


def rows(comparison: Comparison) -> list[list[str]]:
    """The table's rows."""
    return [row(each) for each in changes(comparison)]


def changes(comparison: Comparison) -> list[Change]:
    """The step, unless it is the window's, then the window's and its parts."""
    step = [] if comparison["steps_from"] == "window" else [comparison["step"]]
    return [*step, *comparison["parts"]]


def row(change: Change) -> list[str]:
    """One row: A, B, the change and its noise, and what may be said of it."""
    what = {"none": "within the noise"}.get(change["direction"], change["direction"])
    values = [words.ms(change["a_ns"]), words.ms(change["b_ns"]), _signed(change["change_ns"])]
    indent = "  " if change["what"] in _INNER else ""
    return [indent + change["what"], *values, words.bound(change["noise_ns"]), what]


def finding_rows(comparison: Comparison) -> list[list[str]]:
    """The findings that came, went or changed first; those that stay as they are behind them."""
    found = sorted(comparison["findings"], key=lambda each: each["state"] == "same")
    return [
        [
            _state(each),
            words.plain(named(each)),
            words.ms(each["a_saved_ns"]) if each["a_saved_ns"] else "-",
            words.ms(each["b_saved_ns"]) if each["b_saved_ns"] else "-",
            _signed(each["b_saved_ns"] - each["a_saved_ns"]),
            words.bound(each["noise_ns"]),
        ]
        for each in found[:_MOST_FINDINGS]
    ]


def _state(finding: ComparedFinding) -> str:
    """What became of it; of one that a side does not have, that this may be by chance."""
    if finding["state"] != "same":
        return finding["state"]
    on_one_side = bool(finding["a_saved_ns"]) != bool(finding["b_saved_ns"])
    return "within the noise" if on_one_side else "as before"


def named(finding: ComparedFinding) -> str:
    """A finding's code and ranks."""
    return f"{finding['code']} {words.ranks(finding['ranks'], 4)}"


def names_of(names: Sequence[str]) -> str:
    """The runs of a side in one line."""
    shown = [words.plain(each) for each in names]
    short = [each if len(each) <= _NAME_LENGTH else f"…{each[-_NAME_LENGTH:]}" for each in shown]
    return words.listed(short, 4)


def basis(comparison: Comparison) -> list[str]:
    """Which steps were compared, and what the noise is."""
    counts = [words.counted(comparison[key], "step") for key in ("a_steps", "b_steps")]
    if comparison["steps_from"] == "window":
        which = f"steady-state steps of the windows: {counts[0]} of A, {counts[1]} of B"
    else:
        which = f"step: {counts[0]} of A and {counts[1]} of B outside the windows, by step logs"
    noise = "noise: half-width of the change's 95% interval"
    if len(comparison["a"]) == len(comparison["b"]) == 1:
        noise += "; that runs differ by 0.8% is assumed, a baseline of several runs measures it"
    return [which, noise]


def remarks(comparison: Comparison) -> list[str]:
    """What makes the comparison doubtful."""
    other = [f"these are no runs of one job: {each}" for each in comparison["other_job"]]
    return [words.plain(each) for each in (*other, *comparison["warnings"])]


def _changed(parts: Sequence[Change]) -> list[Change]:
    return [each for each in parts[1:] if each["direction"] != "none"]


def _signed(ns: int) -> str:
    return f"{'+' if ns > 0 else '-' if ns < 0 else ''}{words.ms(abs(ns))}"


def _table(rows: Sequence[Sequence[str]], names: int, width: int) -> list[str]:
    """A table of `names` columns, then four with numbers; where it is too wide these are below."""
    lines = console.table(rows, right=range(names, names + 4))
    if 2 + max(map(len, lines)) <= width:
        return [f"  {line}" for line in lines]
    below = console.table([row[names:] for row in rows], right=range(4))
    heads = ["", *("  ".join(row[:names]) for row in rows[1:])]
    return [
        line
        for head, numbers in zip(heads, below, strict=True)
        for line in (*([f"  {head}"] if head else []), f"      {numbers}")
    ]


def _wrapped(text: str, lead: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=lead, subsequent_indent=" " * len(lead),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
