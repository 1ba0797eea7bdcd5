"""`clusterprof report RUN`: the verdict of a merged run, in any of its forms."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from clusterprof import console
from clusterprof.agent.contracts import files, paths
from clusterprof.arguments import add_gpu_hour, beginning, check_free, path, shortest
from clusterprof.cli import Parser, verb_parser
from clusterprof.run_directory import Window, writing


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb, "Print the verdict of a merged run, from what merging wrote: as text, or in another "
        "form.",
        "report runs/...",
        "report runs/... --markdown                  for an issue or a pull request",
        "report runs/... --ticket                    for who runs the cluster",
        "report runs/... --html -o report.html       the page again",
        "report runs/... --csv                       each rank's account of each step",
        run="a run directory, or merge's --output",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group().add_argument
    form("--json", action="store_true", help="print results.json")
    form("--html", action="store_true", help="print the page")
    form("--markdown", action="store_true", help="print Markdown")
    form("--ticket", action="store_true",
        help="print ten lines for the cluster's operators: who, node, when, how much")  # fmt: skip
    form("--csv", action="store_true",
        help="print the account of each rank in each step (times in ns)")  # fmt: skip
    add = parser.add_argument
    add("-o", "--output", type=path, metavar="FILE", help="write it to FILE instead")
    add("--anonymous", action="store_true",
        help="without hosts, paths and programs' arguments, to share it")  # fmt: skip
    add_gpu_hour(add)
    add("--force", action="store_true", help="replace what -o wrote")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print or write what a run that was merged before has found."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    run = Window.at(arguments.run.absolute())
    results_file = run.merged / paths.RESULTS
    from clusterprof import merge_run, next_command
    from clusterprof.report import results_json, text
    from clusterprof.report.anonymous import anonymous

    if not results_file.is_file():
        raise results_json.not_merged(arguments.run)
    if arguments.output:
        check_free(arguments.output, arguments.force, is_ours)
    results = merge_run.priced(results_json.read(results_file), arguments.gpu_hour)
    if arguments.anonymous and not arguments.html:
        results = anonymous(results)  # who gets it has another machine
    elif not (arguments.json or arguments.html):
        results = next_command.runnable(results, run)
    if arguments.json:
        page = results_json.dumps(results).decode()
    elif arguments.html:
        page = merge_run.page_again(run, results, anonymous=arguments.anonymous)
    elif arguments.markdown:
        page = text.markdown(results)
    elif arguments.ticket:
        from clusterprof.report.ticket import ticket

        page = ticket(results, "RUN" if arguments.anonymous else shortest(arguments.run))
    elif arguments.csv:
        page = text.accounts_csv(results)
    elif arguments.output:
        page = text.render(results)
    else:
        merge_run.print_verdict(results, None if arguments.anonymous else run)
        return 0
    if arguments.output:
        with writing(arguments.output, "--output"):
            files.write(arguments.output, page.encode(errors="backslashreplace"))
        console.say(f"wrote {arguments.output}")
    elif arguments.json:
        console.json(page.encode())
    else:
        sys.stdout.write(page)
    return 0


def is_ours(file: Path) -> bool:
    """Whether a file is one that -o wrote, in any form but text."""
    from clusterprof.report import html, text

    begins = (text.MARKDOWN_MARK, ",".join(text.CSV_COLUMNS), '{\n  "schema_version"')
    start = beginning(file).decode(errors="replace")
    return start.startswith(begins) or html.is_ours(file)
