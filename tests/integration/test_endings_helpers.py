"""What works beside a rank is killed, as the kernel does where memory runs out: the rank trains on.

The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import state_if_any
from lab.stub import FOLDER
from lab.tiers import few

Fault = Callable[..., None]

#: Trains; after some step it kills these parts of the agent, once they are there.
PROGRAM = """
import os, pathlib, signal, sys, time
import torch

def part(name):
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            shown = (each / "comm").read_text().strip()
            if shown == name and own in (each / "environ").read_bytes():
                return int(each.name)
        except OSError:
            pass

own = b"CLUSTERPROF_PLAN=" + os.environb.get(b"CLUSTERPROF_PLAN", b"").partition(b";")[0]
names = os.environ["PARTS"].split()
optimizer = torch.optim.SGD()
for step in range(1, 26):
    optimizer.step()
    if step == int(sys.argv[1]) and "CLUSTERPROF_PLAN" in os.environ:
        while not all(map(part, names)):
            time.sleep(0.02)
        for pid in list(map(part, names)):
            os.kill(pid, signal.SIGKILL)
print("trained")
"""
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(FOLDER)}
OPTIONS = ["--ranks=0", "--steps=5:15", "--run-dir=run", "--no-merge", "--clock-probe=on"]
#: after which step, in a window of the steps 5 to 15
PLACES = {"before the window": 2, "inside the window": 10, "after the window": 17}
#: by profiler, what there is beside a rank
BESIDE = {
    "torch": ["writer", "starter", "prober"],
    "nsys": ["writer", "starter", "prober", "trampoline"],
}
CASES = {
    f"{' and '.join(which)}, {where}, {profiler}": (profiler, which, PLACES[where])
    for profiler, all_of_it in BESIDE.items()
    for which in (*([each] for each in all_of_it), all_of_it)
    for where in PLACES
}  # fmt: skip
SHORT = [f"{' and '.join(each)}, inside the window, {name}" for name, each in BESIDE.items()]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("profiler", "which", "place"), few(CASES, *SHORT))
def test_a_rank_trains_on_without_what_was_killed_beside_it(
    profiler: str, which: list[str], place: int, workdir: Path, fault: Fault
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    line, env = ["python", "train.py", str(place)], {**RANK, "PARTS": " ".join(which)}
    plain = command.run(line, env=env)
    ours = command.clusterprof(["run", *OPTIONS, f"--profiler={profiler}", "--", *line])
    done = command.run(ours, env=env)
    added_s = done.seconds - plain.seconds
    what = f"the {' and '.join(which)} killed after step {place}, {profiler}"
    fault(what, plain.returncode, done.returncode, added_s, state_if_any(workdir / "run"))
    assert done.returncode == plain.returncode == 0, done
    assert done.stdout == plain.stdout == "trained\n", done
    assert "Traceback" not in done.stderr, done
