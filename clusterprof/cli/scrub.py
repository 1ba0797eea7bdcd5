"""`clusterprof scrub EXPORT TARGET`: a copy of an export without its environment variables."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.arguments import check_free, path
from clusterprof.cli import Parser, verb_parser
from clusterprof.console import say


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Copy an nsys SQLite export without the environment variables and the output of the "
        "profiled process. Variables that give rank, job and versions stay.",
        "scrub full.sqlite rank0.sqlite",
    )
    parser.add_argument(
        "export",
        metavar="EXPORT",
        type=path,
        help="made by nsys export -t sqlite --include-blobs=true",
    )
    parser.add_argument("target", metavar="TARGET", type=path, help="the copy")
    parser.add_argument("--force", action="store_true", help="replace TARGET")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Write a copy that can be shared."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    from clusterprof.ingest.nsys.scrubbing import is_ours, scrub

    check_free(arguments.target, arguments.force, is_ours)
    scrub(arguments.export, arguments.target)
    say(f"wrote {arguments.target}")
    return 0
