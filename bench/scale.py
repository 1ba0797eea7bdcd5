"""Merging the tables of a large job: how long it takes, how much memory, and how its page draws.

Eight ranks are simulated. All others of the job are their copies under other numbers: all take part
in the same collectives, and each rank's tables are what its node made of its report (`--reduce`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from figure import Figure
from lab import devtools
from lab.browser import QUIET
from lab.parts import chromium
from process import Failed, run
from simulate import Job, simulate

from clusterprof.agent.contracts import files, paths
from clusterprof.ingest import reduced
from clusterprof.tables import SCHEMAS, RankTables

_SIMULATED = 8
#: bytes of a page, and seconds until it is drawn
_PAGE_MB, _DRAWN_S = 12.0, 2.0


@dataclass(frozen=True)
class Size:
    """How large a job is, and what its merge may take."""

    ranks: int
    job: Job
    #: None: only its page is looked at
    seconds: float | None = None
    megabytes: float = 0.0
    page: bool = False


#: 976 kernels a step, of which 60 communicate
_FULL = Job(
    dp=_SIMULATED, layers=60, steps=20, serial=True, kernels_per_layer=8, layer_ns=400_000,
    launch_ns=8_000, host_noise_frac=0.1,
)  # fmt: skip
_SMALL = Job(dp=_SIMULATED, layers=3, steps=4, host_noise_frac=0.1)
_SIZES = (
    Size(1024, _FULL, 60.0, 2147.0, page=True),
    Size(10_000, _SMALL, 120.0, 4295.0),
    Size(4096, _SMALL, page=True),
)


def merge(part: int = 1) -> list[Figure]:
    """Time and peak memory of `clusterprof merge -o`, and the page; of 1 in `part` ranks."""
    figures = []
    for size in _SIZES:
        with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as name:
            figures += _merged(replace(size, ranks=size.ranks // part), Path(name))
    return figures


def _merged(size: Size, work: Path) -> list[Figure]:
    kernels = leave(work / "reduced", size)
    program = Path(sys.executable).parent / "clusterprof"
    line = [program, "merge", "-o", work / "merged", work / "reduced"]
    done = run(line, memory=True, timeout=1800)
    results = json.loads((work / "merged" / "merged" / paths.RESULTS).read_text())
    if len(results["ranks"]) != size.ranks or not results["collectives"]["matched"]:
        raise Failed(f"{len(results['ranks'])} of {size.ranks} ranks were merged")
    what = f"tables of {size.ranks} simulated ranks"
    remark = f"{kernels} kernels and calls; {done.processor_seconds:.1f} s of processors"
    figures = []
    if size.seconds is not None:
        figures = [
            Figure(f"merge of {what}, time", "s", size.seconds, done.seconds, "", remark),
            Figure(f"merge of {what}, memory", "MB", size.megabytes, done.peak_bytes / 1e6, "",
                   "resident, summed over processes"),
        ]  # fmt: skip
    return figures + (_page(work / "merged" / paths.HTML, size.ranks) if size.page else [])


def _page(page: Path, ranks: int) -> list[Figure]:
    drawn, why = _drawn(page)
    what = f"page of {ranks} ranks"
    return [
        Figure(f"{what}, size", "MB", _PAGE_MB, page.stat().st_size / 1e6),
        Figure(f"{what}, drawn", "s", _DRAWN_S, drawn, "", why),
    ]


def _drawn(page: Path) -> tuple[float | None, str]:
    """Seconds from opening a page in Chromium until it is drawn, the least of three."""
    program = chromium()
    if program is None:
        return None, "there is no Chromium"
    times = []
    with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as profile:
        flags = [*QUIET, "--allow-file-access-from-files"]
        with devtools.tab(program, Path(profile), *flags) as tab:
            for _ in range(3):
                begin = time.perf_counter()
                tab.open(page, 1400, 900)
                times.append(time.perf_counter() - begin)
    return min(times), "the least of three"


def leave(folder: Path, size: Size) -> int:
    """Write the tables of a job of `size`; returns how many activities and calls they have."""
    simulated = [_of_world(each, size.ranks) for each in simulate(size.job)[0]]
    folder.mkdir(parents=True)
    report = folder / paths.REPORT
    report.touch()
    for each in simulated:
        (folder / f"{each.rank:05d}").mkdir(parents=True)
        reduced.write(each, folder / f"{each.rank:05d}" / paths.REDUCED, report)
    report.unlink()
    for rank in range(_SIMULATED, size.ranks):
        source = folder / f"{rank % _SIMULATED:05d}" / paths.REDUCED
        target = folder / f"{rank:05d}" / paths.REDUCED
        target.mkdir(parents=True)
        for name in SCHEMAS:
            os.link(source / f"{name}.parquet", target / f"{name}.parquet")
        content = json.loads((source / paths.REDUCED_RANK).read_text())
        content["info"] |= {"rank": rank, "host": f"n{rank // _SIMULATED}"}
        files.write_json(target / paths.REDUCED_RANK, content, indent=1)
    rows = sum(each.activity.num_rows + each.host_calls.num_rows for each in simulated)
    return rows * size.ranks // _SIMULATED


def _of_world(tables: RankTables, ranks: int) -> RankTables:
    """One rank's tables in a larger job."""
    calls = tables.collective_calls
    at = calls.schema.get_field_index("communicator_size")
    sizes = pa.array([ranks] * calls.num_rows, pa.int32())
    return replace(
        tables,
        info=replace(tables.info, world_size=ranks),
        collective_calls=calls.set_column(at, calls.schema.field(at), sizes),
    )
