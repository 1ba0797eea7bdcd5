"""Reports that nsys left raw in the run directory: made by its importer after the job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.agent import states
from clusterprof.agent.homecoming import RAW
from clusterprof.capture.nsys import Nsys
from clusterprof.nsys import installed
from clusterprof.rundir import RunDirectory

#: The importer takes some 7 µs for each range; one that takes longer than this hangs.
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Made:
    """What became of one rank's raw report; "" for a problem where it is a report now."""

    rank: int
    problem: str = ""


def finish(run: RunDirectory, *, patience_s: float = PATIENCE_S) -> Iterator[Made]:
    """Make the reports of all ranks that have only a raw one, one after the other."""
    manifest = run.read_manifest()
    for rank in run.ranks():
        folder = run.rank(rank)
        if (folder / RAW).is_file() and not (folder / "report.nsys-rep").exists():
            yield Made(rank, _made(folder, manifest, patience_s))


def _made(folder: Path, manifest: dict[str, Any], patience_s: float) -> str:
    importer = _importer(states.read(str(folder)), manifest)
    if importer is None:
        return (
            f"there is no QdstrmImporter here for {folder / RAW}: give its nsys by CLUSTERPROF_NSYS"
        )
    beside = folder / f"report.{os.getpid()}.made.nsys-rep"
    command = [str(importer), "-i", str(folder / RAW), "-o", str(beside)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=patience_s, check=False,
        )  # fmt: skip
        if done.returncode != 0 or not beside.exists():
            words = (done.stdout + done.stderr).strip().splitlines()
            return f"{importer} failed with status {done.returncode}: {words[-1] if words else ''}"
        beside.replace(folder / "report.nsys-rep")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the report could not be made of {folder / RAW}: {error}"
    finally:
        beside.unlink(missing_ok=True)
    states.advance(str(folder), "collected", f"its report was made of {RAW} after the job")
    (folder / RAW).unlink()
    return ""


def _importer(state: dict[str, Any], manifest: dict[str, Any]) -> Path | None:
    """Of the nsys that captured, if it is here as well; else of the one that is here."""
    named = (state.get("nsys") or {}).get("path"), (manifest.get("profiler") or {}).get("path")
    for path in (*filter(None, named), installed()):
        if path and Path(path).exists() and (found := Nsys(Path(path), "").importer):
            return found
    return None
