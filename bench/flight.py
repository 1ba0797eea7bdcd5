"""Merging the flight recorders of a large job: how long it takes, and how much memory."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from figure import Figure, median
from process import Failed, run
from simulate import Cause, Job
from simulate.flight import leave, recorded

from clusterprof import run_directory
from clusterprof.arguments import parse_ranks

#: ranks, entries of each, seconds that the merge may take
_SIZES = ((1024, 2000, 15.0), (4096, 500, 30.0))
_MOST_MB = 2147.0


def merge(rounds: int, part: int = 1) -> list[Figure]:
    """Wall time and peak memory of `clusterprof merge` over a run that profiled no rank.

    `part`: of so many ranks one is simulated, for a look.
    """
    figures = []
    for ranks, entries, limit in _SIZES:
        with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as name:
            done = _merged(Path(name) / "run", ranks // part, entries, rounds)
        times, processors, peaks = (list(each) for each in zip(*done, strict=True))
        what = f"flight recorders of {ranks // part} ranks"
        remark = f"{entries} entries each; {median(processors):.1f} s of processors"
        figures += [
            Figure(f"merge of {what}, time", "s", limit, median(times), "", remark, times),
            Figure(f"merge of {what}, memory", "MB", _MOST_MB, median(peaks), "",
                   "resident, summed over processes", peaks),
        ]  # fmt: skip
    return figures


def _merged(
    folder: Path, ranks: int, entries: int, rounds: int
) -> list[tuple[float, float, float]]:
    """Seconds, processor seconds and MB of each merge; the late rank has to be seen."""
    late = ranks - 3
    job = Job(
        dp=ranks // 8, tp=8, layers=24, steps=2, first_step=10, synchronous=True, tear_ns=0,
        causes=(Cause("host", late, 8_000_000),),
    )  # fmt: skip
    made = run_directory.create(folder)
    made.directory.write_manifest(
        {"schema_version": 1, "launcher": "torchrun", "world_size": ranks, "window": [10, 20],
         "selection": parse_ranks("0")._replace(ranks=())._asdict()}
    )  # fmt: skip
    leave(made, recorded(job), entries)
    program = Path(sys.executable).parent / "clusterprof"
    found = []
    for _ in range(rounds):
        done = run([program, "merge", "--json", folder], memory=True)
        shallow = json.loads(done.stdout)["shallow"]
        first = [each["rank"] for each in shallow["suspects"][:1]]
        if len(shallow["ranks"]) != ranks or first != [late]:
            raise Failed(f"of {ranks} ranks {len(shallow['ranks'])} are merged; late: {first}")
        found.append((done.seconds, done.processor_seconds, done.peak_bytes / 1e6))
    return found
