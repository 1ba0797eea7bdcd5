"""What a check found, and the table of all nodes' checks: nodes that agree share a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from clusterprof.console import wrapped
from clusterprof.words import counted

OK, WARN, BAD = "ok", "warn", "bad"
LEVELS = (OK, WARN, BAD)

#: What must be the same on all nodes, how bad a difference is, and what to do about it.
_ALIKE = {
    "nsys": (BAD, "install one nsys on all nodes, or name one that all have with --nsys"),
    "gpu": (WARN, "nodes with other GPUs or drivers are slower or faster than their peers"),
    "python": (WARN, "start from an environment that all nodes share"),
    "clock source": (WARN, "reading the clock takes different time on these nodes"),
}


@dataclass(frozen=True)
class Check:
    """The result of one check on one host."""

    name: str
    #: ok; warn: something may be missing or slower; bad: a capture here would fail
    level: str
    found: str
    #: the recommendation; "" where none is needed
    advice: str = ""
    #: of quantities that differ from host to host: larger is better, and the least is shown
    amount: float | None = None


def from_json(fields: Mapping[str, Any]) -> Check:
    """A check that another host has sent. Raises KeyError, ValueError for anything else."""
    name, level, result, advice = (str(fields[key]) for key in ("name", "level", "found", "advice"))
    if level not in LEVELS:
        raise ValueError(level)
    amount = fields["amount"]
    return Check(name, level, result, advice, None if amount is None else float(amount))


class Line(NamedTuple):
    """One check with the nodes that share its result."""

    check: Check
    nodes: tuple[str, ...]


def lines(checks_of: Mapping[str, Sequence[Check]]) -> list[Line]:
    """The nodes' checks, equal results in one line each, in the checks' own order."""
    groups: dict[str, dict[tuple[str, str], dict[str, Check]]] = {}
    for host, checks in checks_of.items():
        for check in checks:
            # Quantities differ from node to node: they are alike as long as their level is.
            alike = check.level, "" if check.amount is not None else check.found
            groups.setdefault(check.name, {}).setdefault(alike, {})[host] = check
    return [
        Line(_in_common([*members.values()], is_same=len(results) == 1), tuple(members))
        for results in groups.values()
        for members in results.values()
    ]


def _in_common(checks: Sequence[Check], *, is_same: bool) -> Check:
    """What nodes with equal results have in common; `is_same`: all nodes have it."""
    result = min(checks, key=lambda check: check.amount or 0.0)
    if result.amount is not None and len(checks) > 1:
        result = replace(result, found=f"{result.found} at worst")
    if is_same or result.name not in _ALIKE:
        return result
    level, advice = _ALIKE[result.name]
    worst = max(level, result.level, key=LEVELS.index)
    return replace(result, level=worst, advice=f"the nodes differ: {result.advice or advice}")


def render(table: Sequence[Line], hosts: Sequence[str], width: int = 110) -> str:
    """The table: level, check, nodes, result; the recommendation below each.

    Results begin below each other where they have half of the `width` or more.
    """

    def where(nodes: Sequence[str]) -> str:
        if len(nodes) == len(hosts):
            return f"all {len(hosts)}" if len(hosts) > 1 else ""
        return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")

    name_width = max(len(line.check.name) for line in table)
    where_width = max(len(where(line.nodes)) for line in table)
    below = 6 + name_width + 2 + (where_width + 2 if len(hosts) > 1 else 0)
    indent = " " * (below if below <= width // 2 else 8)
    text = []
    for line in table:
        check, start = line.check, f"{line.check.level:<4}  {line.check.name:<{name_width}}  "
        if len(hosts) > 1:
            start += f"{where(line.nodes):<{where_width}}  "
        text += wrapped(start + check.found, width, indent)
        if check.advice:
            text += wrapped(indent + check.advice, width, indent)
    return "\n".join(text)


def verdict(lines: Sequence[Line], hosts: Sequence[str]) -> str:
    """The last line: how many lines are bad, and how many are warnings."""
    bad, warnings = (sum(line.check.level == level for line in lines) for level in (BAD, WARN))
    where = f"{len(hosts)} nodes" if len(hosts) > 1 else hosts[0]
    and_warnings = f", {counted(warnings, 'warning')}" if warnings else ""
    return f"{where}: {f'{bad} bad' if bad else 'ready to profile'}{and_warnings}"
