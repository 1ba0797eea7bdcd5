"""Which files are reports, who reads each form, and which of them are one report in several forms.

`FORMATS` is all that is read: how its files are called, what that takes, and the reader.
"""

from __future__ import annotations

import lzma
import os
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.agent.contracts import paths
from clusterprof.errors import ReportError
from clusterprof.ingest import other_tools
from clusterprof.ingest.flight.dump import OF_A_RUN
from clusterprof.ingest.kineto.json_stream import keys_of
from clusterprof.ingest.opening import opened, unreadable
from clusterprof.words import counted, listed

if TYPE_CHECKING:
    from clusterprof.ingest.recording import Recording


@dataclass(frozen=True)
class Format:
    """A form in which reports come."""

    #: how its files' names end, and what reading takes for each byte of such a file, s
    seconds_per_byte: Mapping[str, float]
    #: the module whose `read` gives the ranks of a report; imported when used, since a Kineto trace
    #: needs no SQLite driver
    reader: str

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How its files' names end."""
        return tuple(self.seconds_per_byte)

    def read(self, path: Path, *, alone: bool) -> list[Recording]:
        """Return the ranks of a report; `alone`: it has one. Raises ReportError."""
        recordings: list[Recording] = import_module(self.reader).read(path, alone=alone)
        return recordings


#: A packed trace's JSON takes 0.13 s/MB (measured on two cores when Arrow read it), and packs to a
#: twelfth; SQLite and Arrow read an export of nsys.
_TRACE_S, _EXPORT_S = 0.13e-6, 0.02e-6
#: nsys before 2021.5 named it `.qdrep`
NSYS_REPORT = Format(
    {".nsys-rep": _EXPORT_S, ".qdrep": _EXPORT_S}, "clusterprof.ingest.nsys.exported"
)
NSYS_SQLITE = Format(
    {".sqlite": _EXPORT_S, ".sqlite.xz": _EXPORT_S}, "clusterprof.ingest.nsys.sqlite"
)
KINETO = Format(
    {".json": _TRACE_S / 12, ".json.gz": _TRACE_S, ".json.xz": _TRACE_S},
    "clusterprof.ingest.kineto.trace",
)
#: what nsys leaves where it does not make the report
NSYS_RAW = Format({paths.QDSTRM: _EXPORT_S}, NSYS_REPORT.reader)
FORMATS = (NSYS_REPORT, NSYS_SQLITE, KINETO, NSYS_RAW)
SUFFIXES = tuple(suffix for form in FORMATS for suffix in form.suffixes)

#: one of these is a key of every Kineto trace, or it is a list of events
KINETO_MARKS = frozenset({"traceEvents", "schemaVersion", "deviceProperties", "["})
#: JSON that lies in a run directory beside the reports
OUR_OWN = frozenset((
    paths.MANIFEST, paths.AGAIN, paths.PLAN, paths.ORDER, paths.STATE, paths.CLOCK, paths.PROBE,
    paths.PROBE_ADDRESS, paths.CLOCK_PROBE, paths.RESULTS, paths.REDUCED_RANK,
    "beacons.json",  # of earlier versions
))  # fmt: skip
#: bytes, packed or not; JSON that is larger is somebody's recording and no settings
_NO_SETTINGS = 64 << 10

#: how far down, and among how many files, reports are looked for to name them
_DEEPEST, _MOST_ENTRIES = 6, 20_000


@dataclass(frozen=True)
class Source:
    """A report, of one rank as a rule: where it lies, and what is known about it."""

    path: Path
    #: the rank by the manifest or the user; None: the report itself must name it
    rank: int | None = None
    #: a manifest knows that it is of one rank; else an nsys report may hold several
    alone: bool = False
    #: a step log (CSV `step,begin_ns,end_ns`) that overrides the report's own steps
    steps: Path | None = None
    #: a Kineto trace of the same rank and window, beside an nsys report of a CPU-only job
    beside: Path | None = None
    #: where the report's tables are kept (see `ingest.reduced`), or are to be: they are read in
    #: place of the report where they are of it, or it is not there
    reduced: Path | None = None


