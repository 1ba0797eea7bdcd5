"""Each wait of ours that has an end: just before it is waited still, after it not, and why is said.

Those of a guard are in `test_guard_deadlines`, of an outbox in `test_outbox`.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lab.clock import ManualClock

from clusterprof import run_directory
from clusterprof.agent.contracts import clocks, processes, states
from clusterprof.agent.contracts.identity import PLAN
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import Reduction
from clusterprof.agent.guard import session, writer
from clusterprof.agent.guard.report_transfer import Reducing, ReportTransfer
from clusterprof.agent.remote import prober
from clusterprof.launch import job_processes, over_hosts, run_job
from clusterprof.launch.job_processes import Foreground, Witness

ROOT = Path(__file__).resolve().parents[2]
#: the clock itself, and what is piped to another host's Python, alone
_OF_THEIR_OWN = ("timing.py", "host.py")


# --- the rule


def calls(path: Path) -> set[str]:
    """The functions of modules that a file names: `time.sleep`."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def test_nothing_of_ours_waits_but_by_a_clock_that_it_was_given() -> None:
    waiting = {"time.sleep", "select.select", "select.poll"}
    files = [
        path
        for folder in ("clusterprof", "launchers")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in _OF_THEIR_OWN
    ]
    assert len(files) > 100
    assert [path.name for path in files if waiting & calls(path)] == []


def test_no_unit_test_sets_a_deadline_or_a_function_of_time() -> None:
    setting = re.compile(r"setattr\([^,()]+,\s*\"(?:time|\w+_N?S|sleep|monotonic\w*|time_ns)\"")
    setters = {
        path.name: setting.findall(path.read_text(encoding="utf-8"))
        for path in Path(__file__).parent.glob("test_*.py")
    }
    assert {name: found for name, found in setters.items() if found} == {}


# --- the clock


def test_a_condition_is_asked_until_it_holds_or_the_time_is_over(clock: ManualClock) -> None:
    began, asked = clock.now(), []
    assert not clock.until(lambda: asked.append(round(clock.now() - began, 3)), 0.05, 0.02)
    assert asked == [0, 0.02, 0.04, 0.05]
    clock.plan(0.05, lambda: asked.append("there"))
    assert clock.until(lambda: "there" in asked, 0.05, 0.02)


# --- the agent


