"""The launch verbs before anything is launched: what they say, and what they refuse."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.command import Completed
from lab.fakes import fake_nsys

Cli = Callable[..., Completed]


def refused(done: Completed, status: int = 2) -> str:
    """The one message of a refused command: no traceback, nothing on stdout."""
    assert done.returncode == status, done
    assert done.stdout == "", done
    assert done.stderr.startswith("clusterprof: error: "), done
    assert "Traceback" not in done.stderr, done
    return done.stderr


def test_a_line_without_the_two_dashes_is_given_back_with_them(run_clusterprof: Cli) -> None:
    printed = refused(run_clusterprof(["torchrun", "--nproc-per-node", "4", "train.py"]))
    assert " -- train.py" in printed


def test_a_line_without_a_program_is_refused(run_clusterprof: Cli) -> None:
    assert "clusterprof srun" in refused(run_clusterprof(["srun", "-n4", "--"]))


def test_a_rank_outside_of_the_world_is_refused_before_the_job_starts(
    run_clusterprof: Cli, workdir: Path
) -> None:
    printed = refused(
        run_clusterprof(
            ["srun", "--ranks", "0,9", "-n4", "--profiler=torch", "--", "python", "t.py"]
        )
    )
    assert re.search(r"rank\D+9\b", printed)
    assert "-n4" in printed
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "a"], "--ranks"),
        (["--steps", "5:5"], "5:5"),
        (["--step-on", "train"], "--step-on"),
        (["--ranks", "stages"], "--pp"),
        (["--profiler", "torch", "--trace", "cuda"], "--trace"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_a_hint(
    run_clusterprof: Cli, workdir: Path, options: list[str], words: str
) -> None:
    printed = refused(run_clusterprof(["torchrun", *options, "--", "train.py"]))
    assert words in printed
    assert len(printed.splitlines()) >= 2
    assert list(workdir.iterdir()) == []


def test_an_nsys_that_is_missing_is_said_with_what_to_do(
    run_clusterprof: Cli, workdir: Path
) -> None:
    printed = refused(
        run_clusterprof(["torchrun", "--profiler=nsys", "--nsys", "/none/nsys", "--", "train.py"]),
        6,
    )
    assert "/none/nsys" in printed
    assert "--profiler torch" in printed


def test_an_nsys_that_is_too_old_is_said_with_its_version(
    run_clusterprof: Cli, workdir: Path, tmp_path: Path
) -> None:
    old = fake_nsys(workdir, "2020.3.1.72")
    printed = refused(run_clusterprof(["torchrun", "--nsys", str(old), "--", "train.py"]), 6)
    assert "2020.3.1" in printed


@pytest.mark.needs_nsys
def test_flags_that_the_installed_nsys_has_are_shown_and_others_refused_before_the_job_starts(
    run_clusterprof: Cli, workdir: Path
) -> None:
    for option, words in (
        ("--trace=cuda,nonsense", "--trace=nonsense"),
        ("--nsys-arg=--no-such-flag=1", "--no-such-flag"),
    ):
        assert words in refused(run_clusterprof(["torchrun", option, "--", "train.py"]), 6)
    done = run_clusterprof(
        ["torchrun", "--nproc-per-node=4", "--profiler=nsys", "--nsys-arg=--stats=false",
         "--window-by=cuda",
         "--dry-run", "--", "train.py"]
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "--capture-range-end=stop" in done.stdout
    assert "--stats=false" in done.stdout
    assert list(workdir.iterdir()) == []


def test_an_output_directory_that_exists_is_left_as_it_is(
    run_clusterprof: Cli, workdir: Path
) -> None:
    (workdir / "mine").mkdir()
    (workdir / "mine" / "file").write_text("kept")
    printed = refused(
        run_clusterprof(
            ["torchrun", "--profiler=torch", "--run-dir=mine", "--force", "--", "train.py"]
        ),
        5,
    )
    assert "mine" in printed
    assert (workdir / "mine" / "file").read_text() == "kept"


def test_a_launcher_that_is_not_there_is_said(run_clusterprof: Cli, workdir: Path) -> None:
    done = run_clusterprof(
        ["srun", "--profiler=torch", "-n1", "--", "true"], env={"PATH": "/nowhere"}
    )
    assert "srun" in refused(done, 127)
    assert list(workdir.iterdir()) == []


def test_a_dry_run_prints_what_will_run_and_writes_nothing(
    run_clusterprof: Cli, workdir: Path
) -> None:
    done = run_clusterprof(
        ["srun", "--ranks", "0,8", "-N2", "--ntasks-per-node=8", "--gpus-per-node=8",
         "--profiler=torch", "--run-dir", "a run", "--dry-run", "--",
         "python", "train.py", "--name", "it's"],
        env={"CLUSTERPROF_STEPS": "20:30"},
    )  # fmt: skip
    assert done.returncode == 0, done
    assert list(workdir.iterdir()) == []
    (line,) = [line for line in done.stdout.splitlines() if " srun " in line]
    words = shlex.split(line)
    place = words.index("srun")
    assert words[place:] == [
        "srun", "-N2", "--ntasks-per-node=8", "--gpus-per-node=8",
        "python", "train.py", "--name", "***",
    ]  # fmt: skip
    assert f"CLUSTERPROF_PLAN={workdir}/a run/plan.json" in words
    for origin in ("--ranks", "CLUSTERPROF_STEPS", "--profiler torch", "-N2 --ntasks-per-node=8"):
        assert origin in done.stdout


def test_reading_verbs_refuse_what_is_not_there(run_clusterprof: Cli, workdir: Path) -> None:
    assert "nothing" in refused(run_clusterprof(["collect", "nothing"]), 5)
    assert "clusterprof " in refused(run_clusterprof(["report", "."]), 3).partition("error:")[2]
