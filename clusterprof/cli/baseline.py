"""`clusterprof baseline save NAME RUN...`: keep runs under a name, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof import console
from clusterprof.arguments import path
from clusterprof.cli import Parser, verb_parser
from clusterprof.errors import UsageError
from clusterprof.results import MeasuredRun
from clusterprof.words import counted


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Keep what comparisons need of one or several runs, under a name: several tell how much "
        "runs differ from each other.",
        "baseline save nightly runs/a runs/b runs/c",
        "baseline list",
        usage=f"clusterprof {verb} save NAME RUN... | list",
    )
    add = parser.add_argument
    add("action", choices=("save", "list"), metavar="save|list",
        help="save runs, or list the names and their runs")  # fmt: skip
    add("name", nargs="?", metavar="NAME", help="the baseline's name")
    add("runs", nargs="*", type=path, metavar="RUN",
        help="a run directory that was merged, or a results.json")  # fmt: skip
    add("--add", action="store_true", help="keep the runs that the baseline has already")
    add("--force", action="store_true", help="replace the baseline")
    add("--store", type=path, default=None, metavar="DIR",
        help="where baselines are (default .clusterprof/baselines)")  # fmt: skip
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Save or list."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    from clusterprof import baselines, comparison
    from clusterprof.report import comparison_text

    if arguments.action == "list":
        files = baselines.listed(arguments.store)
        if not files:
            console.show(f"no baselines in {arguments.store or baselines.STORE}")
        for file in files:
            names = [run["name"] for run in baselines.read(file)["runs"]]
            shown = comparison_text.names_of(names)
            console.show(f"{file.stem}  {counted(len(names), 'run')}: {shown}")
        return 0
    if not arguments.name or not arguments.runs:
        raise UsageError(
            "a baseline needs a name and runs", "clusterprof baseline save NAME RUN..."
        )
    file = baselines.file_of(arguments.name, arguments.store)
    before: list[MeasuredRun] = []
    if file.exists() and not arguments.force:
        if not arguments.add:
            raise UsageError(
                f"the baseline {arguments.name} exists already: {file}",
                "add these runs to it with --add, or replace it with --force",
            )
        before = baselines.read(file)["runs"]
    runs = [*before, *map(comparison.measured, arguments.runs)]
    comparison.compare(runs[:1], runs)  # nothing can be compared with runs that have no steps
    baselines.save(file, runs)
    console.say(f"wrote {file}: {counted(len(runs), 'run')}")
    return 0
