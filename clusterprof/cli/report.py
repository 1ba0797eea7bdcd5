"""`clusterprof report RUN`: the verdict of a merged run."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof import console
from clusterprof.agent.contracts import paths
from clusterprof.cli import verb_parser
from clusterprof.errors import ReportError
from clusterprof.run_directory import RunDirectory


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print the verdict, or results.json, of a run that was merged before."""
    parser = verb_parser(
        verb, "Print the verdict of a merged run.",
        "report runs/...",
        "report runs/... --json",
        run="a run directory, or merge's --output",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print results.json instead of text")
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
