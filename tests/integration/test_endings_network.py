"""Nodes that are cut off from the network inside the window, for a moment and for good."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import cluster, command
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, Running, allowed_s, outcomes, words

pytestmark = [pytest.mark.needs_nsys, pytest.mark.needs_network, pytest.mark.needs_slurm]


def test_a_node_that_is_cut_off_ends_its_job_as_it_would_have(
    run_clusterprof: Callable[..., Completed],
    workdir: Path,
    slurm_network: Path,
    fault: Callable[..., None],
) -> None:
    # Two nodes, one with a job of ours, for less than it takes to be given up; two for longer.
    plain_short, ours_short, plain_long, ours_long = jobs = [
        job(workdir, slurm_network, f"n{number}", ours=number in (2, 4)) for number in range(1, 5)
    ]
    for each in jobs:
        each.wait_until(each.waits, "waiting")
    for number in (3, 4, 1, 2):  # those for a moment last: cutting takes a slow machine a while
        cluster.cut(slurm_network, f"n{number}")
    time.sleep(4)
    for number in (1, 2):
        cluster.cut(slurm_network, f"n{number}", "mend")
    for each in jobs[:2]:
        (each.run.parent / "go").touch()
    plain, status = plain_short.ends(), ours_short.ends()
    fault("a node is cut off for 4 s", plain, status, 0.0, ours_short.state())
    assert status == plain == 0, ours_short.printed()
    assert words(ours_short.printed()) == words(plain_short.printed())
    assert ours_short.state()["state"] == "collected", ours_short.printed()
    assert outcomes(ours_short.run) == {0: "collected"}

    plain = plain_long.ends()
    began = time.monotonic()
    status = ours_long.ends()
    added_s = time.monotonic() - began
    printed = ours_long.printed()
    fault("a node is cut off for good", plain, status, added_s, ours_long.state())
    assert status == plain, printed
    assert words(printed) == words(plain_long.printed())
    assert added_s < allowed_s()
    assert ours_long.state()["state"] == "lost", printed
    assert outcomes(ours_long.run) == {0: "lost"}
    # What runs there still knows nothing of it; what was captured comes home after all.
    for node in ("n3", "n4"):
        cluster.cut(slurm_network, node, "mend")
        (workdir / node / "go").touch()
    report = ours_long.run / "ranks/00000/report.nsys-rep"
    ours_long.wait_until(report.exists, "home")
    done = run_clusterprof(["collect", "--no-merge", ours_long.run])
    assert (done.returncode, ours_long.state()["state"]) == (0, "collected"), done
    assert ours_long.state()["late"], done
    assert not ours_long.left()
    assert not ours_short.left()


def job(workdir: Path, slurm: Path, node: str, *, ours: bool) -> Running:
    """A job of two ranks on one node that waits inside the window."""
    folder = workdir / node
    folder.mkdir()
    where = ["-n2", f"--nodelist={node}", f"--chdir={folder}"]
    program = ["python", str(PROGRAMS / "ending.py"), "wait", "15"]
    line = ["srun", *where, *program]
    if ours:
        run = ["--no-merge", "--run-dir", str(folder / "run")]
        line = command.clusterprof(["srun", *OPTIONS, *run, *where, "--", *program])
    return Running(line, {"SLURM_CONF": str(slurm / "slurm.conf")}, folder / "out", folder / "run")
