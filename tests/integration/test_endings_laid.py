"""Run directories in which somebody has laid what is no file: whoever looks at one goes on looking.

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
from lab.endings import Running
from lab.stub import OPTIONS, PROGRAM, RANK
from lab.tiers import few

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
        paths.STATE, paths.STEPS, paths.PACE, paths.GARBAGE, paths.CLOCK, paths.PROBE, paths.FLIGHT,
        paths.HANG, paths.GROUPS, paths.LOG, paths.TRACE, paths.REPORT, paths.REDUCED,
    )),
    *(f"ranks/00002/{name}" for name in (paths.STEPS, paths.PACE)),
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
