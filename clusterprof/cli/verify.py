"""`clusterprof verify RUN NEWRUN`: whether a repair saves what was stated."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof import console
from clusterprof.arguments import path
from clusterprof.cli import Parser, verb_parser


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "After a repair: compare the saving that RUN states with the measured change of the step "
        "in NEWRUN, by the steps outside the windows of both. RUN is a run directory that was "
        "merged, and so is NEWRUN, a run of the same job after the repair.",
        "verify runs/before runs/repaired",
        "verify runs/before runs/repaired --finding straggler.host:3",
        run="the run whose finding was repaired",
    )
    add = parser.add_argument
    add("new_run", metavar="NEWRUN", type=path, help="a run of the same job after the repair")
    which = parser.add_mutually_exclusive_group().add_argument
    which("--finding", metavar="CODE[:RANK]",
        help="what was repaired (default: the first finding of RUN that saves "
        "something)")  # fmt: skip
    which("--all", action="store_true",
        help="those were repaired that RUN states a saving of at once: the first four at "
        "most")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print whether the stated saving is there."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    from clusterprof import verification
    from clusterprof.report import results_json

    repaired = verification.asked_for(arguments.finding, at_once=arguments.all)
    verified = verification.verify(arguments.run, arguments.new_run, repaired)
    if arguments.json:
        console.json(results_json.dumps(verified))
    else:
        console.styled(verification.render(verified, min(100, console.width(100))), ())
    return 0
