"""What the tests of endings share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import cluster, command, devtools
from lab.browser import QUIET
from lab.collected import run
from lab.command import Completed
from lab.endings import Running
from lab.fakes import scripted_nsys, scripted_torchrun
from lab.job import Job
from lab.parts import chromium
from lab.warm import CLUSTERPROF, TORCH, Warm, warm

__all__ = ["run"]


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds a row to the table that `make faults` prints."""

    def add(what: str, plain: int, ours: int, added_s: float, found: dict[str, Any]) -> None:
        state, reason = found.get("state", ""), found.get("reason", "")
        record_property("fault", (what, plain, ours, f"{added_s:+.1f} s", state, reason))

    return add


@pytest.fixture(scope="session")
def nsys_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An nsys by a script (`lab.nsys_script`), without faults."""
    return scripted_nsys(tmp_path_factory.mktemp("nsys") / "script")


@pytest.fixture
def scripted(nsys_script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nsys that this test finds, and all that it runs, is that script."""
    monkeypatch.setenv("PATH", str(nsys_script.parent), prepend=os.pathsep)


@pytest.fixture(scope="session")
def light_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python, on all test hosts, whose torchrun loads no torch (`lab.torchrun_script`)."""
    return scripted_torchrun(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture
def light_path(light_python: Path) -> str:
    """A PATH on which that torchrun is the first."""
    return f"{light_python.parent}:{command.environment()['PATH']}"


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """What a test leaves running when it fails midway ends with it."""
    of_fixtures = set(command.ran)  # of a module's, which tests share
    yield
    for words, ran in list(command.ran.items()):
        if isinstance(ran, Running) and words not in of_fixtures:
            ran.close()


@pytest.fixture
def slurm_network() -> Iterator[Path]:
    """A Slurm whose nodes can be cut off (`lab.cluster.cut`), and are down after twenty seconds."""
    state = cluster.up(CLUSTERPROF_LAB_NETWORK="own", CLUSTERPROF_LAB_TIMEOUT="20")
    yield state
    cluster.down(state)


@pytest.fixture
def job(tmp_path: Path, run_command: Callable[..., Completed]) -> Job:
    return Job(tmp_path / "run", run_command)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[devtools.Browser]:
    """The Chromium of all tests; each opens tabs of its own."""
    program = chromium()
    assert program is not None
    with devtools.browser(program, tmp_path_factory.mktemp("chromium"), *QUIET) as started:
        yield started


@pytest.fixture(scope="session")
def torch_process() -> Iterator[Warm]:
    """A process that has loaded torch, for the programs of all tests that may begin in it."""
    with warm(TORCH) as started:
        yield started


@pytest.fixture(scope="session")
def clusterprof_process() -> Iterator[Warm]:
    """A process that has loaded clusterprof, which takes a second where it merges."""
    with warm(CLUSTERPROF) as started:
        yield started


@pytest.fixture
def run_clusterprof(clusterprof_process: Warm) -> Callable[..., Completed]:
    """`run_clusterprof(argv, env=None, timeout=…, cwd=None)`: the real command line.

    `env` is added to a cleaned environment (None takes a name away). Returns `Completed` with
    `returncode`, `stdout`, `stderr`; raises `StillRunning` and kills it when it does not end.
    It begins in a fork of that process; `command.clusterprof` is the command that starts its own.
    """
    return clusterprof_process.clusterprof


@pytest.fixture
def warm_torchrun(tmp_path: Path, torch_process: Warm) -> None:
    """The torchrun that this test finds, and all that it runs, begins in that process."""
    command.settings["PATH"] = torch_process.torchrun(tmp_path / "torchrun")


@pytest.fixture
def warm_job(tmp_path: Path, torch_process: Warm) -> Job:
    """`job` for programs with torch, which is loaded before the agent comes and not after it."""
    return Job(tmp_path / "run", torch_process.run)


@pytest.fixture
def node() -> Iterator[Path]:
    """A temporary folder of the node, as /tmp is: everybody may write, no one remove another's."""
    # pytest's own folders are root's alone.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
