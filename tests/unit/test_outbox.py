"""What a rank hands to its writer, and what it does where no one takes it."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import tempfile
from _thread import get_native_id
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import outbox as outboxes, states
from clusterprof.agent.contracts.outbox import JSON, MOST_B, Outbox, framed, frames
from clusterprof.agent.rank import profilers

Written = Callable[[], None]


def unread(clock: ManualClock) -> tuple[Outbox, socket.socket]:
    """An outbox whose writer is stopped: it reads nothing."""
    ours, theirs = socket.socketpair()
    return Outbox(ours, clock), theirs


def test_a_writer_that_does_not_read_is_never_waited_for_and_takes_bounded_memory(
    clock: ManualClock,
) -> None:
    outbox, theirs = unread(clock)
    steps, began = [(i, i + 1) for i in range(20_000)], clock.now()
    for number in range(200):
        outbox.steps(number * len(steps), steps)
        outbox.look()
    assert clock.now() == began
    assert len(outbox.waiting) < MOST_B + 16 * len(steps) + 100
    theirs.close()


@pytest.mark.parametrize(
    ("answers_at", "ends_at"),
    [
        ([], outboxes.QUIET_S),
        ([3.0], 3.0 + outboxes.QUIET_S),
        ([3.0, 6.0], outboxes.FINISH_S),
        ([each / 2 for each in range(100)], outboxes.FINISH_S),
    ],
    ids=["is silent", "falls silent", "falls silent late", "is never done"],
)
def test_a_rank_waits_at_its_end_as_long_as_its_writer_gets_on_but_not_for_ever(
    clock: ManualClock, answers_at: list[float], ends_at: float
) -> None:
    outbox, theirs = unread(clock)
    for at in answers_at:
        body = json.dumps({"packed": at}).encode()
        clock.plan(at, partial(theirs.sendall, framed(JSON, body)))
    began = clock.now()
    outbox.finish()
    assert clock.now() - began == pytest.approx(ends_at)
    assert outbox.connection is None
    theirs.close()


def test_a_writer_takes_what_another_waits_for_within_a_second_or_does_not(
    clock: ManualClock,
) -> None:
    outbox, theirs = unread(clock)
    outbox.steps(0, [(i, i + 1) for i in range(200_000)])
    assert outbox.waiting
    began = clock.now()
    outbox.hand_over()
    assert clock.now() - began == pytest.approx(outboxes.TAKE_S)
    theirs.close()


def test_a_writer_that_is_gone_costs_nothing_more(clock: ManualClock) -> None:
    outbox, theirs = unread(clock)
    theirs.close()
    outbox.state("counting")
    assert outbox.look() == {}
    assert outbox.connection is None
    outbox.steps(0, [(1, 2)])
    outbox.finish()
    assert not outbox.waiting


def test_messages_in_pieces_are_put_together() -> None:
    whole = framed(JSON, b"abc") + framed(b"S", b"") + framed(JSON, b"de")
    buffer, found = bytearray(), []
    for place in range(len(whole)):
        buffer += whole[place : place + 1]
        found += frames(buffer)
    assert found == [(JSON, b"abc"), (b"S", b""), (JSON, b"de")]
    assert not buffer


def test_a_child_of_the_rank_says_nothing(outbox: Outbox, rank_folder: Path) -> None:
    outbox.pid = os.getpid() + 1
    outbox.state("lost", "said by a child")
    assert not outbox.waiting
    outbox.pid = os.getpid()
    outbox.wait("finished", 0.01)
    assert states.read(str(rank_folder)) == {}


def test_a_guard_and_its_program_write_in_the_order_in_which_they_speak(
    outbox: Outbox, rank_folder: Path, written: Written
) -> None:
    outbox.state("armed")
    connection = outbox.share()
    assert connection is not None
    program = Outbox(connection, outbox.clock)
    for state in ("waiting", "capturing", "finishing"):
        program.state(state)
    program.say("finish")
    assert program.wait("finished", 1.0)
    outbox.state("captured")
    written()
    program.close()
    history = [state for state, _ in states.read(str(rank_folder))["history"]]
    assert history == ["armed", "waiting", "capturing", "finishing", "captured"]


def test_a_trace_is_packed_and_taken_home_and_nothing_stays_on_the_node(
    outbox: Outbox, rank_folder: Path, written: Written
) -> None:
    outbox.say("folder")
    folder = Path(outbox.wait("folder", 1.0))
    (folder / "trace.json").write_text('{"traceEvents": []}')
    outbox.state("finishing")
    outbox.say("trace", path=str(folder / "trace.json"), facts={})
    written()
    assert gzip.decompress((rank_folder / "trace.json.gz").read_bytes()) == b'{"traceEvents": []}'
    assert states.read(str(rank_folder))["state"] == "captured"
    assert not folder.exists()


def test_why_no_folder_for_a_trace_can_be_made_is_the_reason(
    outbox: Outbox, rank_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(prefix: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/node")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    profiler = profilers.TorchProfiler(outbox, alone=True)
    profiler.thread = get_native_id()
    outbox.say("folder")
    with pytest.raises(RuntimeError, match="No space left on device: '/node'"):
        profiler.save()


def closed(
    clock: ManualClock, answers: dict[str, float], closes_s: float = 0
) -> tuple[list[str], float]:
    """Where a window's trace was written that closes in so many seconds, whose writer gives these
    answers so many seconds later each; and how long the training waited. Raises RuntimeError.
    """
    outbox, theirs = unread(clock)
    clock.sleep(closes_s)
    profiler = profilers.TorchProfiler(outbox, alone=True)
    paths: list[str] = []
    profiler.thread = get_native_id()
    profiler.profile = SimpleNamespace(export_chrome_trace=paths.append)
    for name, at in answers.items():
        body = json.dumps({name: "/node"}).encode()
        clock.plan(at, partial(theirs.sendall, framed(JSON, body)))
    began = clock.now()
    with closing(theirs):
        profiler.save()
    return paths, clock.now() - began


def test_a_writer_that_begins_late_is_waited_for_and_its_folder_a_second_from_then(
    clock: ManualClock,
) -> None:
    assert closed(clock, {"begun": 0, "folder": 0.5}) == (["/node/trace.json"], 0.5)
    paths, waited_s = closed(clock, {"begun": 29.5, "folder": 30.25})
    assert (paths, waited_s) == (["/node/trace.json"], pytest.approx(30.25))


@pytest.mark.parametrize(
    ("closes_s", "answers", "waited_s", "what"),
    [
        (0, {"begun": 5}, 6, "/node's disk"),
        (0, {}, profilers.BEGIN_S, "what writes"),
        (25, {}, profilers.BEGIN_S - 25, "what writes"),
        (600, {}, profilers.FOLDER_S, "what writes"),
    ],
)
def test_what_does_not_answer_is_named_and_waited_for_no_longer(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, closes_s: float,
    answers: dict[str, float], waited_s: float, what: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("TMPDIR", "/node's disk")
    began = clock.now()
    with pytest.raises(RuntimeError, match=f"{what}.* does not answer"):
        closed(clock, answers, closes_s)
    assert clock.now() - began == pytest.approx(closes_s + waited_s)


def test_a_trace_that_cannot_be_taken_home_is_lost_with_the_reason(
    outbox: Outbox, rank_folder: Path, written: Written
) -> None:
    outbox.state("finishing")
    outbox.say("trace", path=str(rank_folder / "none"), facts={})
    written()
    found = states.read(str(rank_folder))
    assert (found["state"], os.strerror(errno.ENOENT) in found["reason"]) == ("lost", True)


def test_a_run_directory_that_cannot_be_written_is_said_once(
    outbox: Outbox, written: Written, capfd: pytest.CaptureFixture[str]
) -> None:
    outbox.say(
        "begin",
        run="/proc/none",
        folder="/proc/none/ranks/00003",
        window=[1, 2],
        wall_ns=0,
        log_s=0,
    )
    outbox.state("counting")
    written()
    printed = capfd.readouterr().err
    assert printed.startswith("clusterprof: ")
    assert "/proc/none" in printed
    assert len(printed.splitlines()) == 1


def test_a_descriptor_that_has_become_the_program_s_is_left_alone(
    clock: ManualClock, tmp_path: Path
) -> None:
    outbox, theirs = unread(clock)
    assert outbox.connection is not None
    number = outbox.connection.fileno()
    mine = os.open(tmp_path / "metrics", os.O_CREAT | os.O_RDWR)
    os.dup2(mine, number)  # as after a program has closed all it knows nothing of
    outbox.state("counting")
    outbox.steps(0, [(1, 2)])
    outbox.finish()
    assert outbox.connection is None
    os.write(number, b"the program's")
    assert (tmp_path / "metrics").read_bytes() == b"the program's"
    for each in (mine, number):
        os.close(each)
    theirs.close()


def test_a_trace_beside_nsys_that_cannot_be_written_loses_no_report_of_nsys(
    outbox: Outbox, written: Callable[[], None], rank_folder: Path
) -> None:
    outbox.state("finishing")
    outbox.say("trace", path=str(rank_folder / "none"), facts=None)
    written()
    state = states.read(str(rank_folder))
    assert state["state"] == "finishing"
    assert state["reason"].startswith("torch's trace could not be written")
