"""`clusterprof srun` beside srun alone: whatever srun and Python are told, the program sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from lab.command import Completed
from lab.endings import outcomes, state, window
from lab.tiers import few, long_but

Run = Callable[..., Completed]
PYTHON = Path(sys.executable).parent / "python"

TELL = """\
import os, sys
try:
    import loop
except ImportError:  # python -I
    pass
print((os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"], sys.path, sys.argv[1:],
       sys.flags.isolated, getattr(sys, "marked_by_users_own", None), sys.prefix, os.getcwd(),
       "site" in sys.modules, os.environ.get("FOO")), flush=True)
"""


@pytest.fixture
def project(workdir: Path) -> Path:
    (workdir / "tell.py").write_text(TELL)
    (workdir / "loop.py").write_text("def step():\n    pass\n")
    (workdir / "sub").mkdir()
    (workdir / "own").mkdir()
    (workdir / "own" / "sitecustomize.py").write_text("import sys\nsys.marked_by_users_own = 1\n")
    (workdir / "programs").write_text("0 python tell.py first\n1-2 python tell.py %t\n")
    return workdir


def both(
    run_command: Run, run_clusterprof: Run, line: list[str], env: Mapping[str, str | None]
) -> tuple[Completed, Completed]:
    """The same line under srun alone, and under ours; `--` divides the two halves of ours."""
    place = line.index("--")
    plain = run_command(["srun", *line[:place], *line[place + 1 :]], env=env)
    # A rank that imports what is to be counted ends its run at once, and no one waits for it.
    ours = ["srun", "--ranks", "0", "--profiler=torch", "--step-on", "loop:step", "--run-dir",
            "run", *line]  # fmt: skip
    return plain, run_clusterprof(ours, env=env)


LINES = {
    "options": "-n2 --label -K -W 30 -- python tell.py a",
    "another folder": "-n1 -D {here}/sub -- env PYTHONSAFEPATH=1 python ../tell.py",
    "a pty": "-n1 --pty -- python -m tell -I",
    "MPI by PMIx": "-n2 --mpi=pmix -- python tell.py",
    "several programs": "-n3 --multi-prog -- programs",
    "heterogeneous": "-n1 -- python tell.py a : -n2 python tell.py b -n 9",
    "no environment": "-n2 --export=NONE -- {python} tell.py",
    "one variable": "-n1 --export=FOO -- {python} tell.py",
    "one value": "-n1 --export=FOO=bar,PATH -- python tell.py",
    "another PYTHONPATH": "-n1 --export=ALL,PYTHONPATH={here}/sub -- python tell.py",
    "another PYTHONPATH alone": "-n1 --export=PATH,PYTHONPATH={here}/own -- python tell.py",
    "isolated": "-n1 -- python -I {here}/tell.py",
    "no environment for Python": "-n1 -- python -E tell.py",
    "an option that srun has not": "--no-such-option -n1 -- python tell.py",
}

#: at each change; the others differ from one of these in one word
ALWAYS = (
    "options", "another folder", "a pty", "MPI by PMIx", "several programs", "heterogeneous",
    "no environment", "another PYTHONPATH alone", "isolated",
)  # fmt: skip


@pytest.mark.parametrize("line", few(LINES, *ALWAYS))
def test_the_program_sees_and_says_what_it_would_without_us(
    run_command: Run, run_clusterprof: Run, project: Path, slurm: Mapping[str, str], line: str
) -> None:
    words = [word.format(here=project, python=PYTHON) for word in line.split()]
    env = {**slurm, "PYTHONPATH": f"{project}/own:/nowhere:{project}", "FOO": "foo"}
    plain, ours = both(run_command, run_clusterprof, words, env)
    assert ours.returncode == plain.returncode, (plain, ours)
    assert sorted(ours.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert "Traceback" not in ours.stderr
    for printed in plain.stderr.splitlines():
        if "job" not in printed:  # Slurm numbers its jobs
            assert printed in ours.stderr, ours


@pytest.mark.parametrize("export", long_but(["PYTHONPATH=sub,PATH"], ["ALL,PYTHONPATH=sub"]))
def test_a_path_that_only_srun_is_given_stays(
    run_command: Run, run_clusterprof: Run, project: Path, slurm: Mapping[str, str], export: str
) -> None:
    line = ["-n1", f"--export={export}", "--", "python", "tell.py"]
    plain, ours = both(run_command, run_clusterprof, line, {**slurm, "PYTHONPATH": None})
    assert str(project / "sub") in plain.stdout
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours
    assert "clusterprof: rank 0" in ours.stderr, "the agent was there"


def test_more_tasks_than_the_allocation_has_are_refused_by_srun_itself(
    run_command: Run, project: Path, slurm: Mapping[str, str]
) -> None:
    line = ["-n9", "python", "tell.py"]
    plain = run_command(["salloc", "-Q", "-n1", "srun", *line], env=slurm)
    ours = ["clusterprof", "srun", "--profiler=torch", "--run-dir=run", line[0], "--", *line[1:]]
    done = run_command(["salloc", "-Q", "-n1", *ours], env=slurm)
    assert done.returncode == plain.returncode == 1, done
    assert "More processors requested than permitted" in done.stderr


@pytest.mark.parametrize(
    ("flag", "why"),
    [("-I", "PYTHONPATH"), ("-E", "PYTHONPATH"), ("-S", "sitecustomize")],
)
def test_a_rank_that_we_cannot_get_into_is_lost_with_the_reason(
    run_clusterprof: Run, project: Path, slurm: Mapping[str, str], flag: str, why: str
) -> None:
    done = run_clusterprof(
        ["srun", "-n1", "--profiler=torch", "--run-dir=run", "--", "python", flag, "loop.py"],
        env=slurm,
    )
    assert done.returncode == 0, done
    # Before the job starts, and of each profiled rank at its end.
    assert outcomes(project / "run") == {0: "lost"}
    printed = [
        line for line in done.stderr.splitlines() if f"python {flag}" in line and why in line
    ]
    assert len(printed) >= 2, done
    assert any("rank 0" in line for line in printed[1:]), done


def test_an_environment_s_own_python_and_sitecustomize_are_what_they_were(
    run_command: Run, run_clusterprof: Run, project: Path, slurm: Mapping[str, str]
) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", project / "env"], check=True, timeout=400
    )
    (library,) = (project / "env" / "lib").iterdir()
    own = library / "site-packages" / "sitecustomize.py"
    own.write_text("import sys\nsys.marked_by_users_own = 'of the environment'\n")
    env = {**slurm, "PYTHONPATH": None}
    line = ["-n1", "--", str(project / "env" / "bin" / "python"), "tell.py"]
    plain, ours = both(run_command, run_clusterprof, line, env)
    assert "of the environment" in plain.stdout
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours


@pytest.mark.needs_torch
def test_the_ranks_of_a_heterogeneous_job_count_as_one(
    run_clusterprof: Run, workdir: Path, slurm: Mapping[str, str]
) -> None:
    (workdir / "loop.py").write_text("def step():\n    pass\n")
    (workdir / "train.py").write_text("import loop\nfor _ in range(3):\n    loop.step()\n")
    done = run_clusterprof(
        ["srun", "--ranks", "2", "--step-on", "loop:step", "--profiler=torch", "--run-dir=run",
         "-n1", "--", "python", "train.py", ":", "-n2", "python", "train.py"],
        env=slurm,
    )  # fmt: skip
    assert done.returncode == 0, done
    logs = {
        log.parent.name: len(log.read_text().splitlines())
        for log in Path("run").rglob("steps*.csv")
    }
    assert logs == {"00000": 4, "00001": 4, "00002": 4}
    assert outcomes(Path("run")) == {2: "lost"}
    assert (window(state(Path("run"), 2)), state(Path("run"), 2)["steps"]) == ("before", 3)
