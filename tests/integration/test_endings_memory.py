"""Memory that runs out: the kernel ends what works beside a rank, and the rank trains on.

The groups are real ones (cgroups). The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import check_as_without_us, state_if_any
from lab.memory import Group, memory_group
from lab.stub import OPTIONS, RANK
from lab.tiers import few

pytestmark = [pytest.mark.needs_memory_group, pytest.mark.usefixtures("scripted")]
Fault = Callable[..., None]

#: Trains; after step 10, in a window of the steps 5 to 15, memory runs out: as `HOW` says, that of
#: a part of the agent, or of all that runs in the group.
PROGRAM = """
import os, pathlib, time
import torch

def parts(name):
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            shown = (each / "comm").read_text().strip()
            if shown == name and own in (each / "environ").read_bytes():
                yield each
        except OSError:
            pass

def killed():
    return "oom_kill 0" not in pathlib.Path(os.environ["EVENTS"]).read_text()

def of_a_part(name):
    while not (found := list(parts(name))):
        time.sleep(0.02)
    limit.write_text(str(1 << 16))
    for each in found:
        pathlib.Path(os.environ["PROCESSES"]).write_text(each.name)

def of_all():
    while not list(parts("writer")):
        time.sleep(0.02)
    most = int(pathlib.Path(os.environ["USAGE"]).read_text()) + (8 << 20)
    limit.write_text(str(most))
    kept = []
    while not killed() and len(kept) < 256:
        kept.append(b"x" * (1 << 20))

own = b"CLUSTERPROF_PLAN=" + os.environb.get(b"CLUSTERPROF_PLAN", b"").partition(b";")[0]
limit = pathlib.Path(os.environ["LIMIT"])
optimizer = torch.optim.SGD()
for step in range(1, 26):
    optimizer.step()
    if step == 10 and "CLUSTERPROF_PLAN" in os.environ:
        of_all() if os.environ["HOW"] == "all" else of_a_part(os.environ["HOW"])
print("trained")
"""
#: by profiler, what there is beside a rank
BESIDE = {
    "torch": ["writer", "starter", "prober", "all"],
    "nsys": ["writer", "starter", "prober", "trampoline", "all"],
}
CASES = {
    f"{which}, {profiler}": (profiler, which) for profiler, all_of_it in BESIDE.items()
    for which in all_of_it
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[Group]:
    with memory_group() as made:
        yield made


def trained(workdir: Path, group: Group, profiler: str, how: str) -> tuple[Completed, Completed]:
    """The job without us, and with us."""
    (workdir / "train.py").write_text(PROGRAM)
    names = {"LIMIT": group.limit, "USAGE": group.usage, "EVENTS": group.events,
             "PROCESSES": group.processes}  # fmt: skip
    env = {**RANK, "HOW": how, **{name: str(path) for name, path in names.items()}}
    line = ["python", "train.py"]
    if how == "all":
        enter = f'echo $$ >{group.processes}; exec "$@"'
        line = ["bash", "-c", enter, "bash", *line]
    plain = command.run(line, env=env)
    options = [*OPTIONS, "--clock-probe=on", f"--profiler={profiler}"]
    return plain, command.run(command.clusterprof(["run", *options, "--", *line]), env=env)


@pytest.mark.parametrize(
    ("profiler", "which"), few(CASES, "writer, torch", "all, torch", "all, nsys")
)
def test_a_rank_trains_on_where_the_kernel_ends_what_is_beside_it_for_want_of_memory(
    profiler: str, which: str, workdir: Path, group: Group, fault: Fault
) -> None:
    plain, done = trained(workdir, group, profiler, which)
    found = state_if_any(workdir / "run")
    what = "the rank's group" if which == "all" else f"the {which}"
    added_s = done.seconds - plain.seconds
    fault(f"no memory for {what}, {profiler}", plain.returncode, done.returncode, added_s, found)
    check_as_without_us(plain, done)
    assert which not in ("writer", "all") or group.killed(), "it is no test"
    if (profiler, which) == ("nsys", "writer"):  # its guard has another one: none is waited for
        assert found.get("reason") != "killed while the report was being written", done


def test_a_rank_whose_guard_has_no_memory_ends_as_one_that_the_kernel_has_ended(
    workdir: Path, group: Group, fault: Fault
) -> None:
    """The launcher takes it for the rank: its program ends with it, and does not live on."""
    plain, done = trained(workdir, group, "nsys", "guard")
    found = state_if_any(workdir / "run")
    added_s = done.seconds - plain.seconds
    fault("no memory for the guard", plain.returncode, done.returncode, added_s, found)
    assert done.returncode == 137, done
    assert "Traceback" not in done.stderr, done
    assert group.killed(), "it is no test"
