"""`clusterprof export RUN --format F`: a merged run for Perfetto and other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

from clusterprof.agent.contracts import files, words
from clusterprof.arguments import check_free, path
from clusterprof.cli import verb_parser
from clusterprof.console import say
from clusterprof.errors import UsageError
from clusterprof.export.merged_tables import Merged, read
from clusterprof.run_directory import RunDirectory, writing

#: a trace is at most so large, MB: what Perfetto's page opens in seconds
MOST_MB = 100


class Format(NamedTuple):
    """One format: how its file is called, and who writes it."""

    ending: str
    #: one line of help
    summary: str
    #: writes a file of at most so many bytes, and says what it had to leave out
    write: Callable[[Merged, IO[bytes], int], list[str]]
    #: what to do with it
    next: str


def _perfetto(merged: Merged, file: IO[bytes], limit: int) -> list[str]:
    from clusterprof.export import perfetto, tracks

    chosen = tracks.survey(merged, limit)
    perfetto.write(merged, file, chosen)
    return chosen.notes


def _archive(merged: Merged, file: IO[bytes], limit: int) -> list[str]:
    from clusterprof.export import archive, tracks

    chosen = tracks.Cut()
    archive.write(merged, replace(merged, own_clocks=True), file, chosen)
    return chosen.notes


_PERFETTO = "open it at https://ui.perfetto.dev (it stays on your machine)"
FORMATS = {
    "perfetto": Format(".pftrace", "one trace of all ranks on one clock", _perfetto, _PERFETTO),
    "perfetto-archive": Format(
        ".perfetto.zip", "a trace per rank, whole, and Perfetto's manifest with their offsets",
        _archive, _PERFETTO,
    ),
}  # fmt: skip


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Write one file, of a run that was merged before; the run stays as it is."""
    parser = verb_parser(
        verb,
        "Write a merged run for other tools. The run stays as it is. "
        "Nothing that is written holds environment variables or command lines.",
        "export runs/... --format perfetto                open it at ui.perfetto.dev",
        "export runs/... --format csv",
        run="a run directory, or merge's --output",
    )
    add = parser.add_argument
    add("--format", required=True, choices=FORMATS, metavar="FORMAT",
        help="; ".join(f"{name}: {each.summary}" for name, each in FORMATS.items()))  # fmt: skip
    add("-o", "--output", type=path, metavar="FILE",
        help="where to write it (default: here, called as the run is)")  # fmt: skip
    add("--max-mb", type=_size, default=MOST_MB, metavar="N",
        help=f"perfetto: the trace has at most N MB (default: {MOST_MB}): the shortest kernels, "
        "copies and host calls are left out, and the trace says so")  # fmt: skip
    add("--force", action="store_true", help="replace what export wrote")
    arguments = parser.parse_args([*own, *(program or ())])
    chosen = FORMATS[arguments.format]
    run = RunDirectory(arguments.run.absolute())
    target: Path = arguments.output or Path(run.path.name + chosen.ending)
    check_free(target, arguments.force, _is_ours)
    merged = read(run)
    with writing(target, "-o FILE"), files.new(target) as file:
        notes = chosen.write(merged, file, arguments.max_mb * 1_000_000)
    say(f"wrote {target} ({words.size(target.stat().st_size)}): {chosen.next}")
    for note in notes:
        say(note)
    return 0


def _size(given: str) -> int:
    if not given.isdecimal() or not 0 < int(given) <= 1_000_000:
        raise UsageError(f"--max-mb {given!r} is no size", "write --max-mb 100")
    return int(given)


def _is_ours(file: Path) -> bool:
    """Whether export wrote it: its name is at the beginning of each format."""
    try:
        with file.open("rb") as opened:
            return b"clusterprof" in opened.read(300)
    except OSError:
        return False
