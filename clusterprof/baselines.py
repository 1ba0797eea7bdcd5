"""Named baselines: what comparisons need of one or several runs, in one small file each.

`.clusterprof/baselines/NAME.json` in the current folder, which is usually the project's: small
enough to commit, and to keep between the jobs of a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from clusterprof import __version__
from clusterprof.agent.contracts import files
from clusterprof.comparison import measured
from clusterprof.errors import ReportError, UsageError
from clusterprof.report import results_json
from clusterprof.results import Baseline, MeasuredRun
from clusterprof.run_directory import writing

BASELINE_VERSION = 1
STORE = Path(".clusterprof") / "baselines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def found(given: str, store: Path | None = None) -> list[MeasuredRun]:
    """The runs that `given` names: a run directory, a results.json, or a baseline.

    Raises ReportError where there is no such thing, or it cannot be read.
    """
    here = Path(given).expanduser()
    kept = file_of(given, store) if _NAME.fullmatch(given) else None
    if here.exists() or kept is None:
        return [measured(here)]
    if kept.exists():
        return read(kept)["runs"]
    names = [each.stem for each in listed(store)]
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


def read(path: Path) -> Baseline:
    """Read and check a baseline. Raises ReportError (`results_json.read` says which)."""
    loaded = results_json.load(path)
    version = loaded.get("baseline_version") if isinstance(loaded, dict) else None
    if version != BASELINE_VERSION or isinstance(version, bool):
        raise ReportError(
            f"{path} is no baseline of version {BASELINE_VERSION}, which this clusterprof reads",
            f"it has baseline_version {version!r}",
            f"save it again: clusterprof baseline save {path.stem} RUN... --force",
        )
    results_json.check(path, loaded, Baseline)
    if not loaded["runs"]:
        raise ReportError(f"{path} is damaged: it has no runs", "save it again with --force")
    return cast("Baseline", loaded)


def save(path: Path, runs: Sequence[MeasuredRun]) -> None:
    """Write a baseline by rename. Raises RunDirectoryError."""
    content: Baseline = {
        "baseline_version": BASELINE_VERSION,
        "clusterprof_version": __version__,
        "runs": list(runs),
    }
    with writing(path, "--store"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, results_json.dumps(content))
