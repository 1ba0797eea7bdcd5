"""What is known of the ranks' clocks, for merging: of a run, and of reports with no agent's files.

Both are arguments for `clusterprof.align.clock.measured.known_clocks`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clusterprof.agent.contracts import documents, paths, words
from clusterprof.errors import MergeError
from clusterprof.probe.measurement import Measurement, joined, parsed, read
from clusterprof.run_directory import RunDirectory
from clusterprof.tables import RankTables

#: what each rank wrote of its clocks, by what `clusterprof.align.clock.readings.parsed` calls it
_FILES = {"clock": paths.CLOCK, "state": paths.STATE, "beacons": paths.BEACONS}


def gathered(run: RunDirectory) -> Measurement | None:
    """Gather the probers' measurements into clock_probe.json; None where nothing was measured.

    A clock_probe.json that is there already (an earlier merge, or `clusterprof clock --output`)
    is kept, and what is new added. Removes what the probers needed to meet. Raises ReportError
    for a clock_probe.json that is none, OSError where it cannot be written.
    """
    path = run.path / paths.CLOCK_PROBE
    found = [read(path)] if path.is_file() else []
    for attempt in run.attempts():
        for folder in map(attempt.rank, attempt.ranks()):
            document = _json(folder / paths.PROBE)
            if isinstance(document, dict):
                found.append(parsed({"method": "UDP beside the ranks", **document}))
            with contextlib.suppress(OSError):
                (folder / paths.PROBE_ADDRESS).unlink()
        shutil.rmtree(attempt.home / paths.PROBED, ignore_errors=True)
    if not found:
        return None
    every = joined(found)
    once = Measurement(tuple(dict.fromkeys(every.bounds)), every.method, every.notes)
    once.write(path)
    return once


def of_run(run: RunDirectory, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """What each rank's agent wrote of its clocks."""
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


def of_reports(
    ranks: Sequence[RankTables], found: Measurement
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """What an agent's files would hold of these ranks' clocks by a measurement, and warnings.

    The machine of each rank, by the host name in its report, and one reading inside its window,
    which cannot show a clock that was set. Assumes that the machine of that name is the one that
    was measured. A report without a host name is left out, with a warning. Raises MergeError for a
    host that was not measured, or was measured as two machines.
    """
    machines: dict[str, set[str]] = {}  # that were measured, by their host names
    for bound in found.bounds:
        for machine in (bound.machine, bound.other_machine):
            machines.setdefault(machine.rpartition(" ")[2], set()).add(machine)
    files: dict[int, dict[str, Any]] = {}
    unnamed = []
    for tables in ranks:
        if not tables.info.host:
            unnamed.append(tables.rank)
            continue
        middle = (tables.info.begin_ns + tables.info.end_ns) // 2
        reading = {"event": "report", "wall_ns": middle, "monotonic_ns": 0, "gap_ns": 0}
        machine = _machine(tables.info.host, ranks, machines)
        files[tables.rank] = {"clock": {"machine": machine, "readings": [reading]}}
    if not unnamed:
        return files, []
    who = words.ranks(unnamed)
    return files, [f"{who}: the report does not name its host, so its clock is not measured"]


def _machine(host: str, ranks: Sequence[RankTables], machines: dict[str, set[str]]) -> str:
    """The machine called `host`; of a name with its domain the one without will do."""
    short = host.partition(".")[0]
    names = [host] if host in machines else [
        each for each in machines if each.partition(".")[0] == short
    ]  # fmt: skip
    if len(names) != 1:
        reports = [str(each.info.source) for each in ranks if each.info.host == host]
        raise MergeError(
            f"the clock of host {host} was not measured",
            f"its reports: {', '.join(reports)}",
            f"measured: {', '.join(sorted(machines)) or 'none'}",
            "measure all hosts at once: "
            "srun -N4 --ntasks-per-node=1 clusterprof clock --output FILE",
        )
    (name,) = names
    if len(machines[name]) > 1:
        raise MergeError(
            f"host {name} was measured as {len(machines[name])} machines",
            "it was restarted between the measurements, or two hosts have the same name",
            "leave out the measurement that does not belong to this training",
        )
    return next(iter(machines[name]))
