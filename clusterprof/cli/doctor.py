"""`clusterprof doctor [srun OPTION...]`: whether profiling can work on this host or all nodes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from clusterprof import console
from clusterprof.arguments import path
from clusterprof.cli import Parser, verb_parser
from clusterprof.doctor import cluster, table, this_host
from clusterprof.doctor.table import BAD, Check
from clusterprof.errors import UsageError


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Check what profiling needs: on every node of the allocation that this runs in, on the "
        "nodes that srun's options ask for (-N4 -p gpu), or else on this host. Ends with status 1 "
        "where profiling would fail.",
        "doctor                    this host, or all nodes of the allocation",
        "doctor -N4 -p gpu         four nodes of a partition, asked by srun",
        usage="clusterprof doctor [--json] [srun OPTION...]",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--local", action="store_true", help="check only this host")
    add("--nsys", metavar="PATH", type=path, help="the nsys to use")
    add("--run-dir", metavar="DIR", type=path, default=Path("runs/x"),
        help="the planned run directory (default: in runs/)")  # fmt: skip
    add("--lines", action="store_true", help=argparse.SUPPRESS)
    add("--probe", type=path, help=argparse.SUPPRESS)
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Look, and print what was found; 1 where something is bad. Unknown options are srun's."""
    own_parser = parser(verb)
    arguments, asked = own_parser.parse_known_args(list(own))
    own_parser.check_passed_on(asked)
    if program is not None:
        raise UsageError("doctor runs no program", "leave out -- and what follows it")
    if arguments.local and asked:
        raise UsageError(
            f"doctor --local has no option {asked[0]}", "see clusterprof doctor --help"
        )
    checks_of = _checks_of(arguments, asked)
    if arguments.lines:
        print("\n".join(cluster.own_lines(*next(iter(checks_of.items())))))
        cluster.leave(0)
    lines, hosts = table.lines(checks_of), list(checks_of)
    bad = any(line.check.level == BAD for line in lines)
    if arguments.json:
        nodes = [
            {"host": host, "checks": list(map(asdict, checks))}
            for host, checks in checks_of.items()
        ]
        rows = [{**asdict(line.check), "nodes": list(line.nodes)} for line in lines]
        document = {"schema_version": 1, "fit": not bad, "nodes": nodes, "lines": rows}
        print(json.dumps(document, indent=1))
    else:
        shown = table.render(lines, hosts, min(110, console.width(110)))
        print(f"{shown}\n\n{table.verdict(lines, hosts)}")
    cluster.leave(int(bad))


def _checks_of(arguments: argparse.Namespace, asked: Sequence[str]) -> dict[str, list[Check]]:
    """The checks of each node that srun's options ask for, or of the allocation, or of this one."""
    parent: Path = arguments.run_dir.absolute().parent
    folder = next(above for above in (parent, *parent.parents) if above.is_dir())
    expected: list[str] = []
    if not arguments.local and not asked and cluster.in_allocation(os.environ):
        expected = cluster.hostnames(os.environ.get("SLURM_JOB_NODELIST", ""))
    if not asked and not expected:
        checks = this_host.checks(arguments.nsys, folder, arguments.probe)
        return {this_host.name(): list(this_host.look(checks))}
    if asked:
        console.say("waiting for the nodes that srun is asked for")
    passed = [f"--nsys={arguments.nsys}"] if arguments.nsys else []
    return cluster.ask(asked, expected, folder, passed)
