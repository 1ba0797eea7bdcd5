"""A measurement of the hosts' clocks, for reports that no agent of ours was beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterprof.errors import MergeError
from clusterprof.probe.measurement import Measurement
from clusterprof.tables import RankTables

_HOW = "measure all hosts at once: srun -N4 --ntasks-per-node=1 clusterprof clock --output FILE"


def clock_files(
    ranks: Sequence[RankTables], found: Measurement
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """What the agents' files would say of these ranks' clocks, and warnings.

    The first is what `readings.known_clocks` takes: the machine of each rank, by
    the host name that its report gives, and one reading inside its window, which cannot show a
    clock that was set. Assumes that the machine of that name is the one that was measured. A
    report without a host name is left out, with a warning. Raises MergeError for a host that was
    not measured, or was measured as two machines.
    """
    machines = _machines(found)
    files: dict[int, dict[str, Any]] = {}
    silent = []
    for tables in ranks:
        if not tables.info.host:
            silent.append(tables.rank)
            continue
        middle = (tables.info.begin_ns + tables.info.end_ns) // 2
        reading = {"event": "report", "wall_ns": middle, "monotonic_ns": 0, "gap_ns": 0}
        machine = _machine(tables.info.host, ranks, machines)
        files[tables.rank] = {"clock": {"machine": machine, "readings": [reading]}}
    if not silent:
        return files, []
    who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    told = f"{who}: the report does not say its host: nothing measured ties its clock to the others"
    return files, [told]


def _machines(found: Measurement) -> dict[str, set[str]]:
    """Return host name -> the machines that were measured under it."""
    machines: dict[str, set[str]] = {}
    for bound in found.bounds:
        for machine in (bound.machine, bound.other_machine):
            machines.setdefault(machine.rpartition(" ")[2], set()).add(machine)
    return machines


def _machine(host: str, ranks: Sequence[RankTables], machines: dict[str, set[str]]) -> str:
    """Return the machine called `host`; of a name with its domain the one without will do."""
    names = [host] if host in machines else []
    names = names or [each for each in machines if _short(each) == _short(host)]
    if len(names) != 1:
        reports = [str(each.info.source) for each in ranks if each.info.host == host]
        raise MergeError(
            f"the clock of host {host} was not measured",
            f"its reports: {', '.join(reports)}",
            f"measured: {', '.join(sorted(machines)) or 'none'}",
            _HOW,
        )
    (name,) = names
    if len(machines[name]) > 1:
        raise MergeError(
            f"host {name} was measured as {len(machines[name])} machines",
            "it was started anew between the measurements, or two hosts have one name",
            "leave out the measurement that is not of this training",
        )
    return next(iter(machines[name]))


def _short(host: str) -> str:
    return host.partition(".")[0]
