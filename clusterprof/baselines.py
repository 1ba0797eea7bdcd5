"""Named baselines: what comparisons need of one or several runs, in one small file each.

`.clusterprof/baselines/NAME.json` in the current folder, which is usually the project's: small
enough to commit, and to keep between the jobs of a pipeline.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from clusterprof import __version__
from clusterprof.agent.contracts import files
from clusterprof.arguments import path
from clusterprof.comparison import measured
from clusterprof.errors import ReportError, UsageError
from clusterprof.report import results_json
from clusterprof.results import Baseline, MeasuredRun
from clusterprof.run_directory import writing

BASELINE_VERSION = 2
STORE = Path(".clusterprof") / "baselines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def runs_named(given: str, store: Path | None = None) -> list[MeasuredRun]:
    """The runs of a run directory, a results.json or a baseline. Raises ReportError."""
    location = path(given)
    kept = file_of(given, store) if _NAME.fullmatch(given) else None
    if kept is None or os.path.exists(location):  # noqa: PTH110 - never raises
        return [measured(location)]
    if os.path.exists(kept):  # noqa: PTH110
        return read(kept)["runs"]
    names = [file.stem for file in listed(store)]
    raise ReportError(
        f"there is no run, no file and no baseline {given!r}",
        f"baselines in {kept.parent}: {', '.join(names) or 'none'}",
        f"make one: clusterprof baseline save {given} RUN...",
    )


def file_of(name: str, store: Path | None) -> Path:
    """The file of a baseline. Raises UsageError where it cannot have this name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a baseline", "letters, digits, '.', '_' and '-': main-8gpu"
        )
    return (store or STORE) / f"{name}.json"


def listed(store: Path | None) -> list[Path]:
    """The files of all baselines, by name."""
    return sorted((store or STORE).glob("*.json"))


def read(file: Path) -> Baseline:
    """Read and check a baseline. Raises ReportError (`results_json.read` says which)."""
    loaded = results_json.load(file)
    version = loaded.get("baseline_version") if isinstance(loaded, dict) else None
    if version != BASELINE_VERSION:
        raise ReportError(
            f"{file} is no baseline of version {BASELINE_VERSION}, which this clusterprof reads",
            f"it has baseline_version {version!r}",
            f"save it again: clusterprof baseline save {file.stem} RUN... --force",
        )
    results_json.check(file, loaded, Baseline)
    if not loaded["runs"]:
        raise ReportError(f"{file} is damaged: it has no runs", "save it again with --force")
    return cast("Baseline", loaded)


def save(file: Path, runs: Sequence[MeasuredRun]) -> None:
    """Write a baseline by rename. Raises RunDirectoryError."""
    content: Baseline = {
        "baseline_version": BASELINE_VERSION,
        "clusterprof_version": __version__,
        "runs": list(runs),
    }
    with writing(file, "--store"):
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, results_json.dumps(content))
