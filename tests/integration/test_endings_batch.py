"""Batch jobs that Slurm ends: cancelled, signalled, out of time, preempted and started over.

Each ending is brought upon two jobs, one as it is and one under clusterprof. Slurm takes its time
for some, so that all are under way at once.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.endings import OPTIONS, PROGRAMS, state, window, words
from lab.fakes import scripted_nsys
from lab.tiers import few, long_but

script = pytest.mark.usefixtures("scripted")


def until(holds: Callable[[], Any], what: Callable[[], str]) -> Any:
    """Wait until `holds()` gives something true, and return it."""
    deadline = time.monotonic() + command.PATIENCE_S
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.5)  # what is asked may be Slurm, which takes as long for it as a rank
    raise AssertionError(what())


class Batch:
    """One batch job of two ranks, whose script is one line."""

    def __init__(self, slurm: dict[str, str], folder: Path, line: list[str], *options: str) -> None:
        self.slurm = slurm
        self.folder = folder
        self.run = folder / "run"
        folder.mkdir()
        (folder / "job").write_text(f"#!/bin/bash\nexec {shlex.join(line)}\n")
        done = self.call(
            "sbatch", "--parsable", "--ntasks=2", "--output", folder / "out",
            "--open-mode=append", "--chdir", folder, *options, folder / "job",
        )  # fmt: skip
        self.job = done.strip()
        assert self.job.isdigit(), done

    def call(self, *argv: str | Path) -> str:
        done = command.run(list(argv), env=self.slurm)
        assert done.returncode == 0, done
        return done.stdout

    def stated(self, name: str) -> str:
        """What Slurm says of the job."""
        text = self.call("scontrol", "--oneliner", "show", "job", self.job)
        return text.partition(f" {name}=")[2].split(" ")[0]

    def printed(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    def wait_until_it_hangs(self) -> None:
        ready = {"rank 0 hangs", "rank 1 ends"}
        until(
            lambda: ready <= set(words(self.printed())),
            lambda: f"it never hung: {self.printed()}",
        )

    def end(self) -> tuple[str, str]:
        """Its last state and exit status, by Slurm."""
        going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "PREEMPTED")
        until(
            lambda: self.stated("JobState") not in going,
            lambda: f"it did not end: {self.printed()}",
        )
        return self.stated("JobState"), self.stated("ExitCode")


def ours(*program: str, more: tuple[str, ...] = ()) -> list[str]:
    """`program` under clusterprof, as a batch script has it."""
    options = [*OPTIONS, *more, "--run-dir=run", "--no-merge"]
    return command.clusterprof(["srun", *options, "--", *program])


@dataclass(frozen=True)
class Ending:
    what: str
    command: tuple[str, ...]
    state: str = "collected"
    #: in the reason, where it is not that the program ended inside the window
    reason: str = ""
    #: not inside the window, but while its report's tables are made, which never ends
    reducing: bool = False

    def bring(self, batch: Batch) -> None:
        """Bring it upon a job."""
        line = [word.replace("{}", batch.job) for word in self.command]
        batch.call(*line, *([] if batch.job in line[-1] else [batch.job]))


ENDINGS = [
    # `now` is refused where the next second begins before the controller has it.
    Ending("a time limit", ("scontrol", "update", "EndTime=now+10", "JobId={}")),
    Ending("scancel", ("scancel",)),
    Ending("scancel --full -s TERM", ("scancel", "--full", "-sTERM"), "lost"),
    Ending("scancel --batch -s TERM", ("scancel", "--batch", "-sTERM"), reason="SIGTERM"),
]
#: the ways of `scancel`
SIGNALS = [
    Ending("scancel -s TERM", ("scancel", "-sTERM")),
    Ending("scancel -s INT", ("scancel", "-sINT")),
    Ending("scancel -s USR1", ("scancel", "-sUSR1")),
]
#: the exporter is ended with the rest, gone without a trace or by a signal
REDUCING = [
    Ending(
        f"{each.what}, while tables are made", each.command, each.state,
        "the report stays on n" if each.state == "lost" else "", reducing=True,
    )
    for each in ENDINGS
    if each.what in ("a time limit", "scancel", "scancel --full -s TERM")
]  # fmt: skip


@script
@pytest.mark.parametrize(
    "endings",
    few(
        {
            "capturing": ENDINGS,
            "signals": SIGNALS,
            "reducing": REDUCING[1:],
            "reducing, a time limit": REDUCING[:1],
        },
        "capturing",
        "reducing",
    ),
)
def test_batch_jobs_end_as_they_would_have_ended(
    endings: list[Ending], workdir: Path, slurm: dict[str, str], fault: Callable[..., None]
) -> None:
    exports = f"touch('{workdir}/exporting-' + os.environ['SLURM_JOB_ID']); hang()"
    nsys = scripted_nsys(workdir / "nsys", {"0:export": exports})
    reduced = (f"--nsys={nsys}", "--reduce=now", "--keep-reports=none")
    pairs = []
    for number, ending in enumerate(endings):
        program = [
            "python", str(PROGRAMS / "ending.py"), "hang", "25" if ending.reducing else "15",
        ]  # fmt: skip
        plain = Batch(slurm, workdir / f"plain{number}", ["srun", *program])
        more = reduced if ending.reducing else ()
        mine = Batch(slurm, workdir / f"ours{number}", ours(*program, more=more))
        pairs.append((ending, plain, mine))
    for ending, *both in pairs:
        for each in both:
            each.wait_until_it_hangs()
        if ending.reducing:
            until((workdir / f"exporting-{both[1].job}").exists, both[1].printed)
    # Slurm looks at time limits every half minute: meanwhile the others, one after the other, since
    # each report that is written keeps a processor busy.
    wrong = []
    for ending, *both in pairs[:1]:
        for each in both:
            ending.bring(each)
    for ending, plain, mine in [*pairs[1:], pairs[0]]:
        if ending is not endings[0]:
            ending.bring(plain)
            ending.bring(mine)
        alone = plain.end()
        began = time.monotonic()
        with_us = mine.end()
        added_s = time.monotonic() - began
        found = state(mine.run)
        reason = found.get("reason", "")
        fault(f"sbatch: {ending.what}", alone[1], with_us[1], added_s, found)
        as_it_was = alone == with_us and words(mine.printed()) == words(plain.printed())
        inside = "whole" if ending.reducing else "inside"
        captured = (found["state"], window(found)) == (ending.state, inside)
        # a merge makes the tables of reports that were gathered
        left = mine.run.glob("ranks/*/re*" if ending.reducing else "ranks/*/report*")
        there = list(left) == [mine.run / "ranks/00000/report.nsys-rep"]
        captured = captured and there == (ending.state == "collected")
        explained = ending.reason in reason and (
            (ending.reducing and ending.state == "collected") == ("not_reduced" in found)
        )
        if not as_it_was or not captured or not explained:
            wrong.append((ending.what, alone, with_us, found))
            print(ending.what, plain.printed(), mine.printed(), sep="\n---\n")
    assert not wrong


#: the first time it hangs inside the window until it is preempted; started over it goes on from its
#: checkpoint
TWICE = ["python", str(PROGRAMS / "checkpointing.py")]
#: what it prints the first time, and then
FIRST = ["rank 0 begins at 0", "rank 0 hangs", "rank 0 is preempted after 15"]
SECOND = ["rank 0 begins at 15", "rank 0 ends"]


def started_over(batch: Batch) -> None:
    """Slurm starts a job over after two minutes: it is asked to do so now.

    Not within the second in which it ended: its nodes still refuse all credentials of that second
    ("Job credential revoked"), and Slurm then ends the job, or drains the node.
    """
    until(lambda: batch.stated("JobState") == "PENDING", batch.printed)
    time.sleep(1)
    batch.call("scontrol", "update", f"JobId={batch.job}", "StartTime=now")


@script
@pytest.mark.parametrize("by", long_but(["preempted"], ["requeued"]))
def test_a_job_that_starts_over_keeps_what_its_first_start_captured(
    by: str,
    workdir: Path,
    slurm: dict[str, str],
    fault: Callable[..., None],
    run_clusterprof: Callable[..., command.Completed],
) -> None:
    batch = Batch(slurm, workdir / "job", ours(*TWICE), "--requeue")
    batch.wait_until_it_hangs()
    if by == "requeued":
        batch.call("scontrol", "requeue", batch.job)
    else:
        batch.call("srun", "--partition=urgent", "--nodes=4", "--exclusive", "true")
    started_over(batch)
    ended = batch.end()
    assert ended == ("COMPLETED", "0:0"), batch.printed()
    printed = [line for line in batch.printed().splitlines() if line.startswith("rank 0 ")]
    assert printed == [*FIRST, *SECOND], batch.printed()
    again = batch.folder / "run-restart1"
    assert (state(again)["state"], state(again).get("reason")) == ("collected", None)
    fault(f"sbatch: {by}, and started over", 0, 0, 0.0, state(batch.run))
    assert (window(state(batch.run)), "reason" in state(batch.run)) == ("inside", True)
    assert f"clusterprof collect {batch.run}" in batch.printed()
    done = run_clusterprof(["collect", "--no-merge", batch.run])
    assert done.returncode == 0, done
    assert (state(batch.run)["state"], state(again)["state"]) == ("collected", "collected")


@script
def test_a_window_is_closed_when_the_time_limit_nears_and_the_training_goes_on(
    workdir: Path, slurm: dict[str, str]
) -> None:
    # Its limit is a minute away: the margin is reached half a minute after it began, in a window
    # that would last longer.
    line = command.clusterprof(
        ["srun", *OPTIONS, "--steps=10:5000", "--max-steps=5000", "--time-margin=30",
         "--run-dir=run", "--no-merge", "--", "python", PROGRAMS / "ending.py", "slow", "0"]
    )  # fmt: skip
    batch = Batch(slurm, workdir / "job", line, "--time=1")
    begun = {"rank 0 begins", "rank 1 begins"}  # from then on they handle the signal
    until(lambda: begun <= set(words(batch.printed())), batch.printed)
    batch.call("scancel", "--signal=USR1", batch.job)
    assert batch.end() == ("COMPLETED", "0:0"), batch.printed()
    assert {"rank 0 is warned", "rank 0 ends"} <= set(words(batch.printed()))
    found = state(batch.run)
    assert found["state"] == "collected", batch.printed()
    assert (batch.run / "close").read_text().strip() in found["reason"], found
    # Between two steps, or within one where a machine is so busy that it takes a second.
    assert found.get("step_end", 11) < 5000, found


@pytest.mark.parametrize(
    "nsys",
    ["scripted", pytest.param("real", marks=[pytest.mark.needs_nsys, pytest.mark.long])],
)
def test_two_runs_that_one_job_starts_at_once_do_not_meet(
    nsys: str, workdir: Path, slurm: dict[str, str], request: pytest.FixtureRequest
) -> None:
    if nsys == "scripted":
        request.getfixturevalue("scripted")
    line = command.clusterprof(
        ["srun", "--overlap", *OPTIONS, "--no-merge", "--", "python", PROGRAMS / "ending.py",
         "none", "0"]
    )  # fmt: skip
    both = f"{shlex.join(line)} & {shlex.join(line)} & wait -n && wait -n"
    batch = Batch(slurm, workdir / "job", ["bash", "-c", both])
    assert batch.end() == ("COMPLETED", "0:0"), batch.printed()
    runs = sorted((batch.folder / "runs").iterdir())
    assert len(runs) == 2, batch.printed()
    assert [state(run)["state"] for run in runs] == ["collected", "collected"], batch.printed()
    assert [json.loads((run / "run.json").read_text())["exit_status"] for run in runs] == [0, 0]
    sessions = {state(run)["session"] for run in runs}
    assert len(sessions) == 2
