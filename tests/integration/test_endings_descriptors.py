"""A profiled rank has the streams and descriptors that its launcher gave it, under nsys as well."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import PROGRAMS, state
from lab.fakes import fake_nsys
from lab.parts import find
from lab.tiers import long_but

pytestmark = pytest.mark.usefixtures("scripted")
Fault = Callable[..., None]

#: Says what it was given, uses it, trains through a window, and says what it has then.
PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(PROGRAMS)!r})
import loop

def has(each):
    try:
        os.fstat(each)
    except OSError:
        return False
    return True

names = os.environ["LOOK"].split()
print("has", [each for each in map(int, names) if has(each)], flush=True)
if has(7):
    os.write(7, b"metrics\\n")
for _ in range(14):
    loop.step()
if "close" in sys.argv:
    os.closerange(3, 4096)
    for each in range(3, 100):
        try:
            os.close(each)
        except OSError:
            pass
sys.exit(4)
"""
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def ours(*more: str) -> str:
    """What stands before the program: a job of one rank, which is chosen."""
    options = ["--ranks=0", "--steps=3:10", "--run-dir=run", "--no-merge", *more, "--"]
    return shlex.join(command.clusterprof(["run", *options]))


NSYS = ("--profiler=nsys", "--step-on=loop:step")


def bash(line: str, **env: str) -> Completed:
    return command.run(["bash", "-c", line], env={**RANK, **env})


def compare(
    workdir: Path,
    fault: Fault,
    what: str,
    program: str,
    redirected: str,
    before: str = "",
    nsys: str = "nsys",
    **env: str,
) -> Completed:
    """The program with and without us; the same status and words, and a report."""
    plain = bash(f"{before}{program} {redirected}", **env)
    before, under = before.replace("mkfifo", "true"), ours(*NSYS, f"--nsys={nsys}")
    done = bash(f"{before}{under} {program} {redirected}", **env)
    found = state(workdir / "run")
    fault(what, plain.returncode, done.returncode, done.seconds - plain.seconds, found)
    assert done.returncode == plain.returncode == 4, (plain, done, found)
    assert done.stdout == plain.stdout, (plain, done)
    assert found["state"] == "collected", (found, done)
    return done


@pytest.fixture
def program(workdir: Path) -> str:
    (workdir / "train.py").write_text(PROGRAM)
    return "python train.py"


def test_a_program_under_nsys_has_what_its_launcher_gave_it_and_may_close_everything(
    program: str, workdir: Path, fault: Fault
) -> None:
    # nsys itself opens descriptors from 3 on in the program; 7 and 250 are given.
    compare(
        workdir, fault, "descriptors given from 3 on, all closed", "python <(cat train.py) close",
        "7>metrics.txt 250</dev/null 251>&7", LOOK="0 1 2 250 251 252 253",
    )  # fmt: skip
    assert (workdir / "metrics.txt").read_text() == "metrics\n"


@pytest.mark.long
@pytest.mark.needs_nsys
def test_a_program_under_a_real_nsys_may_close_everything(
    program: str, workdir: Path, fault: Fault
) -> None:
    # What nsys has put into the program has descriptors of its own.
    compare(
        workdir, fault, "closes all, nsys' too", f"{program} close", "7>m",
        nsys=str(find("nsys")), LOOK="0 1 2 7",
    )  # fmt: skip


@pytest.mark.parametrize("redirected", long_but(["<&- 2>&-"], ["2>&-", "2>/dev/full"]))
def test_a_program_under_nsys_has_the_stderr_that_it_would_have_had(
    redirected: str, program: str, workdir: Path, fault: Fault
) -> None:
    # What is closed is /dev/null under nsys, which would open its own in its place.
    compare(workdir, fault, f"a rank with {redirected}", program, redirected, LOOK="1")


def test_no_one_waits_for_us_at_the_end_of_a_program_s_pipe(
    program: str, workdir: Path, fault: Fault
) -> None:
    # It closes its end, and waits for its reader to see that.
    waits = 'os.close(7); print("the reader", os.read(8, 9), flush=True)'
    (workdir / "train.py").write_text(PROGRAM.replace('os.write(7, b"metrics\\n")', waits))
    reader = "mkfifo data answer; { cat data >/dev/null; echo ended >answer; } & exec "
    done = compare(
        workdir, fault, "closes a pipe early", program, "7>data 8<>answer", reader, LOOK="7 8"
    )
    assert "the reader b'ended" in done.stdout


@pytest.mark.parametrize("redirected", long_but(["2>&-"], ["2>/dev/full"]))
@pytest.mark.parametrize("how", ["no such step", "no nsys"])
def test_what_the_agent_has_to_say_ends_no_program(
    how: str, redirected: str, program: str, workdir: Path, fault: Fault
) -> None:
    plain = bash(f"{program} {redirected}", LOOK="0 1 2")
    if how == "no nsys":
        more = ("--step-on=loop:step", f"--nsys={fake_nsys(workdir / 'bin', '2022.4.2')}")
    else:
        more = ("--profiler=torch", "--step-on=loop:nothing")
    done = bash(f"{ours(*more)} {program} {redirected}", LOOK="0 1 2")
    added = done.seconds - plain.seconds
    fault(f"a complaint ({how}) with {redirected}", plain.returncode, done.returncode, added, {})
    assert done.returncode == plain.returncode == 4, done
    assert done.stdout == plain.stdout, done


@pytest.mark.parametrize("launcher", long_but(["srun"], ["torchrun"]))
def test_a_rank_has_what_its_launcher_gives_its_tasks(
    launcher: str, program: str, workdir: Path, slurm: dict[str, str], fault: Fault
) -> None:
    # Slurm's PMI speaks over a descriptor of its own.
    asks = """
import os
name = os.environ.get("PMI_FD")
if name:
    os.write(int(name), b"cmd=init pmi_version=1 pmi_subversion=1\\n")
    print("srun says", os.read(int(name), 200), flush=True)
"""
    (workdir / "train.py").write_text(asks + PROGRAM)
    options = {"srun": ["--mpi=pmi2", "-n1"], "torchrun": ["--standalone", "--nproc-per-node=1"]}
    line = [*options[launcher], *(["python"] if launcher == "srun" else []), "train.py"]
    env = {**slurm, "LOOK": "0 1 2"}
    env["PYTHONPATH"] = str(PROGRAMS)
    plain = command.run([launcher, *line[:-1], "train.py"], env=env)
    at = line.index("train.py") - (launcher == "srun")
    done = command.run(
        command.clusterprof(
            [launcher, "--ranks=0", "--steps=3:10", "--run-dir=run", "--no-merge", *NSYS,
             *line[:at], "--", *line[at:]]
        ), env=env,
    )  # fmt: skip
    found = state(workdir / "run")
    added = done.seconds - plain.seconds
    fault(f"{launcher}'s own descriptors", plain.returncode, done.returncode, added, found)
    assert done.returncode == plain.returncode != 0, (plain, done)
    assert done.stdout == plain.stdout, (plain, done)
    assert found["state"] == "collected", (found, done)
    assert launcher != "srun" or "srun says b'cmd=response_to_init" in done.stdout, done
