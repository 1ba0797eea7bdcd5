"""The clocks of a run: what its agents and their probers left, brought together for merging."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clusterprof.agent.contracts import documents, paths
from clusterprof.probe.measurement import Measurement, joined, parsed, read
from clusterprof.run_directory import RunDirectory

#: what each rank wrote of its clocks, by what `clusterprof.align.clock.readings.parsed` calls it
_FILES = {"clock": paths.CLOCK, "state": paths.STATE, "beacons": paths.BEACONS}


def probe_path(run: RunDirectory) -> Path:
    """clock_probe.json."""
    return run.path / paths.CLOCK_PROBE


def settle(run: RunDirectory) -> Measurement | None:
    """Gather the probers' measurements into clock_probe.json; None where nothing was measured.

    A clock_probe.json that is there already (an earlier merge, or `clusterprof clock --output`)
    is kept, and what is new added. Removes what the probers needed to meet. Raises ReportError
    for a clock_probe.json that is none, OSError where it cannot be written.
    """
    path = probe_path(run)
    found = [read(path)] if path.is_file() else []
    folders = [each.rank(rank) for each in run.attempts() for rank in each.ranks()]
    for folder in folders:
        document = _json(folder / paths.PROBE)
        if isinstance(document, dict):
            found.append(parsed({"method": "UDP beside the ranks", **document}))
        with contextlib.suppress(OSError):
            (folder / paths.PROBE_ADDRESS).unlink()
    for each in run.attempts():
        shutil.rmtree(each.home / paths.PROBED, ignore_errors=True)
    if not found:
        return None
    every = joined(found)
    once = Measurement(tuple(dict.fromkeys(every.bounds)), every.method, every.notes)
    once.write(path)
    return once


def clock_files(run: RunDirectory, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """What each rank's agent wrote of its clocks, as parsed: arguments for `readings.parsed`."""
    return {
        rank: {name: _json(run.rank(rank) / file) for name, file in _FILES.items()}
        for rank in ranks
    }


def _json(path: Path) -> Any:
    """A small file of a rank; None where it is missing or broken: the rank's, not the merge's."""
    try:
        return documents.load(str(path))
    except (OSError, ValueError):
        return None
