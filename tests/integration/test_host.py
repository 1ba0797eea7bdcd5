"""The helper that `clusterprof ssh` runs on a host: what it starts ends as it should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.remote import host

HELPER = Path(host.__file__)
_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Whatever a test that fails has started ends with it: the helper takes it along."""
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.wait(timeout=120)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def start(folder: Path, argv: list[str], **environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", HELPER, "run", folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    _started.append(process)
    assert process.stdin is not None
    request = {"argv": argv, "folder": str(folder), "environment": environment}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return process


def output(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """All that it prints; its stdin stays open, whose end would be an order."""
    assert process.stdout is not None
    assert process.stderr is not None
    printed = process.stdout.read(), process.stderr.read()
    process.wait(timeout=120)
    return printed


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], 137),
        (["/no/such/program"], 127),
        ([str(HELPER.parent)], 126),
    ],
)
def test_the_status_is_the_program_s(tmp_path: Path, argv: list[str], status: int) -> None:
    process = start(tmp_path, argv)
    _, printed = output(process)
    assert process.returncode == status, printed
    assert b"Traceback" not in printed


def test_the_program_gets_the_agent_before_its_own_path(tmp_path: Path) -> None:
    tell = "import json, os; print(json.dumps(dict(os.environ)))"
    process = start(tmp_path, [sys.executable, "-I", "-c", tell], PYTHONPATH="/mine", A="b c")
    out, _ = output(process)
    environ: dict[str, Any] = json.loads(out)
    assert environ["PYTHONPATH"] == f"{tmp_path}/agent/inject:/mine"
    assert environ["CLUSTERPROF_PLAN"] == f"{tmp_path}/plan.json"
    assert environ["A"] == "b c"


def until_it_says(process: subprocess.Popen[bytes], word: bytes) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(word), line
    return line


#: Says ready, and on TERM that it was told; a child of its own runs on in another session.
STUBBORN = """
import os, signal, subprocess, sys, time
def told(number, frame):
    print("told", number, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, told)
child = subprocess.Popen(["sleep", "97"], start_new_session=True)
print("ready", child.pid, flush=True)
time.sleep(90)
"""


def gone(pid: int) -> bool:
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", ["order", "end of input", "signal"])
def test_told_to_end_it_ends_the_program_with_its_own_status_and_its_orphans(
    tmp_path: Path, how: str
) -> None:
    process = start(tmp_path, [sys.executable, "-c", STUBBORN])
    orphan = int(until_it_says(process, b"ready").split()[1])
    assert process.stdin is not None
    if how == "order":
        process.stdin.write(b"TERM\n")
        process.stdin.flush()
    elif how == "end of input":
        process.stdin.close()
    else:
        os.kill(process.pid, signal.SIGTERM)
    until_it_says(process, b"told 15")
    assert process.wait(timeout=120) == 5
    assert gone(orphan)


def test_the_order_to_kill_spares_nothing(tmp_path: Path) -> None:
    deaf = "trap '' TERM INT; echo ready; sleep 96 & while :; do sleep 1; done"
    process = start(tmp_path, ["sh", "-c", deaf])
    until_it_says(process, b"ready")
    assert process.stdin is not None
    process.stdin.write(b"TERM\nKILL\n")
    process.stdin.flush()
    assert process.wait(timeout=120) == 137


def test_what_a_program_leaves_on_purpose_lives_on(tmp_path: Path) -> None:
    process = start(tmp_path, ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"])
    out, _ = output(process)
    os.kill(int(out), signal.SIGKILL)  # it is still there
    assert process.returncode == 0


def test_a_listing_has_every_finished_file_and_its_checksum(tmp_path: Path) -> None:
    rank = tmp_path / "ranks" / "00003"
    rank.mkdir(parents=True)
    (rank / "report.nsys-rep").write_bytes(b"abc")
    (rank / "state.json").write_text('{"state": "captured"}')
    (rank / "steps.csv.77.tmp").write_text("half")
    (rank / "link").symlink_to("/etc/passwd")
    found = {entry["path"]: entry for entry in host.listing(str(tmp_path), 0)}
    assert set(found) == {"00003/report.nsys-rep", "00003/state.json"}
    assert found["00003/report.nsys-rep"]["size"] == 3
    assert found["00003/report.nsys-rep"]["sha256"].startswith("ba7816bf8f01cfea")


def test_killed_itself_it_takes_the_program_along_and_the_next_knows(tmp_path: Path) -> None:
    assert not host.still_running(str(tmp_path), 0)
    process = start(tmp_path, ["sh", "-c", "echo ready $$; exec sleep 95"])
    program = int(until_it_says(process, b"ready").split()[1])
    assert host.still_running(str(tmp_path), 0.2)
    process.kill()  # it cannot say goodbye
    process.wait()
    assert gone(program)
    assert not host.still_running(str(tmp_path), 0.2)


def test_only_a_folder_of_ours_is_ever_removed(tmp_path: Path) -> None:
    ours, other = tmp_path / "clusterprof-0123", tmp_path / "data"
    link = tmp_path / "clusterprof-link"
    for folder in (ours, other):
        folder.mkdir()
    link.symlink_to(other)
    for folder in (ours, other, link):
        host.remove(str(folder))
    assert (ours.exists(), other.exists()) == (False, True)
