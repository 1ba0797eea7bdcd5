"""The clock table of `make truth`: the errors of aligned times, and how often bounds hold.

The recordings are of ranks that share one host's clock, so the true offset between any two is
zero. Here their ranks get clocks that are wrong in a known way (up to 50 ms off at the window's
middle and up to 50 ppm fast or slow), their host names are blanked (nothing may suggest that they
share a clock), and the collectives have to find it out. Each is also tried with the offsets
alone, as of hosts whose daemons keep the frequency, and with both where the reports have no steps:
then the ranks' windows have to be placed against each other too. An error is the distance of an
aligned time from the reference rank's, for each other rank, at nine times from the first matched
collective to the last: it is collectives whose times are compared. The window begins long before
the first (the ranks resume up to 200 ms apart), and there a drift goes on unseen: the worst error
anywhere in the window stands beside, and the bound has to hold there too. Ranks that nothing
bounds are counted and have no error.

The plain methods beside ours: `wall` takes the reports' own clocks as they are; `ends` takes the
median difference of the ends of all collectives that a rank shares with the reference rank.

The simulator lets the members of a large collective end at random within a given time. Real rings
do not; one class has the ends that were measured on four GPUs (`programs/ends.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from simulate import Job, middle, simulate, wall, with_clock

from clusterprof.align.clock import UNBOUNDED_NS, Clock, align
from clusterprof.align.match import match
from clusterprof.errors import ClusterprofError
from clusterprof.ingest import gather
from clusterprof.tables import RankTables, empty

_MS = 1_000_000
#: what is planted, and its title
_PLANTED = {
    "steady": "Offsets up to 50 ms",
    "drifting": "Offsets up to 50 ms and drifts up to 50 ppm",
    "no steps": "Offsets up to 50 ms and drifts up to 50 ppm, reports without steps",
}
_OFFSET_NS, _DRIFT_PPM = 50 * _MS, 50.0
#: planted clocks per recording
_TRIALS = 8
#: seeds of the simulated jobs that no rule was made on
_HELD_OUT = 1000
_TO_REACH_NS = {"small": 2_000, "large": 20_000}
_LATENCY_BOUND_NS = 30_000
_PLAIN = replace(Job(), steps=4)
_RINGS = "large only, ends of rings"
#: a large AllReduce's ends by distance from the last to come, part of its transfer: four H200s,
#: and what that differs by from recording to recording
_ENDS = np.array([0.05, 0.01, -0.045, -0.015])
_ENDS_FACTOR = (0.7, 1.5)
#: the simulated classes: what is in the name is what differs from plain data parallelism
_CLASSES = {
    "data parallel": _PLAIN,
    _RINGS: replace(_PLAIN, small_calls=False, phase_ns=4_000),
    "large only, ends at random": replace(_PLAIN, small_calls=False),
    "eight ranks": replace(_PLAIN, dp=8),
    "tensor × data": replace(_PLAIN, dp=2, tp=2),
    "pipeline": replace(_PLAIN, dp=1, pp=4, layers=8),
    "pipeline × data": replace(_PLAIN, dp=2, pp=2),
    "no ids": replace(_PLAIN, communicator_ids=False),
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Errors:
    """One method's errors (ns), over planted clocks, ranks and times."""

    values: Floats

    def __str__(self) -> str:
        if not len(self.values):
            return f"{'—':>26}"
        shown = [*np.quantile(self.values, [0.5, 0.95]), self.values.max()]
        return " ".join(f"{_us(v):>8}" for v in shown)


@dataclass(frozen=True)
class ClockRow:
    """One recording or simulated class."""

    kind: str
    name: str
    #: `small`: latency-bound calls connect all ranks; `large`: only large ones do; `host`: gloo
    calls: str
    #: a key of `_PLANTED`
    planted: str
    ours: Errors
    #: ours, anywhere in the window
    window: Errors
    wall: Errors
    ends: Errors
    #: how often the bound held, of how many (rank, planted clock)
    held: int
    bounds: int
    #: the bounds' median (ns), over ranks and planted clocks
    uncertainty_ns: float
    unbounded: int

    @property
    def p95_ns(self) -> float:
        """The 95th percentile of our errors."""
        return float(np.quantile(self.ours.values, 0.95)) if len(self.ours.values) else np.nan


