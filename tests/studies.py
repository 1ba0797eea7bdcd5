"""Recordings and simulated jobs, each read, simulated and studied once, and read-only.

`tests/science` hands them out as the fixtures `studied` and `simulated`; its tests of one recording
or of one kind of job run one after the other, so that a few at a time are enough.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from simulate import Job, simulate
from simulate.cases import Case, cases

from clusterprof.analysis.findings.registry import all_findings
from clusterprof.ingest import Gathered, gather
from clusterprof.results import Finding
from clusterprof.study import Study, dataset_of, study
from clusterprof.tables import RankTables

FOLDER = Path(__file__).parent / "data" / "recordings"
#: what is true of each recording, by its name
TRUTH = json.loads((FOLDER / "truth.json").read_text())["recordings"]
NAMES = sorted(TRUTH)
#: a seed of simulated jobs that no constant of the product was chosen on
SEED = 7001
#: so many studies are kept; each takes some 20 MB
_KEPT = 12


@dataclass(frozen=True)
class Simulated:
    """A simulated job: its truth, its profiled ranks, and their study."""

    case: Case
    ranks: tuple[RankTables, ...]
    study: Study


def gathered(name: str) -> Gathered:
    """The reports of a recording."""
    cached = _gathered(name)
    return replace(cached, ranks=[*cached.ranks])


def studied(name: str) -> Study:
    """The study of a recording."""
    return _with_own_results(_studied(name))


def simulated(kind: str, seed: int = SEED) -> Simulated:
    """A job of `simulate.cases`."""
    found = _simulated(kind, seed)
    return replace(found, study=_with_own_results(found.study))


def found_in(ranks: Sequence[RankTables], **more: Any) -> list[Finding]:
    """What is found in these ranks, without the rest of their study."""
    return all_findings(dataset_of(ranks, **more))[0]


def simulated_job(job: Job) -> list[RankTables]:
    """The ranks of a simulated job."""
    return list(_ranks(job))


def studied_job(job: Job) -> Study:
    """The study of a simulated job."""
    return _with_own_results(_studied_job(job))


@functools.lru_cache(_KEPT)
def _gathered(name: str) -> Gathered:
    return gather([FOLDER / name])


@functools.lru_cache(_KEPT)
def _studied(name: str) -> Study:
    found = _gathered(name)
    return frozen(study(found.ranks, found.missing, found.warnings, source=str(FOLDER / name)))


@functools.lru_cache(_KEPT)
def _simulated(kind: str, seed: int) -> Simulated:
    (case,) = cases([kind], range(seed, seed + 1))
    ranks = tuple(
        tables
        for tables in simulate(case.job)[0]
        if case.profiled is None or tables.rank in case.profiled
    )
    return Simulated(case, ranks, frozen(study(ranks)))


@functools.lru_cache(_KEPT)
def _ranks(job: Job) -> tuple[RankTables, ...]:
    return tuple(simulate(job)[0])


@functools.lru_cache(_KEPT)
def _studied_job(job: Job) -> Study:
    return frozen(study(_ranks(job), source="reports"))


def _with_own_results(cached: Study) -> Study:
    """The study with results of its reader's own: these are plain lists, which a test may edit."""
    return replace(cached, results=copy.deepcopy(cached.results))


def frozen(made: Study) -> Study:
    """The study, with every array in it read-only: who writes into a shared one is told."""
    pending: list[object] = [made]
    visited: dict[int, object] = {}
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif type(value).__module__.startswith("clusterprof"):
            pending.extend(getattr(value, "__dict__", {}).values())
    return made
