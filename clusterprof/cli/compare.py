"""`clusterprof compare A B`: what has changed from one run to another, beyond the noise."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof import console, gate
from clusterprof.arguments import check_free, path
from clusterprof.cli import Parser, verb_parser
from clusterprof.errors import MergeError


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Compare two runs of a job: step time, its parts and findings, each with the noise. A and "
        "B are run directories that were merged, results.json files, or names of baselines.",
        "compare runs/before runs/after",
        "compare nightly runs/after --fail-on 'step>+3%'",
    )
    add = parser.add_argument
    add("a", metavar="A", help="what was: a run, a results.json or a baseline")
    add("b", metavar="B", help="what is now")
    add("--store", type=path, default=None, metavar="DIR",
        help="where baselines are (default .clusterprof/baselines)")  # fmt: skip
    add("--html", type=path, metavar="FILE", help="write a page to FILE")
    add("--force", action="store_true", help="replace what --html wrote")
    gate.add_option(add, compares=True)
    shown = parser.add_mutually_exclusive_group().add_argument
    shown("--json", action="store_true", help="print JSON instead of text")
    shown("--markdown", action="store_true", help="print Markdown, for a pull request")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Compare and print; 0, or 1 where a condition of --fail-on is met."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    gate.check_codes(arguments.fail_on)
    from clusterprof import baselines, comparison
    from clusterprof.report import comparison_text, html, results_json

    if arguments.html:
        check_free(arguments.html, arguments.force, html.is_ours)
    sides = [baselines.runs_named(name, arguments.store) for name in (arguments.a, arguments.b)]
    made = comparison.compare(*sides)
    if arguments.html:
        html.write(arguments.html, comparison_text.page(made), "--html")
        console.say(f"wrote {arguments.html}")
    if arguments.json:
        console.json(results_json.dumps(made))
    elif arguments.markdown:
        console.styled(comparison_text.markdown(made), ())
    else:
        console.styled(comparison_text.render(made, min(100, console.width(100))), ())
    if arguments.fail_on and made["other_job"]:
        raise MergeError(
            f"--fail-on cannot be checked: {made['other_job'][0]}",
            "compare runs of one job, or leave --fail-on out",
        )
    return int(comparison.fails(arguments.fail_on, made))
