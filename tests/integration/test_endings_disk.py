"""Disks that fill up: the run directory's and the node's own, before the window and inside it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.command import Completed
from lab.disk import small_disk
from lab.endings import OPTIONS, PROGRAMS, Running, state, window, words
from lab.parts import find

from clusterprof.agent.contracts import paths

#: Open MPI will not start as root unless it is told to.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
NEVER = 0

pytestmark = [
    pytest.mark.needs_root, pytest.mark.usefixtures("scripted"), pytest.mark.needs_openmpi,
]  # fmt: skip


@pytest.fixture
def disk() -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of its own of a given size."""
    with contextlib.ExitStack() as made:
        yield lambda size: made.enter_context(small_disk(size))


def run(line: list[str | Path], temporary: Path | None = None) -> Completed:
    env = {**OPEN_MPI, **({"TMPDIR": str(temporary)} if temporary else {})}
    return command.run(line, env=env)


def ends_alike(
    folder: Path, at: int, run_directory: Path, fault: Callable[..., None], what: str,
    temporary: Path | None = None, *left: int, more: Sequence[str] = (),
) -> tuple[Completed, dict[str, Any]]:  # fmt: skip
    """The program that fills `folder` after step `at`, without us and with us."""
    program = ["python", PROGRAMS / "filling.py", folder, str(at), *map(str, left)]
    plain = run(["mpirun", "-n", "1", *map(str, program)], temporary)
    (folder / "filler").unlink(missing_ok=True)
    options = [*OPTIONS, *more, "--run-dir", run_directory, "--no-merge"]
    ours = ["mpirun", *options, "-n", "1", "--", *program]
    done = run(list(command.clusterprof(ours)), temporary)
    assert done.returncode == plain.returncode == 3, done
    assert done.stdout == plain.stdout == "rank 0 ends\n"
    assert "Traceback" not in done.stderr
    found = state(run_directory)
    fault(what, plain.returncode, done.returncode, done.seconds - plain.seconds, found)
    return done, found


def test_a_report_that_finds_no_space_in_the_run_directory_stays_on_its_node(
    disk: Callable[[str], Path], tmp_path: Path, fault: Callable[..., None]
) -> None:
    full = disk("96k")
    done, found = ends_alike(
        tmp_path, NEVER, full / "run", fault, "no space in the run directory for the report"
    )
    assert f"{full}/run/ranks/00000" in done.stderr
    assert (found["state"], window(found)) == ("lost", "whole")
    report = Path(found["reason"].rpartition(" as ")[2])
    assert report.stat().st_size > 96_000
    assert [each.name for each in report.parent.iterdir() if each.name == "nsys"] == []
    for each in report.parent.iterdir():
        each.unlink()
    report.parent.rmdir()


def test_a_run_directory_that_is_full_before_the_window_says_so_in_the_last_line(
    disk: Callable[[str], Path], fault: Callable[..., None]
) -> None:
    full = disk("1m")
    done, _ = ends_alike(full, 5, full / "run", fault, "the run directory's disk is full")
    (lost,) = [line for line in done.stderr.splitlines() if line.startswith("clusterprof: rank 0")]
    assert all(fact in lost for fact in (f"{full}/run", "space")), done


@pytest.mark.long
@pytest.mark.needs_torch
def test_a_disk_that_is_full_after_the_first_look_leaves_the_second_window_out(
    disk: Callable[[str], Path], workdir: Path, fault: Callable[..., None]
) -> None:
    full = disk("1m")
    line = ["python", str(PROGRAMS / "looked_at.py"), "1", "fill", str(full), "light"]
    (workdir / "go").touch()
    plain = command.run(["mpirun", "-n", "2", *line], env=OPEN_MPI)
    for left in (full / "filler", workdir / "go", workdir / "store"):
        left.unlink(missing_ok=True)
    ours = ["mpirun", "--ranks=auto", "--steps", "5:10", "--step-on", "loop:step", "--run-dir",
            str(full / "run"), "-n", "2"]  # fmt: skip
    running = Running(command.clusterprof([*ours, "--", *line]), OPEN_MPI, workdir / "out")
    running.run = full / "run"
    dump = running.run / "ranks/00001" / paths.FLIGHT
    running.wait_until(dump.exists, "looked at")
    (workdir / "go").touch()
    status = running.ends()
    found = state(running.run)
    fault("the run directory's disk is full after the look", plain.returncode, status, 0.0, found)
    assert status == plain.returncode == 3, running.printed()
    assert words(running.printed()) == words(plain.stdout) == ["rank 0 ends", "rank 1 ends"]
    assert "Traceback" not in running.printed()
    assert not running.left()


@pytest.mark.parametrize(
    "nsys", ["script", pytest.param("real", marks=[pytest.mark.needs_nsys, pytest.mark.long])]
)
def test_a_window_closes_when_the_node_s_disk_fills_and_the_program_is_not_hurt(
    nsys: str, disk: Callable[[str], Path], tmp_path: Path, fault: Callable[..., None]
) -> None:
    more = [] if nsys == "script" else [f"--nsys={find('nsys')}"]
    # nsys 2022.4.2 ends a program by SIGSEGV whose disk has no byte left while it captures: what
    # fills within one look (`plan.LOOK_NS`) cannot be prevented.
    full = disk("100m")
    done, found = ends_alike(
        full, 12, tmp_path / "run", fault, "the node's disk fills inside the window", full,
        40_000_000, more=more,
    )  # fmt: skip
    assert found["state"] == "collected", done
    assert all(fact in found["reason"] for fact in (f"{full}/", "space")), done
    assert not list(full.glob("clusterprof-*/*")), "nothing is left there"


def test_nothing_is_captured_on_a_node_without_space(
    disk: Callable[[str], Path], tmp_path: Path, fault: Callable[..., None]
) -> None:
    full = disk("20m")
    done, found = ends_alike(
        tmp_path, NEVER, tmp_path / "run", fault, "no space on the node's disk", full
    )
    # It is not even started under nsys.
    assert (found["state"], dict(found["history"]).keys() & {"waiting", "capturing"}) == (
        "lost", set(),
    )  # fmt: skip
    (free,) = re.findall(r"(\d+) MB", found["reason"])
    assert (str(full) in found["reason"], 0 < int(free) <= 21) == (True, True), done
    assert os.listdir(full) in ([], ["nvidia"])
