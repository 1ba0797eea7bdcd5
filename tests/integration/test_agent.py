"""The agent in a real interpreter with a real torch: what it counts, and what it leaves alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import window
from lab.job import CHOSEN, LOOP, Job
from lab.stub import FOLDER
from lab.tiers import long_but

from clusterprof.launch.planning import INJECT

pytestmark = pytest.mark.needs_torch

#: a program that says its own steps, and needs no torch for them
STEPS = """
import sys, clusterprof
def iterate(n):
    for _ in range(n):
        clusterprof.step()
"""


def test_a_rank_that_is_not_chosen_logs_its_steps_touches_no_file_and_ends_as_it_ends(
    warm_job: Job,
) -> None:
    done = warm_job(
        LOOP
        + """
touched, on = [], False
names = ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir", "os.utime")
sys.addaudithook(lambda event, what: touched.append(str(what)) if event in names and on else None)
iterate(3)
on = True
iterate(400)
on = False
print(touched)
sys.exit(7)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "[]\n", "")
    assert warm_job.steps() == list(range(403))
    stated = warm_job.state
    assert (stated["state"], stated["steps"], stated["chosen"]) == ("counted", 403, False)


def test_what_a_rank_says_of_itself_is_in_the_variable_that_it_was_given(job: Job) -> None:
    done = job(
        STEPS
        + """
import os
iterate(3)
with open("/proc/self/environ") as file:
    before = file.read()
print(*[name for name in os.environ if name[:12] == "CLUSTERPROF_" and name not in before])
print(os.environ["CLUSTERPROF_PLAN"].replace(str(os.getpid()), "PID"))
""",
        selection=CHOSEN,
    )
    assert done.stdout == f"\n{job.folder}/plan.json;lent=KINETO_LOG_LEVEL;counting=PID\n", done


def test_a_rank_that_is_killed_leaves_its_steps(job: Job) -> None:
    # Two seconds after its last steps were handed over the next ones are.
    done = job(
        STEPS
        + """
import os, signal, time
iterate(40)
time.sleep(2)
iterate(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert done.returncode in (-9, 137)
    deadline = time.monotonic() + command.PATIENCE_S
    while job.steps() != list(range(41)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.steps() == list(range(41))
    assert job.state["state"] == "counting"


#: an interpreter of its own that trains, by a torch that is not imported for seconds
CHILD = (
    f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import torch; "
    "optimizer = torch.optim.SGD(); [optimizer.step() for _ in range(3)]"
)


@pytest.mark.parametrize("way", long_but(["fork"], ["spawn"]))
def test_accumulation_two_optimizers_workers_and_children_do_not_miscount(
    warm_job: Job, way: str
) -> None:
    done = warm_job(
        f"way, child = {way!r}, {CHILD!r}"
        + LOOP
        + """
import os, subprocess
from torch.utils.data import DataLoader

other = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        # A worker that trains a little model of its own is still no rank.
        iterate(1)
        return float(i)

if __name__ == "__main__":
    for _ in DataLoader(Squares(), 3, num_workers=2, multiprocessing_context=way):
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        other.step()
    subprocess.run([sys.executable, "-c", child], check=True)
    if os.fork() == 0:
        iterate(5)
        sys.exit(0)
    os.wait()
"""
    )
    assert done.returncode == 0, done
    assert warm_job.steps() == [0, 1]
    assert sorted(path.name for path in warm_job.rank.iterdir()) == [
        "hardware.csv",
        "state.json",
        "steps.csv",
    ]


def test_skipped_steps_belong_to_the_next_and_optimizers_in_turn_all_count(warm_job: Job) -> None:
    done = warm_job(
        LOOP
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for number in range(10):
    loss = model(torch.ones(1, 4)).sum() * (float("inf") if number in (2, 7) else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
other = torch.optim.Adam(model.parameters())
for _ in range(2):
    iterate(3)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        other.step()
"""
    )
    assert done.returncode == 0, done
    # eight that were not skipped, and four turns of three
    assert warm_job.steps() == list(range(8 + 12))


def test_a_program_without_a_step_is_told_how_to_name_one(warm_job: Job) -> None:
    done = warm_job(LOOP + "model(torch.ones(1, 4))", selection=CHOSEN)
    assert (done.returncode, done.stderr) == (0, "")
    assert (warm_job.state["state"], warm_job.state["steps"]) == ("lost", 0)
    assert "--step-on module:function" in warm_job.state["reason"]
    assert "--step-on module:function" in warm_job.state["flight"]


