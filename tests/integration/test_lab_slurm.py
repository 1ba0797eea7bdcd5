"""The test Slurm itself: if it does not behave like four nodes, no test on it means anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lab.command import Completed

Run = Callable[..., Completed]


def test_four_nodes_have_host_names_of_their_own(run_command: Run, slurm: dict[str, str]) -> None:
    done = run_command(
        ["srun", "-N4", "--ntasks-per-node=2", "-l", "sh", "-c", "hostname; echo $SLURM_NODEID"],
        env=slurm,
    )
    assert done.returncode == 0, done
    hosts = {line.split(": ")[1] for line in done.stdout.splitlines() if ": n" in line}
    assert hosts == {"n1", "n2", "n3", "n4"}
    assert len(done.stdout.splitlines()) == 16


def test_each_node_has_temporary_and_shared_memory_folders_of_its_own(
    run_command: Run, slurm: dict[str, str], slurm_state: Path
) -> None:
    write = 'hostname > "$TMPDIR/who"; hostname > /dev/shm/who; cat /dev/shm/who'
    done = run_command(["srun", "-N4", "-n4", "sh", "-c", write], env=slurm)
    assert done.returncode == 0, done
    assert sorted(done.stdout.split()) == ["n1", "n2", "n3", "n4"]
    for node in ("n1", "n4"):
        assert (slurm_state / "local" / node / "who").read_text().strip() == node


def test_the_highest_exit_code_of_the_tasks_is_sruns(
    run_command: Run, slurm: dict[str, str]
) -> None:
    done = run_command(["srun", "-n2", "sh", "-c", "exit $((SLURM_PROCID + 3))"], env=slurm)
    assert done.returncode == 4, done


def test_a_cancelled_job_leaves_no_child_behind(
    run_command: Run, slurm: dict[str, str], workdir: Path
) -> None:
    # A child in a session of its own, as nsys starts its daemons.
    script = f"setsid sleep 97531 & echo $! > {workdir}/child; scancel $SLURM_JOB_ID; wait"
    done = run_command(["srun", "-n1", "sh", "-c", script], env=slurm)
    assert done.returncode != 0
    status = Path("/proc", (workdir / "child").read_text().strip(), "status")
    deadline = (
        time.monotonic() + 120
    )  # srun returns when the task has ended, its child may not have
    while status.exists() and "\nState:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the child outlives its job"
        time.sleep(0.05)