def suffix_of(path: Path) -> str:
    """Return which of `SUFFIXES` the name ends in, empty for none."""
    longest_first = sorted(SUFFIXES, key=len, reverse=True)
    return next((suffix for suffix in longest_first if path.name.endswith(suffix)), "")


def format_of(path: Path) -> Format | None:
    """Return the format of a file by its name; None for one that is none of these."""
    suffix = suffix_of(path)
    return next((form for form in FORMATS if suffix in form.suffixes), None)


def seconds(source: Source) -> float:
    """What reading a source takes, about; 0 where its file cannot be seen."""
    path = source.beside or source.path
    form = format_of(path)
    try:
        return path.stat().st_size * (form.seconds_per_byte[suffix_of(path)] if form else _EXPORT_S)
    except OSError:
        return 0.0


def stem_of(path: Path) -> str:
    """Return the name without its report suffix (`rank0` of `rank0.sqlite.xz`)."""
    return path.name.removesuffix(suffix_of(path))


def find_sources(paths: Iterable[Path | Source]) -> list[Source]:
    """Return one source per report in `paths` (files, folders, or sources as they are).

    Of a folder its own reports are taken, or, where it has none, those one level below
    (a run directory: those below its `ranks/`); a folder there that cannot be listed is a source
    that cannot be read. Raises `ReportError` for a folder that cannot be listed or has no
    reports. One file given twice is one.
    """
    sources: list[Source] = []
    for path in paths:
        if isinstance(path, Source):
            sources.append(path)
        elif os.path.isdir(path):  # noqa: PTH112 - nor where it cannot be seen: its reader says so
            sources.extend(_in_folder(path))
        else:
            sources.append(Source(path))
    return list({resolved(source.path): source for source in reversed(sources)}.values())[::-1]


