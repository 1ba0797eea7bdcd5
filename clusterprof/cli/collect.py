"""`clusterprof collect RUN`: finish what was interrupted, with the holes named."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clusterprof import rundir
from clusterprof.cli.launch import tell
from clusterprof.cli.narrate import say
from clusterprof.cli.options import path
from clusterprof.collect import collect_attempts
from clusterprof.errors import ReportError
from clusterprof.ranks import Selection


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Settle the ranks of a run whose launch was cut off, merge and report."""
    parser = argparse.ArgumentParser(
        prog=f"clusterprof {verb}",
        description="Settle the ranks of a run that was interrupted, merge its reports, report.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=path, help="a run directory")
    parser.add_argument("--no-merge", action="store_true", help="collect only")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(list(own))
    run = rundir.opened(arguments.run)
    manifest = run.read_manifest()
    selection = Selection.from_json(manifest["selection"])
    if any(host["left"] for host in manifest.get("hosts", [])):
        from clusterprof.collect.over_ssh import gather_left

        for host in gather_left(run, manifest):
            say(f"{host.name}: {host.reason or 'its reports are here'}")
        run.write_manifest(manifest)
    from clusterprof.collect import raw

    for made in (made for each in run.attempts() for made in raw.finish(each)):
        say(f"rank {made.rank}: {made.problem or 'its report is made'}")
    run, outcomes = collect_attempts(run, selection.expected(manifest["world_size"]), patience_s=0)
    if run.attempt != manifest.get("attempt", 1):
        manifest["attempt"] = run.attempt
        run.write_manifest(manifest)
    tell(run, outcomes)
    if not any(each.report for each in outcomes):
        raise ReportError(
            f"no report was captured in {run.path}",
            "each rank's state.json and log, below its ranks/, say what happened",
        )
    if not arguments.no_merge:
        from clusterprof.cli.merging import merge_run, tell_results

        tell_results(merge_run(run, outcomes), run)
    return 0
