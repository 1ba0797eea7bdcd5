"""`make truth`: what is true of recordings and simulated jobs, and what clusterprof finds.

Prints tables of clocks, of verdicts, and of savings stated and measured. Exits with 1 when fewer
than 95% of the verdicts are right, or more than 1% of the healthy jobs have a straggler. The
rules were made looking at the seeds below `_HELD_OUT` and at most of the recordings; the
simulated jobs of the table are of seeds that no rule was made on. See README.md beside this file
for the format of `truth.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulate import simulate
from simulate.cases import KINDS, Case, cases, right, straggler_named

from clusterprof import run_directory
from clusterprof.collect.outcomes import collect
from clusterprof.errors import ClusterprofError
from clusterprof.ingest import gather
from clusterprof.merge_run import merge_run
from clusterprof.results import Results
from clusterprof.study import study

_RECORDINGS = Path(__file__).resolve().parent.parent / "tests" / "data" / "recordings"
#: simulated jobs of seeds from here on were not looked at while the rules were made
_HELD_OUT = 1000
_RIGHT_FRAC, _FALSE_FRAC = 0.95, 0.01
#: a stated saving is near the measured one within this part of it, or this part of the step
_NEAR_SAVED_FRAC, _NEAR_STEP_FRAC = 0.10, 0.02


@dataclass(frozen=True)
class Saving:
    """What the program without the cause saves, measured, and what the finding states."""

    name: str
    code: str
    step_ms: float
    measured_ms: float
    spread_ms: float
    stated_ms: float

    @property
    def near(self) -> bool:
        """Whether what is stated is near what was measured."""
        most = max(_NEAR_SAVED_FRAC * self.measured_ms, _NEAR_STEP_FRAC * self.step_ms)
        return abs(self.stated_ms - self.measured_ms) <= most


@dataclass(frozen=True)
class Row:
    """One recording or simulated job: its truth and the verdict."""

    kind: str
    name: str
    truth: str
    found: str
    right: bool
    healthy: bool
    false_straggler: bool
    savings: tuple[Saving, ...] = ()


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="further recordings"
    )
    parser.add_argument("--truth", type=Path, help="their truth, where it is not FOLDER/truth.json")
    parser.add_argument("--seeds", type=int, default=9, help="simulated jobs of each class")
    parser.add_argument("--first-seed", type=int, default=_HELD_OUT)
    parser.add_argument("--no-clocks", action="store_true", help="the verdicts only")
    options = parser.parse_args()
    folders = [(_RECORDINGS, _RECORDINGS / name) for name in ("truth.json", "pairs.json")]
    folders += [(folder, options.truth or folder / "truth.json") for folder in options.folder]
    if not options.no_clocks and importlib.util.find_spec("truth_clock"):
        clock = importlib.import_module("truth_clock")
        print(clock.table(list(dict.fromkeys(folder for folder, _ in folders))))
        print()
    begin = time.monotonic()
    recorded = [row for folder, truth in folders for row in of_recordings(folder, truth)]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    simulated = [judge(case) for case in cases(list(KINDS), seeds)]
    return _print(recorded, simulated, options.first_seed, time.monotonic() - begin)


def of_recordings(folder: Path, truth: Path) -> Iterator[Row]:
    """One row for each recording that `truth` names and `folder` holds."""
    named: dict[str, dict[str, Any]] = json.loads(truth.read_text())["recordings"]
    for name, what in named.items():
        if not (folder / name).is_dir():
            print(f"{folder / name} is not there", file=sys.stderr)
            continue
        case = Case(
            name, 0, None, tuple(what["codes"]), tuple(what.get("ranks", ())),  # type: ignore[arg-type]
            healthy=what.get("healthy", False),
        )  # fmt: skip
        try:
            results = _studied(folder / name)
        except ClusterprofError as error:
            yield Row(
                "recording", name, _truth(case), f"error: {error}", False, case.healthy, False
            )
            continue
        good = _recorded_right(case, results["findings"], what.get("cost_ms"))
        row = _row("recording", name, case, results["findings"], good)
        yield replace(row, savings=tuple(_savings(name, what, results["findings"])))


def _studied(path: Path) -> Results:
    """Return the results of a folder of reports, or of a copy of a run directory."""
    if not (path / "run.json").is_file():
        gathered = gather([path])
        return study(gathered.ranks, gathered.missing, gathered.warnings).results
    with tempfile.TemporaryDirectory() as place:
        run = run_directory.opened(shutil.copytree(path, Path(place) / path.name))
        outcomes = collect(run, run.read_manifest().expected_ranks(), patience_s=0)
        return merge_run(run, outcomes).results


def _savings(name: str, what: dict[str, Any], found: list[Any]) -> Iterator[Saving]:
    for pair in (what, *what.get("also", ())):
        if "saved_of" in pair:
            stated = sum(f["cost_ns_per_step"] for f in found if f["code"] == pair["saved_of"])
            yield Saving(
                name, pair["saved_of"], what["step_ms"], pair["saved_ms"],
                pair["saved_spread_ms"], stated / 1e6,
            )  # fmt: skip


def _recorded_right(case: Case, found: list[Any], cost_ms: Sequence[float] | None) -> bool:
    """As for simulated jobs; of a recording whose healthy truth names a code, that code on top."""
    good = right(case, found)
    if good and cost_ms is not None:
        good = cost_ms[0] <= found[0]["cost_ns_per_step"] / 1e6 <= cost_ms[1]
    return good


def judge(case: Case) -> Row:
    """One simulated job's row."""
    ranks, _ = simulate(case.job)
    if case.profiled is not None:
        ranks = [r for r in ranks if r.rank in case.profiled]
    found: list[Any] = list(study(ranks).results["findings"])
    return _row(case.kind, str(case.seed), case, found, right(case, found))


