"""`clusterprof doctor` on this host and on the nodes of a real Slurm."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.command import Completed
from lab.fakes import fake_nsys

Run = Callable[..., Completed]


def named(found: dict[str, Any], host: str) -> dict[str, dict[str, Any]]:
    """One node's checks by their names."""
    (node,) = [node for node in found["nodes"] if node["host"] == host]
    return {check["name"]: check for check in node["checks"]}


def bad(found: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(line["name"], line["nodes"]) for line in found["lines"] if line["level"] == "bad"]


def test_this_host_is_looked_at(run_clusterprof: Run, workdir: Path) -> None:
    done = run_clusterprof(["doctor", "--json"])
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["fit"] else 1)
    (node,) = found["nodes"]
    names = {check["name"] for check in node["checks"]}
    assert {"nsys", "gpu", "temporary folder", "/dev/shm", "loopback", "clock", "python"} <= names
    assert list(workdir.iterdir()) == []


def test_an_nsys_that_does_not_run_is_bad_and_the_status_says_so(
    run_clusterprof: Run, workdir: Path
) -> None:
    (workdir / "nsys").write_text("#!/bin/sh\nexit 1\n")
    (workdir / "nsys").chmod(0o755)
    done = run_clusterprof(["doctor", "--nsys", workdir / "nsys"])
    assert done.returncode == 1, done
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("bad")] == [
        ["bad", "nsys"]
    ]
    assert "1 bad" in done.stdout.splitlines()[-1]


def test_options_that_make_no_sense_are_refused(run_clusterprof: Run, workdir: Path) -> None:
    for line in (["--local", "-N4"], ["--", "python"]):
        done = run_clusterprof(["doctor", *line])
        assert (done.returncode, done.stdout) == (2, ""), done


def test_every_node_of_the_allocation_is_looked_at_at_once(
    run_command: Run, workdir: Path, slurm: dict[str, str]
) -> None:
    done = run_command(["salloc", "-Q", "-N4", "clusterprof", "doctor", "--json"], env=slurm)
    found = json.loads(done.stdout)
    assert [node["host"] for node in found["nodes"]] == ["n1", "n2", "n3", "n4"], done
    assert done.returncode == (0 if found["fit"] else 1)
    for host in ("n1", "n4"):
        assert named(found, host)["run directories"]["level"] == "ok"
        assert named(found, host)["/dev/shm"]["level"] == "ok"
    assert list(workdir.iterdir()) == [], "the probe has been taken away"


def test_nodes_that_no_allocation_has_are_asked_for_with_sruns_options(
    run_clusterprof: Run, run_command: Run, workdir: Path, slurm: dict[str, str]
) -> None:
    done = run_clusterprof(["doctor", "--json", "-w", "n2,n3"], env=slurm)
    assert [node["host"] for node in json.loads(done.stdout)["nodes"]] == ["n2", "n3"], done
    inside = run_command(
        ["salloc", "-Q", "-N3", "clusterprof", "doctor", "--json", "-w", "n2", "-N1"], env=slurm
    )
    assert [node["host"] for node in json.loads(inside.stdout)["nodes"]] == ["n2"], inside
    refused = run_clusterprof(["doctor", "-p", "nowhere"], env=slurm)
    assert refused.returncode != 0
    assert "invalid partition" in refused.stderr


def test_a_folder_that_is_another_one_on_each_node_cannot_hold_runs(
    run_command: Run, workdir: Path, slurm: dict[str, str], slurm_state: Path
) -> None:
    run = slurm_state / "scratch" / "runs" / "x"
    done = run_command(
        ["salloc", "-Q", "-N2", "clusterprof", "doctor", "--json", "--run-dir", run], env=slurm
    )
    assert done.returncode == 1, done
    assert ("run directories", ["n1", "n2"]) in bad(json.loads(done.stdout))


def test_another_nsys_on_one_node_and_none_on_the_next_are_flagged(
    run_command: Run, workdir: Path, slurm: dict[str, str], slurm_state: Path
) -> None:
    for node, version in (("n1", "2024.5.1.1"), ("n2", "2025.3.2.4")):
        fake_nsys(slurm_state / "local" / node, version)
    try:
        done = run_command(
            ["salloc", "-Q", "-N3", "clusterprof", "doctor", "--json", "--nsys",
             slurm_state / "scratch" / "nsys"],
            env=slurm,
        )  # fmt: skip
    finally:
        for node in ("n1", "n2"):
            (slurm_state / "local" / node / "nsys").unlink()
    assert done.returncode == 1, done
    nsys = [nodes for name, nodes in bad(json.loads(done.stdout)) if name == "nsys"]
    assert sorted(nsys) == [["n1"], ["n2"], ["n3"]]


@pytest.fixture
def frozen_node(slurm_state: Path) -> Iterator[str]:
    """n3, whose slurmd does not answer."""
    pid = int((slurm_state / "pid" / "slurmd.n3.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    yield "n3"
    os.kill(pid, signal.SIGCONT)


def test_a_node_that_does_not_answer_is_a_bad_line_and_not_a_hang(
    run_command: Run, workdir: Path, slurm: dict[str, str], frozen_node: str
) -> None:
    done = run_command(["salloc", "-Q", "-N4", "clusterprof", "doctor", "--json"], env=slurm)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert ("answer", [frozen_node]) in bad(found)
    assert named(found, "n4")["loopback"]["level"] == "ok"
