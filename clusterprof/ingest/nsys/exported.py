"""An nsys report (`.nsys-rep`) through the installed nsys: `nsys export`, then what that made.

That is Arrow where this nsys has it (2025.3 does), else SQLite, which takes longer. Where the
report has ranges of NCCL without payloads there (nsys before 2024.6 cannot export them), nsys is
asked for its JSON too.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from clusterprof.agent.contracts import files
from clusterprof.agent.contracts.paths import QDSTRM
from clusterprof.agent.nsys import VARIABLE, Nsys
from clusterprof.errors import ReportError
from clusterprof.ingest.nsys import NO_PAYLOADS, nccl_payloads, sqlite
from clusterprof.ingest.nsys.database import gathered
from clusterprof.ingest.nsys.events import Ranges
from clusterprof.ingest.nsys.nccl_payloads import Payloads
from clusterprof.ingest.opening import unreadable
from clusterprof.ingest.recording import Recording
from clusterprof.installed_nsys import installed

#: nsys' name for a folder of tables in Arrow's stream format
ARROW = "arrowdir"
#: nsys needs a third of a second for 100,000 kernels; after this it hangs.
_DEADLINE_S = 1800
#: bytes; with less left in the temporary folder, or less than the report's own size, whatever went
#: wrong there is taken to have gone wrong for that
_LEAST_FREE = 1 << 20

#: how nsys refuses the report of a newer one: 2022.4 (`2024@2@3@38-242334140272v0`), and 2023.4
_NEWER = re.compile(
    r"(?:Version number is invalid: |created in Nsight Systems version \()(\d{4}[@.\d]+)"
)

#: one value for all reports: it is asked only once what it offers
_asked_once = lru_cache(maxsize=8)(Nsys)


def read(path: Path, *, alone: bool = False) -> list[Recording]:
    """Read the ranks of a `.nsys-rep`, or of the `.qdstrm` that nsys leaves without its importer.

    What is made of it lies in a temporary folder and is removed afterwards. Each installed nsys is
    tried until one can read it.

    Raises `ReportError` where the report is missing or empty, no nsys is installed, or the export
    fails (most often: the report is of a newer nsys, or cut short).
    """
    try:
        size = path.stat().st_size
        with files.opened(path, links=True):
            pass
    except OSError as error:
        raise unreadable(path, error) from error
    if size == 0:
        raise ReportError(
            f"{path} is empty", "nsys was killed before it wrote the report: record again"
        )
    tools = [_asked_once(tool.path) for tool in installed()]
    if not tools:
        raise ReportError(
            f"{path} cannot be read without nsys, which is not installed on this host",
            "nsys reads reports without a GPU: NVIDIA's package nsight-systems-cli, or for older "
            "reports Debian's nsight-systems (non-free)",
            "or export all of them on a host that has it, and merge these exports instead:",
            f'for f in {_alike(path)}; do nsys export -t sqlite --include-blobs=true "$f"; done',
        )
    with tempfile.TemporaryDirectory(prefix="clusterprof-") as folder:
        try:
            return _read(path, tools, Path(folder), alone)
        except ReportError as error:
            if shutil.disk_usage(folder).free < max(_LEAST_FREE, size):
                raise ReportError(
                    f"{path} cannot be exported: the disk of {folder} is full",
                    "point TMPDIR to a file system with enough space for the exported report",
                ) from error
            raise


def _alike(path: Path) -> str:
    """A shell's pattern for all reports of a folder; in a run directory each rank has a folder."""
    folder, pattern = path.parent, f"*{path.suffix}"
    if folder.name.isdecimal():
        folder, pattern = folder.parent, f"*/{pattern}"
    return shlex.quote(f"{folder}/") + pattern


def _read(path: Path, tools: Sequence[Nsys], folder: Path, alone: bool) -> list[Recording]:
    database = folder / f"{path.stem}.sqlite"
    errors: list[ReportError] = []
    for nsys in tools:
        try:
            report = _imported(nsys, path, folder) if path.suffix == QDSTRM else path
            numbers = _tables(nsys, report, path, database)
            break
        except ReportError as error:
            errors.append(error)
    else:
        tried = [f"tried: {', '.join(tool.path for tool in tools)}"] * (len(tools) > 1)
        raise ReportError(errors[0].what, *errors[0].details, *tried) from errors[0]
    # A newer nsys may have left them out too, of a report that an older one made.
    beside = JsonBeside(nsys, report, database.with_suffix(".json"))
    ranks = sqlite.read(database, origin=path, elsewhere=beside, alone=alone, numbers=numbers)
    return [recording.warned(*beside.warnings) for recording in ranks]


