"""A run directory that somebody else made: it decides nothing of what is executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.command import Completed
from lab.tiers import long_but

Cli = Callable[..., Completed]


def manifest(**more: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "launcher": "srun",
        "argv": ["srun", "python", "train.py"],
        "world_size": 1,
        "selection": {"kind": "all", "text": "all", "ranks": [], "pp": 1, "world_size": None},
        "window": [5, 10],
        "profiler": {"name": "nsys", "version": "2022.4", "path": None},
        **more,
    }


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """An nsys with an importer that leave a file `executed` when anybody runs them."""
    for name in ("target/nsys", "host-linux-x64/QdstrmImporter"):
        program = tmp_path / "evil" / name
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/executed\nexit 1\n")
        program.chmod(0o755)
    return tmp_path / "evil" / "target" / "nsys"


@pytest.fixture
def executed(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def received(folder: Path, recorded: dict[str, Any], state: dict[str, Any], name: str) -> Path:
    rank = folder / "ranks" / "00000"
    rank.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(recorded))
    (rank / "state.json").write_text(json.dumps({"chosen": True, **state}))
    (rank / name).write_bytes(b"something")
    return folder


@pytest.mark.parametrize("verb", ["merge", "collect"])
def test_the_nsys_that_a_run_directory_names_is_not_executed(
    tmp_path: Path, traps: Path, executed: Path, verb: str, run_clusterprof: Cli
) -> None:
    recorded = manifest(profiler={"name": "nsys", "version": "2022.4", "path": str(traps)})
    state = {"state": "captured", "nsys": {"path": str(traps)}}
    run = received(tmp_path / "run", recorded, state, "report.nsys-rep")
    done = run_clusterprof([verb, run])
    assert done.returncode == 3, done
    assert not executed.exists(), executed.read_text()


def test_the_importer_beside_the_nsys_that_a_run_directory_names_is_not_executed(
    tmp_path: Path, traps: Path, executed: Path, run_clusterprof: Cli
) -> None:
    recorded = manifest(profiler={"name": "nsys", "version": "2022.4", "path": str(traps)})
    state = {"state": "lost", "reason": "x", "nsys": {"path": str(traps)}}
    run = received(tmp_path / "run", recorded, state, "report.qdstrm")
    done = run_clusterprof(["collect", run])
    assert "rank 0:" in done.stderr, done
    assert not executed.exists(), executed.read_text()


def test_the_nsys_that_the_user_names_is_executed(
    tmp_path: Path, traps: Path, executed: Path, run_clusterprof: Cli
) -> None:
    state = {"state": "captured"}
    run = received(tmp_path / "run", manifest(), state, "report.nsys-rep")
    for verb in ("merge", "collect"):
        run_clusterprof([verb, "--nsys", traps, run])
        assert "target/nsys" in executed.read_text()
        executed.unlink()


@pytest.mark.needs_fabric
@pytest.mark.parametrize("what", long_but(["config"], ["python"]))
def test_a_run_directory_chooses_neither_ssh_configuration_nor_program_of_a_host(
    tmp_path: Path, traps: Path, executed: Path, what: str, run_clusterprof: Cli
) -> None:
    config = tmp_path / "run" / "config"
    ssh = {"config": None, "python": "/evil/python", "timeout_s": 5}
    if what == "config":
        ssh["config"] = str(config)
    host = {
        "name": "h1", "address": "h1", "user": None, "port": None, "hostname": "h1",
        "status": 1, "reason": "lost", "left": "/tmp/clusterprof-0123456789abcdef",
    }  # fmt: skip
    recorded = manifest(ssh=ssh, hosts=[host])
    run = received(tmp_path / "run", recorded, {"state": "captured"}, "report.nsys-rep")
    config.write_text(f"Host *\n  ProxyCommand {traps}\n")
    done = run_clusterprof(["collect", run])
    assert done.returncode == 2, done
    assert "--python /evil/python" in done.stderr
    assert (f"-F {config}" in done.stderr) == (what == "config")
    assert not executed.exists()
    # Whoever says that they are right gets them.
    done = run_clusterprof(["collect", "-F", config, "--python", "/evil/python", run])
    assert "h1: " in done.stderr, done
    assert executed.exists()
