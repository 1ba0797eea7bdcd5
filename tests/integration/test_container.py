"""A rank in a container: another place, another user, and nothing of ours but one plain folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.command import Completed
from lab.endings import OPTIONS, PROGRAMS

import clusterprof
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.cli.launch import parser
from clusterprof.launch.profiling import choose

AGENT = Path(clusterprof.__file__).parent / "agent"
CHECKOUT = Path(clusterprof.__file__).resolve().parents[1]
NO_ONE = "65534"

#: In mount namespaces of its own: no checkout, the agent read-only at another place, the run
#: directory too; then as no one, with an empty environment but for what follows.
INSIDE = """
set -e
hidden=$1 agent=$2 run=$3 shm=$4 place=$5
shift 5
mkdir "$place/agent" "$place/run"
mount --bind "$agent" "$place/agent"
mount -o remount,bind,ro "$place/agent"
mount --bind "$run" "$place/run"
mount -t tmpfs -o ro tmpfs "$hidden"
mount -t tmpfs -o ro tmpfs "$run"
[ "$shm" = shared ] || mount -t tmpfs -o "$shm" tmpfs /dev/shm
cd "$place/program"
exec setpriv --reuid=65534 --regid=65534 --clear-groups env -i PATH=/usr/bin:/bin "$@"
"""

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_nsys]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may walk to, and write to."""
    folder = Path(tempfile.mkdtemp(prefix="clusterprof-container-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


class Container:
    """Runs the rank 3 of a job in it; its folders are those of `place`."""

    def __init__(self, place: Path, run: Callable[..., Completed]) -> None:
        self.place = place
        self.command = run

    def run(self, shm: str, *environment: str) -> tuple[Completed, dict[str, Any]]:
        run, program = self.place / "launched", self.place / "program"
        agent = self.place / "ours"
        shutil.copytree(AGENT, agent, ignore=shutil.ignore_patterns("__pycache__"))
        program.mkdir()
        for name in ("ending.py", "loop.py"):
            shutil.copy(PROGRAMS / name, program)
        (run / "ranks").mkdir(parents=True)
        for folder in (run, run / "ranks"):
            folder.chmod(0o777)
        window = OPTIONS[OPTIONS.index("--steps") + 1].split(":")
        nsys = choose(parser("run").parse_args(["--profiler=nsys"])).nsys
        assert nsys
        plan = Plan(
            str(run), Selection("3", "ranks", (3,)), (int(window[0]), int(window[1])), "nsys",
            "torchrun", "loop:step", nsys=nsys._replace(start_s=60),
        )  # fmt: skip
        (run / "plan.json").write_text(json.dumps(plan.to_json()))
        (run / "run.json").write_text("{}")
        # One that every user may run, which that of the tests need not be.
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
        assert python
        here = self.place / "run"
        done = self.command(
            ["unshare", "--mount", "bash", "-c", INSIDE, "container", CHECKOUT, agent, run, shm,
             self.place, "RANK=3", "WORLD_SIZE=8", "LOCAL_RANK=3", "TORCHELASTIC_RUN_ID=none",
             f"CLUSTERPROF_PLAN={here}/plan.json", f"PYTHONPATH={self.place}/agent/inject",
             *environment, python, "ending.py", "none", "0"],
        )  # fmt: skip
        states = list(run.glob("ranks/00003/state.json"))
        return done, json.loads(states[0].read_text()) if states else {}


@pytest.fixture
def container(place: Path, run_command: Callable[..., Completed]) -> Container:
    return Container(place, run_command)


def test_a_rank_in_a_container_needs_one_plain_folder_and_the_run_directory(
    container: Container,
) -> None:
    done, found = container.run("rw,mode=1777", "TMPDIR=/nowhere")
    assert (done.returncode, done.stdout) == (0, "rank 3 begins\nrank 3 ends\n"), done
    assert done.stderr == ""
    assert found["state"] == "captured", found
    report = container.place / "launched/ranks/00003/report.nsys-rep"
    assert report.stat().st_uid == int(NO_ONE)
    steps = (container.place / "launched/ranks/00003/steps.csv").read_text()
    assert len(steps.splitlines()) == 31


def test_a_container_without_shared_memory_runs_its_program_and_says_why_nothing_is_captured(
    container: Container,
) -> None:
    done, found = container.run("ro", "HOME=/proc")
    assert (done.returncode, done.stdout) == (0, "rank 3 begins\nrank 3 ends\n"), done
    assert all(fact in done.stderr for fact in ("rank 3", "nsys"))
    assert found["state"] == "lost"
    assert os.strerror(errno.EROFS) in found["reason"]
