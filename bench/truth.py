"""`make truth`: what is true of recordings and simulated jobs, and what clusterprof says of them.

Prints a table for each promise, every figure with its target and its value before the model (the
rules of 2026-11-21), and exits with 1 when a target is missed. The simulated jobs are of seeds
that nothing was tried on. See README.md beside this file for the format of `truth.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from simulate import Job, simulate
from simulate.cases import KINDS, Case, cases, right, saved_ns, straggler_named

from clusterprof import run_directory
from clusterprof.align.clock import align
from clusterprof.align.match import match, numbered
from clusterprof.analysis.findings.registry import all_findings
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.recorded import replay_of
from clusterprof.analysis.model.replay import Lengths, Replay
from clusterprof.collect.outcomes import collect
from clusterprof.columns import Floats, Ints
from clusterprof.errors import ClusterprofError
from clusterprof.ingest import gather
from clusterprof.merge_run import merge_run
from clusterprof.results import Results
from clusterprof.study import dataset_of, study
from clusterprof.tables import RankTables

_RECORDINGS = Path(__file__).resolve().parent.parent / "tests" / "data" / "recordings"
#: nothing was tried on simulated jobs of seeds from here on
_HELD_OUT = 1000
#: a stated saving is near the measured one within this part of it, or this part of the step
_NEAR_SAVED_FRAC, _NEAR_STEP_FRAC = 0.10, 0.02
#: a finding that saves so much of a step is above information
_DECIDES_FRAC = 0.05
#: what two replays of one job may differ by
_ROUNDED_NS = 1_000
#: planted clocks are off by up to so much; so many runs are timed, fewer of those that take long
_CLOCKS_NS, _RUNS, _LONG_S = 50_000_000, 5, 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A promise: the most that its rows' errors may be, and what they were before the model."""

    title: str
    mean: float | None = None
    worst: float | None = None
    before: str = "not measured"
    #: print all rows, not only those that are wrong
    every: bool = False
    unit: str = "%"


