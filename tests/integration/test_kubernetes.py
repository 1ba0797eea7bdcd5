"""What the pods of the templates for Kubernetes run, two of them side by side on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.command import free_port
from lab.endings import outcomes

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.needs_torch

TRAIN = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(32):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
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


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_the_first_pod_s_run_has_the_ranks_of_all_pods(workdir: Path, kind: str) -> None:
    port = str(free_port())
    (workdir / "train.py").write_text(TRAIN)
    text = (ROOT / "kubernetes" / f"{kind}.yaml").read_text()
    for template, here in (
        ("--ranks 0,8", "--profiler torch --no-merge --ranks 0,1"), ("/shared", str(workdir)),
        ("--nproc-per-node=8", "--nproc-per-node=1"), ("train-node-0-0.train", "127.0.0.1"),
        ("29500", port),
    ):  # fmt: skip
        text = text.replace(template, here)
    pod = container(yaml.safe_load(text))
    environ = {
        **os.environ, **{each["name"]: each["value"] for each in pod["env"]},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": "",
        # as the training operator sets them
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }  # fmt: skip
    pods = [
        subprocess.Popen(
            pod["command"], cwd=workdir, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**environ, "JOB_COMPLETION_INDEX": number, "PET_NODE_RANK": number},
        )
        for number in "01"
    ]  # fmt: skip
    try:
        printed = [pod.communicate(timeout=300)[0].decode() for pod in pods]
    finally:
        for each in pods:
            each.kill()
    assert [pod.returncode for pod in pods] == [0, 0], printed
    assert outcomes(workdir / "runs" / "train") == {0: "collected", 1: "collected"}, printed
