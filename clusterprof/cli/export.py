"""`clusterprof export RUN --format F`: a merged run for Perfetto and other tools."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from clusterprof import words
from clusterprof.agent.contracts import files
from clusterprof.arguments import beginning, check_free, path
from clusterprof.cli import Parser, verb_parser
from clusterprof.console import say
from clusterprof.errors import UsageError
from clusterprof.export.merged_tables import Merged, read
from clusterprof.run_directory import Window, bytes_of, writing


class Format(NamedTuple):
    """One format: how what it writes is called."""

    ending: str
    #: one line of help
    summary: str
    #: what to do with it
    next: str


def _write(form: str, merged: Merged, target: Path, limit_b: int) -> list[str]:
    """Write a file, or a folder; returns what was left out. A trace has at most `limit_b` bytes."""
    from clusterprof.export import chrome, commands, flat_tables, perfetto, prometheus
    from clusterprof.export.tracks import Cut, survey

    if form in ("csv", "parquet"):
        write = flat_tables.write_csv if form == "csv" else flat_tables.write_parquet
        write(merged, target)
        return []
    if form == "prometheus":
        files.write(target, prometheus.text(merged))
        return []
    if form in ("nsys", "ncu"):
        lines = commands.nsys(merged) if form == "nsys" else commands.ncu(merged)
        files.write(target, "\n".join(lines) + "\n")
        # of a file with comments alone, what those say
        empty = all(line.startswith("#") for line in lines)
        return [line.removeprefix("# ") for line in lines[1:]] if empty else []
    whole, json = form == "perfetto-archive", form == "chrome-json"
    chosen = Cut() if whole else survey(merged, limit_b, json=json)
    with files.new(target) as file:
        if whole:
            perfetto.write_archive(merged, replace(merged, own_clocks=True), file, chosen)
        else:
            (chrome if json else perfetto).write(merged, file, chosen)
    return chosen.notes


_PERFETTO = "open it at https://ui.perfetto.dev (it stays on your machine)"
_TABLES = "operations, ranks, steps, findings, collectives, and summaries as nsys makes them"
FORMATS = {
    "perfetto": Format(".pftrace", "one trace of all ranks on one clock", _PERFETTO),
    "perfetto-archive": Format(
        ".perfetto.zip", "a trace per rank, whole, and Perfetto's manifest with their offsets",
        _PERFETTO,
    ),
    "chrome-json": Format(
        ".json", "the same as Chrome's Trace Event JSON",
        "for viewers and scripts that read Chrome's Trace Event format",
    ),
    "csv": Format("-csv", f"a folder of tables: {_TABLES}", "one table a file"),
    "parquet": Format("-parquet", "the same as Parquet", "one table a file"),
    "prometheus": Format(
        ".prom", "gauges for node_exporter's textfile collector",
        "put it into node_exporter's --collector.textfile.directory",
    ),
    "nsys": Format(
        "-nsys.sh", "commands that export each nsys report on the reference rank's clock",
        "read it, then run it where the reports are",
    ),
    "ncu": Format(
        "-ncu.sh", "commands that profile the kernels that findings name, by Nsight Compute",
        "put its command in the place of that rank's program",
    ),
}  # fmt: skip


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Write a merged run for other tools. The run stays as it is. "
        "Nothing that is written holds environment variables or command lines.",
        "export runs/... --format perfetto                open it at ui.perfetto.dev",
        "export runs/... --format perfetto-archive",
        run="a run directory, or merge's --output",
    )
    add = parser.add_argument
    add("--format", required=True, choices=FORMATS, metavar="FORMAT",
        help="; ".join(f"{name}: {form.summary}" for name, form in FORMATS.items()))  # fmt: skip
    add("-o", "--output", type=path, metavar="PATH",
        help="where to write it (default: here, called as the run is)")  # fmt: skip
    add("--max-mb", type=_size, default=100, metavar="N",  # what Perfetto's page opens in seconds
        help="perfetto, chrome-json: the trace has at most N MB (default: 100): the "
        "shortest kernels, copies and host calls are left out, and the trace says so")  # fmt: skip
    add("--force", action="store_true", help="replace what export wrote")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Write a merged run in one format; the run stays as it is."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    chosen = FORMATS[arguments.format]
    run = Window.at(arguments.run.absolute())
    target: Path = arguments.output or Path(run.path.name + chosen.ending)
    check_free(target, arguments.force, _is_ours)
    merged = read(run)
    with writing(target, "-o PATH"):
        notes = _write(arguments.format, merged, target, arguments.max_mb * 1_000_000)
    # a script without commands has nothing to be done with
    empty = notes and chosen.ending.endswith(".sh")
    then = "no command" if empty else chosen.next
    say(f"wrote {target} ({words.size(bytes_of(target))}): {then}")
    for note in notes:
        say(note)
    return 0


def _size(given: str) -> int:
    if not given.isdecimal() or not 0 < int(given) <= 1_000_000:
        raise UsageError(f"--max-mb {given!r} is no size", "write --max-mb 100")
    return int(given)


def _is_ours(target: Path) -> bool:
    """Whether export wrote it: a file names us at its beginning, a folder has our files only."""
    from clusterprof.export.flat_tables import NAMES

    if not target.is_dir():
        return b"clusterprof" in beginning(target)[:300]
    ours = {f"{name}.{ending}" for name in NAMES for ending in ("csv", "parquet")}
    with contextlib.suppress(OSError):
        return {file.name for file in target.iterdir()} <= ours
    return False
