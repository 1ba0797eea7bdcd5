"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OK, WARN, BAD = "ok", "warn", "bad"
LEVELS = (OK, WARN, BAD)


@dataclass(frozen=True)
class Check:
    """What was found of one thing on one host."""

    name: str
    #: ok; warn: something may be missing or slower; bad: a capture here would fail
    level: str
    found: str
    #: what to do, "" where there is nothing to do
    advice: str = ""
    #: of quantities that differ from host to host: larger is better, and the least is shown
    amount: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields as they are."""
        return {
            "name": self.name, "level": self.level, "found": self.found, "advice": self.advice,
            "amount": self.amount,
        }  # fmt: skip


def from_json(fields: Mapping[str, Any]) -> Check:
    """A check that another host has sent. Raises KeyError, ValueError for anything else."""
    if fields["level"] not in LEVELS:
        raise ValueError(fields["level"])
    amount = fields["amount"]
    return Check(
        str(fields["name"]), fields["level"], str(fields["found"]), str(fields["advice"]),
        None if amount is None else float(amount),
    )  # fmt: skip


def size(count: float) -> str:
    """A number of bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