def clock_table(
    recordings: Sequence[Path], simulated: int = 4, seed: int = _HELD_OUT
) -> list[ClockRow]:
    """Return the table's rows: one per recording or simulated class, and what is planted.

    `recordings` are folders with the reports of one run, all of one host; `simulated` is the
    number of jobs of each class, of seeds from `seed` on.
    """
    rows = [row for path in recordings for row in _of_recording(path)]
    for name, job in _CLASSES.items():
        jobs = [simulate(replace(job, seed=seed + k))[0] for k in range(simulated)]
        if name == _RINGS:
            jobs = [_ringed(ranks, seed + k) for k, ranks in enumerate(jobs)]
        rows += [_row("simulated", name, jobs, planted, 2) for planted in _PLANTED if jobs]
    return rows


def _ringed(ranks: Sequence[RankTables], seed: int) -> list[RankTables]:
    """The job with each AllReduce's ends moved as a ring of four moves them."""
    matched = match(ranks).select(["collective", "rank", "call", "start_ns", "end_ns"]).to_pandas()
    matched["length"] = matched["end_ns"] - matched["start_ns"]
    calls = matched.groupby("collective")
    last = matched.loc[calls["start_ns"].idxmax()].set_index("collective")["rank"]
    distance = (matched["rank"] - matched["collective"].map(last)) % len(_ENDS)
    factor = np.random.default_rng(seed).uniform(*_ENDS_FACTOR)
    shift = factor * _ENDS[distance] * calls["length"].transform("min")
    out = []
    for tables in ranks:
        mine = matched["rank"] == tables.rank
        frame = tables.collective_calls.to_pandas().set_index("call")
        moved = shift[mine].round().astype("int64").to_numpy()
        frame.loc[matched["call"][mine], "end_ns"] += moved
        schema = tables.collective_calls.schema
        table = pa.Table.from_pandas(frame.reset_index(), schema=schema, preserve_index=False)
        out.append(replace(tables, collective_calls=table))
    return out


def table(folders: Sequence[Path], simulated: int = 4, seed: int = _HELD_OUT) -> str:
    """Return the printed table for all recordings under `folders` and for simulated jobs."""
    return text(clock_table([p for f in folders for p in recordings_of(f)], simulated, seed))


def recordings_of(folder: Path) -> list[Path]:
    """Return the folders at or below `folder` that hold the reports of two ranks or more.

    Left out are those whose ranks share no clock, according to `folder`'s truth.json.
    """
    truth = folder / "truth.json"
    known = json.loads(truth.read_text())["recordings"] if truth.is_file() else {}
    apart = {folder / name for name, what in known.items() if not what.get("shared_clock", True)}
    every = sorted({p.parent for p in folder.rglob("rank*") if _is_report(p)} - apart)
    return [p for p in every if sum(_is_report(f) for f in p.iterdir()) > 1]


def _is_report(path: Path) -> bool:
    return path.name.startswith("rank") and path.name.endswith(
        (".sqlite", ".sqlite.xz", ".nsys-rep", ".json", ".json.gz")
    )


def _of_recording(path: Path) -> Iterator[ClockRow]:
    name = "/".join(path.parts[-2:])
    try:
        ranks = gather([path]).ranks
    except ClusterprofError as error:
        print(f"{path}: {error.what}", file=sys.stderr)
        return
    if not _complete(match(ranks)).num_rows:
        print(f"{path}: no collective that several ranks have", file=sys.stderr)
    else:
        for planted in _PLANTED:
            yield _row("recording", name, [ranks], planted, _TRIALS)


