"""An nsys report (`.nsys-rep`) through the installed nsys: `nsys export`, then its SQLite."""

from __future__ import annotations

import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from clusterprof.errors import ReportError
from clusterprof.ingest import nsys_sqlite
from clusterprof.ingest.export import unreadable
from clusterprof.nsys import installed
from clusterprof.tables import RankTables

#: nsys needs a third of a second for 100,000 kernels; after this it hangs.
_DEADLINE_S = 1800

#: wanted where `nsys export --help` has them: NCCL's payloads, as bytes or at least as text
_PAYLOAD_FLAGS = ("--include-blobs", "--include-json")


def read(path: Path, nsys: Path | None = None) -> RankTables:
    """Read a `.nsys-rep`; its export lies in a temporary folder and is removed afterwards.

    `nsys` is the one that made it, which is taken where it is there.

    Raises `ReportError` where the report is missing or empty, no nsys is installed, or the
    export fails (most often: the report is of a newer nsys, or cut short).
    """
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise unreadable(path, error) from error
    if size == 0:
        raise ReportError(
            f"{path} is empty", "nsys was killed before it wrote the report: record again"
        )
    found = installed(nsys)
    if found is None:
        raise ReportError(
            f"{path} cannot be read without nsys, which is not installed on this host",
            "install Nsight Systems (package nsight-systems), or export it on a host that has it:",
            f"nsys export -t sqlite {path}",
        )
    with tempfile.TemporaryDirectory(prefix="clusterprof-") as folder:
        database = Path(folder, f"{path.stem}.sqlite")
        _export(str(found), path, database)
        return nsys_sqlite.read(database, origin=path)


def export_command(nsys: str, report: Path, database: Path) -> list[str]:
    """Return the command line that exports `report`, with the flags that this nsys has."""
    understood = _export_help(nsys)
    payloads = [f"{flag}=true" for flag in _PAYLOAD_FLAGS if flag in understood][:1]
    return [
        nsys,
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        *payloads,
        f"--output={database}",
        # nsys resolves a leading dash as an option; an absolute path has none
        str(report.resolve()),
    ]


@lru_cache(maxsize=8)
def _export_help(nsys: str) -> str:
    try:
        asked = subprocess.run(
            [nsys, "export", "--help"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout + asked.stderr


def _export(nsys: str, report: Path, database: Path) -> None:
    command = export_command(nsys, report, database)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ReportError(
            f"nsys did not finish the export of {report} within {_DEADLINE_S // 60} minutes"
        ) from error
    except OSError as error:
        raise ReportError(f"{nsys} cannot be started: {error.strerror}") from error
    if done.returncode != 0 or not database.is_file():
        said = _first_line(done.stderr) or _first_line(done.stdout) or "nothing"
        raise ReportError(
            f"nsys could not export {report} (exit status {done.returncode})",
            f'nsys said: "{said}"',
            "a report of a newer nsys needs that nsys; one cut short must be recorded or copied"
            " again",
        )


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.replace("\r", "\n").split("\n"))
    return next((line for line in lines if line and "Exporting" not in line), "")
