"""Other users of the same machine: what they put into folders that everybody may write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.clock import ManualClock
from lab.command import Completed
from users import ALICE, MALLORY, as_user

from clusterprof.agent import nsys
from clusterprof.agent.contracts import plan as plans, processes, states
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.agent.guard import session
from clusterprof.agent.guard.report_transfer import ReportTransfer
from clusterprof.launch.planning import INJECT

pytestmark = pytest.mark.needs_root

LOCK = "SessionManager-2022.4.2.1.lock"


@pytest.fixture
def home(node: Path) -> Path:
    """Alice's home, which others may look into and not write to."""
    folder = node / "alice"
    folder.mkdir()
    os.chown(folder, ALICE, ALICE)
    return folder


def scratch(node: Path) -> Path:
    """What a rank of Alice's makes for its nsys; returns the link to the lock."""
    tempfile.tempdir = str(node)
    private = tempfile.mkdtemp()
    return Path(nsys.scratch(private, "2022.4.2.1"), "nvidia", "nsight_systems", LOCK)


@pytest.mark.parametrize("planted", ["lock", "folder", "pipe"])
def test_another_user_s_link_is_not_followed_by_the_lock_of_nsys(
    node: Path, home: Path, planted: str
) -> None:
    inside = node / "nvidia" / "nsight_systems"

    def plant() -> None:
        os.umask(0)
        if planted == "folder":
            inside.parent.symlink_to(home)
            return
        inside.mkdir(parents=True)
        for name in (inside / LOCK, node / f"clusterprof-{ALICE}-{LOCK}"):
            name.symlink_to(home / ".bash_profile") if planted == "lock" else os.mkfifo(name)

    def launch() -> None:
        lock = scratch(node)
        # No lock at all, or one that is Alice's.
        assert not lock.is_symlink() or lock.stat().st_uid == ALICE

    as_user(MALLORY, plant)
    as_user(ALICE, launch)
    assert list(home.iterdir()) == []


def test_users_share_one_lock_for_nsys_whoever_made_it(node: Path) -> None:
    made = node / "nvidia" / "nsight_systems" / LOCK

    def launch() -> None:
        assert scratch(node).samefile(made)
        with made.open("r+"):
            pass

    as_user(MALLORY, launch)
    as_user(ALICE, launch)
    assert made.stat().st_uid == MALLORY
    assert stat.S_IMODE(made.stat().st_mode) == 0o666


def test_a_lock_of_all_of_ours_is_not_another_user_s(node: Path) -> None:
    ours = node / f"clusterprof-{ALICE}-{LOCK}"

    def plant() -> None:
        (node / "nvidia").touch()
        ours.touch()
        ours.chmod(0o666)

    def launch() -> None:
        assert not scratch(node).is_symlink()

    as_user(MALLORY, plant)
    as_user(ALICE, launch)


# --- a run directory that was renamed away, with another in its place


def in_its_place(folder: Path) -> Path:
    """A run directory whose plan, state and order are of whoever makes it; returns the plan."""
    rank = folder / "ranks" / "00000"
    rank.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "close").write_text("now\n")
    (rank / "state.json").write_text(json.dumps({"state": "captured"}))
    plan = Plan(str(folder), Selection("all", "all"), (2, 4), "torch")
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder / "plan.json"


@pytest.mark.parametrize("who", [ALICE, 0])
def test_plans_states_and_orders_are_believed_from_the_same_user_and_from_root(
    node: Path, who: int
) -> None:
    plan = node / "run" / "plan.json"

    def obey() -> None:
        assert plans.read(str(plan)).run == str(plan.parent)
        assert states.read(str(plan.parent / "ranks" / "00000"), ours=True) == {"state": "captured"}
        assert states.stop_requested(str(plan.parent)) == "now"

    as_user(who, lambda: in_its_place(plan.parent))
    as_user(ALICE, obey)


