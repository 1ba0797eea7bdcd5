"""`clusterprof status` on runs that go on, have ended, or were cut off."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab import command
from lab.command import Completed
from lab.endings import PROGRAMS
from lab.warm import Warm

from clusterprof.agent.contracts.states import State

pytestmark = pytest.mark.needs_torch
Cli = Callable[..., Completed]
LINE = ["torchrun", "--ranks", "0", "--steps", "3:6", "--step-on=loop:step", "--profiler=torch",
        "--run-dir=run", "--nproc-per-node", "2", "--no-python", "--"]  # fmt: skip


@pytest.fixture
def going_on(workdir: Path, light_path: str, torch_process: Warm) -> Iterator[Path]:
    """A run of two ranks that are through their window and wait for the file `go`."""
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "waits.py").write_text(
        dedent("""
        import os, pathlib, time
        import loop
        for _ in range(9):
            loop.step()
        pathlib.Path("waits." + os.environ["RANK"]).touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.05)
        """)
    )
    with (workdir / "output").open("wb") as output:
        process = subprocess.Popen(
            command.clusterprof([*LINE, *torch_process.launcher(0), "waits.py"]),
            env=command.environment({"PATH": light_path}), stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + command.PATIENCE_S
    run, before = workdir / "run", None
    while not all((workdir / f"waits.{rank}").exists() for rank in (0, 1)) or (
        before != (before := everything(run))  # the report is made beside the training
        or not (run / "ranks/00000/trace.json.gz").exists()
    ):
        assert time.monotonic() < deadline, (workdir / "output").read_text()
        time.sleep(1)
    try:
        yield run
        (workdir / "go").touch()
        process.wait(command.PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """All files and folders with size and time of change."""
    return {
        str(each.relative_to(folder)): (each.stat().st_size, each.stat().st_mtime_ns)
        for each in folder.rglob("*")
    }


def stated(run_clusterprof: Cli, run: Path) -> dict[str, Any]:
    done = run_clusterprof(["status", "--json", run])
    assert done.returncode == 0, done
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def test_a_run_that_goes_on_is_told_rank_by_rank_and_not_touched_and_watching_ends_with_it(
    run_clusterprof: Cli, going_on: Path
) -> None:
    # The ranks are waiting: what changes is ours, or what their writers add once in a minute.
    for _ in range(2):
        before = everything(going_on)
        text = run_clusterprof(["status", going_on])
        found = stated(run_clusterprof, going_on)
        run_clusterprof(["status", "--all", going_on])
        if everything(going_on) == before:
            break
    else:
        raise AssertionError((before, everything(going_on)))
    assert (text.returncode, text.stderr) == (0, "")
    headline, _, header, row, rest = text.stdout.splitlines()
    assert "3:6" in headline
    assert header.split()[0] == "rank"
    assert row.split()[:2] == ["0", "captured"]
    assert "1 counting" in rest
    assert (found["ended"], found["window"]) == (None, [3, 6])
    first, second = found["ranks"]
    assert (first["chosen"], first["steps"] >= 6) == (True, True)
    assert (second["chosen"], second["state"]) == (False, "counting")
    newest = max(each.stat().st_mtime for each in (going_on / "ranks/00000").iterdir())
    assert first["silent_s"] <= time.time() - newest + 1  # whole seconds

    (going_on.parent / "go").touch()
    done = run_clusterprof(["status", "--watch", "--all", going_on])
    assert done.returncode == 0, done
    assert "status 0" in done.stdout


def test_an_interrupted_run_says_how_to_finish_it(
    run_clusterprof: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workdir / "run"
    rank = run / "ranks" / "00003"
    rank.mkdir(parents=True)
    (run / "run.json").write_text(
        json.dumps(
            {
                "schema_version": 1, "began": "2026-01-02T03:04:05.678+00:00", "ended": None,
                "exit_status": None, "window": [10, 15], "world_size": 4,
                "selection": {"text": "1,3", "kind": "ranks", "ranks": [1, 3], "pp": 1,
                              "world_size": None},
            }
        )
    )  # fmt: skip
    (rank / "state.json").write_text(
        json.dumps({"state": "capturing", "host": "n7", "chosen": True})
    )
    (rank / "steps.csv").write_text("step,begin_ns,end_ns\n11,1,2\n12,3,4\n13,5")
    for each in rank.iterdir():
        os.utime(each, (time.time() - 7200, time.time() - 7200))
    done = run_clusterprof(["status", run])
    assert done.returncode == 0, done
    assert "2 h" in done.stdout
    assert f"clusterprof collect {run}" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()[3:]]
    assert [row[0] for row in rows] == ["1", "3"]
    assert {"capturing", "13", "4", "of", "5", "n7", "2", "h"} <= set(rows[1])
    # Half written, by a rank that was killed: the rest is told all the same.
    (rank / "state.json").write_text('{"state": "cap')
    assert stated(run_clusterprof, run)["ranks"][1]["steps"] == 13
    shutil.rmtree(run / "ranks")
    gone = stated(run_clusterprof, run)["ranks"]
    assert [(each["rank"], each["steps"]) for each in gone] == [(1, None), (3, None)]
    assert {each["state"] for each in gone}.isdisjoint(each.value for each in State)


def test_what_is_no_run_directory_is_refused(run_clusterprof: Cli, workdir: Path) -> None:
    for folder in (workdir, workdir / "nothing"):
        done = run_clusterprof(["status", folder])
        assert done.returncode == 5
        assert "Traceback" not in done.stderr
