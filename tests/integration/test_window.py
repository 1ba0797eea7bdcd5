"""The window in programs that do more with torch than train: whatever they do, they end as ever.

Each is run as the program itself and its end is looked at: torch ends a program by a signal, not
by an exception, where its profiler is used wrongly.
"""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.command import Completed
from lab.endings import PROGRAMS, RANKS, window
from lab.job import CHOSEN, LOOP, Job
from lab.tiers import few
from lab.warm import Warm

pytestmark = pytest.mark.needs_torch


def names_in(trace: Path) -> Counter[str]:
    """How often an operator is in a trace."""
    opened: Any = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt") as file:
        return Counter(event.get("name", "") for event in json.load(file)["traceEvents"])


def test_a_training_in_successive_threads_keeps_its_status_and_its_report(warm_job: Job) -> None:
    done = warm_job(
        LOOP
        + """
import threading
for _ in range(4):
    thread = threading.Thread(target=iterate, args=(4,))
    thread.start()
    thread.join()
print("trained")
""",
        selection=CHOSEN, window=[2, 9],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "trained\n"), done
    assert warm_job.state["state"] == "captured"
    assert (window(warm_job.state), warm_job.state["step_end"]) == ("inside", 4)
    assert "thread" in warm_job.state["reason"]
    assert warm_job.steps() == list(range(16))
    assert names_in(warm_job.rank / "trace.json.gz")["aten::linear"] == 2


def test_a_window_that_only_another_thread_could_close_is_lost_with_its_reason(
    warm_job: Job,
) -> None:
    done = warm_job(
        LOOP
        + """
import threading, time
inside = threading.Event()
def train():
    iterate(3)
    inside.set()
    time.sleep(600)
threading.Thread(target=train, daemon=True).start()
inside.wait()
print("trained")
""",
        selection=CHOSEN,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "trained\n"), done
    assert warm_job.state["state"] == "lost"
    assert window(warm_job.state) == "inside"
    assert "thread" in warm_job.state["reason"]


def test_a_program_that_goes_on_in_another_thread_than_the_window_s_is_not_ended(
    warm_job: Job,
) -> None:
    done = warm_job(
        LOOP
        + """
import threading
iterate(3)
thread = threading.Thread(target=iterate, args=(40,))
thread.start()
thread.join()
iterate(1)
print("trained")
""",
        selection=CHOSEN, window=[2, 5],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "trained\n"), done
    assert warm_job.state["state"] == "lost"
    assert window(warm_job.state) == "inside"
    assert "thread" in warm_job.state["reason"]


OWN = """
own = torch.profiler.profile(
    activities=[torch.profiler.ProfilerActivity.CPU],
    schedule=torch.profiler.schedule(wait={wait}, warmup=1, active=3, repeat=1),
    on_trace_ready=lambda profile: profile.export_chrome_trace({trace!r}),
)
with own:
    for _ in range(14):
        iterate(1)
        own.step()
"""


