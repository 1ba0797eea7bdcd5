"""What the pods of the templates for Kubernetes run, two of them side by side on this host."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import command
from lab.endings import PROGRAMS, Running, outcomes
from lab.tiers import long_but

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.needs_torch, pytest.mark.usefixtures("scripted", "warm_torchrun")]

TRAIN = """
import loop
for _ in range(32):
    loop.step()
"""


def container(resource: dict[str, Any]) -> dict[str, Any]:
    """The container that all pods of a template have."""
    spec = resource["spec"]
    if resource["kind"] == "JobSet":
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    else:
        master, worker = spec["pytorchReplicaSpecs"].values()
        assert master["template"] == worker["template"]
        pod = master["template"]["spec"]
    found: dict[str, Any] = pod["containers"][0]
    return found


@pytest.mark.parametrize("kind", long_but(["jobset"], ["pytorchjob"]))
def test_the_first_pod_s_run_has_the_ranks_of_all_pods(workdir: Path, kind: str) -> None:
    port = str(command.free_port())
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "train.py").write_text(TRAIN)
    text = (ROOT / "kubernetes" / f"{kind}.yaml").read_text()
    for template, here in (
        ("--ranks 0,8", "--step-on loop:step --no-merge --ranks 0,1"), ("/shared", str(workdir)),
        ("--nproc-per-node=8", "--nproc-per-node=1"), ("train-node-0-0.train", "127.0.0.1"),
        ("29500", port),
    ):  # fmt: skip
        text = text.replace(template, here)
    pod = container(yaml.safe_load(text))
    environ = {
        **os.environ, **{each["name"]: each["value"] for each in pod["env"]},
        "PATH": command.environment()["PATH"], "PYTHONPATH": "",
        # as the training operator sets them
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }  # fmt: skip
    pods = [
        Running(
            pod["command"], {**environ, "JOB_COMPLETION_INDEX": number, "PET_NODE_RANK": number},
            workdir / f"out{number}", cwd=workdir,
        )
        for number in "01"
    ]  # fmt: skip
    try:
        assert [pod.ends() for pod in pods] == [0, 0], pods
    finally:
        for each in pods:
            each.process.kill()
    assert outcomes(workdir / "runs" / "train") == {0: "collected", 1: "collected"}, pods
