"""When a rank's step hangs, by the steps that ended; and what the rank hands over then."""

from __future__ import annotations

import gzip
import itertools
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lab.clock
import pytest
from lab.clock import ManualClock, WriterBeside
from lab.command import PATIENCE_S

from clusterprof import run_directory
from clusterprof.agent.contracts import paths, states
from clusterprof.agent.contracts.messages import users_line
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.agent.contracts.timing import REAL
from clusterprof.agent.guard.step_log import TIMES, Hangs
from clusterprof.agent.rank import hanging
from clusterprof.agent.rank.hanging import Hanging
from clusterprof.agent.rank.recorder import Recorder
from clusterprof.agent.rank.steps import Counter
from clusterprof.ingest.flight.all_dumps import find_dumps
from clusterprof.launch import watch
from clusterprof.run_directory import Window

S = 1_000_000_000
DUMP = b'{"entries": []}'


def steps(*lasting_s: float) -> tuple[list[tuple[int, int]], float]:
    """Steps one after the other, and when the last one ended, s."""
    ends = [0]
    for each in lasting_s:
        ends.append(ends[-1] + int(each * S))
    return list(itertools.pairwise(ends)), ends[-1] / S


@pytest.mark.parametrize(
    ("lasting_s", "after_s", "at_s"),
    [
        ([0.1] * 9, 60, 60),
        ([5.0] * 9, 60, TIMES * 5),
        ([100.0, 1.0, 1.0], 5, TIMES * 1),
        ([7.0], 60, TIMES * 7),
    ],
)
def test_a_step_hangs_after_twenty_times_the_usual_and_no_earlier_than_asked(
    lasting_s: list[float], after_s: float, at_s: float
) -> None:
    hangs = Hangs()
    hangs.listen(after_s, unseen_s=2)
    ended, last_s = steps(*lasting_s)
    assert not hangs.ended(ended)
    due_s = last_s + 2 + at_s
    found = []
    for now in (last_s, last_s + after_s + 1.9, due_s - 0.1, due_s, due_s + 100):
        looked_at = hangs.look_at
        found.append(hangs.overdue(now))
        assert hangs.look_at > now or now < looked_at, "it is not looked at again and again"
    assert found == [False, False, False, True, False]
    assert hangs.ended([(int(last_s * S), int(due_s * S))])
    assert not hangs.ended([(int(due_s * S), int(due_s * S) + 1)])
    assert not hangs.overdue(due_s + 3)


def test_without_an_ended_step_or_a_listening_rank_nothing_hangs_and_is_looked_at() -> None:
    hangs = Hangs()
    hangs.listen(5, 2)
    assert not hangs.overdue(1e6)
    assert hangs.look_at == float("inf")
    unasked = Hangs()
    unasked.ended(steps(1, 1)[0])
    assert unasked.look_at == float("inf")


def test_the_line_is_the_innermost_that_the_user_wrote() -> None:
    torch = ("/v/lib/python3.11/site-packages/torch/distributed/c10d.py", 9, "all_reduce")
    ours = ("/v/clusterprof/agent/rank/hooks.py", 1, "stepping")
    python = ("/usr/lib/python3.11/queue.py", 180, "get")
    mine, other = ("/home/me/train.py", 41, "evaluate"), ("/home/me/train.py", 90, "main")
    assert users_line([ours, torch, python, mine, other]) == "/home/me/train.py:41 evaluate"
    assert users_line([python, torch]) == "/usr/lib/python3.11/queue.py:180 get"
    assert users_line([]) is None


class Hung:
    """A rank with a torch of ours that has a process group, and its writer."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock, dump: Any
    ) -> None:
        self.clock = clock
        self.run = folder / "run"
        self.rank = self.run / "ranks" / "00003"
        (self.run / "ranks").mkdir(parents=True)
        torch, dist = ModuleType("torch"), ModuleType("torch.distributed")
        core = SimpleNamespace(_dump_fr_trace_json=dump)
        vars(torch).update(
            __version__="2.13.0", _C=SimpleNamespace(_distributed_c10d=core),
            cuda=SimpleNamespace(is_initialized=lambda: False),
        )  # fmt: skip
        vars(dist).update(
            is_available=lambda: True, is_initialized=lambda: True,
            get_backend_config=lambda group: "gloo", destroy_process_group=lambda: None,
            distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_map=("one",))),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "torch.distributed", dist)
        ours, theirs = socket.socketpair()
        self.beside = WriterBeside(theirs, clock)
        self.outbox = Outbox(ours, clock)
        plan = Plan("run", Selection("", "ranks"), (50, 60), "none", hang_after=1)
        self.counter = Counter(clock)
        self.counter.begin(self.outbox)
        self.outbox.say("begin", run=str(self.run), folder=str(self.rank), window=[50, 60],
                        wall_ns=self.counter.wall(0), log_s=0)  # fmt: skip
        self.outbox.state("counting")
        recorder = Recorder(plan, self.outbox, {}, window=None, clock=False)
        self.hanging = Hanging(plan, self.outbox, recorder, self.counter)
        self.counter.attend(1, self.hanging.at)

    def answer(self) -> dict[str, Any]:
        """What this thread would answer; only the other one may send by its outbox."""
        with pytest.MonkeyPatch.context() as alone:
            alone.setattr(hanging, "hand_over", lambda source, *_: source.content())
            return self.hanging.answer()

    def state(self, until_known: bool) -> dict[str, Any]:
        """What the rank's state says of the hang, once its thread has answered."""
        self.clock.sleep(0)
        while True:
            found: dict[str, Any] = states.read(str(self.rank)).get("hangs", {})
            if found and (found["until_ns"] is not None) == until_known:
                return found
            assert REAL.wait(self.beside.connections(), PATIENCE_S), "the thread never answers"
            self.clock.sleep(0)

    def end(self) -> None:
        self.hanging.stop()
        self.outbox.finish()
        self.clock.sleep(0)
        assert not self.beside.writer.peers