@pytest.mark.parametrize("wait", [3, 5, 6])
def test_a_program_s_own_schedule_has_its_trace(warm_job: Job, tmp_path: Path, wait: int) -> None:
    own = tmp_path / "own.json"
    done = warm_job(
        LOOP + OWN.format(wait=wait, trace=str(own)), selection=CHOSEN, window=[5, 10]
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    assert names_in(own)["aten::linear"] == 3
    if wait == 3:
        assert warm_job.state["state"] == "lost"
        assert window(warm_job.state) != "whole"
        assert "torch.profiler" in warm_job.state["reason"]
    else:
        assert warm_job.state["state"] == "captured"
        assert warm_job.state["step_end"] == wait
        assert "torch.profiler" in warm_job.state["reason"]
        assert names_in(warm_job.rank / "trace.json.gz")["aten::linear"] == wait - 5


def test_a_profile_of_one_iteration_inside_the_window_is_whole(warm_job: Job) -> None:
    done = warm_job(
        LOOP
        + """
iterate(3)
with torch.autograd.profiler.profile() as own:
    iterate(1)
print(sum(event.name == "aten::linear" for event in own.function_events))
iterate(4)
""",
        selection=CHOSEN, window=[2, 6],
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", ""), done
    assert warm_job.state["state"] == "captured"
    assert (warm_job.state["step_begin"], warm_job.state["step_end"]) == (2, 3)
    assert "torch.profiler" in warm_job.state["reason"]


BACKWARD = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
_apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
for _ in range(12):
    model(torch.ones(1, 4)).sum().backward()
print("trained")
"""


def test_an_optimizer_that_steps_inside_the_backward_has_its_window(warm_job: Job) -> None:
    done = warm_job(BACKWARD, selection=CHOSEN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", ""), done
    stated = warm_job.state
    assert (stated["state"], stated["step_begin"], stated["step_end"]) == ("captured", 2, 4)
    assert warm_job.steps() == list(range(12))
    # whole steps: two forwards and two backwards
    names = names_in(warm_job.rank / "trace.json.gz")
    assert (names["aten::linear"], names["autograd::engine::evaluate_function: SumBackward0"]) == (
        4, 2,
    )  # fmt: skip


def test_a_child_forked_inside_the_window_or_after_it_ends_as_it_would(warm_job: Job) -> None:
    done = warm_job(
        LOOP
        + """
import os
for steps in (3, 3):
    iterate(steps)
    child = os.fork()
    if child == 0:
        print("child", flush=True)
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
""",
        selection=CHOSEN,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "child\n5\nchild\n5\n", ""), done
    assert warm_job.state["state"] == "captured"
    assert warm_job.steps() == list(range(6))


def test_a_program_that_runs_under_another_profiler_is_left_to_it(warm_job: Job) -> None:
    nsys = {
        "path": "nsys", "version": "2025.3", "importer": None, "trace": {"cpu": "", "gpu": ""},
        "profile": [], "launch": [], "start": [], "stop": [],
    }  # fmt: skip
    done = warm_job(
        LOOP + "iterate(6)", selection=CHOSEN, profiler="nsys", nsys=nsys, window_by="session",
        environ={"CUDA_INJECTION64_PATH": "/opt/tool/lib/libtool.so"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    assert warm_job.state["state"] == "lost"
    assert "/opt/tool/lib/libtool.so (CUDA_INJECTION64_PATH)" in warm_job.state["reason"]
    assert warm_job.steps() == list(range(6))


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("program", "reason"), few({"threads": ("threads", "thread"), "backward": ("backward", "")},
                               "threads"),
)  # fmt: skip
def test_under_nsys_too(
    program: str, reason: str, run_clusterprof: Callable[..., Completed], workdir: Path,
    torch_process: Warm,
) -> None:  # fmt: skip
    threads = LOOP + (
        "import threading\nthread = threading.Thread(target=iterate, args=(8,))\n"
        "thread.start()\nthread.join()\nprint('trained')\n"
    )
    (workdir / "train.py").write_text(threads if program == "threads" else BACKWARD)
    done = run_clusterprof(
        ["run", "--ranks", "0", "--steps", "5:10", "--profiler=nsys", "--run-dir=run",
         "--no-merge", "--", *torch_process.launcher(1), "train.py"],
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "trained" in done.stdout
    state = json.loads((workdir / "run" / "ranks" / "00000" / "state.json").read_text())
    assert state["state"] == "collected", (state.get("reason"), done)
    assert reason in state.get("reason", "")
    names = sorted(path.name for path in (workdir / "run" / "ranks" / "00000").iterdir())
    assert {"report.nsys-rep", "trace.json.gz"} <= set(names)


@pytest.mark.parametrize(
    "torch", few({"there before": "warm_job", "imported": "job"}, "there before")
)
def test_a_compiled_optimizer_is_compiled_as_without_us_and_counted(
    torch: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    job: Job = request.getfixturevalue(torch)
    program = """
import sys, torch
early = "torch._dynamo" in sys.modules
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile(backend="eager")
def step():
    optimizer.step()
for _ in range(6):
    model(torch.ones(1, 4)).sum().backward()
    step()
    optimizer.zero_grad()
from torch._dynamo.utils import counters
print(early, counters["frames"]["total"], sum(counters["graph_break"].values()))
"""
    (tmp_path / "plain.py").write_text(program)
    plain = job.run([sys.executable, tmp_path / "plain.py"])
    done = job(program, selection=CHOSEN)
    assert (plain.returncode, done.returncode) == (0, 0), done
    assert job.steps() == list(range(6))
    assert (job.state["state"], job.state["step_begin"]) == ("captured", 2)
    (early, frames, breaks), ours = plain.stdout.split(), done.stdout.split()
    assert (ours[0], ours[2]) == (early, breaks)
    assert early == str(torch == "warm_job")
    # What is skipped without a hook, since nothing is in it, is one frame with ours.
    assert int(ours[1]) <= int(frames)
    assert len(done.stderr.splitlines()) == len(plain.stderr.splitlines()), done


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("profiler", ["torch", "nsys"])
def test_of_two_programs_that_one_task_starts_at_once_one_is_the_rank(
    profiler: str, run_clusterprof: Callable[..., Completed], workdir: Path, torch_process: Warm
) -> None:
    shutil.copy(PROGRAMS / "loop.py", workdir)
    # neither has taken all its steps before the other began
    (workdir / "train.py").write_text(
        "import glob, loop, os\nopen(f'begun.{os.getpid()}', 'w').close()\n"
        "while len(glob.glob('begun.*')) < 2: loop.time.sleep(0.02)\n"
        # nor closes its window before there is a writer
        "loop.step()\n"
        "while not os.path.exists('run/ranks/00000/state.json'): loop.time.sleep(0.02)\n"
        "for _ in range(19): loop.step()\nprint('trained')\n"
    )
    start = torch_process.launcher(1) if profiler == "torch" else [str(RANKS), "1", sys.executable]
    (workdir / "both.sh").write_text(
        f"{shlex.join(start)} train.py & first=$!\n{shlex.join(start)} train.py & second=$!\n"
        "wait $first && wait $second\n"
    )
    done = run_clusterprof(
        ["run", "--ranks", "0", "--steps", "5:10", "--step-on=loop:step",
         f"--profiler={profiler}", "--run-dir=run", "--no-merge", "--", "bash", "both.sh"],
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("trained")) == (0, 2), done
    rank = workdir / "run" / "ranks" / "00000"
    state = json.loads((rank / "state.json").read_text())
    assert state["state"] == "collected", (state, done)
    assert [path.name for path in rank.glob("steps*")] == ["steps.csv"]
    assert len((rank / "steps.csv").read_text().splitlines()) == 21
    assert str(state["program_pid"]) in done.stderr
