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
from clusterprof.run_directory import Window
from golden import nsys_of_a_recording
from golden.plans import planned
from golden.program import Program, environment_of_a_rank, without_times
from golden.record import RECORDED
from golden.replay import PATIENCE_S, WriterReplay, answers_text, end_group, files_text, repeats
from golden.store import Golden, check_same, stored

WRITERS = sorted(file.stem for file in RECORDED.glob("*-writer-*.jsonl"))
#: requests that are not the program's own
TRAMPOLINES = ("hello PID", "pid PID", "ended 3")
GUARDS = sorted(file.stem for file in RECORDED.glob("*-guard-*.jsonl"))


def recording(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def fake_nsys(folder: Path, name: str) -> Path:
    """An nsys whose program asks its guard what a recording has, and keeps the replies."""
    nsys = folder / "nsys"
    nsys.write_text(nsys_of_a_recording.SCRIPT.format(
        python=shlex.quote(sys.executable), file=shlex.quote(nsys_of_a_recording.__file__),
        recording=shlex.quote(str(RECORDED / f"{name}.jsonl")),
        replies=shlex.quote(str(folder / "replies")),
    ))  # fmt: skip
    nsys.chmod(0o755)
    return nsys


def run_of(line: str) -> Window:
    """The run directory of a command line, before anything has run."""
    _, (plan,) = planned(line.split())
    run = run_directory.create(plan.run)
    run.directory.write_plan(plan.for_agent)
    return run


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
            answers = given.setdefault(entry["peer"], [])
            if not repeats(entry["answer"], answers):
                answers.append(entry["answer"])
    check_same(name, answers_text(given), replay.answered())
    golden(f"conversations/{name}", text)


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_answers_what_it_did_and_ends_as_the_program(
    name: str, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERPROF_NSYS_START_S", "60")
    nsys = fake_nsys(tmp_path, name)
    run = run_of(f"run --ranks 0 --profiler nsys --nsys {nsys} --run-dir run -- train.py")
    guard = subprocess.Popen(
        [sys.executable, "train.py"], env=environment_of_a_rank(run.directory.plan),
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = guard.communicate(timeout=PATIENCE_S)
    finally:
        end_group(guard)
    before = (RECORDED / f"{name}.jsonl").read_text()
    check_same(name, before, (tmp_path / "replies").read_text())
    left = files_text(run.path, {"{TMP}": str(tmp_path)})
    golden(f"conversations/{name}", f"status {guard.returncode}\n{printed.decode()}{left}")


def test_a_program_says_to_its_guard_and_its_writer_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, writer = recording("nsys-guard-0"), recording("nsys-writer-0")
    monkeypatch.chdir(tmp_path)
    nsys = fake_nsys(tmp_path, "nsys-guard-0")
    options = "--ranks 0 --profiler nsys --steps 3:6 --step-on loop:step --run-dir run"
    run = run_of(f"run {options} --nsys {nsys} -- train.py")
    of_program = [entry for entry in writer if entry["peer"] == 1]
    program = Program(
        tmp_path, run.directory.plan, sum(entry.get("steps", 0) for entry in of_program)
    )
    try:
        status = program.run(replies_by_request(guard))
    finally:
        program.close()
    of_guard = [request for request in replies_by_request(guard) if request not in TRAMPOLINES]
    check_same("nsys-guard-0", "\n".join(of_guard), "\n".join(dict.fromkeys(program.requests)))
    messages = program.messages(run.path)
    check_same("nsys-writer-0", without_times(of_program), messages)
    assert status == 3


def replies_by_request(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Each request with the last line of its reply."""
    replies: dict[str, str] = {}
    for entry in entries:
        if "request" in entry:
            request = entry["request"]
            replies[request] = ""
        else:
            replies[request] = entry["reply"]
    return replies


@pytest.mark.parametrize("name", GUARDS)
def test_a_trampoline_asks_what_it_did_and_ends_as_the_program(name: str, tmp_path: Path) -> None:
    status = TRAMPOLINES[-1].split()[1]
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
            requests = requests_of_a_trampoline(guard)
            assert trampoline.wait(PATIENCE_S) == int(status)
        finally:
            end_group(trampoline)
    recorded = replies_by_request(recording(name))
    of_trampolines = [request for request in recorded if request in TRAMPOLINES]
    check_same(name, "\n".join(of_trampolines), "\n".join(requests))


def requests_of_a_trampoline(guard: socket.socket) -> list[str]:
    """What a trampoline asks of a guard that has the three streams for its program."""
    requests = []
    for _ in range(2):
        connection, _ = guard.accept()
        with connection:
            requests.append(without_ids(connection.recv(64)))
            if requests[-1].startswith("hello "):
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 1, 2]))]
                connection.sendmsg([b"0,1,2\n"], beside)
                connection.sendall(b"ok\n")
                requests.append(without_ids(connection.recv(64)))
    return requests


def without_ids(request: bytes) -> str:
    word, value = request.decode().split()
    return f"{word} {value if word == 'ended' else 'PID'}"


def test_what_is_stored_of_conversations_belongs_to_a_case() -> None:
    assert stored("conversations") == {f"conversations/{name}" for name in [*WRITERS, *GUARDS]}
