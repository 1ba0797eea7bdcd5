"""`clusterprof clock`: offsets and drifts of the nodes' wall clocks, with a bound that holds."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from clusterprof import clock_probe, console, run_directory
from clusterprof.agent.contracts.identity import identify
from clusterprof.arguments import check_free, path
from clusterprof.cli import Parser, verb_parser
from clusterprof.clock_probe import Bound, Measurement, is_measurement
from clusterprof.errors import ClusterprofError, UsageError

_HOW = "srun -N4 --ntasks-per-node=1 clusterprof clock --output clock.json"


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Measure every rank's wall clock against rank 0's by a ping-pong over UDP. Run it inside "
        f"a launcher, one task per node: `{_HOW}`, before a training and after it. With FILEs: "
        "combine earlier measurements, which gives the drift.",
        "clock before.json after.json               with the drift between both",
        usage=f"LAUNCHER clusterprof {verb} [OPTIONS]\n       clusterprof {verb} FILE...",
    )
    add = parser.add_argument
    add("files", nargs="*", type=path, metavar="FILE", help="earlier measurements")
    add("-o", "--output", type=path, metavar="FILE", help="write the measurement to FILE")
    add("--force", action="store_true", help="replace what --output wrote before")
    add("--json", action="store_true", help="print the measurement as JSON")
    add("--meet", type=path, default=Path(), metavar="DIR",
        help="a folder that all nodes see, where rank 0 is found (default: the current "
        "one)")  # fmt: skip
    add("--timeout", type=float, default=30.0, metavar="S",
        help="give up after S seconds (default 30)")  # fmt: skip
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Measure, or put measurements together; 0, or the error's own status."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    if not arguments.timeout > 0:
        raise UsageError("--timeout is positive", "leave it out: 30")
    if arguments.files:
        measured = clock_probe.joined(map(clock_probe.read, arguments.files))
        return print_measurement(measured, arguments)
    me = identify(os.environ)
    if me is None or (me.world_size or 1) < 2:
        raise UsageError(
            "a clock is measured against another one",
            "no launcher has started more than one of us here",
            f"write: {_HOW}",
        )
    if me.rank == 0 and arguments.output:
        check_free(arguments.output, arguments.force, is_measurement)

    of_all = clock_probe.over_udp(me, arguments.meet, os.environ, arguments.timeout)
    return 0 if of_all is None else print_measurement(of_all, arguments)


def print_measurement(measurement: Measurement, arguments: argparse.Namespace) -> int:
    """Write and print what was measured."""
    if arguments.output:
        check_free(arguments.output, arguments.force, is_measurement)
    if not measurement.bounds:
        raise ClusterprofError("no clock could be measured", *measurement.notes)
    if arguments.output:
        with run_directory.writing(arguments.output):
            measurement.write(arguments.output)
        console.say(f"wrote {arguments.output}")
    for note in measurement.notes:
        console.say(note)
    print(json.dumps(measurement.as_json(), indent=1) if arguments.json else shown(measurement))
    return 0


def shown(measurement: Measurement) -> str:
    """One line for each rank: its last offset, its bound, and its drift where it was seen twice."""
    by_rank: dict[tuple[int, str], list[Bound]] = {}
    for bound in measurement.bounds:
        by_rank.setdefault((bound.rank, bound.machine), []).append(bound)
    rows = []
    for _, bounds in sorted(by_rank.items()):
        last = max(bounds, key=lambda bound: bound.at_ns)
        best = min(bound.round_trip_ns for bound in bounds)
        drift = "not constant" if len(bounds) > 1 else ""
        if limits := clock_probe.drift(bounds):
            middle, half = sum(limits) / 2, (limits.high_ppm - limits.low_ppm) / 2
            drift = f"{middle:+.3f} ±{half:.3f} ppm"
        rows.append(
            (str(last.rank), last.host, f"{last.offset_ns / 1e3:+.1f} µs",
             f"±{last.uncertainty_ns / 1e3:.1f} µs", f"{best / 1e3:.1f} µs", drift)
        )  # fmt: skip
    last_name = "drift" if any(row[5] for row in rows) else ""
    names = ("rank", "host", "offset", "bound", "round trip", last_name)
    lines = console.table([names, *rows], right=(0, 2, 3, 4, 5))
    first = measurement.bounds[0]
    host = first.other_machine.rpartition(" ")[2]
    return "\n".join([*lines, f"against rank {first.other} on {host}, over {measurement.method}"])
