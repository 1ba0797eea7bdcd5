"""Other users of the same machine: what they put into folders that everybody may write."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from users import ALICE, MALLORY, as_user

from clusterprof.agent import profiler

pytestmark = pytest.mark.needs_root

LOCK = "SessionManager-2022.4.2.1.lock"


@pytest.fixture
def node() -> Iterator[Path]:
    """A temporary folder of the node, as /tmp is: everybody may write, nobody remove another's."""
    # pytest's own folders are root's alone.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


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
    return Path(profiler.scratch(private, "2022.4.2.1"), "nvidia", "nsight_systems", LOCK)


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
