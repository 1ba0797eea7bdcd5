"""`clusterprof export RUN --format F`: a merged run for Perfetto and other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from clusterprof import words
from clusterprof.agent.contracts import files
from clusterprof.arguments import check_free, path
from clusterprof.cli import Parser, verb_parser
from clusterprof.console import say
from clusterprof.errors import UsageError
from clusterprof.export.merged_tables import Merged, read
from clusterprof.run_directory import RunDirectory, bytes_of, writing

#: a trace is at most so large, MB: what Perfetto's page opens in seconds
MOST_MB = 100


class Format(NamedTuple):
    """One format: how what it writes is called, and who writes it."""

    ending: str
    #: one line of help
    summary: str
    #: writes a file, or a folder, and says what was left out; a trace has at most so many bytes
    write: Callable[[Merged, Path, int], list[str]]
    #: what to do with it
    next: str


def _perfetto(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import perfetto, tracks

    chosen = tracks.survey(merged, limit)
    with files.new(target) as file:
        perfetto.write(merged, file, chosen)
    return chosen.notes


def _archive(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import archive, tracks

    chosen = tracks.Cut()
    with files.new(target) as file:
        archive.write(merged, replace(merged, own_clocks=True), file, chosen)
    return chosen.notes


def _csv(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import flat_tables

    flat_tables.write_csv(merged, target)
    return []


def _parquet(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import flat_tables

    flat_tables.write_parquet(merged, target)
    return []


def _chrome(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import chrome, tracks

    chosen = tracks.survey(merged, limit, json=True)
    with files.new(target) as file:
        chrome.write(merged, file, chosen)
    return chosen.notes


def _prometheus(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import prometheus

    files.write(target, prometheus.text(merged))
    return []


def _nsys(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import commands

    return _script(target, commands.nsys(merged))


def _ncu(merged: Merged, target: Path, limit: int) -> list[str]:
    from clusterprof.export import commands

    return _script(target, commands.ncu(merged))


def _script(target: Path, lines: list[str]) -> list[str]:
    """Write commands; of a file with comments alone, what those say."""
    files.write(target, "\n".join(lines) + "\n")
    whys = [line.removeprefix("# ") for line in lines[1:]]
    return [] if any(not line.startswith("#") for line in lines) else whys


_PERFETTO = "open it at https://ui.perfetto.dev (it stays on your machine)"
_TABLES = "operations, ranks, steps, findings, collectives, and summaries as nsys makes them"
FORMATS = {
    "perfetto": Format(".pftrace", "one trace of all ranks on one clock", _perfetto, _PERFETTO),
    "perfetto-archive": Format(
        ".perfetto.zip", "a trace per rank, whole, and Perfetto's manifest with their offsets",
        _archive, _PERFETTO,
    ),
    "chrome-json": Format(
        ".json", "the same as Chrome's Trace Event JSON", _chrome,
        "for viewers and scripts that read Chrome's Trace Event format",
    ),
    "csv": Format("-csv", f"a folder of tables: {_TABLES}", _csv, "one table a file"),
    "parquet": Format("-parquet", "the same as Parquet", _parquet, "one table a file"),
    "prometheus": Format(
        ".prom", "gauges for node_exporter's textfile collector", _prometheus,
        "put it into node_exporter's --collector.textfile.directory",
    ),
    "nsys": Format(
        "-nsys.sh", "commands that export each nsys report on the reference rank's clock", _nsys,
        "read it, then run it where the reports are",
    ),
    "ncu": Format(
        "-ncu.sh", "commands that profile the kernels that findings name, by Nsight Compute", _ncu,
        "put its command in the place of that rank's program",
    ),
}  # fmt: skip


def parser(verb: str) -> Parser:
    """The verb's options."""
    this = verb_parser(
        verb,
        "Write a merged run for other tools. The run stays as it is. "
        "Nothing that is written holds environment variables or command lines.",
        "export runs/... --format perfetto                open it at ui.perfetto.dev",
        "export runs/... --format perfetto-archive",
        run="a run directory, or merge's --output",
    )
    add = this.add_argument
    add("--format", required=True, choices=FORMATS, metavar="FORMAT",
        help="; ".join(f"{name}: {each.summary}" for name, each in FORMATS.items()))  # fmt: skip
    add("-o", "--output", type=path, metavar="PATH",
        help="where to write it (default: here, called as the run is)")  # fmt: skip
    add("--max-mb", type=_size, default=MOST_MB, metavar="N",
        help=f"perfetto, chrome-json: the trace has at most N MB (default: {MOST_MB}): the "
        "shortest kernels, copies and host calls are left out, and the trace says so")  # fmt: skip
    add("--force", action="store_true", help="replace what export wrote")
    return this


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Write a merged run in one format; the run stays as it is."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    chosen = FORMATS[arguments.format]
    run = RunDirectory(arguments.run.absolute())
    target: Path = arguments.output or Path(run.path.name + chosen.ending)
    check_free(target, arguments.force, _is_ours)
    merged = read(run)
    with writing(target, "-o PATH"):
        notes = chosen.write(merged, target, arguments.max_mb * 1_000_000)
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
    """Whether export wrote it: its name is at the beginning of each format's file.

    A folder has files of ours only.
    """
    from clusterprof.export.flat_tables import NAMES

    try:
        if target.is_dir():
            ours = {f"{name}.{ending}" for name in NAMES for ending in ("csv", "parquet")}
            return {each.name for each in target.iterdir()} <= ours
        with files.opened(target, links=True) as opened:
            return b"clusterprof" in opened.read(300)
    except OSError:
        return False