def test_a_start_of_nsys_waits_for_the_node_s_others_and_not_for_ever(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    began = clock.now()
    with session.one_at_a_time(clock):
        clock.sleep(session.START_GAP_S)
    assert clock.now() - began == pytest.approx(session.START_GAP_S)
    held = os.open(tmp_path / f"clusterprof-{os.getuid()}.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    began = clock.now()
    with session.one_at_a_time(clock):
        assert clock.now() - began == pytest.approx(session.LOCK_S)
    clock.plan(session.LOCK_S - 1, lambda: os.close(held))
    began = clock.now()
    with session.one_at_a_time(clock):
        assert clock.now() - began == pytest.approx(session.LOCK_S - 1, abs=0.03)


def test_a_file_system_that_takes_a_report_too_slowly_is_given_up_at_the_deadline(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, folder = tmp_path / "private", tmp_path / "run/ranks/00000"
    private.mkdir()
    folder.parent.mkdir(parents=True)
    (private / "report.nsys-rep").write_bytes(bytes(3 << 23))
    home = ReportTransfer(str(private), str(folder), clock=clock)
    home.got_on = lambda: clock.sleep(1)  # for each piece
    home.settle(0, 4.0, opened=True)
    assert states.read(str(folder))["state"] == "captured"
    (private / "nsys").mkdir(parents=True)
    (private / "report.nsys-rep").write_bytes(bytes(3 << 23))
    slow = ReportTransfer(str(private), str(folder.with_name("00001")), clock=clock)
    slow.got_on = lambda: clock.sleep(1)
    began = clock.now()
    slow.settle(0, 2.0, opened=True)
    found = states.read(str(folder.with_name("00001")))
    assert (found["state"], "took too long" in found["reason"]) == ("lost", True)
    assert clock.now() - began <= 2 + 2


class Child:
    """A process that runs until it is killed."""

    pid = 1 << 24

    def __init__(self, clock: ManualClock, lasts_s: float) -> None:
        self.ended = False
        clock.plan(lasts_s, self.end)

    def end(self) -> None:
        self.ended = True

    def poll(self) -> int | None:
        return 0 if self.ended else None


@pytest.mark.parametrize(("lasts_s", "why"), [(9.9, ""), (10.1, "it did not end in time")])
def test_the_tables_of_a_report_are_waited_for_as_long_as_the_rank_may_wait(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, lasts_s: float, why: str
) -> None:
    monkeypatch.setattr(processes, "end_group", lambda child: child.end())
    reducing = Reducing(Reduction("node", "gather", ("python",)), clock=clock)
    reducing.child = cast("Any", Child(clock, lasts_s))
    began, looks = clock.now(), []
    assert reducing.wait(10, lambda: looks.append(clock.now())) == why
    assert clock.now() - began == pytest.approx(min(lasts_s, 10), abs=0.06)
    assert len(looks) > 100
    assert reducing.child.poll() == 0


def test_a_writer_whose_guard_was_killed_waits_for_nsys_and_not_for_ever(
    clock: ManualClock, outbox: Outbox, rank_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "of_session", lambda name, children=False: [Child.pid])
    ended: list[float] = []
    monkeypatch.setattr(processes, "end_own_nsys", lambda session, clock: ended.append(clock.now()))
    private = rank_folder.parents[2] / "private"
    private.mkdir()
    outbox.state("capturing")
    outbox.say("keep", private=str(private), session="clusterprof-of-no-rank", importer=None)
    clock.sleep(0)
    (beside,) = (act.__self__ for act in clock.beside)
    began = clock.now()
    beside.writer.take_over()
    assert ended[0] - began == pytest.approx(writer.WRITING_S)
    assert states.read(str(rank_folder))["state"] == "lost"


@pytest.mark.parametrize(
    ("happens", "lasts_s"), [("close", prober.GRACE_S), ("rank ends", prober.QUIET_S)]
)
def test_the_reference_rank_s_prober_answers_for_a_while_after_its_window_or_its_rank(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: str,
    lasts_s: float,
) -> None:  # fmt: skip
    name = f"clusterprof-{tmp_path}"[-90:]
    monkeypatch.setenv(PLAN, f"/nowhere/plan.json;probe={name.replace('/', '%2F')}")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    owner, rank = os.pipe()
    act = partial(clocks.notify_prober, "close") if happens == "close" else partial(os.close, rank)
    clock.plan(1000, act)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pipe.bind(f"\0{name}")
        made = prober.Prober(pipe, str(tmp_path), 0, 0, owner, clock)
        began = clock.now()
        made.answer()
        assert clock.now() - began == pytest.approx(1000 + lasts_s)
    os.close(owner)


def test_with_looks_the_reference_rank_s_prober_answers_until_its_rank_ends(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"clusterprof-{tmp_path}"[-90:]
    monkeypatch.setenv(PLAN, f"/nowhere/plan.json;probe={name.replace('/', '%2F')}")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    owner, rank = os.pipe()
    clock.plan(10, partial(clocks.notify_prober, "close"))
    for look in range(2):
        clock.plan(600 * (look + 1), partial(clocks.notify_prober, clocks.LOOK))
    clock.plan(10_000, partial(os.close, rank))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pipe:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pipe.bind(f"\0{name}")
        began = clock.now()
        prober.Prober(pipe, str(tmp_path), 0, 0, owner, clock, watched=True).answer()
        assert clock.now() - began == pytest.approx(10_000 + prober.QUIET_S)
    os.close(owner)
    written = json.loads((tmp_path / "ranks" / "00000" / "probe.json").read_text())
    assert [reading["event"] for reading in written["readings"]] == ["look", "look"]


# --- the launching host


class Aparts:
    """Stands for `Apart`: the first is the task, those after it ask the file systems."""

    def __init__(self, clock: ManualClock, task_s: float, ask_s: float) -> None:
        self.clock, self.lasts_s = clock, [task_s, ask_s]
        self.made = 0

    def __call__(self, task: Callable[[], int], clock: ManualClock) -> Any:
        ends_at = clock.now() + self.lasts_s[min(self.made, 1)]
        self.made += 1

        def ends_within(seconds: float) -> bool:
            return clock.until(lambda: clock.now() >= ends_at, seconds, 0.01)

        return SimpleNamespace(ends_within=ends_within, status=7)


@pytest.mark.parametrize(
    ("task_s", "ask_s", "status", "ended_s"),
    [
        (0.5, 0.0, 7, 0.5),
        (60.0, 0.0, 7, 60.0),
        (60.0, job_processes.STALLED_S - 0.1, 7, 60.0),
        (60.0, 1e9, None, job_processes.ASK_S + job_processes.STALLED_S),
        (5.0, 1e9, 7, 5.0),
    ],
    ids=["quick", "long", "slow disk", "stalled disk", "done beside a stalled disk"],
)
def test_a_task_is_given_up_where_its_file_system_stalls_and_never_for_its_length(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_s: float,
    ask_s: float, status: int | None, ended_s: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(job_processes, "Apart", Aparts(clock, task_s, ask_s))
    began = clock.now()
    assert job_processes.unless_stalled(lambda: 7, tmp_path, clock) == status
    assert clock.now() - began == pytest.approx(ended_s, abs=0.2)


@pytest.fixture
def run(tmp_path: Path) -> run_directory.Window:
    """A run whose rank 0 is inside its window."""
    made = run_directory.create(tmp_path / "run")
    states.advance(str(made.rank(0)), "capturing", chosen=True)
    return made


def test_a_signal_waits_for_reports_no_longer_than_it_may(
    run: run_directory.Window, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_job.BeforeSrunKills(run, [0], longer_s=4, clock=clock)
    began = clock.now()
    assert before(signal.SIGTERM, lambda: clock.sleep(0.1) or False) == [signal.SIGTERM]
    assert clock.now() - began == pytest.approx(run_job.SAVING_S + 4, abs=0.11)
    assert "saving 1 report, at most 10 s" in capsys.readouterr().err


@pytest.mark.parametrize(("apart_s", "kills"), [(0.9, True), (1.0, False)])
def test_two_interrupts_kill_where_they_come_within_a_second(
    run: run_directory.Window, clock: ManualClock, apart_s: float, kills: bool
) -> None:
    before = run_job.BeforeSrunKills(run, [0], clock=clock)
    before(signal.SIGINT, lambda: True)
    clock.sleep(apart_s)
    assert len(before(signal.SIGINT, lambda: True)) == (2 if kills else 1)


@pytest.mark.parametrize(("margin_s", "closed_at"), [(None, 540.0), (100.0, 500.0)])
def test_the_windows_are_closed_before_the_time_limit(
    run: run_directory.Window, clock: ManualClock, monkeypatch: pytest.MonkeyPatch,
    margin_s: float | None, closed_at: float,
) -> None:  # fmt: skip
    began = clock.now()
    monkeypatch.setattr(run_job, "slurm_job", lambda run, expected: "1")
    monkeypatch.setattr(run_job, "time_left", lambda job: (began + 600 - clock.now(), 600.0))
    run_job.close_before_limit(run, [0], margin_s, clock)
    assert clock.now() - began == pytest.approx(closed_at, abs=1.0)
    assert states.stop_requested(str(run.path)) == "the job's time limit is near"


class Deaf:
    """A host's command that hears its signals and does not end."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.received: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.received.append(data)

    def wait(self, seconds: float) -> bool:
        self.clock.sleep(seconds)
        return False

    def close(self) -> None:
        self.received.append(b"closed")


def test_a_host_that_does_not_end_its_job_is_given_up_after_the_second_signal(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimpleNamespace(status=None, reason="", command=Deaf(clock))
    monkeypatch.setattr(over_hosts, "start", lambda *_: None)
    running = over_hosts.Running(cast("Any", [host]), clock)
    clock.plan(100, lambda: running.signals.append("INT"))
    clock.plan(200, lambda: running.signals.append("INT"))
    began = clock.now()
    assert running.run(cast("Any", SimpleNamespace(commands=[()])), cast("Any", None)) == 255
    assert clock.now() - began == pytest.approx(200 + over_hosts.KILLED_S, abs=1.1)
    assert host.command.received == [b"INT\n", b"KILL\n", b"closed"]
    assert host.reason == "it did not end when asked to"


def witness(clock: ManualClock) -> tuple[Witness, int]:
    """A witness that another process would be, and where it would report from."""
    reader, reporter = os.pipe()
    made = Witness.__new__(Witness)
    made._clock, made._received_at = clock, {}
    pipe = os.fdopen(reader, "rb", buffering=0)
    made._process = cast("Any", SimpleNamespace(stdout=pipe, pid=os.getpid()))
    return made, reporter


@pytest.mark.parametrize(("after_s", "group"), [(0.0, True), (0.19, True), (0.21, False)])
def test_a_signal_is_the_group_s_where_the_witness_has_it_within_a_moment(
    clock: ManualClock, after_s: float, group: bool
) -> None:
    made, reporter = witness(clock)
    clock.plan(after_s, lambda: os.write(reporter, bytes([signal.SIGTERM])))
    began = clock.now()
    assert made.received(signal.SIGTERM) == group
    assert clock.now() - began == pytest.approx(min(after_s, Witness.WITHIN_S), abs=0.001)
    os.close(reporter)


@pytest.mark.parametrize(("later_s", "one"), [(0.4, True), (0.6, False)])
def test_a_second_signal_within_half_a_second_is_the_first_one_again(
    clock: ManualClock, later_s: float, one: bool
) -> None:
    made, reporter = witness(clock)
    os.write(reporter, bytes([signal.SIGTERM]))
    assert made.received(signal.SIGTERM)
    clock.sleep(later_s)
    assert made.received(signal.SIGTERM) == one
    os.close(reporter)


def test_two_signals_of_one_kind_are_handed_on_one_after_the_other(clock: ManualClock) -> None:
    sent: list[tuple[float, int]] = []
    began = clock.now()
    twice = Foreground(["true"], {}, lambda number, enough: [number, number], clock)
    job = SimpleNamespace(send_signal=lambda number: sent.append((clock.now() - began, number)))
    twice._hand_on(signal.SIGINT, cast("Any", job))
    assert [number for _, number in sent] == [signal.SIGINT] * 2
    assert [at for at, _ in sent] == pytest.approx([0, 0.1])
    assert twice.end_signals == [signal.SIGINT]


@pytest.mark.parametrize("lasts_s", [writer.LINGER_S - 1, 1e9])
def test_a_writer_that_a_file_system_holds_outlives_its_rank_by_minutes(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, lasts_s: float
) -> None:
    ours, theirs = socket.socketpair()
    made = writer.Writer(theirs, os.getpid(), clock)
    monkeypatch.setattr(made, "work", lambda jobs: None)  # it is held by its first job
    clock.plan(lasts_s, lambda: setattr(made.jobs, "unfinished_tasks", 0))
    ours.close()
    began = clock.now()
    made.serve()
    assert clock.now() - began == pytest.approx(min(lasts_s, writer.LINGER_S), abs=0.1)


@pytest.mark.parametrize(
    ("status", "finished", "noted"),
    [
        (137, False, {"ended_ns": 7, "program_status": 137}),
        (3, True, {"ended_ns": 7, "program_status": 3}),
        (0, True, {}),
        (processes.GONE, False, {"ended_ns": 7}),
        (processes.GONE, True, {}),
        (None, True, {}),
    ],
)
def test_a_writer_notes_how_its_rank_ended_as_far_as_that_is_known(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    status: int | None, finished: bool, noted: dict[str, int],
) -> None:  # fmt: skip
    made = writer.Writer(socket.socketpair()[1], os.getpid(), clock)
    made.folder, made.has_finished = str(tmp_path / "run/ranks/00000"), finished
    (tmp_path / "run").mkdir()
    states.advance(made.folder, "counted")
    monkeypatch.setattr(processes, "last_status", lambda pid: status)
    began = clock.now()
    made.note_end(7)
    found = states.read(made.folder)
    assert {name: found[name] for name in ("ended_ns", "program_status") if name in found} == noted
    assert clock.now() - began == pytest.approx(writer.ENDING_S if status is None else 0, abs=0.1)
    # what the rank itself has said of its end stays
    states.advance(made.folder, None, ended_ns=5)
    made.note_end(7)
    assert states.read(made.folder)["ended_ns"] == 5


def test_a_guard_s_writer_leaves_it_to_the_guard_to_say_how_the_program_ended(
    tmp_path: Path,
) -> None:
    made = writer.Writer(socket.socketpair()[1], os.getpid())
    made.do_guard(next(iter(made.peers.values())), str(tmp_path), str(tmp_path / "ranks/00000"))
    made.note_end(7)
    assert not (tmp_path / "ranks").exists()


def test_who_waits_for_a_thread_that_never_ends_goes_on(clock: ManualClock) -> None:
    began = clock.now()
    assert not clock.happens(threading.Event(), 3)
    assert clock.now() - began == pytest.approx(3)
