"""`make bench`: the figures that the project promises, measured on this machine.

Prints a table and writes the same as JSON into `bench/results/`. Exits with 1 when a figure
does not hold, or could not be measured well enough to tell.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import export
import flight
import operations
import reports
import scale
import start
import steps
import traces
from figure import Figure, table

import clusterprof

_RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--large", type=Path, metavar="DIR", help="two large reports to merge")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="two large traces to merge")
    parser.add_argument("--only", choices=sorted(_benchmarks(None)), action="append")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    options = parser.parse_args()
    figures: list[Figure] = []
    for name, measure in _benchmarks(options.large, options.traces, quick=options.quick).items():
        if options.only and name not in options.only:
            continue
        if name == "traces" and options.traces is None:
            continue
        print(f"measuring {name} …", file=sys.stderr)
        try:
            figures += measure()
        except Exception as error:  # noqa: BLE001 - one that cannot be measured leaves the others
            limit, unit = _LIMITS[name]
            figures.append(Figure(name, unit, limit, None, remark=f"not measured: {error}"))
    print(table(figures))
    print(f"written to {_write(figures)}", file=sys.stderr)
    return 0 if all(figure.verdict == "ok" for figure in figures) else 1


_LIMITS = {"help": (100.0, "ms"), "start": (50.0, "ms"), "hook": (5.0, "µs"), "steps": (0.5, "%"),
           "recorder": (50.0, "ms"), "watch": (0.5, "%"), "operations": (1.5, "a minute"),
           "merge": (3.0, "s"), "flight": (15.0, "s"),
           "traces": (1 / 6, "of the peer's"), "many": (0.6, "of the rows' reading"),
           "export": (1.6, "of the export's"), "scale": (60.0, "s")}  # fmt: skip


def _benchmarks(
    large: Path | None, large_traces: Path | None = None, quick: bool = False
) -> dict[str, Callable[[], list[Figure]]]:
    few = 10 if quick else 1
    return {
        "help": lambda: [start.help_time(30 // few)],
        "start": lambda: [start.agent_start(40 // few)],
        "hook": lambda: [steps.hook_cost(60 // few)],
        "steps": lambda: [steps.unprofiled_rank(4000 // few)],
        "recorder": lambda: steps.flight_recorder(30 // few),
        "watch": lambda: steps.watch(60 // few),
        "operations": lambda: [operations.per_minute(1 if quick else 3)],
        "merge": lambda: reports.merge(large, 10 // few),
        "traces": lambda: traces.merge(large_traces or Path(), 3 // few or 1),
        "flight": lambda: flight.merge(1 if quick else 3, 32 if quick else 1),
        "many": lambda: reports.many(8 if quick else 64, 1 if quick else 3),
        "export": lambda: export.merge(1 if quick else 3, few),
        "scale": lambda: scale.merge(32 if quick else 1),
    }


def _write(figures: list[Figure]) -> Path:
    now = datetime.datetime.now(datetime.timezone.utc)
    _RESULTS.mkdir(exist_ok=True)
    path = _RESULTS / f"{now:%Y%m%dT%H%M%SZ}.json"
    beside = path.with_suffix(".tmp")
    facts = {
        "time": now.isoformat(timespec="seconds"),
        "clusterprof": clusterprof.__version__,
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    beside.write_text(
        json.dumps({**facts, "figures": [each.as_json() for each in figures]}, indent=1) + "\n"
    )
    beside.rename(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
