"""`clusterprof scrub EXPORT TARGET`: an export without the environment it was taken in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clusterprof.console import say
from clusterprof.launch.settings import check_free, path


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Write a copy that can be shared."""
    parser = argparse.ArgumentParser(
        prog=f"clusterprof {verb}",
        description="Copy an nsys SQLite export without the environment variables and the output "
        "of the process that it is of. Rank, job and version variables stay.",
        allow_abbrev=False,
    )
    parser.add_argument("export", metavar="EXPORT", type=path, help="made by nsys export -t sqlite")
    parser.add_argument("target", metavar="TARGET", type=path, help="the copy")
    parser.add_argument("--force", action="store_true", help="replace TARGET")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args([*own, *(program or ())])
    from clusterprof.ingest.nsys.scrubbing import is_ours, scrub

    check_free(arguments.target, arguments.force, is_ours)

    scrub(arguments.export, arguments.target)
    say(f"wrote {arguments.target}")
    return 0
