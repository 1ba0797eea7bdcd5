"""Runs that are there already: a user's own, in one folder, the newest first.

What one of them found about a program decides how the next run of it is captured, where nothing
else can: nsys must be there when a program starts, and before that nothing can be measured.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from clusterprof import masking
from clusterprof.agent.contracts import paths
from clusterprof.arguments import shortest
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.results import Results
from clusterprof.run_directory import Manifest, Window

#: So many of the newest runs are looked through for one of the same program.
MOST = 50
#: All ranks run one program: so many of them tell what it launches.
TELLING = 2


def runs_in(parent: Path) -> list[tuple[Window, Manifest]]:
    """The user's own runs in a folder, the newest first; what is damaged is left out."""
    runs = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            run = Window.at(Path(entry.path))
            # A pipe, or a link of somebody else's, would be waited for or followed.
            with contextlib.suppress(OSError, ClusterprofError):
                status = run.directory.manifest.lstat()
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if ours and entry.is_dir(follow_symlinks=False):
                    manifest = run.directory.read_manifest()
                    runs.append((manifest.began, run, manifest))
    return [(run, manifest) for _, run, manifest in sorted(runs, key=lambda run: run[0])[::-1]]


class MergedRun(NamedTuple):
    """A merged run of the same program."""

    run: Window
    results: Results

    def __str__(self) -> str:
        return shortest(self.run.path)

    def was_launch_bound(self) -> bool:
        """Whether launches bind the steps, or steps stayed longer after nsys' window: nsys costs
        time for each launch until the program ends.
        """
        from clusterprof.analysis.findings.finding import LAUNCH_BOUND
        from clusterprof.analysis.findings.profiler_overhead import stay

        cost = self.results["capture"]
        by_nsys = any(rank["profiler"].startswith("nsys") for rank in self.results["ranks"])
        stays = by_nsys and cost is not None and stay(cost["profiled"])
        codes = {finding["code"] for finding in self.results["findings"]}
        return bool(stays) or LAUNCH_BOUND in codes

    def had_graphs(self) -> bool:
        """Whether a rank launched CUDA graphs in its window: of many the first ones tell."""
        from clusterprof.tables import SCHEMAS, launches_graphs, read_table

        for rank in sorted(self.run.results.path.glob(f"{paths.TABLES}/[0-9]*"))[:TELLING]:
            with contextlib.suppress(ReportError):
                calls = read_table(rank / "host_calls.parquet", SCHEMAS["host_calls"], ["name"])
                if launches_graphs(calls):
                    return True
        return False


def latest(parent: Path, program: Sequence[str]) -> MergedRun | None:
    """The latest merged run of this program in `parent`; None where its results cannot be read."""
    wanted = masking.suspected(program)
    for run, manifest in runs_in(parent)[:MOST]:
        again, result = manifest.whole, run.merged / paths.RESULTS
        if "--" in again and again[again.index("--") + 1 :] == wanted and result.is_file():
            from clusterprof.report import results_json

            with contextlib.suppress(ReportError):  # of another version
                return MergedRun(run, results_json.read(result))
            return None
    return None
