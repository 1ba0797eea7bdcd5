"""What a check found, and the table of all nodes' checks: nodes that agree share a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

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

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)


def from_json(fields: Mapping[str, Any]) -> Check:
    """A check that another host has sent. Raises KeyError, ValueError for anything else."""
    if fields["level"] not in LEVELS:
        raise ValueError(fields["level"])
    amount = fields["amount"]
    return Check(
        str(fields["name"]), fields["level"], str(fields["found"]), str(fields["advice"]),
        None if amount is None else float(amount),
    )  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One check with the nodes that share its result."""

    check: Check
    nodes: tuple[str, ...]


def lines(found: Mapping[str, Sequence[Check]]) -> list[Line]:
    """The nodes' checks, equal results in one line each, in the checks' own order."""
    groups: dict[str, dict[tuple[str, str], list[tuple[str, Check]]]] = {}
    for host, checks in found.items():
        for check in checks:
            # Quantities differ from node to node: they are alike as long as their level is.
            alike = check.level, "" if check.amount is not None else check.found
            groups.setdefault(check.name, {}).setdefault(alike, []).append((host, check))
    return [
        _line(members, differ=len(results) > 1)
        for results in groups.values()
        for members in results.values()
    ]


def _line(members: Sequence[tuple[str, Check]], *, differ: bool) -> Line:
    least = min((check for _, check in members), key=lambda check: check.amount or 0.0)
    if least.amount is not None and len(members) > 1:
        least = replace(least, found=f"{least.found} at worst")
    if differ and least.name in _ALIKE:
        level, advice = _ALIKE[least.name]
        worst = max(level, least.level, key=LEVELS.index)
        least = replace(least, level=worst, advice=f"the nodes differ: {least.advice or advice}")
    return Line(least, tuple(host for host, _ in members))


def render(made: Sequence[Line], hosts: Sequence[str], width: int = 110) -> str:
    """The table: level, check, nodes, result; the recommendation below each.

    Results begin below each other where they have half of the `width` or more.
    """
    many = len(hosts) > 1
    rows = [(each.check, _where(each.nodes, hosts) if many else "") for each in made]
    wide = max(len(check.name) for check, _ in rows)
    wider = max(len(where) for _, where in rows)
    below = 6 + wide + 2 + (wider + 2) * many
    indent = " " * (below if below <= width // 2 else 8)
    text = []
    for check, where in rows:
        start = f"{check.level:<4}  {check.name:<{wide}}  " + (f"{where:<{wider}}  " * many)
        text += wrapped(start + check.found, width, indent)
        if check.advice:
            text += wrapped(indent + check.advice, width, indent)
    return "\n".join(text)


def _where(nodes: Sequence[str], hosts: Sequence[str]) -> str:
    if len(nodes) == len(hosts):
        return f"all {len(hosts)}"
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def verdict(made: Sequence[Line], hosts: Sequence[str]) -> str:
    """The last line: how many lines are bad, and how many are warnings."""
    bad, warnings = (sum(each.check.level == level for each in made) for level in (BAD, WARN))
    where = f"{len(hosts)} nodes" if len(hosts) > 1 else hosts[0]
    and_warnings = f", {counted(warnings, 'warning')}" if warnings else ""
    return f"{where}: {f'{bad} bad' if bad else 'ready to profile'}{and_warnings}"