@pytest.mark.parametrize("who", [MALLORY, 65_534])
def test_plans_states_and_orders_of_another_user_are_not_believed(node: Path, who: int) -> None:
    plan = node / "run" / "plan.json"

    def obey() -> None:
        with pytest.raises(PermissionError) as error:
            plans.read(str(plan))
        assert (error.value.errno, error.value.filename) == (errno.EPERM, str(plan))
        assert states.read(str(plan.parent / "ranks" / "00000"), ours=True) == {}
        assert states.stop_requested(str(plan.parent)) is None

    as_user(who, lambda: in_its_place(plan.parent))
    as_user(ALICE, obey)
    as_user(0, obey)


def test_a_rank_that_finds_another_user_s_plan_runs_as_without_us(
    node: Path, run_command: Callable[..., Completed]
) -> None:
    # Mallory's plan would have it run a profiler of hers.
    as_user(MALLORY, lambda: in_its_place(node / "run"))
    environ = dict(os.environ, RANK="0", CLUSTERPROF_PLAN=str(node / "run" / "plan.json"))
    environ["PYTHONPATH"] = str(INJECT)
    done = run_command([sys.executable, "-c", "print('trained')"], env=environ)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done
    assert f"({MALLORY})" in done.stderr, "whose plan it is"
    assert str(node / "run" / "plan.json") in done.stderr


def test_a_parent_that_others_may_write_without_a_sticky_bit_is_warned_of(
    node: Path, run_clusterprof: Callable[..., Completed]
) -> None:
    for mode, warned in ((0o1777, False), (0o755, False), (0o777, True), (0o775, True)):
        parent = node / f"{mode:o}"
        parent.mkdir()
        os.chown(parent, 0, ALICE)
        parent.chmod(mode)
        done = run_clusterprof(
            ["run", "--profiler=torch", f"--run-dir={parent / 'run'}", "--", "true"]
        )
        assert done.returncode == 0, done
        named = re.search(rf"{parent}(?!/)", done.stderr)
        assert bool(named) == warned, done


def test_no_report_is_brought_into_another_user_s_run_directory(node: Path) -> None:
    run = node / "run"

    def plant() -> None:
        os.umask(0)
        (run / "ranks").mkdir(parents=True)

    def bring() -> None:
        private = node / "private"
        private.mkdir(0o700)
        home = ReportTransfer(str(private), str(run / "ranks" / "00000"))
        Path(home.report + ".nsys-rep").write_bytes(b"the environment")
        assert f"({MALLORY})" in str(home.bring())

    as_user(MALLORY, plant)
    as_user(ALICE, bring)
    assert list((run / "ranks").iterdir()) == []


# --- names that processes hold, which every user of the node may take


def test_a_state_is_written_though_another_user_holds_the_name_by_which_writers_take_turns(
    node: Path,
) -> None:
    folder = node / "rank"
    as_user(ALICE, folder.mkdir)
    there = folder.stat()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        held.bind(f"\0clusterprof-state-{ALICE}-{there.st_dev:x}-{there.st_ino:x}")
        as_user(ALICE, lambda: states.advance(str(folder), "captured"))
    assert states.read(str(folder))["state"] == "captured"


def test_a_pipe_of_another_user_s_in_place_of_a_file_of_nsys_is_left_alone(node: Path) -> None:
    pipe = node / "sem.nsys_sem_1"
    as_user(MALLORY, lambda: os.mkfifo(pipe))
    as_user(ALICE, lambda: processes.remove_unused(str(pipe)))
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("laid", ["file", "pipe"])
def test_a_start_of_nsys_does_not_wait_for_another_user_who_holds_our_lock(
    node: Path, laid: str
) -> None:
    lock = node / f"clusterprof-{ALICE}.lock"

    def plant() -> None:
        os.umask(0)
        lock.touch() if laid == "file" else os.mkfifo(lock, 0o666)

    def start() -> None:
        tempfile.tempdir = str(node)
        clock = ManualClock()
        with session.one_at_a_time(clock):
            assert clock.slept == []

    as_user(MALLORY, plant)
    held = os.open(lock, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    as_user(ALICE, start)
    os.close(held)