def _truth(case: Case) -> str:
    codes = " or ".join(c or "nothing" for c in case.codes)
    if case.job is None:
        who = f" rank {case.ranks[0]}" if case.ranks else ""
        return codes + who
    return case.truth


def _row(kind: str, name: str, case: Case, found: list[Any], good: bool) -> Row:
    top = "nothing"
    # an information costs nothing and changes no verdict, unless it is all there is
    if found and (found[0]["severity"] != "info" or "" not in case.codes):
        rank = "" if found[0]["rank"] is None else f" rank {found[0]['rank']}"
        top = f"{found[0]['code']}{rank} {found[0]['cost_ns_per_step'] / 1e6:.1f} ms"
    return Row(
        kind, name, _truth(case), top, good, case.healthy, case.healthy and straggler_named(found)
    )


def _print(recorded: list[Row], simulated: list[Row], first: int, seconds: float) -> int:
    print("Verdicts, recordings")
    wide = max(len(row.name) for row in recorded)
    for row in recorded:
        mark = "right" if row.right else "WRONG"
        print(f"  {mark}  {row.name:{wide}}  {row.truth}  |  {row.found}")
    _print_savings([saving for row in recorded for saving in row.savings])
    kind = "known while the rules were made" if first < _HELD_OUT else "held out"
    print(f"\nVerdicts, simulated jobs (seeds from {first} on: {kind})")
    for kind in dict.fromkeys(row.kind for row in simulated):
        mine = [row for row in simulated if row.kind == kind]
        false = f", {sum(row.false_straggler for row in mine)} false" if mine[0].healthy else ""
        truth = " / ".join(dict.fromkeys(r.truth.split(" rank")[0] for r in mine))
        print(f"  {sum(row.right for row in mine):3} of {len(mine):3}  {kind:26}  {truth}{false}")
    for row in simulated:
        if not row.right:
            print(f"  WRONG  {row.kind}, seed {row.name}: {row.truth}  |  {row.found}")
    every = [*recorded, *simulated]
    good, healthy = sum(row.right for row in every), [row for row in every if row.healthy]
    false_ones = sum(row.false_straggler for row in healthy)
    print(
        f"\n{good} of {len(every)} right ({100 * good / len(every):.1f}%; to reach: 95%), "
        f"{false_ones} false stragglers on {len(healthy)} healthy jobs (to reach: at most 1%), "
        f"in {seconds:.0f} s"
    )
    enough = good >= _RIGHT_FRAC * len(every)
    return 0 if enough and false_ones <= _FALSE_FRAC * len(healthy) else 1


def _print_savings(savings: list[Saving]) -> None:
    print("\nSavings in ms per step: measured without the cause (± spread), stated; of steps of")
    for each in savings:
        mark = "near" if each.near else "FAR "
        print(
            f"  {mark}  {each.name:22}  {each.measured_ms:6.2f} ±{each.spread_ms:5.2f}  "
            f"{each.stated_ms:6.2f}  {each.step_ms:6.2f}  {each.code}"
        )
    near = sum(each.near for each in savings)
    print(
        f"  {near} of {len(savings)} within {_NEAR_SAVED_FRAC:.0%} of the saving or "
        f"{_NEAR_STEP_FRAC:.0%} of the step"
    )


if __name__ == "__main__":
    sys.exit(main())
