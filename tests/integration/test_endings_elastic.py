"""An elastic launcher starts the ranks over while a guard of the attempt before is still there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import OPTIONS, PROGRAMS, Running, state, words
from lab.fakes import scripted_nsys

pytestmark = [
    pytest.mark.usefixtures("warm_torchrun"), pytest.mark.needs_torch, pytest.mark.long,
]  # fmt: skip

LINE = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FIRST = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
#: what nsys does in the first attempt, in which rank, and how that rank ends; rank 0 fails there
#: after its window
FAULTS = {
    "whose nsys hangs": ("hang()", 0, 3),
    "that is stopped": ("os.kill(os.getppid(), signal.SIGSTOP)", 1, 137),
}


@pytest.mark.parametrize("what", FAULTS)
def test_ranks_are_started_over_beside_a_guard_that_does_not_end(
    what: str, workdir: Path, fault: Callable[..., None]
) -> None:
    program = [str(PROGRAMS / "ending.py"), "once", "25"]
    plain = command.run(["torchrun", *LINE, *program], env=ENV)
    act, rank, ended = FAULTS[what]
    nsys = scripted_nsys(workdir / "nsys", {f"{rank}:stop": f"{FIRST} and {act}"})
    options = [*OPTIONS, "--ranks=0,1", f"--nsys={nsys}", "--run-dir=run", "--no-merge"]
    ours = command.clusterprof(["torchrun", *options, *LINE, "--", *program])
    running = Running(ours, ENV, workdir / "out")
    status = running.ends()
    found = state(running.run, rank)
    assert found["program_status"] == ended, found
    fault(f"torchrun starts over beside a guard {what}", plain.returncode, status, 0.0, found)
    assert status == plain.returncode == 0, running.printed()
    assert words(running.printed()) == words(plain.stdout), running.printed()
    assert "Traceback" not in running.printed()
    assert not running.left()