@pytest.mark.parametrize("dump", [lambda **k: DUMP, lambda **k: None])
def test_a_rank_that_hangs_leaves_its_dump_and_where_it_is_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock, dump: Any
) -> None:
    rank = Hung(tmp_path, monkeypatch, clock, dump)
    known = threading.enumerate()
    for _ in range(3):
        clock.sleep(0.01)
        rank.counter.say()
    assert threading.enumerate() == known, "the program does not see ours"
    rank.counter.flush()
    since_ns = clock.wall_ns()
    clock.sleep(hanging.FLUSH_NS / 1e9 + 0.9)
    assert "hangs" not in states.read(str(rank.rank)), "a second is not over yet"
    clock.sleep(0.2)
    found = rank.state(until_known=False)
    assert found["step"] == 3
    assert found["since_ns"] == since_ns
    assert found["line"].startswith((__file__, str(lab.clock.__file__))), "where this thread waits"
    assert (found["no_dump"] is None) == bool(dump()) == (rank.rank / paths.HANG).exists()
    if dump():
        assert gzip.decompress((rank.rank / paths.HANG).read_bytes()) == DUMP
        assert find_dumps(rank.run, "hang") == [(rank.rank / paths.HANG, 3)]
        assert find_dumps(rank.run) == []
    live = watch.hang_of(Window.at(rank.run))
    assert live is not None
    assert [(each.rank, each.step) for each in live.ranks] == [(3, 3)]
    rank.counter.say()
    rank.counter.flush()
    assert rank.state(until_known=True)["until_ns"] > found["since_ns"]
    assert watch.hang_of(Window.at(rank.run)) is None
    rank.end()


def test_a_hang_names_the_errors_of_its_ranks_gpus(tmp_path: Path) -> None:
    run = run_directory.create(tmp_path / "run")
    hangs = {"step": 7, "since_ns": S, "until_ns": None, "line": None, "no_dump": "off"}
    errors = [{"xid": xid, "after_ns": S, "until_ns": 2 * S} for xid in (79, 79, 45)]
    for rank, xids in enumerate(([], errors, "many", [{"xid": None}])):
        states.advance(str(run.rank(rank)), "counting", hangs=hangs, hardware={"xids": xids})
    live = watch.hang_of(run)
    assert live is not None
    assert [line for line in live.lines() if "XID" in line] == [
        "the GPU of rank 1 reported XID 79 and 45"
    ]
    assert live.as_json()["ranks"][1]["xids"] == (79, 79, 45)


class JobEnds(Exception):
    """The job has ended, and with it who watches it."""


@pytest.mark.parametrize(
    ("looks", "printed"),
    [
        # the ranks notice it one after the other, go on one after the other, and hang again
        ([[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [], [2], [2]], [3, 1]),
        ([[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]], [2, 3]),  # one notices it much later
        ([[0], [], [0], []], []),
    ],
)
def test_a_hang_is_said_when_no_more_ranks_come_to_it_and_again_where_some_do(
    tmp_path: Path,
    clock: ManualClock,
    capsys: pytest.CaptureFixture[str],
    looks: list[list[int]],
    printed: list[int],
) -> None:
    run = run_directory.create(tmp_path / "run")

    def become(hang: list[int]) -> None:
        for rank in range(3):
            until_ns = None if rank in hang else 2 * S
            hangs = {"step": 7, "since_ns": S, "until_ns": until_ns, "line": None, "no_dump": "off"}
            states.advance(str(run.rank(rank)), "counting", hangs=hangs)

    def ends() -> None:
        raise JobEnds

    for number, hang in enumerate(looks):
        clock.plan((number + 0.5) * watch.HANG_LOOK_S, partial(become, hang))
    clock.plan((len(looks) + 0.5) * watch.HANG_LOOK_S, ends)
    with pytest.raises(JobEnds):
        watch.watch_hangs(run, clock)
    lines = [line for line in capsys.readouterr().err.splitlines() if " in step 7" in line]
    ranks = {1: "rank 2 hangs", 2: "ranks 0–1 hang", 3: "ranks 0–2 hang"}
    assert [line.partition(" in step")[0] for line in lines] == [
        f"clusterprof: {ranks[count]}" for count in printed
    ]


def test_the_thread_takes_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    blocked: list[set[Any]] = []

    def dump(**_: Any) -> bytes:
        blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        return DUMP

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    rank = Hung(tmp_path, monkeypatch, clock, dump)
    rank.counter.say()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    rank.answer()
    rank.counter.flush()
    clock.sleep(60)
    rank.state(until_known=False)
    assert blocked[0] == before
    assert {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT} <= blocked[1]
    rank.end()


def test_nothing_is_dumped_while_process_groups_are_destroyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    rank = Hung(tmp_path, monkeypatch, clock, lambda **k: DUMP)
    rank.counter.say()
    answers = []
    dist = sys.modules["torch.distributed"]
    rank.hanging.destroy()
    answers.append(rank.answer()["no_dump"])
    rank.hanging.destroyed()
    answers.append(rank.answer()["no_dump"])
    dist.destroy_process_group()
    answers.append(rank.answer()["no_dump"])
    assert [each is None for each in answers] == [False, True, True]
    rank.end()
