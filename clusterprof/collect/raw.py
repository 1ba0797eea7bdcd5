"""Reports that nsys left raw in the run directory: made by its importer after the job."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterprof.agent import nsys
from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.paths import RAW, REPORT
from clusterprof.agent.contracts.states import State
from clusterprof.run_directory import RunDirectory

#: The importer takes some 7 µs for each range; one that takes longer than this hangs.
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Made:
    """What became of one rank's raw report; "" for a problem where it is a report now."""

    rank: int
    problem: str = ""


def finish(run: RunDirectory, *, patience_s: float = PATIENCE_S) -> Iterator[Made]:
    """Make the reports of all ranks that have only a raw one, one after the other."""
    for rank in run.ranks():
        folder = run.rank(rank)
        if (folder / RAW).is_file() and not (folder / REPORT).exists():
            yield Made(rank, _made(folder, patience_s))


def _made(folder: Path, patience_s: float) -> str:
    importer = next(filter(None, (each.importer for each in nsys.installed())), None)
    if importer is None:
        return (
            f"there is no QdstrmImporter here for {folder / RAW}: name an nsys that has one: --nsys"
        )
    try:
        return _import(importer, folder, patience_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the report could not be made of {folder / RAW}: {error}"


def _import(importer: str, folder: Path, patience_s: float) -> str:
    # The importer replaces nothing: it gets a folder of its own.
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as private:
        made = Path(private, REPORT)
        command = [importer, "-i", str(folder / RAW), "-o", str(made)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=patience_s, check=False,
        )  # fmt: skip
        if done.returncode != 0 or not made.exists():
            words = (done.stdout + done.stderr).strip().splitlines()
            return f"{importer} failed with status {done.returncode}: {words[-1] if words else ''}"
        made.replace(folder / REPORT)
    states.advance(str(folder), State.COLLECTED, f"its report was made of {RAW} after the job")
    (folder / RAW).unlink(missing_ok=True)  # somebody else may be collecting too
    return ""