TABLES = {
    "recordings": Table("Top finding, recordings", 0.01, None, "0 of 21 wrong", every=True),
    "simulated": Table("Top finding, simulated jobs", 0.01, None, "0.9%"),
    "false": Table("A rank of a healthy job called a straggler", 0.01, None, "0 of 79"),
    "saving": Table(
        "Stated saving against the same simulated job without its cause, of the step",
        0.01, 0.05, "mean 1.7%, worst 24.1%",
    ),
    "measured": Table(
        "On GPUs: stated saving against the measured one, beyond a tenth of it or 2% of the step",
        None, 0.0, every=True,
    ),
    "repeats": Table(
        "The same, beyond that and what the measured one varies by from repeat to repeat",
        None, 0.0, every=True,
    ),
    "unsure": Table(
        "True saving beyond the stated uncertainty (on GPUs and what repeats vary by)",
        0.05, None, "not measured",
    ),
    "width": Table(
        "Half the width of what may be saved, of the saving, where that is above information",
        0.15, None, "a third",
    ),
    "replay": Table("Replay without change against the recorded steps", None, 0.01),
    # steps differ, so that what the other half lasted is compared; 3.3%: Lumos' mean, MLSys 2025
    "halves": Table(
        "Replay of every other step with the lengths of the next, against those next steps",
        0.033, every=True,
    ),
    "time": Table(
        "Processor time of the findings", None, 22.0, "11 and 22 s at 4096 ranks", every=True,
        unit="s",
    ),
    "scaling": Table("Processor time of matching and clock", every=True, unit="s"),
    "slope": Table(
        "Slope of the log-log fit of that time over the ranks",
        None, 1.05, "matching 1.00 to 1.07, clock 0.91 to 0.96; clock 1.73 at first", every=True,
        unit="",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What is true of one recording or simulated job, what was found, and how wrong that is."""

    table: str
    kind: str
    name: str
    truth: str
    found: str
    #: 0 or 1 of a verdict, else a share of the step (or seconds)
    error: float


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="further recordings"
    )
    parser.add_argument("--truth", type=Path, help="their truth, where it is not FOLDER/truth.json")
    parser.add_argument("--seeds", type=int, default=9, help="simulated jobs of each class")
    parser.add_argument("--first-seed", type=int, default=_HELD_OUT)
    parser.add_argument("--kinds", default="", help="only classes with one of these words (a,b)")
    parser.add_argument("--no-clocks", action="store_true", help="no table of clocks")
    parser.add_argument("--no-recordings", action="store_true", help="simulated jobs only")
    parser.add_argument(
        "--ranks", type=int,
        help="time the findings at so many simulated ranks, matching and clock at 64 and more, too",
    )  # fmt: skip
    options = parser.parse_args()
    folders = [(_RECORDINGS, _RECORDINGS / name) for name in ("truth.json", "pairs.json")]
    folders += [(folder, options.truth or folder / "truth.json") for folder in options.folder]
    if options.no_recordings:
        folders = []
    elif not options.no_clocks and importlib.util.find_spec("truth_clock"):
        clock = importlib.import_module("truth_clock")
        print(clock.table(list(dict.fromkeys(folder for folder, _ in folders))))
    begin = time.monotonic()
    rows = [row for folder, truth in folders for row in of_recordings(folder, truth)]
    kinds = [kind for kind in KINDS if any(word in kind for word in options.kinds.split(","))]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows += [row for case in cases(kinds, seeds) for row in of_job(case)]
    rows += [*timed(options.ranks), *scaled(options.ranks)] if options.ranks else []
    kept = [show(table, [r for r in rows if r.table == name]) for name, table in TABLES.items()]
    known = "nothing was tried on them" if options.first_seed >= _HELD_OUT else "known"
    print(f"\nseeds from {options.first_seed} on: {known}; {time.monotonic() - begin:.0f} s")
    return 0 if all(kept) else 1


def show(table: Table, rows: Sequence[Row]) -> bool:
    """Print a table; returns whether its promise is kept."""
    if not rows:
        return True

    def shown(value: float) -> str:
        return f"{100 * value:.1f}%" if table.unit == "%" else f"{value:.2f} {table.unit}".rstrip()

    print(f"\n{table.title}")
    promised = [value for value in (table.mean, table.worst) if value is not None]
    limit = max(promised, default=math.inf)
    for kind, group in groupby(sorted(rows, key=lambda r: r.kind), lambda row: row.kind):
        here = list(group)
        errors = [row.error for row in here]
        mean = shown(float(np.mean(errors)))
        good = sum(error <= limit for error in errors)
        print(
            f"  {kind:30} {good:4} of {len(here):4}  mean {mean:>6}  worst {shown(max(errors)):>6}"
        )
        for row in here:
            if table.every or row.error > limit:
                mark = "WRONG" if row.error > limit else "     "
                print(f"    {mark} {shown(row.error):>6}  {row.name}: {row.truth} | {row.found}")
    errors = [row.error for row in rows]
    kept = True
    for name, value, most in (
        ("mean", float(np.mean(errors)), table.mean), ("worst", max(errors), table.worst),
    ):  # fmt: skip
        if most is not None:
            kept &= value <= most
            print(
                f"  {'ok' if value <= most else 'MISSED'}: {name} {shown(value)} of {len(rows)} "
                f"(to reach: {shown(most)}; before: {table.before})"
            )
    return kept


def of_recordings(folder: Path, truth: Path) -> Iterator[Row]:
    """The verdict on each recording, whether a healthy rank is named, savings and replays."""
    for name, what in json.loads(truth.read_text())["recordings"].items():
        case = Case(
            name, 0, Job(), tuple(what["codes"]), tuple(what.get("ranks", ())),
            healthy=what.get("healthy", False),
        )  # fmt: skip
        true = " or ".join(code or "nothing" for code in case.codes)
        true += f" rank {case.ranks[0]}" if case.ranks else ""
        try:
            found = list(studied(folder / name)["findings"])
            dataset = dataset_of(gather([folder / name]).ranks)
        except (ClusterprofError, OSError) as error:
            yield Row("recordings", "recording", name, true, f"error: {error}", 1.0)
            continue
        good = right(case, found)
        if good and "cost_ms" in what:
            low, high = what["cost_ms"]
            good = low <= found[0]["cost_ns_per_step"] / 1e6 <= high
        yield Row("recordings", "recording", name, true, _top(case, found), float(not good))
        yield from _false("recording", name, case, found)
        yield from _measured(name, what, found)
        yield from _replays(name, dataset)


def studied(path: Path) -> Results:
    """The results of a folder of reports, or of a copy of a run directory."""
    if not (path / "run.json").is_file():
        gathered = gather([path])
        return study(gathered.ranks, gathered.missing, gathered.warnings).results
    with tempfile.TemporaryDirectory() as place:
        run = run_directory.opened(shutil.copytree(path, Path(place) / path.name))
        outcomes = collect(run, run.directory.read_manifest().expected_ranks(), patience_s=0)
        return merge_run(run, outcomes).results


def of_job(case: Case) -> Iterator[Row]:
    """The verdict on a simulated job, whether a healthy rank is named, and what it would save."""
    ranks, name = profiled(case, case.job), f"seed {case.seed}"
    found = list(study(ranks).results["findings"])
    wrong = float(not right(case, found))
    yield Row("simulated", case.kind, name, case.truth, _top(case, found), wrong)
    yield from _false(case.kind, name, case, found)
    if case.without is not None:
        dataset, stated = dataset_of(ranks), _stated(case, found)
        before = _step_ns(dataset)
        true = before - _step_ns(dataset_of(profiled(case, case.without)))
        views = {f["saving"]["stated"] for f in _true(case, found) if f["saving"]}
        if dataset.usual_step_ns is None and views == {"long_run"}:
            # queued work covers the cause in the window: what it costs behind it is stated
            true, before = saved_ns(case.job)
        what = f"{true / 1e6:.2f} of {before / 1e6:.2f} ms"
        error = abs(stated - true) / before
        text = _text(_true(case, found))
        yield Row("saving", case.kind, name, what, text, error)
        yield from _intervals(case.kind, name, what, _true(case, found), true, _ROUNDED_NS, before)


def profiled(case: Case, job: Job) -> list[RankTables]:
    """The reports of a case's job, or of the same one without its cause."""
    ranks, _ = simulate(job)
    return [t for t in ranks if case.profiled is None or t.rank in case.profiled]


def _top(case: Case, found: Sequence[Any]) -> str:
    # an information costs nothing and changes no verdict, unless it is all there is
    if not found or (found[0]["severity"] == "info" and "" in case.codes):
        return "nothing"
    rank = "" if found[0]["rank"] is None else f" rank {found[0]['rank']}"
    return f"{found[0]['code']}{rank} {_saved(found[0]) / 1e6:.1f} ms"


def _false(kind: str, name: str, case: Case, found: Sequence[Any]) -> Iterator[Row]:
    if case.healthy:
        named = float(straggler_named(list(found)))
        yield Row("false", kind, name, "no straggler", _top(case, found), named)


def _saved(finding: Any) -> float:
    """What a finding says that its repair saves a step (ns); before the model: what it costs."""
    return float(finding.get("saved_ns_per_step", finding["cost_ns_per_step"]))


def _stated(case: Case, found: Iterable[Any]) -> float:
    """What the findings that are true of a case would save together: each is net of the others."""
    return sum(_saved(f) for f in _true(case, found))


def _true(case: Case, found: Iterable[Any]) -> list[Any]:
    """The findings that are true of a case."""
    return [
        f for f in found
        if f["code"] in case.codes
        and (not case.ranks or f["rank"] is None or f["rank"] in case.ranks)
    ]  # fmt: skip


def _step_ns(dataset: Dataset) -> float:
    """A step's length without the profiler, where it is known."""
    return float(dataset.usual_step_ns or dataset.step_ns)


def _replays(name: str, dataset: Dataset) -> Iterator[Row]:
    """The replay of unchanged lengths, and of every other step with the lengths of the next."""
    job = replay_of(dataset)
    if job is None:
        return
    at = np.searchsorted(dataset.steady_steps, job.steps)
    true = dataset.account("duration_ns")[job.ranks][:, at].mean(axis=0)
    yield _apart("replay", name, true, _steps(job, job.lengths))
    half = np.arange(0, len(job.steps) - 1, 2)
    if len(half):
        found = _steps(job, lengths_of_others(job, half, half + 1))
        own = f", its own {true[half].mean() / 1e6:.2f} ms"
        yield _apart("halves", name, true[half + 1], found[half], own)


def _steps(job: Replay, lengths: Lengths) -> Floats:
    """How long each step is with these lengths, the mean over ranks (ns)."""
    return np.asarray(np.diff(job.times(lengths)[job.marks], axis=1).mean(axis=0))


def _apart(table: str, name: str, true: Floats, found: Floats, more: str = "") -> Row:
    one, other = float(true.mean()), float(found.mean())
    error = abs(other - one) / one
    return Row(
        table, "recording", name, f"{one / 1e6:.2f} ms", f"{other / 1e6:.2f} ms{more}", error
    )


def lengths_of_others(job: Replay, steps: Ints, others: Ints) -> Lengths:
    """The job's lengths with those of `others` in each of `steps`, by their place in the step."""
    own, run = job.lengths.own.copy(), job.lengths.run.copy()
    order = np.argsort(job.launch_moment, kind="stable")
    work = job.joined * 4 + job.kind
    for step, other in zip(steps.tolist(), others.tolist(), strict=True):
        for rank in job.ranks.tolist():
            host = (
                np.flatnonzero((job.host_rank == rank) & (job.host_step == s))
                for s in (step, other)
            )
            _copied(own, job.lengths.own, job.host_root, *host)
            device = (
                order[(job.rank[order] == rank) & (job.step[order] == s)] for s in (step, other)
            )
            _copied(run, job.lengths.run, work, *device)
    return replace(job.lengths, own=own, run=run)


def _copied(out: Ints, lengths: Ints, kind: Ints, mine: Ints, its: Ints) -> None:
    """Give the n-th of each kind among `mine` the length of the n-th of that kind among `its`.

    One step may do more than the other: what has no partner takes no time, and partners that are
    left over are added to the last one, so that all of the other step's time is there.
    """
    for k in np.unique(kind[mine]).tolist():
        one, other = mine[kind[mine] == k], its[kind[its] == k]
        least = min(len(one), len(other))
        out[one] = 0
        out[one[:least]] = lengths[other[:least]]
        out[one[-1]] += lengths[other[least:]].sum()


def _measured(name: str, what: dict[str, Any], found: Sequence[Any]) -> Iterator[Row]:
    """What findings state beside the speed-up that was measured without what was planted."""
    for pair in (what, *what.get("also", ())):
        if "saved_of" not in pair:
            continue
        mine = [_left_out(f) for f in found if f["code"] == pair["saved_of"]]
        stated = sum(_saved(f) for f in mine) / 1e6
        saved, spread, step = pair["saved_ms"], pair["saved_spread_ms"], what["step_ms"]
        most = max(_NEAR_SAVED_FRAC * abs(saved), _NEAR_STEP_FRAC * step)
        error = abs(stated - saved)
        true = f"{saved:.2f} ± {spread:.2f} of {step:.2f} ms, {pair['saved_of']}"
        text = _text(mine)
        for table, near in (("measured", most), ("repeats", most + spread)):
            beyond = max(error - near, 0.0) / step
            yield Row(table, "recording", name, true, text, beyond)
        ns = (1e6 * each for each in (saved, spread, step))
        yield from _intervals("recording", name, true, mine, *ns)


def _left_out(finding: Any) -> Any:
    """A finding as if work that it spreads were left out, as it was in what was measured."""
    key, stated = "left_out_saves_ns_per_step", finding["saved_ns_per_step"]
    times = next((row[key] / stated for row in finding["evidence"] if key in row and stated), 1.0)
    # the interval in proportion
    names = ("saved_ns_per_step", "saved_least_ns", "saved_most_ns")
    return {**finding, **{name: finding[name] * times for name in names}}


def _interval(found: Sequence[Any]) -> tuple[float, float]:
    """From where to where what findings save together lies (ns)."""
    least, most = (sum(f[f"saved_{end}_ns"] for f in found) for end in ("least", "most"))
    return least, most


def _text(found: Sequence[Any]) -> str:
    """What findings save together."""
    stated = sum(_saved(f) for f in found)
    low, high = (each / 1e6 for each in _interval(found))
    return f"{stated / 1e6:.2f} ({low:.2f} to {high:.2f}) ms"


def _intervals(
    kind: str, name: str, what: str, found: Sequence[Any], true: float, within: float, step: float
) -> Iterator[Row]:
    """Whether what is true lies in the interval, and how wide that is where it is a finding."""
    (least, most), stated = _interval(found), sum(_saved(f) for f in found)
    beyond = float(not least - within <= true <= most + within)
    yield Row("unsure", kind, name, what, _text(found), beyond)
    if least >= _DECIDES_FRAC * step:
        width = (most - least) / 2 / stated
        yield Row("width", kind, name, what, _text(found), width)


def timed(ranks: int) -> Iterator[Row]:
    """Processor time of all findings of large jobs: data parallel, and parallel in three ways."""
    for job in _large(ranks):
        dataset = dataset_of(simulate(job)[0])
        begin = time.process_time()
        found, _ = all_findings(dataset)
        took = time.process_time() - begin
        yield Row("time", "findings", _laid_out(job), "", f"{len(found)} findings", took)


def scaled(most: int) -> Iterator[Row]:
    """Processor time of matching and of the clocks over 64 ranks, four times as many, to `most`.

    Each rank has a host and a clock of its own, planted; the least of several runs.
    """
    sizes = [64 * 4**k for k in range(most) if 64 * 4**k <= most]
    took: dict[str, list[float]] = {}
    for ranks in sizes:
        rng = np.random.default_rng(ranks)
        planted = rng.integers(-_CLOCKS_NS, _CLOCKS_NS, ranks), rng.uniform(-50, 50, ranks)
        for layout, job in zip(("data parallel", "three ways"), _large(ranks), strict=True):
            offset, drift = (tuple(values.tolist()) for values in planted)
            job = replace(job, ranks_per_host=1, offset_ns=offset, drift_ppm=drift)
            tables = numbered(simulate(job)[0])
            matching, matched = _least_time(lambda t=tables: match(t))
            clock, _ = _least_time(lambda t=tables, m=matched: align(t, m))
            for what, seconds in (("matching", matching), ("clock", clock)):
                kind = f"{what}, {layout}"
                took.setdefault(kind, []).append(seconds)
                calls = f"{sum(t.collective_calls.num_rows for t in tables)} calls"
                yield Row("scaling", kind, _laid_out(job), calls, f"{seconds:.2f} s", seconds)
    if len(sizes) > 1:
        for kind, seconds in took.items():
            slope = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
            yield Row("slope", kind, f"{sizes[0]} to {sizes[-1]} ranks", "", "", slope)


def _large(ranks: int) -> tuple[Job, Job]:
    # 12 calls a rank, and 84: 49 and 344 thousand at 4096
    return tuple(
        Job(
            dp=dp, tp=tp, pp=pp, layers=2 if pp == 1 else pp, steps=4, host_noise_frac=0.1,
            host_pace_frac=0.03,
        )
        for dp, tp, pp in ((ranks, 1, 1), (ranks // 32, 8, 4))
    )  # fmt: skip


def _laid_out(job: Job) -> str:
    return f"{job.world} ranks, {job.dp} x {job.tp} x {job.pp}"


def _least_time(run: Callable[[], T]) -> tuple[float, T]:
    """The least processor time of several runs (s; one where that takes long), and the result."""
    times: list[float] = []
    while not times or (len(times) < _RUNS and sum(times) < _LONG_S):
        begin = time.process_time()
        result = run()
        times.append(time.process_time() - begin)
    return min(times), result


if __name__ == "__main__":
    sys.exit(main())
