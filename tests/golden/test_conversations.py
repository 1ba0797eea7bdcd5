"""What ranks, writers, guards and trampolines say to each other, by recordings of real runs."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from clusterprof import run_directory
from clusterprof.agent.contracts import processes
from golden import nsys_of_a_recording
from golden.plans import planned
from golden.record import RECORDED
from golden.replay import PATIENCE_S, WriterReplay, answers_text, end_group, files_text
from golden.store import Golden, difference, stored

WRITERS = sorted(file.stem for file in RECORDED.glob("*-writer-*.jsonl"))
GUARDS = sorted(file.stem for file in RECORDED.glob("*-guard-*.jsonl"))


def recording(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_answers_and_writes_what_it_did(name: str, golden: Golden, tmp_path: Path) -> None:
    entries = recording(name)
    replay = WriterReplay(tmp_path)
    try:
        text = replay.play(entries)
    finally:
        replay.close()
    given: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        if "answer" in entry:
            given.setdefault(entry["peer"], []).append(entry["answer"])
    assert not (changed := difference(answers_text(given), replay.answered())), changed
    golden(f"conversations/{name}", text)


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_answers_what_it_did_and_ends_as_the_program(
    name: str, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys, replies = tmp_path / "nsys", tmp_path / "replies"
    nsys.write_text(nsys_of_a_recording.SCRIPT.format(
        python=shlex.quote(sys.executable), file=shlex.quote(nsys_of_a_recording.__file__),
        recording=shlex.quote(str(RECORDED / f"{name}.jsonl")), replies=shlex.quote(str(replies)),
    ))  # fmt: skip
    nsys.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERPROF_NSYS_START_S", "60")
    line = f"run --ranks 0 --profiler nsys --nsys {nsys} --steps 3:6 --run-dir run -- train.py"
    _, (plan,) = planned(line.split())
    run = run_directory.create(plan.run)
    run.write_plan(plan.for_agent)
    guard = subprocess.Popen(
        [*processes.part("guard"), str(run.plan), "0", "train.py"], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = guard.communicate(timeout=PATIENCE_S)
    finally:
        end_group(guard)
    before = (RECORDED / f"{name}.jsonl").read_text()
    assert not (changed := difference(before, replies.read_text())), changed
    left = files_text(run.path, {"{TMP}": str(tmp_path)})
    golden(f"conversations/{name}", f"status {guard.returncode}\n{printed.decode()}{left}")


@pytest.mark.parametrize("name", GUARDS)
def test_a_trampoline_asks_what_it_did_and_ends_as_the_program(name: str, tmp_path: Path) -> None:
    requests = [entry["request"] for entry in recording(name) if "request" in entry]
    trampolines = [each for each in requests if each.split()[0] in ("hello", "pid", "ended")]
    status = trampolines[-1].split()[1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
        guard.bind(str(tmp_path / "socket"))
        guard.listen()
        guard.settimeout(PATIENCE_S)
        program = ["sh", "-c", f"exit {status}"]
        trampoline = subprocess.Popen(
            [*processes.part("trampoline"), guard.getsockname(), "0o22", "TMPDIR", *program],
            start_new_session=True,
        )
        try:
            asked = asked_of(guard)
            assert trampoline.wait(PATIENCE_S) == int(status)
        finally:
            end_group(trampoline)
    assert asked == trampolines


def asked_of(guard: socket.socket) -> list[str]:
    """What a trampoline asks of a guard that has the three streams for its program."""
    asked = []
    for _ in range(2):
        connection, _ = guard.accept()
        with connection:
            asked.append(without_ids(connection.recv(64)))
            if asked[-1].startswith("hello "):
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 1, 2]))]
                connection.sendmsg([b"0,1,2\n"], beside)
                connection.sendall(b"ok\n")
                asked.append(without_ids(connection.recv(64)))
    return asked


def without_ids(request: bytes) -> str:
    word, value = request.decode().split()
    return f"{word} {value if word == 'ended' else 'PID'}"


def test_what_is_stored_of_conversations_belongs_to_a_case() -> None:
    assert stored("conversations") == {f"conversations/{name}" for name in [*WRITERS, *GUARDS]}
