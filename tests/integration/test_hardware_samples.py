"""What a rank's writer asks of a real library and of a real node, and that no rank waits for it."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.command import Completed
from lab.warm import Warm

from clusterprof.agent.contracts import paths, processes, states
from clusterprof.agent.contracts.outbox import CUDA, Outbox

SOURCE = Path(__file__).parents[1] / "lab" / "fake_nvml.c"
Sampled = Callable[[str, Callable[[], bool]], bool]
#: a job of two ranks that has no GPU
TRAINING = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnvidia-ml.so.1 by `fake_nvml.c`."""
    folder = tmp_path_factory.mktemp("nvml")
    line = ["cc", "-O1", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE]
    subprocess.run(line, check=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of the rank."""
    made = tmp_path / "run" / "ranks" / "00000"
    made.parent.mkdir(parents=True)
    return made


@pytest.fixture
def sampled(nvml: Path, folder: Path) -> Iterator[Sampled]:
    """Has a writer sample this process by a library that does so (FAKE_NVML) until there is what is
    wanted: whether each wait for the writer was answered.
    """
    started: list[subprocess.Popen[bytes]] = []

    def sample(mode: str, wanted: Callable[[], bool]) -> bool:
        ours, theirs = socket.socketpair()
        env = {"LD_LIBRARY_PATH": str(nvml), "FAKE_NVML": mode}
        with theirs:
            line = [*processes.part("writer"), str(theirs.fileno()), str(os.getpid())]
            started.append(
                subprocess.Popen(
                    line, pass_fds=[theirs.fileno()], env={**command.environment(), **env}
                )
            )
        outbox = Outbox(ours)
        outbox.say("begin", run=str(folder.parents[1]), folder=str(folder), window=[1, 2],
                   wall_ns=0, log_s=0)  # fmt: skip
        answered, until = True, time.monotonic() + command.PATIENCE_S
        # the first sample is taken at once, by a thread of its own
        while not wanted() and time.monotonic() < until:
            outbox.say("hardware", uses=CUDA, uuid="5d8f")
            outbox.say("finish")
            answered &= bool(outbox.wait("finished", command.PATIENCE_S))
        outbox.close()
        # the writer ends with its rank, whatever a thread of it waits for
        assert started[0].wait(command.PATIENCE_S) == 0
        return answered

    yield sample
    for process in started:
        process.kill()
        process.wait()


def table(folder: Path) -> list[dict[str, str]]:
    if not (folder / paths.HARDWARE).exists():
        return []
    with (folder / paths.HARDWARE).open() as file:
        return list(csv.DictReader(file))


def hardware(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = states.read(str(folder)).get("hardware", {})
    return found


@pytest.mark.needs_compiler
def test_a_library_is_read_by_the_process_beside_the_rank(folder: Path, sampled: Sampled) -> None:
    def answered() -> list[dict[str, str]]:
        return [row for row in table(folder) if row["sm_mhz"]]

    assert sampled("answers", lambda: bool(answered()))
    state = hardware(folder)
    assert (state["uuid"], state["name"], state["most_sm_mhz"]) == ("GPU-5d8f", "a GPU", 1980)
    first = answered()[0]
    assert (first["sm_mhz"], first["memory_mhz"], first["reasons"]) == ("1350", "2619", "4")
    assert (first["limit_mw"], first["temperature_c"], first["busy_percent"]) == ("", "", "")
    assert "NVML does not give busy_percent, ecc_uncorrected, energy_mj, limit_mw" in state["note"]
    assert "NVML gives impossible values of temperature_c" in state["note"]


@pytest.mark.needs_compiler
def test_a_driver_that_hangs_keeps_neither_the_rank_nor_its_writer(
    folder: Path, sampled: Sampled
) -> None:
    assert sampled("hangs", lambda: "in time" in hardware(folder).get("note", ""))
    assert {row["sm_mhz"] for row in table(folder)} == {""}
    assert all(row["load"] for row in table(folder))


@pytest.mark.needs_compiler
def test_a_driver_that_refuses_is_said(folder: Path, sampled: Sampled) -> None:
    assert sampled("denied", lambda: "note" in hardware(folder))
    assert hardware(folder)["note"] == "NVML cannot be used: Insufficient Permissions"


@pytest.mark.needs_torch
def test_a_job_without_gpus_has_its_nodes_columns_and_nothing_else(
    run_clusterprof: Callable[..., Completed], workdir: Path, torch_process: Warm
) -> None:
    (workdir / "train.py").write_text(TRAINING)
    done = run_clusterprof(
        ["run", "--profiler=none", "--steps", "4:8", "--run-dir=run", "--",
         *torch_process.launcher(2), "train.py"],
    )  # fmt: skip
    assert done.returncode == 0, done
    results = json.loads((workdir / "run" / "merged" / "results.json").read_text())
    assert [row["rank"] for row in results["hardware"]] == [0, 1]
    for rank, row in enumerate(results["hardware"]):
        folder = workdir / "run" / "ranks" / f"{rank:05d}"
        samples = table(folder)
        assert len(samples) == row["samples"] >= 1
        assert all(sample["load"] for sample in samples)
        of_gpu = [name for name in ("sm_mhz", "power_mw", "reasons", "busy_percent")
                  if any(sample[name] for sample in samples)]  # fmt: skip
        assert of_gpu == []
        assert (row["uuid"], row["note"], row["sm_mhz"], row["power_w"]) == (None, "", None, None)
        assert hardware(folder) == {}
    assert "run_size" not in results  # there are no GPU hours
    assert "GPU hours" not in done.stdout
    assert '<section id="hardware"' in (workdir / "run" / "report.html").read_text()