def _row(
    kind: str, name: str, jobs: Sequence[Sequence[RankTables]], planted: str, trials: int
) -> ClockRow:
    rng = np.random.default_rng(11)
    ours: list[Floats] = []
    window: list[Floats] = []
    plain: dict[str, list[Floats]] = {"wall": [], "ends": []}
    bounds: list[int] = []
    held = unbounded = 0
    calls = "small"
    for true in jobs:
        at, numbers = middle(true), [t.rank for t in true]
        whole, span = _whole(true), _span(match(true))
        shown = [replace(t, steps=empty("steps")) for t in true] if planted == "no steps" else true
        for _ in range(trials):
            offset = rng.integers(-_OFFSET_NS, _OFFSET_NS, len(true)).tolist()
            drift = rng.uniform(-_DRIFT_PPM, _DRIFT_PPM, len(true)) * (planted != "steady")
            wrong = [
                with_clock(_unnamed(t), o, d, at)
                for t, o, d in zip(shown, offset, drift, strict=True)
            ]
            matched = match(wrong)
            clock = align(wrong, matched)
            truth = dict(zip(numbers, zip(offset, drift, strict=True), strict=True))
            within = _errors(clock, span, truth, at)
            for rank, error in _errors(clock, whole, truth, at).items():
                if clock.uncertainty(rank) >= UNBOUNDED_NS:
                    unbounded += 1
                    continue
                bounds.append(clock.uncertainty(rank))
                held += bool(error.max() <= clock.uncertainty(rank))
                ours.append(within[rank])
                window.append(error)
            for method, other in (("wall", _wall(clock)), ("ends", _ends(clock, matched))):
                plain[method] += list(_errors(other, span, truth, at).values())
            calls = _calls(matched, len(true))
    return ClockRow(
        kind=kind,
        name=name,
        calls=calls,
        planted=planted,
        ours=_all(ours),
        window=_all(window),
        wall=_all(plain["wall"]),
        ends=_all(plain["ends"]),
        held=held,
        bounds=len(bounds),
        uncertainty_ns=float(np.median(bounds)) if bounds else 0.0,
        unbounded=unbounded,
    )


def _all(values: list[Floats]) -> Errors:
    return Errors(np.concatenate(values) if values else np.empty(0))


def _unnamed(tables: RankTables) -> RankTables:
    return replace(tables, info=replace(tables.info, host=""))


def _whole(true: Sequence[RankTables]) -> tuple[int, int]:
    first = min(int(pc.min(t.activity["start_ns"]).as_py()) for t in true)
    return first, max(int(pc.max(t.activity["end_ns"]).as_py()) for t in true)


def _span(matched: pa.Table) -> tuple[int, int]:
    """End of the first and of the last collective that all its members have."""
    ends = _complete(matched)["end_ns"]
    return int(pc.min(ends).as_py()), int(pc.max(ends).as_py())


def _complete(matched: pa.Table) -> pa.Table:
    return matched.filter(pc.equal(matched["state"].cast(pa.string()), "matched"))


def _errors(
    clock: Clock, span: tuple[int, int], planted: dict[int, tuple[int, float]], at: int
) -> dict[int, Floats]:
    """Each rank's error at nine times over `span`; the reference's own is left out."""
    times = np.linspace(*span, 9).astype(np.int64)
    reference = wall(times, *planted[clock.reference_rank], at)
    return {
        rank: np.abs(clock.align(rank, wall(times, *planted[rank], at)) - reference).astype(float)
        for rank in planted
        if rank != clock.reference_rank
    }


def _wall(clock: Clock) -> Clock:
    zero = np.zeros(len(clock.ranks), dtype=np.int64)
    return replace(clock, offset_ns=zero, drift_ppm=zero.astype(float))


