"""Disks that fail in the midst of it: the training ends as it would have ended.

From some operation on whatever is done to files below a folder fails, or that one operation alone.
The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.disk import small_disk
from lab.endings import state_if_any
from lab.failing_files import Failing, library
from lab.stub import OPTIONS, PROGRAM, RANK
from lab.tiers import few

from clusterprof.errors import RunDirectoryError

pytestmark = [
    pytest.mark.needs_compiler, pytest.mark.needs_root, pytest.mark.usefixtures("scripted"),
]  # fmt: skip
Fault = Callable[..., None]

#: folder, profiler, error, whether it is one operation alone that fails, and at how many places
CASES = {
    f"{what}, {folder}, {profiler}": (folder, profiler, number, once, 8)
    for what, number, once in (
        ("a disk fails", errno.EIO, False), ("a disk fails once", errno.EIO, True),
        ("a disk is full, or has no inodes", errno.ENOSPC, False),
    )
    for profiler in ("torch", "nsys")
    for folder in ("run", "tmp")
}  # fmt: skip
SHORT = {"a disk fails before the window": ("run", "torch", errno.EIO, False, 2)}


#: folder, profiler, and with how many inodes
INODES = {
    f"{number} inodes, {folder}, {profiler}": (folder, profiler, number)
    for profiler in ("torch", "nsys")
    for folder, numbers in (("run", (4, 5, 6, 7, 8, 10, 12)), ("tmp", (1, 2, 3, 4, 6, 8, 12)))
    for number in numbers
}  # fmt: skip


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that fails."""
    return library(tmp_path_factory.mktemp("failing"))


def trained(workdir: Path, failing: Path, profiler: str, fails: Failing) -> tuple[Completed, int]:
    """The job whose disk fails so; and how many operations there were."""
    for name in ("run", "tmp"):
        shutil.rmtree(workdir / name, ignore_errors=True)
    (workdir / "tmp").mkdir()
    line = command.clusterprof(["run", *OPTIONS, f"--profiler={profiler}", "--"])
    env = {**RANK, "TMPDIR": str(workdir / "tmp")}
    return fails.run(failing, [*line, "python", "train.py"], env)


def check(done: Completed) -> None:
    """The training is as it is without us; or it was said before it began why it cannot begin."""
    assert "Traceback" not in done.stderr, done
    assert "a bug" not in done.stderr, done
    if done.returncode == RunDirectoryError.exit_code:
        assert not done.stdout, done
        assert "clusterprof: error: " in done.stderr, done
    else:
        assert (done.returncode, done.stdout) == (0, "trained\n"), done


@pytest.mark.parametrize(
    ("folder", "profiler", "number", "once", "places"), few({**SHORT, **CASES}, *SHORT)
)
def test_a_program_trains_to_its_end_wherever_a_disk_begins_to_fail(
    folder: str, profiler: str, number: int, once: bool, places: int, workdir: Path, failing: Path,
    fault: Fault,
) -> None:  # fmt: skip
    (workdir / "train.py").write_text(PROGRAM)
    under = workdir / folder
    _, count = trained(workdir, failing, profiler, Failing(under, number, 1 << 30))
    for first in sorted({count * (2 * place + 1) // (2 * places) for place in range(places)}):
        done, _ = trained(workdir, failing, profiler, Failing(under, number, first, once))
        check(done)
    assert count > 1, "it is no test"
    found = state_if_any(workdir / "run")
    how = f"{os.strerror(number)}, once" if once else os.strerror(number)
    fault(f"{how}: {folder}, {profiler}", 0, done.returncode, 0.0, found)


@pytest.mark.parametrize(
    ("folder", "profiler", "number"), few(INODES, "7 inodes, run, torch", "1 inodes, tmp, torch")
)
def test_a_program_trains_to_its_end_on_a_disk_that_takes_no_further_file(
    folder: str, profiler: str, number: int, workdir: Path, fault: Fault
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    with small_disk(f"200m,nr_inodes={number}") as place:
        run = place / "run" if folder == "run" else workdir / "run"
        options = [*OPTIONS, f"--run-dir={run}", f"--profiler={profiler}"]
        line = command.clusterprof(["run", *options, "--", "python", "train.py"])
        done = command.run(
            line, env={**RANK, **({"TMPDIR": str(place)} if folder == "tmp" else {})}
        )
        found = state_if_any(run)
    fault(f"{number} inodes: {folder}, {profiler}", 0, done.returncode, 0.0, found)
    check(done)
    # Of a disk for all that is written beside the run, the system's own is taken as well.
    assert folder == "run" or found["state"] in ("captured", "collected", "lost"), done
