"""What was found, in lines: nodes that agree share one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterprof.doctor.check import BAD, LEVELS, WARN, Check

#: What must be the same on all nodes, and why.
_ALIKE = {
    "nsys": (BAD, "install one nsys on all nodes, or name one that all have with --nsys"),
    "gpu": (WARN, "nodes with other GPUs or drivers are slower or faster than their peers"),
    "python": (WARN, "start from an environment that all nodes share"),
    "clock source": (WARN, "the nodes' timestamps cost differently"),
}


@dataclass(frozen=True)
class Line:
    """One thing, as it was found on one or several nodes."""

    check: Check
    nodes: tuple[str, ...]


def lines(found: Mapping[str, Sequence[Check]]) -> list[Line]:
    """The nodes' checks, those that are alike in one line each, in the checks' own order."""
    names = dict.fromkeys(check.name for checks in found.values() for check in checks)
    return [each for name in names for each in _of_one_name(name, found)]


def _of_one_name(name: str, found: Mapping[str, Sequence[Check]]) -> list[Line]:
    groups: dict[tuple[str, str], list[tuple[str, Check]]] = {}
    for host, checks in found.items():
        for check in checks:
            if check.name == name:
                # Quantities differ from node to node: they are alike as long as their level is.
                what = "" if check.amount is not None else check.found
                groups.setdefault((check.level, what), []).append((host, check))
    made = []
    for members in groups.values():
        least = min((check for _, check in members), key=lambda check: check.amount or 0.0)
        if least.amount is not None and len(members) > 1:
            least = replace(least, found=f"{least.found} at worst")
        made.append(Line(least, tuple(host for host, _ in members)))
    if len(groups) > 1 and name in _ALIKE:
        made = [_differing(each) for each in made]
    return made


def _differing(line: Line) -> Line:
    level, advice = _ALIKE[line.check.name]
    worst = max(level, line.check.level, key=LEVELS.index)
    return replace(line, check=replace(
        line.check, level=worst, advice=f"the nodes differ: {line.check.advice or advice}"
    ))  # fmt: skip


def render(made: Sequence[Line], hosts: Sequence[str]) -> str:
    """The table: level, what, where, what was found; what to do below."""
    many = len(hosts) > 1
    rows = [(each.check, _where(each.nodes, hosts) if many else "") for each in made]
    wide = max(len(check.name) for check, _ in rows)
    wider = max(len(where) for _, where in rows)
    text = []
    for check, where in rows:
        start = f"{check.level:<4}  {check.name:<{wide}}  " + (f"{where:<{wider}}  " * many)
        text += textwrap.wrap(
            start + check.found, 110, subsequent_indent=" " * len(start),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if check.advice:
            indent = " " * (8 + wide)
            text += textwrap.wrap(
                check.advice, 110, initial_indent=indent, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return "\n".join(text)


def _where(nodes: Sequence[str], hosts: Sequence[str]) -> str:
    if len(nodes) == len(hosts):
        return f"all {len(hosts)}"
    return ",".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def verdict(made: Sequence[Line], hosts: Sequence[str]) -> str:
    """The last line: how many of each."""
    count = {level: sum(each.check.level == level for each in made) for level in LEVELS}
    where = f"{len(hosts)} nodes" if len(hosts) > 1 else hosts[0]
    if count[BAD]:
        return f"{where}: {count[BAD]} bad, {count[WARN]} to look at"
    return f"{where}: fit to be profiled" + (f", {count[WARN]} to look at" if count[WARN] else "")
