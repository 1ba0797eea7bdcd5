"""What `merge` wrote, as an export reads it: results, collectives, accounts and ranks' tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof.agent.contracts import paths
from clusterprof.align.clock import Clock
from clusterprof.align.lateness import SHALLOW
from clusterprof.align.match import PLACED
from clusterprof.analysis.model.accounts import ACCOUNTS
from clusterprof.columns import integers
from clusterprof.errors import ReportError
from clusterprof.report import results_json
from clusterprof.results import Results, steady_steps
from clusterprof.run_directory import Window
from clusterprof.tables import SCHEMAS, read_table


@dataclass(frozen=True)
class Merged:
    """A merged run. What is large is read when it is asked for, one rank at a time."""

    #: its window, or merge's --output
    run: Window
    results: Results
    #: schema `clusterprof.align.match.PLACED`
    collectives: pa.Table
    #: schema `clusterprof.analysis.model.accounts.ACCOUNTS`
    accounts: pa.Table
    #: times are on each rank's own wall clock, of which only the drift is removed
    own_clocks: bool = False

    @property
    def ranks(self) -> list[int]:
        """The profiled ranks, in order."""
        return [entry["rank"] for entry in self.results["ranks"]]

    @cached_property
    def is_steady(self) -> pa.ChunkedArray:
        """Which rows of the accounts are of steady-state steps."""
        steps = pa.array(steady_steps(self.results), pa.int64())
        return pc.is_in(self.accounts["step"], steps)

    @cached_property
    def names(self) -> dict[int, str]:
        """What each profiled rank is called: `rank 8 · gpu-01`."""
        return {
            entry["rank"]: f"rank {entry['rank']}"
            + (f" · {entry['host']}" if entry["host"] else "")
            for entry in self.results["ranks"]
        }

    @cached_property
    def clock(self) -> Clock:
        """Every profiled rank's clock. Raises ReportError where results.json lacks one."""
        entry = self.results["clock"]
        clocks = entry["ranks"]
        if absent := set(self.ranks) - {clock["rank"] for clock in clocks}:
            file = self.run.merged / paths.RESULTS
            raise _damaged(file, f"it has no clock of rank {min(absent)}")
        return Clock(
            entry["reference_rank"],
            entry["middle_ns"],
            entry["method"],
            tuple(clock["rank"] for clock in clocks),
            np.array([0 if self.own_clocks else c["offset_ns"] for c in clocks], np.int64),
            np.array([clock["drift_ppm"] for clock in clocks], np.float64),
            np.array([clock["uncertainty_ns"] for clock in clocks], np.int64),
            assumed=tuple(entry["assumed"]),
        )

    @cached_property
    def shallow(self) -> pa.Table | None:
        """All ranks' calls by their flight recorders; None where no rank left one."""
        file = self.run.merged / "shallow.parquet"
        return read_table(file, SHALLOW) if file.is_file() else None

    def has_tables(self, rank: int) -> bool:
        """Whether a rank's tables are still there."""
        return self._file(rank, "activity").is_file()

    def table(self, rank: int, name: str, columns: Sequence[str]) -> pa.Table:
        """Columns of one of a rank's tables (`SCHEMAS`); no rows where it was removed since."""
        file, schema = self._file(rank, name), SCHEMAS[name]
        if file.is_file():
            return read_table(file, schema, columns)
        return schema.empty_table().select(columns)

    def _file(self, rank: int, name: str) -> Path:
        return self.run.tables(rank) / f"{name}.parquet"


def read(run: Window) -> Merged:
    """A run that was merged before. Raises ReportError where it was not, or is damaged."""
    file = run.merged / paths.RESULTS
    if not file.is_file():
        raise results_json.not_merged(run.path)
    results = results_json.read(file)
    merged = Merged(
        run,
        results,
        read_table(run.merged / "collectives.parquet", PLACED),
        read_table(run.merged / "accounts.parquet", ACCOUNTS),
    )
    of_tables = {*integers(merged.collectives, "rank"), *integers(merged.accounts, "rank")}
    if not of_tables <= set(merged.ranks) or len(merged.names) < len(merged.ranks):
        raise _damaged(file, "its ranks are not those of the tables beside it")
    return merged


def _damaged(file: Path, why: str) -> ReportError:
    return ReportError(f"{file} cannot be read: {why}", "write it again: clusterprof merge RUN")
