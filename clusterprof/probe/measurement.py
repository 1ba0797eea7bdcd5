"""What a measurement of clocks says: clock_probe.json, and offsets and drifts out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.agent.contracts import documents, files
from clusterprof.errors import ReportError

SCHEMA_VERSION = 1
_NUMBERS = dict.fromkeys(
    ("rank", "other", "at_ns", "low_ns", "high_ns", "round_trip_ns", "exchanges"), int
)
_WORDS = ("when", "machine", "other_machine")


@dataclass(frozen=True)
class Bound:
    """At `at_ns` (the other's wall clock) rank's clock minus the other's is in [low_ns, high_ns].

    That holds whatever the network did, as long as neither clock was set while it was measured
    and the two drifted apart by at most 150 ppm.
    """

    rank: int
    other: int
    machine: str
    other_machine: str
    at_ns: int
    low_ns: int
    high_ns: int
    round_trip_ns: int
    exchanges: int
    when: str = ""

    @property
    def offset_ns(self) -> int:
        """The middle of what is possible: the truth if both ways take equally long."""
        return (self.low_ns + self.high_ns) // 2

    @property
    def uncertainty_ns(self) -> int:
        """How far the truth can be from the middle."""
        return (self.high_ns - self.low_ns + 1) // 2

    @property
    def host(self) -> str:
        """The rank's host name."""
        return self.machine.rpartition(" ")[2]


@dataclass(frozen=True)
class Measurement:
    """The bounds of one or several measurements, and what could not be measured."""

    bounds: tuple[Bound, ...]
    method: str
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """clock_probe.json."""
        return {
            "schema_version": SCHEMA_VERSION,
            "method": self.method,
            "bounds": [dict(vars(each)) for each in self.bounds],
            "notes": list(self.notes),
        }

    def write(self, path: Path) -> None:
        """Write it by rename. Raises OSError."""
        files.write_json(path, self.as_json(), indent=1)


class Drift(NamedTuple):
    """How fast a rank's clock gains on the other's, from two of its bounds: at least, at most."""

    low_ppm: float
    high_ppm: float


def drift(bounds: Sequence[Bound]) -> Drift | None:
    """The drift that two or more bounds of one rank leave, if it is constant; None from one.

    Each pair of bounds limits the slope of every line through both; the limits of all pairs
    hold. None as well where no line passes through all: a clock was set, or its rate changed.
    """
    ordered = sorted(bounds, key=lambda each: each.at_ns)
    low, high = -float("inf"), float("inf")
    for place, one in enumerate(ordered):
        for later in ordered[place + 1 :]:
            apart = later.at_ns - one.at_ns
            if apart > 0:
                low = max(low, (later.low_ns - one.high_ns) / apart)
                high = min(high, (later.high_ns - one.low_ns) / apart)
    if high == float("inf") or low > high:
        return None
    return Drift(low * 1e6, high * 1e6)


def joined(measurements: Iterable[Measurement]) -> Measurement:
    """Several measurements, one after the other, as one: that is what tells a drift."""
    every = list(measurements)
    return Measurement(
        tuple(bound for each in every for bound in each.bounds),
        ", ".join(dict.fromkeys(each.method for each in every if each.method)),
        tuple(dict.fromkeys(note for each in every for note in each.notes)),
    )


def read(path: Path) -> Measurement:
    """Read a clock_probe.json. Raises ReportError for a file that is none."""
    try:
        found = documents.load(str(path))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ReportError(f"{path} is no measurement of clocks", str(error)) from None
    if not isinstance(found, Mapping) or found.get("schema_version") != SCHEMA_VERSION:
        raise ReportError(
            f"{path} is no measurement of clocks",
            f'expected an object with "schema_version": {SCHEMA_VERSION}',
            "make one: srun -N2 --ntasks-per-node=1 clusterprof clock --output FILE",
        )
    return parsed(found)


def is_measurement(path: Path) -> bool:
    """Whether a file is a clock_probe.json."""
    try:
        read(path)
    except ReportError:
        return False
    return True


def parsed(found: Mapping[str, Any]) -> Measurement:
    """What a document holds; rows that are none, or contradict themselves, become notes."""
    bounds, notes = [], [str(each) for each in _list(found.get("notes"))]
    for row in _list(found.get("bounds")):
        if documents.fits(row, _NUMBERS) and row["low_ns"] <= row["high_ns"]:
            members: dict[str, Any] = {name: row[name] for name in _NUMBERS}
            members.update((name, str(row.get(name) or "")) for name in _WORDS)
            bounds.append(Bound(**members))
        else:
            notes.append("a row of the measurement could not be understood and is left out")
    return Measurement(tuple(bounds), str(found.get("method") or ""), tuple(notes))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