def test_a_profiled_rank_leaves_a_trace_of_its_window(job: Job) -> None:
    done = job(LOOP + "iterate(6); print('trained')", selection=CHOSEN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert job.state["state"] == "captured"
    assert (job.state["step_begin"], job.state["step_end"]) == (2, 4)
    from clusterprof.ingest import read_report

    tables = read_report(job.rank / "trace.json.gz", rank=3, steps=job.rank / "steps.csv")
    assert tables.activity.num_rows > 0
    clock = json.loads((job.rank / "clock.json").read_text())
    assert [each["event"] for each in clock["readings"]] == ["open", "opened", "closing", "close"]
    assert clock["machine"] == job.state["machine"]
    # a build's own name, such as +cpu, may follow
    assert job.state["torch"].partition("+")[0] == version("torch").partition("+")[0]


def test_a_program_that_ends_before_the_window_says_so_and_keeps_its_status(job: Job) -> None:
    done = job(STEPS + "iterate(5); sys.exit(9)", selection=CHOSEN, window=[10, 15])
    assert (done.returncode, done.stderr) == (9, "")
    assert job.state["state"] == "lost"
    assert (window(job.state), job.state["steps"]) == ("before", 5)
    assert "10:15" in job.state["reason"]


def test_a_program_that_ends_inside_the_window_leaves_what_there_was(warm_job: Job) -> None:
    done = warm_job(LOOP + "iterate(5); sys.exit(9)", selection=CHOSEN, window=[3, 15])
    assert (done.returncode, done.stderr) == (9, "")
    assert warm_job.state["state"] == "captured"
    assert (window(warm_job.state), warm_job.state["step_begin"], warm_job.state["step_end"]) == (
        "inside",
        3,
        5,
    )
    assert "3:15" in warm_job.state["reason"]
    assert (warm_job.rank / "trace.json.gz").stat().st_size > 0


def test_a_window_that_ends_with_the_program_is_whole(warm_job: Job) -> None:
    done = warm_job(LOOP + "iterate(4)", selection=CHOSEN)
    assert done.returncode == 0
    assert warm_job.state["state"] == "captured"
    assert (window(warm_job.state), "reason" in warm_job.state) == ("whole", False)


def test_a_function_of_the_program_s_own_can_be_the_step(job: Job) -> None:
    job.folder.mkdir()
    (job.folder / "loop.py").write_text(
        "class Trainer:\n    def train_batch(self):\n        return 1\n"
    )
    done = job(
        "from loop import Trainer\nfor _ in range(5): assert Trainer().train_batch() == 1",
        step_on="loop:Trainer.train_batch",
    )
    assert done.returncode == 0, done
    assert job.steps() == list(range(5))


def test_a_step_function_that_is_not_there_is_said_and_the_program_goes_on(job: Job) -> None:
    done = job("import json; print('done')", step_on="json:missing")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "--step-on json:missing" in done.stderr


def test_a_program_can_say_its_steps_itself(job: Job) -> None:
    done = job(STEPS + "iterate(5)")
    assert done.returncode == 0, done
    assert job.steps() == list(range(5))


def test_saying_steps_outside_of_a_run_does_nothing(run_command: Callable[..., Completed]) -> None:
    done = run_command([sys.executable, "-c", "import clusterprof; clusterprof.step(); print(1)"])
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_user_s_own_sitecustomize_still_runs(job: Job, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('mine')")
    done = job("import sitecustomize; print(sitecustomize.__file__)",
               environ={"PYTHONPATH": f"{INJECT}:{own}"})  # fmt: skip
    assert done.stdout == f"mine\n{own / 'sitecustomize.py'}\n"
    assert done.stderr == ""


def test_a_plan_of_a_newer_clusterprof_is_refused_and_the_program_runs(job: Job) -> None:
    done = job("print('done')", schema_version=2)
    assert (done.returncode, done.stdout) == (0, "done\n"), done
    assert all(fact in done.stderr for fact in (str(job.folder / "plan.json"), " 2", " 1"))


def test_a_plan_that_cannot_be_read_costs_one_line_and_nothing_else(job: Job) -> None:
    done = job("print('done')", environ={"CLUSTERPROF_PLAN": "/nowhere/plan.json"})
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("clusterprof: ")
    assert "/nowhere/plan.json" in done.stderr


def test_a_process_that_is_no_rank_leaves_nothing(job: Job) -> None:
    done = job("print('done')", environ={"TORCHELASTIC_RUN_ID": "none", "RANK": "no number"})
    assert (done.returncode, done.stderr) == (0, "")
    assert not (job.folder / "ranks").exists()


def test_an_interpreter_of_a_rank_that_never_trains_leaves_nothing(job: Job) -> None:
    assert job("print('prepared')").returncode == 0
    assert not (job.folder / "ranks").exists()


def test_a_run_directory_that_cannot_be_written_does_not_stop_the_training(job: Job) -> None:
    done = job(STEPS + "iterate(5); sys.exit(4)", selection=CHOSEN, run="/proc/nowhere")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr


def test_the_agent_is_standard_library_only_in_every_interpreter(job: Job) -> None:
    done = job("import sys; print([n for n in sys.modules if n.split('.')[0] in "
               "('clusterprof', 'numpy', 'pyarrow', 'torch', 'pandas')])")  # fmt: skip
    assert done.stdout == "[]\n"