def _tables(nsys: Nsys, report: Path, path: Path, database: Path) -> dict[str, Path]:
    """Export a report to the SQLite `database`; the tables that are Arrow's beside it, if any."""
    arrow = database.with_suffix(".arrow")
    if nsys.offers("export", ARROW):
        try:
            _make(export_command(nsys, report, arrow, ARROW), path, arrow)
            return gathered(arrow, database)
        except ReportError:
            database.unlink(missing_ok=True)
    _make(export_command(nsys, report, database), path, database)
    return {}


def export_command(nsys: Nsys, report: Path, target: Path, kind: str = "sqlite") -> list[str]:
    """The command line that exports `report`, with the flags that this nsys has."""
    # NVTX payloads come to tables as bytes or else as text, and before 2024.6 not at all
    names = ("--include-blobs", "--include-json") if kind != "json" else ()
    flags = [f"{flag}=true" for flag in names if nsys.offers("export", flag)]
    if not nsys.offers("profile", "--nccl-trace"):
        del flags[1:]  # of advanced NCCL tracing only the text is documented: there it is both
    # nsys takes a leading dash for an option; an absolute path has none
    paths = [f"--output={target}", os.path.realpath(report)]
    return [nsys.path, "export", f"--type={kind}", "--force-overwrite=true", *flags, *paths]


def _imported(nsys: Nsys, path: Path, folder: Path) -> Path:
    """Return the report that nsys's importer makes of a `.qdstrm`."""
    if nsys.importer is None:
        raise ReportError(
            f"{path} is not a report yet, and {nsys.path} has no importer to make one of it",
            "import it where nsys was installed whole, and give what that makes:",
            f"QdstrmImporter -i {path}",
        )
    report = folder / f"{path.stem}.nsys-rep"
    _make([nsys.importer, "-i", str(path.resolve()), "-o", str(report)], path, report)
    return report


@dataclass
class JsonBeside:
    """NCCL's payloads out of the report's JSON export, which is made when they are asked for."""

    nsys: Nsys
    report: Path
    target: Path
    warnings: list[str] = field(default_factory=list)

    def __call__(self, ranges: Ranges) -> Payloads:
        """Return the payloads of `ranges`; none, and a warning, where they cannot be had.

        What else the report holds is worth reading without them.
        """
        try:
            if not self.target.exists():  # one of several ranks has asked before
                command = export_command(self.nsys, self.report, self.target, "json")
                _make(command, self.report, self.target)
            return nccl_payloads.read_json(self.target, ranges)
        except ReportError as error:
            why = "; ".join((error.what, *error.details[:1]))
            self.warnings.append(f"{NO_PAYLOADS}: {why}")
            self.target.unlink(missing_ok=True)
            return Payloads.of()


def _make(command: list[str], path: Path, target: Path) -> None:
    """Run nsys or its importer, which makes `target` of the report `path`."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_DEADLINE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        text = f"nsys did not finish the export of {path} within {_DEADLINE_S // 60} minutes"
        raise ReportError(text) from error
    except OSError as error:
        raise ReportError(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode == 0 and target.exists() and (target.is_dir() or target.stat().st_size):
        return
    if recorded_by := _NEWER.search(done.stderr + done.stdout):
        version = recorded_by[1].replace("@", ".")
        raise ReportError(
            f"{path} is of nsys {version}, which {command[0]} cannot read",
            f"install that nsys or a newer one, or name one: {VARIABLE}=PATH",
        )
    lines = f"{done.stderr}\n{done.stdout}".replace("\r", "\n").split("\n")
    printed = (line for line in map(str.strip, lines) if line and "Exporting" not in line)
    raise ReportError(
        f"nsys could not export {path} (exit status {done.returncode})",
        f'nsys printed: "{next(printed, "nothing")}"',
        "a report of a newer nsys needs that nsys; one cut short must be recorded or copied again",
    )
