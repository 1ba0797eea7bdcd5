"""Nodes that are cut off from the network inside the window, for a moment and for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from lab import cluster, command
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS, Running, outcomes, words
from lab.fakes import scripted_nsys

pytestmark = [
    pytest.mark.usefixtures("scripted"), pytest.mark.needs_network, pytest.mark.needs_slurm,
]  # fmt: skip


@pytest.fixture
def ends_alike(fault: Callable[..., None]) -> Callable[[Running, Running, str], int]:
    """`ends_alike(plain, ours, what)`: both end alike, ours little later; with which status."""

    def check(plain: Running, ours: Running, what: str) -> int:
        expected = plain.ends()
        began = time.monotonic()
        status = ours.ends()
        added_s = time.monotonic() - began
        printed = ours.printed()
        fault(what, expected, status, added_s, ours.state())
        assert status == expected, printed
        assert words(printed) == words(plain.printed()), printed
        return status

    return check


def test_a_node_that_is_cut_off_ends_its_job_as_it_would_have(
    run_clusterprof: Callable[..., Completed],
    workdir: Path,
    slurm_network: Path,
    ends_alike: Callable[[Running, Running, str], int],
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
    assert ends_alike(plain_short, ours_short, "a node is cut off for 4 s") == 0
    assert ours_short.state()["state"] == "collected", ours_short.printed()
    assert outcomes(ours_short.run) == {0: "collected"}

    ends_alike(plain_long, ours_long, "a node is cut off for good")
    assert ours_long.state()["state"] == "lost", ours_long.printed()
    assert outcomes(ours_long.run) == {0: "lost"}
    # What runs there still knows nothing of it; what was captured comes home after all.
    for node in ("n3", "n4"):
        cluster.cut(slurm_network, node, "mend")
        (workdir / node / "go").touch()
    report = ours_long.run / "ranks/00000/report.nsys-rep"
    ours_long.wait_until(report.exists, "home")

    def collected() -> bool:
        done = run_clusterprof(["collect", "--no-merge", ours_long.run])
        assert done.returncode == 0, done
        return ours_long.state()["state"] == "collected"

    # Two nodes that write one state at once do not see each other: the node may have the last word.
    ours_long.wait_until(collected, "collected")
    assert ours_long.state()["late"]
    assert not ours_long.left()
    assert not ours_short.left()


@pytest.mark.long
def test_a_node_that_is_lost_while_it_reduces_ends_its_job_as_it_would_have(
    run_clusterprof: Callable[..., Completed],
    workdir: Path,
    slurm_network: Path,
    ends_alike: Callable[[Running, Running, str], int],
) -> None:
    # It goes on once the node is back, long after the job was given up.
    exports = f"touch('{workdir}/exporting'); wait_for('{workdir}/go-on')"
    nsys = scripted_nsys(workdir / "nsys", {"0:export": exports})
    reduced = [f"--nsys={nsys}", "--reduce=now", "--keep-reports=none"]
    plain_job = job(workdir, slurm_network, "n1", ours=False, at=25)
    ours_job = job(workdir, slurm_network, "n2", ours=True, at=25, more=reduced)
    for each in (plain_job, ours_job):
        each.wait_until(each.waits, "waiting")
    ours_job.wait_until((workdir / "exporting").exists, "exporting")
    for node in ("n1", "n2"):
        cluster.cut(slurm_network, node)
    assert all(each.goes_on() for each in (plain_job, ours_job)), "given up before it was cut off"
    ends_alike(plain_job, ours_job, "a node is lost while it reduces")
    assert outcomes(ours_job.run) == {0: "lost"}, (ours_job.state(), ours_job.printed())
    (workdir / "go-on").touch()
    for node in ("n1", "n2"):
        cluster.cut(slurm_network, node, "mend")
        (workdir / node / "go").touch()
    rank = ours_job.run / "ranks/00000"
    ours_job.wait_until(
        lambda: (rank / "reduced").exists() or (rank / "report.nsys-rep").exists(), "home"
    )
    done = run_clusterprof(["collect", "--no-merge", ours_job.run])
    assert (done.returncode, ours_job.state()["state"]) == (0, "collected"), done
    assert not ours_job.left()


def job(
    workdir: Path, slurm: Path, node: str, *, ours: bool, at: int = 15, more: Sequence[str] = ()
) -> Running:
    """A job of two ranks on one node that waits inside the window, or after step `at`."""
    folder = workdir / node
    folder.mkdir()
    where = ["-n2", f"--nodelist={node}", f"--chdir={folder}"]
    program = ["python", str(PROGRAMS / "ending.py"), "wait", str(at)]
    line = ["srun", *where, *program]
    if ours:
        run = [*more, "--no-merge", "--run-dir", str(folder / "run")]
        line = command.clusterprof(["srun", *OPTIONS, *run, *where, "--", *program])
    return Running(line, {"SLURM_CONF": str(slurm / "slurm.conf")}, folder / "out", folder / "run")
