"""However a job of `--ranks auto` ends between its two windows: as it would have ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import PROGRAMS, Running, ours_in_tracebacks, state, words

from clusterprof.agent.contracts import paths

pytestmark = [pytest.mark.usefixtures("scripted"), pytest.mark.needs_torch]

#: the finding of a rank that delays others, by the flight recorders of all alone
SHALLOW = "straggler.shallow"
LINE = ["python", str(PROGRAMS / "looked_at.py"), "1"]


def job(workdir: Path, slurm: dict[str, str], *program: str) -> Running:
    argv = ["srun", "--ranks", "auto", "--steps", "5:10", "--step-on", "loop:step",
            "--run-dir=run", "-n2", "--", *program]  # fmt: skip
    return Running(command.clusterprof(argv), slurm, workdir / "out")


#: by what the program is told: its end without clusterprof, and what it prints
PLAINLY = {"die": (137, []), "2": (0, ["rank 0 ends", "rank 1 ends"])}


@pytest.mark.long
@pytest.mark.parametrize("how", PLAINLY)
def test_the_program_without_clusterprof_ends_as_the_others_compare_with(
    how: str, workdir: Path, slurm: dict[str, str]
) -> None:
    (workdir / "go").touch()
    done = command.run(["srun", "-n2", *LINE, how, "light"], env=slurm)
    assert (done.returncode, words(done.stdout)) == PLAINLY[how], done


def test_a_rank_that_dies_between_the_two_windows_ends_its_job_as_without_us(
    workdir: Path, slurm: dict[str, str], fault: Callable[..., None]
) -> None:
    plain = PLAINLY["die"]
    running = job(workdir, slurm, *LINE, "die", "light")
    order = running.run / "windows/2" / paths.ORDER
    running.wait_until(order.exists, "ordered")
    (workdir / "go").touch()
    status = running.ends()
    found = state(running.run, 1)
    fault("killed between the two windows of --ranks auto", plain[0], status, 0.0, found)
    assert (status, words(running.printed())) == plain, running.printed()
    assert (found["state"], state(running.run, 0)["chosen"]) == ("counting", False)
    assert not ours_in_tracebacks(running.printed())
    # What was looked at stands, and names rank 1, which was late.
    results = json.loads((running.run / paths.MERGED / paths.RESULTS).read_text())
    assert [each["ranks"] for each in results["findings"] if each["code"] == SHALLOW] == [[1]]
    assert {each["rank"] for each in results["missing"]} == {0, 1}
    assert not running.left()


@pytest.mark.long
def test_a_run_directory_that_cannot_be_seen_keeps_no_job_from_its_end(
    workdir: Path, slurm: dict[str, str], fault: Callable[..., None]
) -> None:
    plain = PLAINLY["2"]
    (workdir / "node").mkdir()
    hidden = f'mount --bind "{workdir}/node" "$PWD/run/ranks"; exec {" ".join(LINE)} 30 light'
    running = job(workdir, slurm, "unshare", "--mount", "bash", "-euc", hidden)
    status = running.ends()
    fault("run directory not seen, --ranks auto", plain[0], status, 0.0,
          {"state": "lost", "reason": "not seen"})  # fmt: skip
    assert (status, words(running.printed())) == plain, running.printed()
    assert (workdir / "node/00000" / paths.FLIGHT).exists()
    assert not (running.run / "windows/2").exists()
    assert not running.left()
