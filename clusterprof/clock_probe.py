"""Clocks of a job's nodes against each other: a ping-pong between ranks, and clock_probe.json.

Also what is known of the ranks' clocks, of a run (`gathered`, `of_run`) and of reports with no
agent's files (`of_reports`): arguments for `clusterprof.align.clock.measured.known_clocks`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterprof import words
from clusterprof.agent.contracts import clocks, exchange, files, paths
from clusterprof.agent.contracts.exchange import Answerer, Endpoint
from clusterprof.agent.contracts.identity import Identity
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.errors import ClusterprofError, MergeError, ReportError
from clusterprof.run_directory import Window

if TYPE_CHECKING:
    from clusterprof.tables import RankTables


SCHEMA_VERSION = 1
_NUMBERS = dict.fromkeys(
    ("rank", "other", "at_ns", "low_ns", "high_ns", "round_trip_ns", "exchanges"), int
)
_WORDS = ("when", "machine", "other_machine")
#: what each rank wrote of its clocks, by what `clusterprof.align.clock.measured.parsed` calls it
_FILES = {"clock": paths.CLOCK, "state": paths.STATE, "probe": paths.PROBE}


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
        lists = {"bounds": [*map(asdict, self.bounds)], "notes": [*self.notes]}
        return {"schema_version": SCHEMA_VERSION, "method": self.method, **lists}

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
    ordered = sorted(bounds, key=lambda bound: bound.at_ns)
    low, high = -float("inf"), float("inf")
    for earlier, later in itertools.combinations(ordered, 2):
        apart_ns = later.at_ns - earlier.at_ns
        if apart_ns > 0:
            low = max(low, (later.low_ns - earlier.high_ns) / apart_ns)
            high = min(high, (later.high_ns - earlier.low_ns) / apart_ns)
    if high == float("inf") or low > high:
        return None
    return Drift(low * 1e6, high * 1e6)


def joined(measurements: Iterable[Measurement]) -> Measurement:
    """Several measurements, one after the other, as one: that is what tells a drift."""
    every = list(measurements)
    return Measurement(
        tuple(bound for measurement in every for bound in measurement.bounds),
        ", ".join(dict.fromkeys(measurement.method for measurement in every if measurement.method)),
        tuple(dict.fromkeys(note for measurement in every for note in measurement.notes)),
    )


def read(path: Path) -> Measurement:
    """Read a clock_probe.json. Raises ReportError for a file that is none."""
    try:
        document = files.load(path, links=True)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ReportError(f"{path} is no measurement of clocks", str(error)) from None
    if not isinstance(document, Mapping) or document.get("schema_version") != SCHEMA_VERSION:
        raise ReportError(
            f"{path} is no measurement of clocks",
            f'expected an object with "schema_version": {SCHEMA_VERSION}',
            "make one: srun -N2 --ntasks-per-node=1 clusterprof clock --output FILE",
        )
    return parsed(document)


def is_measurement(path: Path) -> bool:
    """Whether a file is a clock_probe.json."""
    with contextlib.suppress(ReportError):
        return read(path) is not None
    return False


def parsed(document: Mapping[str, Any]) -> Measurement:
    """What a document holds; rows that are none, or contradict themselves, become notes."""
    rows, given_notes = (
        value if isinstance(value := document.get(key), list) else [] for key in ("bounds", "notes")
    )
    bounds, notes = [], [*map(str, given_notes)]
    for row in rows:
        if files.fits(row, _NUMBERS) and row["low_ns"] <= row["high_ns"]:
            texts: dict[str, Any] = {name: str(row.get(name) or "") for name in _WORDS}
            bounds.append(Bound(**{name: row[name] for name in _NUMBERS}, **texts))
        else:
            notes.append("a row of the measurement could not be understood and is left out")
    return Measurement(tuple(bounds), str(document.get("method") or ""), tuple(notes))


def gathered(run: Window) -> Measurement | None:
    """Gather the probers' measurements into clock_probe.json; None where nothing was measured.

    A clock_probe.json that is there already (an earlier merge, or `clusterprof clock --output`)
    is kept, and what is new added. Removes what the probers needed to meet, except for a later
    window, which is merged while the job runs and has a clock_probe.json of its own. Raises
    ReportError for a clock_probe.json that is none, OSError where it cannot be written.
    """
    measured = measured_so_far(run)
    for attempt in run.attempts() if run.number == 1 else ():
        for folder in map(attempt.rank, attempt.ranks()):
            with contextlib.suppress(OSError):
                (folder / paths.PROBE_ADDRESS).unlink()
        files.remove(attempt.folder / paths.PROBED)
    if measured is not None:
        measured.write(run.path / paths.CLOCK_PROBE)
    return measured


def measured_so_far(run: Window) -> Measurement | None:
    """The same, also while the probers measure, and nothing is written. Raises ReportError."""
    written = dict.fromkeys(folder / paths.CLOCK_PROBE for folder in (run.directory.path, run.path))
    measurements = [read(path) for path in written if path.is_file()]
    for attempt in run.directory.first().attempts():
        for folder in map(attempt.rank, attempt.ranks()):
            document = _file_of_rank(folder / paths.PROBE)
            if isinstance(document, dict):
                measurements.append(parsed({"method": "UDP beside the ranks", **document}))
    if not measurements:
        return None
    every = joined(measurements)
    return replace(every, bounds=tuple(dict.fromkeys(every.bounds)))


def of_run(run: Window, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """What each rank's agent wrote of its clocks, and before: when the probers measured, maybe."""

    def written(attempt: Window, rank: int) -> dict[str, Any]:
        return {name: _file_of_rank(attempt.rank(rank) / file) for name, file in _FILES.items()}

    attempts = run.directory.first().attempts()
    before = [attempt for attempt in attempts if attempt.attempt <= run.attempt and attempt != run]
    return {
        rank: {**written(run, rank), "before": [written(attempt, rank) for attempt in before]}
        for rank in ranks
    }


