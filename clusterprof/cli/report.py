"""`clusterprof report RUN`: the verdict of a merged run again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clusterprof import console
from clusterprof.agent.contracts import paths
from clusterprof.errors import ReportError
from clusterprof.launch.settings import path
from clusterprof.run_directory import RunDirectory


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print the verdict, or results.json, of a run that was merged before."""
    parser = argparse.ArgumentParser(
        prog=f"clusterprof {verb}",
        description="Print the verdict of a merged run again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", type=path, help="a run directory, or merge's --output"
    )
    parser.add_argument("--json", action="store_true", help="print results.json instead of text")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(list(own))
    run = RunDirectory(arguments.run)
    found = run.merged / paths.RESULTS
    if not found.is_file():
        raise ReportError(
            f"{run.path} has not been merged: it has no merged/results.json",
            f"merge it: clusterprof merge {run.path}",
        )
    from clusterprof.merge_run import print_verdict
    from clusterprof.report import results_json

    results = results_json.read(found)
    if arguments.json:
        console.json(results_json.dumps(results))
    else:
        print_verdict(results)
    return 0