def _ends(clock: Clock, matched: pa.Table) -> Clock:
    """Median difference of the ends of all collectives shared with the reference rank."""
    frame = matched.select(["collective", "rank", "end_ns"]).to_pandas().dropna()
    # what a rank sends to itself, in an all-to-all, is two calls of one rank with one end
    frame = frame.drop_duplicates(["collective", "rank"])
    ends = frame.pivot(index="collective", columns="rank", values="end_ns")
    offset = np.zeros(len(clock.ranks), dtype=np.int64)
    for k, rank in enumerate(clock.ranks):
        if rank != clock.reference_rank and rank in ends and clock.reference_rank in ends:
            both = ends[[rank, clock.reference_rank]].dropna()
            if len(both):
                # nanoseconds of today do not fit a double: subtract as integers
                mine, its = both.astype("int64").to_numpy().T
                offset[k] = int(np.median(mine - its))
    return replace(clock, offset_ns=offset, drift_ppm=np.zeros(len(clock.ranks)))


def _calls(matched: pa.Table, ranks: int) -> str:
    """`small` where each rank takes part in latency-bound calls; `host` where there is no device.

    Latency-bound is what took less than 30 µs after everybody had come.
    """
    names = matched["source"].cast(pa.string())
    if pc.any(pc.equal(names, "gloo")).as_py():
        return "host"
    frame = matched.select(["collective", "rank", "start_ns", "end_ns", "state"]).to_pandas()
    frame = frame[frame["state"].astype(str) == "matched"].dropna()
    frame["length"] = frame["end_ns"] - frame["start_ns"]
    shortest = frame.groupby("collective")["length"].transform("min")
    small = frame[shortest < _LATENCY_BOUND_NS]
    groups = small.groupby("collective")["rank"].agg(frozenset).unique()
    known: set[int] = set(groups[0]) if len(groups) else set()
    for _ in range(ranks):
        known |= {r for g in groups if g & known for r in g}
    return "small" if len(known) == ranks else "large"


def text(rows: Sequence[ClockRow]) -> str:
    """Return the rows as a table to print, with what was to be reached below it."""
    wide = max([len(row.name) for row in rows], default=10)
    head = (
        f"  {'':{wide}}        {'ours: median, 95%, worst':26} {'in window':>9} {'wall clock':>26}"
    )
    head += f" {'median of all ends':>26}  bound held  median bound"
    lines = ["Clock: errors in µs"]
    for planted, what in _PLANTED.items():
        lines += [f"\n{what}", head]
        for row in rows:
            if row.planted == planted:
                worst = _us(row.window.values.max()) if len(row.window.values) else "—"
                ours = f"{row.ours} {worst:>9}"
                lines.append(
                    f"  {row.name:{wide}}  {row.calls:5} {ours} {row.wall} {row.ends}"
                    f"  {row.held:4} of {row.bounds:4} {_us(row.uncertainty_ns):>9}"
                    + (f"  {row.unbounded} unbounded" if row.unbounded else "")
                )
    return "\n".join([*lines, "", *_summary(rows)])


def _summary(rows: Sequence[ClockRow]) -> list[str]:
    out = []
    for calls, limit in _TO_REACH_NS.items():
        for planted in _PLANTED:
            mine = [r for r in rows if r.calls == calls and r.planted == planted]
            mine = [r for r in mine if len(r.ours.values)]
            if mine:
                every = np.concatenate([r.ours.values for r in mine])
                good = sum(r.p95_ns <= limit for r in mine)
                out.append(
                    f"{planted}, {calls} collectives: 95% of all errors within "
                    f"{_us(np.quantile(every, 0.95))} µs; {good} of {len(mine)} recordings and "
                    f"classes within {limit // 1000} µs"
                )
    held, bounds = sum(r.held for r in rows), sum(r.bounds for r in rows)
    free = sum(r.unbounded for r in rows)
    out.append(f"the bound held {held} times of {bounds}; {free} times there was none")
    return out


def _us(value: float) -> str:
    return f"{value / 1e3:.1f}"


if __name__ == "__main__":
    print(table([Path(argument) for argument in sys.argv[1:]]))