def _file_of_rank(path: Path) -> Any:
    """A small file of a rank; None where it is missing or broken: the rank's, not the merge's."""
    with contextlib.suppress(OSError, ValueError):
        return files.load(path)


def of_reports(
    ranks: Sequence[RankTables], measurement: Measurement
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """What an agent's files would hold of these ranks' clocks by a measurement, and warnings.

    The machine of each rank, by the host name in its report, and one reading inside its window,
    which cannot show a clock that was set. Assumes that the machine of that name is the one that
    was measured. A report without a host name is left out, with a warning. Raises MergeError for a
    host that was not measured, or was measured as two machines.
    """
    machines: dict[str, set[str]] = {}  # that were measured, by their host names
    for bound in measurement.bounds:
        for machine in (bound.machine, bound.other_machine):
            machines.setdefault(machine.rpartition(" ")[2], set()).add(machine)
    clocks_of: dict[int, dict[str, Any]] = {}
    for tables in ranks:
        if tables.info.host:
            middle = (tables.info.begin_ns + tables.info.end_ns) // 2
            reading = {"event": "report", "wall_ns": middle, "monotonic_ns": 0, "gap_ns": 0}
            machine = _machine(tables.info.host, ranks, machines)
            clocks_of[tables.rank] = {"clock": {"machine": machine, "readings": [reading]}}
    unnamed = [tables.rank for tables in ranks if tables.rank not in clocks_of]
    why = "the report does not name its host, so its clock is not measured"
    return clocks_of, [f"{words.ranks(unnamed)}: {why}"] if unnamed else []


def _machine(host: str, ranks: Sequence[RankTables], machines: dict[str, set[str]]) -> str:
    """The machine called `host`; of a name with its domain the one without will do."""
    short = host.partition(".")[0]
    alike = [name for name in machines if name.partition(".")[0] == short]
    names = [host] if host in machines else alike
    if len(names) != 1:
        reports = [str(rank.info.source) for rank in ranks if rank.info.host == host]
        raise MergeError(
            f"the clock of host {host} was not measured",
            f"its reports: {', '.join(reports)}",
            f"measured: {', '.join(sorted(machines)) or 'none'}",
            "measure all hosts at once: "
            "srun -N4 --ntasks-per-node=1 clusterprof clock --output FILE",
        )
    machine, *others = machines[names[0]]
    if others:
        raise MergeError(
            f"host {names[0]} was measured as {len(others) + 1} machines",
            "it was restarted between the measurements, or two hosts have the same name",
            "leave out the measurement that does not belong to this training",
        )
    return machine


# -- measuring -----------------------------------------------------------------------------------
#
# A ping-pong over UDP between rank 0 and every other rank bounds the offsets of their wall clocks.
# Rank 0 listens on the address by which the job itself would reach it, and answers only those who
# prove that they know a secret. It leaves address and secret in a file that only its owner can
# read, in a folder that all nodes see: whoever can read that file is the same user.

#: a rank's bound on its way to rank 0, and back that it has come
_DELIVER, _RECEIVED = b"clp>", b"clp<"
_PATIENCE_S = 2.0


def over_udp(
    me: Identity, meet: Path, environ: Mapping[str, str], timeout_s: float, clock: Clock = REAL
) -> Measurement | None:
    """Measure every rank's wall clock against rank 0's; the result on rank 0, None elsewhere.

    `meet` is a folder that all nodes see. Raises ClusterprofError where rank 0 cannot listen
    there, or where a rank does not find or reach it within `timeout_s`.
    """
    # What distinguishes this measurement from another of the same user in the same folder.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
    given = [re.sub(r"\W", "_", environ[name]) for name in names if environ.get(name)]
    path = meet / f".clusterprof-clock-{'.'.join(given) or 'here'}"
    if me.rank == 0:
        return _answer(path, me.world_size or 1, environ, timeout_s, clock)
    _ask(me, path, timeout_s, clock)
    return None


def _answer(
    path: Path, size: int, environ: Mapping[str, str], timeout_s: float, clock: Clock
) -> Measurement:
    """All ranks' bounds against rank 0's own clock."""
    address = exchange.own_address(environ)
    try:
        endpoint = exchange.announce(str(path), address)
    except OSError as error:
        raise ClusterprofError(
            f"rank 0 cannot listen on {address}, or cannot announce it in {path}",
            error.strerror or str(error),
            "name a folder that all nodes see and you may write: --meet DIR",
        ) from None
    rows: dict[int, dict[str, Any]] = {}
    deadline = clock.now() + timeout_s
    with contextlib.closing(endpoint):
        while len(rows) < size - 1 and endpoint.wait(deadline - clock.now(), clock):
            if delivered := _taken(endpoint):
                row = json.loads(delivered)
                rows[int(row["rank"])] = row
        # A rank whose last confirmation was lost asks again: it has a moment for it.
        until = clock.now() + 0.3
        while endpoint.wait(until - clock.now(), clock):
            _taken(endpoint)
    bounds, notes = [], []
    for _, row in sorted(rows.items()):
        if "note" in row:
            notes.append(row["note"])
        else:
            bounds.append({**row, "other": 0, "other_machine": clocks.machine()})
    if silent := set(range(1, size)) - set(rows):
        notes.append(f"no answer from {words.ranks(silent)} within {timeout_s:g} s")
    return parsed({"method": "UDP", "bounds": bounds, "notes": notes})


def _taken(endpoint: Endpoint) -> bytes:
    """Take one datagram and answer it; what a rank has delivered by it, b"" for nothing."""
    body, sender = exchange.answer(endpoint) or (b"", None)
    if not body.startswith(_DELIVER):
        return b""
    endpoint.send(_RECEIVED + body[4:12], sender)
    return body[12:]


def _ask(me: Identity, path: Path, timeout_s: float, clock: Clock) -> None:
    deadline = clock.now() + timeout_s
    tried: Answerer | None = None
    while clock.now() < deadline:
        with contextlib.suppress(OSError, ValueError):
            # One that does not answer was left by a killed measurement, or is late: look again.
            tried = exchange.announced(str(path), ours=False)
            if _measured(me, tried, clock):
                return
        clock.sleep(0.05)  # rank 0's file may appear late on other nodes
    where = f"{tried.address} UDP port {tried.port}" if tried else str(path)
    raise ClusterprofError(
        f"rank {me.rank} did not reach rank 0 within {timeout_s:g} s",
        f"looked for: {where}",
        "do the nodes see that folder (--meet DIR), and may they speak UDP to each other?",
    )


def _measured(me: Identity, answerer: Answerer, clock: Clock) -> bool:
    """Measure, and deliver the bound to rank 0, or a note where the exchanges leave none; whether
    it has confirmed that. Raises OSError.
    """
    with contextlib.closing(answerer.endpoint()) as endpoint:
        exchanges = exchange.measure(endpoint, answerer, clock)
        if not exchanges:
            return False
        try:
            row = exchange.described(me.rank, exchanges)
        except ValueError as error:
            row = {"rank": me.rank, "note": f"rank {me.rank}: {error}"}
        mark, deadline = os.urandom(8), clock.now() + _PATIENCE_S
        while clock.now() < deadline:
            endpoint.send(_DELIVER + mark + json.dumps(row).encode(), answerer[:2])
            answers = exchange.received([endpoint], exchange.ASK_AGAIN_S, clock)
            if any(body == _RECEIVED + mark for body, _, _ in answers):
                return True
        return False
