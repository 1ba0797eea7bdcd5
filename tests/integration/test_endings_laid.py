"""Folders in which somebody has laid what is no file, or lies: whoever looks there goes on looking.

The torch of these programs is `lab/stub`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.endings import Running
from lab.stub import OPTIONS, PROGRAM, RANK
from lab.tiers import few
from users import MALLORY

from clusterprof.agent.contracts import paths

Fault = Callable[..., None]

#: kilobytes that a verb may take
MOST = 4_000_000


def bound(place: Path) -> None:
    """A socket: its name may have 107 bytes."""
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(place.parent):
        made.bind(place.name)


def huge(place: Path) -> None:
    """A file of a terabyte that takes no space."""
    with place.open("wb") as file:
        file.truncate(1 << 40)


LAID: dict[str, Callable[[Path], None]] = {
    "pipes": os.mkfifo,
    "sockets": bound,
    "links to a device": lambda place: place.symlink_to("/dev/zero"),
    "links to themselves": lambda place: place.symlink_to(place),
    "folders": Path.mkdir,
    "huge files": huge,
}
#: in the place of each of these something is laid
PLACES = [
    paths.PLAN, paths.AGAIN, paths.CLOSE, paths.PROBED, paths.CLOCK_PROBE, "attempt-2",
    "windows/2/order.json", "windows/3", "ranks/00001", "merged/results.json",
    *(f"ranks/00000/{name}" for name in (
        paths.STATE, paths.STEPS, paths.PACE, paths.PAUSES, paths.GARBAGE, paths.CLOCK,
        paths.HARDWARE, paths.PROBE, paths.FLIGHT, paths.HANG, paths.GROUPS, paths.LOG,
        paths.TRACE, paths.REPORT, paths.REDUCED,
    )),
    *(f"ranks/00002/{name}" for name in (paths.STEPS, paths.PACE, paths.PAUSES)),
]  # fmt: skip


@pytest.fixture
def run(workdir: Path) -> Path:
    """That of a job which has not ended, as far as it says."""
    (workdir / "train.py").write_text(PROGRAM)
    line = ["run", *OPTIONS, "--profiler=torch", "--", "python", "train.py"]
    assert command.run(command.clusterprof(line), env=RANK).returncode == 0
    manifest = json.loads((workdir / "run/run.json").read_text())
    (workdir / "run/run.json").write_text(json.dumps({**manifest, "ended": None}))
    return workdir / "run"


def lay(run: Path, what: Callable[[Path], None]) -> None:
    for name in PLACES:
        place = run / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        what(place)


@pytest.mark.parametrize("what", few(LAID, "pipes", "huge files"))
def test_who_watches_a_run_goes_on_whatever_is_laid_there(
    what: Callable[[Path], None], run: Path, workdir: Path, fault: Fault
) -> None:
    lay(run, what)
    line = command.clusterprof(["status", "--watch", "--all", run])
    limited = ["bash", "-c", f'ulimit -v {MOST}; exec "$@"', "-", *line]
    watching = Running(limited, {}, workdir / "out")
    watching.wait_until(lambda: watching.printed().count("began ") >= 2, "looked again")
    watching.process.send_signal(signal.SIGINT)
    status = watching.ends()
    name = next(name for name, each in LAID.items() if each is what)
    fault(f"status --watch: {name} in the run directory", 130, status, 0.0, {})
    assert "Traceback" not in watching.printed(), watching.printed()
    assert "a bug" not in watching.printed(), watching.printed()
    assert "rank" in watching.printed()


@pytest.mark.parametrize("what", few(LAID, "pipes", "huge files"))
def test_what_is_laid_for_scrub_is_refused_in_words_and_stays(
    what: Callable[[Path], None], workdir: Path, fault: Fault
) -> None:
    export, target = workdir / "rank.sqlite", workdir / "scrubbed.sqlite"
    what(export)
    line = command.clusterprof(["scrub", export, target, "--force"])
    for make in (what, None):
        done = command.run(["bash", "-c", f'ulimit -v {MOST}; exec "$@"', "-", *line])
        assert "Traceback" not in done.stderr, done
        assert "a bug" not in done.stderr, done
        assert 0 < done.returncode < 10, done
        if make is not None:
            assert not os.path.lexists(target)
            make(target)
    assert os.path.lexists(target)
    name = next(name for name, each in LAID.items() if each is what)
    fault(f"scrub: {name} for an export and its copy", 3, done.returncode, 0.0, {})


#: files of a received run, each in turn a pipe
PIPES = [paths.MANIFEST, *(f"ranks/00000/{name}" for name in (
    paths.STATE, paths.CLOCK, paths.STEPS, paths.PACE, paths.PAUSES,
    f"{paths.REDUCED}/{paths.REDUCED_RANK}",
))]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("verb", ["merge", "collect", "status", "runs", "report", "export"])
def test_no_verb_waits_for_a_pipe_in_a_received_run(
    verb: str, run: Path, fault: Fault, run_clusterprof: Callable[..., Completed]
) -> None:
    words = {"runs": [run.parent], "export": [run, "--format=csv", "-oout", "--force"]}
    kept = run.rename("kept")
    for name in PIPES:
        shutil.copytree(kept, run)
        place = run / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        os.mkfifo(place)
        done = run_clusterprof([verb, *words.get(verb, [run])])
        fault(f"{verb}: {name} is a pipe", 0, done.returncode, 0.0, {})
        assert "Traceback" not in done.stderr, (name, done)
        assert 0 <= done.returncode < 10, (name, done)
        shutil.rmtree(run)


def test_what_a_received_run_says_makes_no_line_of_its_own(
    run: Path, fault: Fault, run_clusterprof: Callable[..., Completed]
) -> None:
    state = run / "ranks/00000" / paths.STATE
    lie = "x\nforged\r\nforged\x85forged\u2028forged"
    content = {**json.loads(state.read_text()), "state": "lost", "reason": lie, "host": lie}
    state.write_text(json.dumps(content))
    done = run_clusterprof(["status", run])
    fault("status: a reason and a host forge lines", 0, done.returncode, 0.0, {})
    assert done.returncode == 0, done
    assert "forged" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.lstrip().startswith("forged")]


OWN = "config/clusterprof/clusterprof.toml"
#: files of settings that a group may write, or everybody: their modes, and how the job ends
SETTINGS = {
    "found above, of mode 664": ("clusterprof.toml", 0o664, 2),
    "found above, of mode 666": ("clusterprof.toml", 0o666, 0),
    "the user's own, of mode 664": (OWN, 0o664, 0),
}


@pytest.mark.needs_root
@pytest.mark.parametrize("what", SETTINGS)
def test_a_file_of_settings_that_others_may_write_runs_no_program_of_theirs(
    what: str, workdir: Path, fault: Fault
) -> None:
    name, mode, status = SETTINGS[what]
    trap, here, file = workdir / "trap", workdir / "job", workdir / name
    trap.write_text(f"#!/bin/sh\ntouch {workdir}/executed\n")
    trap.chmod(0o755)
    for folder in (here, file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f'nsys = "{trap}"\n')
    os.chown(file, 0, MALLORY)
    file.chmod(mode)
    line = command.clusterprof(["run", *OPTIONS, "--", "python", "-c", "print('trained')"])
    done = command.run(line, env={**RANK, "XDG_CONFIG_HOME": str(workdir / "config")}, cwd=here)
    fault(f"clusterprof.toml, {what}, names an nsys", status, done.returncode, 0.0, {})
    assert done.returncode == status, done
    assert "clusterprof.toml" in done.stderr
    assert not (workdir / "executed").exists()
