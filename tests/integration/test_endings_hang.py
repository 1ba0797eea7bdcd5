"""Ranks that hang and then end in some way: as they would have without clusterprof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.disk import small_disk
from lab.endings import PROGRAMS, ours_in_tracebacks, state, words

from clusterprof.ingest.flight.all_dumps import find_dumps
from clusterprof.merge_run import merge_dumps

pytestmark = [pytest.mark.needs_torch]

Fault = Callable[..., None]
LAUNCHER = ["torchrun", "--standalone", "--nproc-per-node", "2"]


QUIET = {"OMP_NUM_THREADS": "1"}

#: how it ends without us, and what it prints
PLAINLY: dict[str, tuple[int, list[str]]] = {
    "sleeps": (1, ["rank 0 ends", "rank 1 ends"]),
    "dies": (1, []),
    "ends": (1, ["rank 1 is told to end"]),
    "fills": (1, ["rank 0 ends", "rank 1 ends"]),
}


@pytest.mark.long
@pytest.mark.needs_root
@pytest.mark.parametrize("how", PLAINLY)
def test_the_program_without_clusterprof_ends_as_the_others_compare_with(how: str) -> None:
    with small_disk("1m") as folder:
        done = command.run([*LAUNCHER, PROGRAMS / "hanging.py", how, folder], env=QUIET)
    assert (done.returncode, words(done.stdout)) == PLAINLY[how], done


def ends_alike(how: str, run: Path, fault: Fault, what: str, *more: str) -> dict[str, Any]:
    """The job as without us; rank 0's state, which waits."""
    program = [str(PROGRAMS / "hanging.py"), how, *more]
    verb, *options = LAUNCHER
    ours = [verb, "--profiler=none", "--steps=3:5", "--step-on=loop:step", "--hang-after=6",
            "--run-dir", str(run), "--no-merge", *options, "--", *program]  # fmt: skip
    done = command.run(command.clusterprof(ours), env=QUIET)
    assert (done.returncode, words(done.stdout)) == PLAINLY[how], done
    # Not as many as without us: whether a rank prints its own depends on when torchrun ends it.
    assert not ours_in_tracebacks(done.stderr), done
    found = state(run)
    fault(what, PLAINLY[how][0], done.returncode, 0.0, found)
    return found


@pytest.mark.long
def test_a_hang_that_was_diagnosed_goes_on(workdir: Path, fault: Fault) -> None:
    found = ends_alike("sleeps", workdir / "run", fault, "a hang is diagnosed, and the job goes on")
    assert found["steps"] == 30
    assert found["hangs"]["no_dump"] is None
    assert found["hangs"]["until_ns"] > found["hangs"]["since_ns"]


def test_a_rank_dies_in_a_hang(workdir: Path, fault: Fault) -> None:
    found = ends_alike("dies", workdir / "run", fault, "a rank dies in a hang")
    assert found["hangs"]["step"] == 20
    (cause,) = merge_dumps(find_dumps(workdir / "run", "hang"), {})["hang"]
    assert (cause["cause"], cause["ranks"], cause["sequence"]) == ("never_joined", [1], 21)


@pytest.mark.long
def test_a_rank_is_told_to_end_while_its_recorder_is_dumped(workdir: Path, fault: Fault) -> None:
    ends_alike("ends", workdir / "run", fault, "SIGTERM while a hang is dumped")
    assert not (workdir / "run/ranks/00001/hang.json.gz").exists()


@pytest.mark.long
@pytest.mark.needs_root
def test_the_dump_of_a_hang_finds_a_full_disk(fault: Fault) -> None:
    with small_disk("1m") as full:
        ends_alike("fills", full / "run", fault, "no space for the dump of a hang", str(full))
        assert not list(full.glob("run/ranks/*/hang*"))
