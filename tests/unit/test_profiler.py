"""A node's own nsys: what it is told where it is not the launching host's, and where it writes."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from clusterprof.agent import nsys
from clusterprof.agent.contracts.plan import NsysPlan

STATED = NsysPlan(
    "/bin/sh", "2025.3.2.4", None, {"gpu": "cuda,nvtx,nccl", "cpu": "nvtx,osrt"}, ["profile"],
    ["launch", "--session-new={session}", "--trace={trace}", "--pytorch=autograd-nvtx"],
    ["start", "--session={session}", "--output={output}", "--gpu-metrics=0", "-y=1"],
    ["stop", "--session={session}"],
)  # fmt: skip


def answers(monkeypatch: pytest.MonkeyPatch, **printed: str) -> None:
    """Have nsys say `said` to --version, and to the --help of its verbs."""
    monkeypatch.setattr(
        nsys, "ask", lambda command, patience_s: printed.get(command[1].lstrip("-"), "unrecognised")
    )


def test_the_launching_host_s_version_is_told_what_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, version="NVIDIA Nsight Systems version 2025.3.2.4-36243v0")
    assert nsys.here(STATED, "session") == (STATED, [])


def test_another_version_is_told_what_it_knows_and_by_the_verb_that_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(
        monkeypatch, version="version 2023.4.4.54-1",
        launch="--session-new= --trace= cuda nvtx osrt --gpu-metrics=",
        start="--session= --output=",
    )  # fmt: skip
    fitted, differs = nsys.here(STATED, "session")
    assert fitted.launch == [*STATED.launch[:3], "--gpu-metrics=0"]
    assert fitted.start == [*STATED.start[:3], "-y=1"]
    assert fitted.trace == {"gpu": "cuda,nvtx", "cpu": "nvtx,osrt"}
    versions, left_out = differs
    assert re.findall(r"[\d.]{5,}", versions) == ["2023.4.4.54", "2025.3.2.4"]
    assert re.findall(r"--[\w=-]+", left_out) == ["--pytorch", "--trace=nccl"]
    assert STATED.launch[3] == "--pytorch=autograd-nvtx"


@pytest.mark.parametrize(
    ("offered", "planned", "given"),
    [
        ("cuda cuda-hw cuda-sw nvtx", "cuda,nvtx", "cuda-sw,nvtx"),
        ("cuda cuda-hw cuda-sw nvtx", "cuda-hw,nvtx", "cuda-hw,nvtx"),
        ("cuda nvtx", "cuda-sw,nvtx", "cuda,nvtx"),
    ],
)
def test_cuda_is_traced_by_software_where_there_is_the_choice(
    monkeypatch: pytest.MonkeyPatch, offered: str, planned: str, given: str
) -> None:
    answers(monkeypatch, version="version 2026.3.1.157", launch="--trace= " + offered, start="-o")
    plan = STATED._replace(trace={"gpu": planned, "cpu": "nvtx"})
    fitted, differs = nsys.here(plan, "session")
    assert fitted.trace == {"gpu": given, "cpu": "nvtx"}
    assert not re.findall(r"--trace=\S+", " ".join(differs))


@pytest.mark.parametrize(
    ("printed", "wanted"),
    [
        ("version 2021.5.1.77", "too old"),
        ("", "it printed: nothing"),
        ("no such library", "library"),
    ],
)
def test_an_nsys_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, printed: str, wanted: str
) -> None:
    answers(monkeypatch, version=printed)
    with pytest.raises(OSError, match=wanted):
        nsys.here(STATED, "session")


def test_a_node_without_that_path_uses_the_nsys_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys, "PLACES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsys.found("/opt/elsewhere/nsys") is None
    (tmp_path / "nsys").touch(0o755)
    assert nsys.found("/opt/elsewhere/nsys") == str(tmp_path / "nsys")
    with pytest.raises(OSError, match="/opt/elsewhere/other"):
        nsys.here(STATED._replace(path="/opt/elsewhere/other"), "session")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's own temporary folder."""
    monkeypatch.setattr(nsys.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_session_s_own_folder_is_as_nsys_would_make_it_and_shares_the_node_s_lock(
    node: Path,
) -> None:
    before = os.umask(0o077)
    try:
        (node / "a").mkdir()
        (node / "b").mkdir()
        folders = [Path(nsys.scratch(str(node / name), "2022.4.2.1")) for name in "ab"]
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    name = "nvidia/nsight_systems/SessionManager-2022.4.2.1.lock"
    for folder in folders:
        for inner in ("nvidia", "nvidia/nsight_systems"):
            assert stat.S_IMODE((folder / inner).stat().st_mode) == 0o777
        assert (folder / name).samefile(node / name)
    assert stat.S_IMODE((node / name).stat().st_mode) == 0o666


def test_a_lock_that_another_user_keeps_from_us_is_replaced_by_one_for_all_of_ours(
    node: Path,
) -> None:
    (node / "nvidia").touch()
    (node / "a").mkdir()
    folder = Path(nsys.scratch(str(node / "a"), "2022.4"))
    lock = folder / "nvidia/nsight_systems/SessionManager-2022.4.lock"
    assert lock.resolve().parent == node
    assert str(os.getuid()) in lock.resolve().name


def test_a_folder_whose_name_leaves_no_space_for_a_socket_is_not_used(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nsys.temporary(len(str(node))) == str(node)
    assert nsys.temporary(len(str(node)) - 1) == "/tmp"
