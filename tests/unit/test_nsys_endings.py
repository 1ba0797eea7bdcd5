"""After the program's end: whether nsys still makes the report, or hangs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import NsysPlan, Plan, Selection
from clusterprof.agent.guard import becoming, guard, report_transfer, session

#: of each look, a second apart: by process its state and CPU ticks, and the bytes of the files
Look = tuple[dict[int, tuple[str, int]], int]


def made_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start_s: int = 6
) -> session.Session:
    monkeypatch.setattr(session.profiler.tempfile, "gettempdir", lambda: str(folder))
    nsys = NsysPlan("nsys", "2022.4", None, {"cpu": "", "gpu": ""}, [], [], [], [], start_s)
    home = report_transfer.ReportTransfer(str(folder), str(folder / "rank"))
    return session.Session(
        "clusterprof-of-no-rank", nsys, "session", home, 0, Outbox(None), ManualClock()
    )


def hangs_at(
    looks: Iterable[Look], folder: Path, monkeypatch: pytest.MonkeyPatch, start_s: int = 6
) -> int | None:
    """The number of the first look that finds nsys hanging; None for none."""
    made = made_session(folder, monkeypatch, start_s)
    clock = made.clock
    for second, (works, written) in enumerate(looks):
        monkeypatch.setattr(session.processes, "work", lambda pid, now=works: now[pid])
        monkeypatch.setattr(made.files, "written", lambda now=written: now)
        if made.hangs(list(works)):
            return second
        clock.sleep(1)
    return None


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        pytest.param([({1: ("S", 500)}, 7)] * 9, 4, id="waits"),
        pytest.param([({1: ("T", 500)}, 7)] * 9, 4, id="is stopped"),
        pytest.param([({1: ("S", 500 + 2 * n)}, 7) for n in range(9)], 4, id="looks around"),
        pytest.param([({1: ("D", 500)}, 7)] * 9, None, id="waits for its disk"),
        pytest.param([({1: ("R", 500 + n)}, 7) for n in range(60)], None, id="busy node"),
        pytest.param([({1: ("R", 500 + 100 * n)}, 7) for n in range(9)], 5, id="spins"),
        pytest.param([({1: ("R", 500 + 25 * n)}, 7) for n in range(60)], 16,
                     id="spins on a busy node"),
        pytest.param([({1: ("R", 500 + 100 * n)}, 7 + n) for n in range(60)], None, id="writes"),
        pytest.param([({1: ("S", 500 + 20 * n)}, 7 + n) for n in range(60)], None,
                     id="writes slowly"),
        # what has ended took more than what runs now has by then
        pytest.param([({1: ("S", 500 + 90 * n), **({2: ("S", 20 * n)} if n > 1 else {})}
                       if n < 3 else {2: ("S", 20 * n)}, 7 + n) for n in range(20)],
                     None, id="one ends, the next works"),
    ],
)  # fmt: skip
def test_an_nsys_that_does_no_more_is_told_from_one_that_a_busy_node_slows(
    looks: list[Look], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hangs_at(looks, tmp_path, monkeypatch) == expected


@pytest.mark.parametrize(("at", "ticks", "usual"), [("S", 0, 4), ("R", 100, 5)])
@pytest.mark.parametrize("longer_s", [0, 4])
def test_an_nsys_that_the_user_gives_longer_hangs_later(
    at: str, ticks: int, usual: int, longer_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Look] = [({1: (at, ticks * n)}, 7) for n in range(40)]
    assert hangs_at(looks, tmp_path, monkeypatch, 6 + longer_s) == usual + longer_s


@pytest.mark.parametrize(
    ("status", "troubles", "torn"),
    [
        (None, ["nsys stop did not end"], True),
        (-11, ["nsys stop was killed by signal 11"], True),
        (0, [], False),
    ],
)
def test_a_stop_that_fails_as_the_program_ends_is_said_too(
    status: int | None, troubles: list[str], torn: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Process:
        pid = 7

        def poll(self) -> int | None:
            return status

    made = made_session(tmp_path, monkeypatch)
    for name in ("end_group", "end_own_nsys"):
        monkeypatch.setattr(session.processes, name, lambda *_, **__: None)
    monkeypatch.setattr(made, "child", Process(), raising=False)
    monkeypatch.setattr(made, "stops", [Process()])
    made.end()
    assert (made.troubles, made.transfer.torn) == (troubles, torn)


def test_why_each_start_of_nsys_failed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first is killed; what the second waits for is only that the time is up.
    nsys = NsysPlan("nsys", "2022.4", None, {"cpu": "", "gpu": ""}, [], [], [], [])
    selection = Selection("0", "ranks", (0,))
    plan = Plan(str(tmp_path), selection, (2, 4), "nsys", nsys=nsys)
    for module, name, value in (
        (guard.outbox, "start", lambda: Outbox(None)),
        (guard.profiler, "here", lambda nsys, window_by: (nsys, [])),
        (guard.profiler, "free_bytes", lambda folder: 1 << 40),
        (guard.profiler, "temporary", lambda longest: str(tmp_path)),
        (guard.processes, "adopt_orphans", lambda: True),
        (guard.processes, "forget_dead_sessions", lambda: None),
    ):
        monkeypatch.setattr(module, name, value)
    reasons = iter(["nsys was killed by signal 9", "nsys did not start the program within 6 s"])
    made = guard.Guard(plan, 0, ["true"])
    monkeypatch.setattr(made, "start", lambda attempt, until: next(reasons))
    assert made.begin() == "nsys was killed by signal 9; nsys did not start the program within 6 s"


@pytest.mark.parametrize(
    ("status", "by_signal"), [(0, None), (3, None), (128, None), (137, 9), (139, 11), (255, None)]
)
def test_a_guard_ends_as_its_program_by_a_status_or_a_signal(
    status: int, by_signal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_by: list[int] = []
    plan = Plan(str(tmp_path), Selection("none", "ranks", ()), (2, 4), "nsys")
    monkeypatch.setattr(guard.Guard, "run", lambda self: status)
    monkeypatch.setattr(guard.descriptors, "fill_streams", lambda: None)
    monkeypatch.setattr(becoming, "end_by_signal", ended_by.append)
    monkeypatch.setattr(becoming.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        becoming.end(guard.Guard(plan, 0, ["python"]))
    assert (ended.value.code, ended_by) == (status, [by_signal] if by_signal else [])
