"""Files are written whole or not at all, and through no one's link."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterprof.agent.contracts import files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_a_file_holds_what_was_written_and_nothing_is_beside_it(tmp_path: Path) -> None:
    files.write(tmp_path / "one", "grün\n")
    files.write(str(tmp_path / "two"), b"\xff")
    files.write_json(tmp_path / "three", {"a": 1})
    assert (tmp_path / "one").read_text(encoding="utf-8") == "grün\n"
    assert (tmp_path / "two").read_bytes() == b"\xff"
    assert json.loads((tmp_path / "three").read_text()) == {"a": 1}
    assert sorted(os.listdir(tmp_path)) == ["one", "three", "two"]


def test_a_file_is_its_owner_s_alone_until_it_is_complete(tmp_path: Path, umask: None) -> None:
    with files.new(tmp_path / "file") as file:
        file.write(b"half")
        file.flush()
        (beside,) = tmp_path.iterdir()
        assert Path(file.name) == beside
        assert mode(beside) == 0o600
    assert mode(tmp_path / "file") == 0o640
    files.write(tmp_path / "file", "", 0o600)
    assert mode(tmp_path / "file") == 0o600


def test_reading_the_umask_changes_it_for_no_one(umask: None) -> None:
    assert files.umask() == 0o027
    assert os.umask(0o027) == 0o027


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    def interrupted() -> None:
        with files.new(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "file").read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        files.write(tmp_path / "folder", "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_link_waiting_under_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No one can guess the name; here it is known, as if somebody had.
    monkeypatch.setattr(os, "urandom", lambda size: b"0" * size)
    with files.new(tmp_path / "file") as file:
        waiting = Path(file.name)
    (tmp_path / "profile").write_text("mine")
    for target in (tmp_path / "profile", tmp_path / "absent"):
        waiting.symlink_to(target)
        with pytest.raises(FileExistsError):
            files.write(tmp_path / "file", "theirs")
        waiting.unlink()
    assert (tmp_path / "profile").read_text() == "mine"
    assert not (tmp_path / "absent").exists()


def test_a_link_at_the_place_itself_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("mine")
    (tmp_path / "file").symlink_to(tmp_path / "profile")
    files.write(tmp_path / "file", "text")
    assert (tmp_path / "profile").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "text"


def test_the_longest_and_the_oddest_names_can_be_written(tmp_path: Path) -> None:
    for name in ("ä" * 127, os.fsdecode(b"\xff" * 255), "-x\n'\""):
        files.write(tmp_path / name, name.encode("utf-8", "surrogateescape"))
        assert (tmp_path / name).read_bytes() == os.fsencode(name)


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    problems: list[OSError] = []

    def write(letter: str) -> None:
        try:
            for _ in range(50):
                files.write(tmp_path / "file", letter * 100_000)
        except OSError as error:
            problems.append(error)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert problems == []
    content = (tmp_path / "file").read_text()
    assert content == content[0] * 100_000
    assert os.listdir(tmp_path) == ["file"]


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("kind", [a_pipe, a_socket, a_device, Path.mkdir])
def test_what_is_no_regular_file_is_not_read_and_not_waited_for(
    tmp_path: Path, kind: Callable[[Path], object]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kind(tmp_path / "file")
    with pytest.raises(OSError):
        files.opened(tmp_path / "file", links=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_is_followed_where_that_is_asked_for_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"content")
    assert files.content(tmp_path / "link", 100, links=True) == b"content"
    with pytest.raises(OSError, match="it is a link"):
        files.content(tmp_path / "link", 100)


def test_what_is_larger_than_may_be_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)  # takes no space, and would not fit into memory
    with pytest.raises(OSError, match="larger than 1 MB"):
        files.content(tmp_path / "file", 1 << 20)
