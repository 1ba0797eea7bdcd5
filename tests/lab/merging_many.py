"""Many small merges in one start of an engine: what each wrote, compared by its bytes.

    python merging_many.py OUT CASE...

merges each folder of reports into OUT/its name, by the tasks that mpirun has started.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from clusterprof.agent.contracts import paths
from clusterprof.errors import ClusterprofError
from clusterprof.ingest import read_report, reduced
from clusterprof.ingest.engines import Engine, Processes
from clusterprof.launch import tasks
from clusterprof.merge_run import merge_reports, save
from clusterprof.run_directory import Window

#: what may have become of a rank's report
STATES = ("whole", "whole", "gone", "garbage", "cut", "reduced", "reduced", "cut tables")


def make(recording: Path, folder: Path, seed: int) -> None:
    """A case: the recording's ranks, at least one of them whole."""
    chance = random.Random(seed)
    reports = sorted(recording.glob("rank*"))
    states = ["whole", *(chance.choice(STATES) for _ in reports[1:])]
    chance.shuffle(states)
    for rank, (report, state) in enumerate(zip(reports, states, strict=True)):
        here = folder / paths.RANKS / f"{rank:05d}"
        here.mkdir(parents=True)
        if state != "gone":
            _put(report, here / f"report{''.join(report.suffixes)}", state)


def _put(report: Path, target: Path, state: str) -> None:
    content = report.read_bytes()
    if state == "garbage":
        content = b"garbage"
    elif state == "cut":
        content = content[: len(content) // 2]
    target.write_bytes(content)
    if state in ("reduced", "cut tables"):
        kept = target.with_name(paths.REDUCED)
        reduced.write(read_report(target), kept, target)
        target.unlink()
        if state == "cut tables":
            os.truncate(kept / "activity.parquet", 100)


def merge(cases: Sequence[Path], out: Path, engine: Engine) -> int:
    """Merge each case into a folder of its name below `out`."""
    for case in cases:
        made = Window.at(out / case.name)
        made.path.mkdir(parents=True)
        try:
            save(merge_reports([case], {}, engine=engine), made)
        except ClusterprofError as error:
            (made.path / "error").write_text(str(error))
    return 0


def written(out: Path) -> dict[str, bytes]:
    """All that was written: the bytes of each file."""
    found = {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }
    shutil.rmtree(out)
    return found


if __name__ == "__main__":
    work = partial(merge, [Path(each) for each in sys.argv[2:]], Path(sys.argv[1]))
    mine = tasks.task(os.environ)
    with tasks.first_speaks(mine) as speak:
        status = tasks.over("mpi", mine, Processes(), sys.argv, work, speak)
    sys.exit(status)