def resolved(path: Path) -> Path:
    """Return the file's one name, whichever link leads to it; of links in a circle the path."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def _in_folder(folder: Path) -> list[Source]:
    try:
        if sources := _reports(folder):
            return sources
        parent = folder / paths.RANKS if (folder / paths.RANKS).is_dir() else folder
        below = sorted(entry for entry in parent.iterdir() if entry.is_dir())
    except OSError as error:
        raise unreadable(folder, error) from error
    if sources := [source for entry in below for source in _reports_below(entry)]:
        return sources
    looked_for = f"looked for: {', '.join('*' + suffix for suffix in SUFFIXES)}"
    raise ReportError(f"{folder} holds no reports", looked_for, *_further_down(folder))


def _further_down(folder: Path) -> list[str]:
    """What lies in or below a folder: runs, reports, a merge's results, and what reads one."""
    runs: list[Path] = []
    results: list[Path] = []
    reports: dict[Path, int] = {}
    for current, below, names in _walk(folder):
        if current.name == paths.MERGED and paths.RESULTS in names:
            results.append(current.parent)
        if paths.MANIFEST in names and paths.RANKS in below:
            runs.append(current)
            below.clear()  # its reports are the run's
        elif many := sum(_may_be_report(current / name) for name in names):
            reports[current] = many
    lines = []
    if runs:
        lines.append(f"below it {counted(len(runs), 'run')}: {listed(map(str, sorted(runs)), 3)}")
    if reports:
        folders = listed((f"{path} ({count})" for path, count in sorted(reports.items())), 3)
        lines.append(f"further down there may be reports: {folders}")
    if runs or reports:
        example = shlex.quote(str(min(runs or reports)))
        return [*lines, f"merge one of them: clusterprof merge {example}"]
    if results:
        run = shlex.quote(str(min(results)))
        return [f"a merge has left its results there: clusterprof report {run}"]
    return []


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk as `os.walk` does, but not too deep, nor through too many entries."""
    looked_at = 0
    for directory, below, names in os.walk(folder):
        looked_at += 1 + len(names)
        current = Path(directory)
        if looked_at > _MOST_ENTRIES or len(current.relative_to(folder).parts) >= _DEEPEST:
            below.clear()
        yield current, below, names


def _may_be_report(path: Path) -> bool:
    """Whether a file looks like a report, by its name and size."""
    if not suffix_of(path) or path.name in OUR_OWN:
        return False
    try:
        return suffix_of(path) != ".json" or path.stat().st_size >= _NO_SETTINGS
    except OSError:
        return False


def _reports_below(folder: Path) -> list[Source]:
    try:
        sources = _with_reduced(folder, _reports(folder))
        logged = len(sources) == 1 and (folder / paths.STEPS).is_file()
    except OSError:
        return [Source(folder)]
    # the one report of a rank, also where it is an export: its steps are those of the rank's log
    return [replace(sources[0], steps=folder / paths.STEPS)] if logged else sources


def _with_reduced(folder: Path, sources: list[Source]) -> list[Source]:
    """Return the reports, and the one of which only the tables are there, if there are any."""
    kept = folder / paths.REDUCED
    if not (kept / paths.REDUCED_RANK).is_file():
        return sources
    from clusterprof.ingest.reduced import report_of

    try:
        report = report_of(kept)
    except ReportError:
        report = sources[0].path if sources else folder / paths.REPORT  # its reader says why
    if os.path.lexists(report) or (sources and format_of(report) is KINETO):
        return sources
    traces = (source.path for source in sources if format_of(source.path) is KINETO)
    return [Source(report, alone=True, beside=next(traces, None), reduced=kept)]


def _reports(folder: Path) -> list[Source]:
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        if _is_report(path):
            stem = stem_of(path)
            # a run directory calls a rank's two files so; elsewhere one report's files share a stem
            name = "report" if stem == "trace" else stem
            files.setdefault(name, {})[suffix_of(path)] = path
    sources: list[Source] = []
    for forms in files.values():
        traces, exports, reports, raw = (
            [forms[suffix] for suffix in form.suffixes if suffix in forms]
            for form in (KINETO, NSYS_SQLITE, NSYS_REPORT, NSYS_RAW)
        )
        if nsys := exports + reports or raw:
            sources.append(Source(fresh_export(nsys), beside=next(iter(traces), None)))
        else:
            sources += map(Source, traces[:1] or forms.values())
    return sources


def _is_report(path: Path) -> bool:
    """Whether a file of a folder is a report, or what another tool left in its place."""
    if path.is_dir():
        return False
    if (form := format_of(path)) is not KINETO:
        return form is not None or other_tools.by_name(path, SUFFIXES) is not None
    # A link to a report that is gone is a missing report, and so is a pipe.
    ours = path.name in OUR_OWN or OF_A_RUN.fullmatch(path.name) is not None
    return not path.is_file() or (not ours and _is_trace(path))


def _is_trace(path: Path) -> bool:
    """Whether a JSON file is a trace, of whatever tool, or so large that it could be one."""
    try:
        with opened(path) as file:
            keys = {*(keys_of(file, KINETO_MARKS) or ())}
        if "entries" in keys and not KINETO_MARKS & keys:
            return False  # a dump of a flight recorder
        if KINETO_MARKS & keys or other_tools.by_keys(path, keys):
            return True
        return path.stat().st_size == 0 or path.stat().st_size >= _NO_SETTINGS
    except (ReportError, OSError, EOFError, lzma.LZMAError, zlib.error):
        return True  # the reader reports what is wrong with it


def fresh_export(forms: list[Path]) -> Path:
    """Return which form of one nsys report to read: an export, unless the report is newer."""
    existing = [path for path in forms if path.is_file()] or forms[:1]
    exports = [path for path in existing if format_of(path) is NSYS_SQLITE]
    reports = [path for path in existing if path not in exports]
    if not exports or not reports:
        return (exports or reports)[0]
    recorded = reports[0].stat().st_mtime_ns
    return next((path for path in exports if path.stat().st_mtime_ns >= recorded), reports[0])
