"""`clusterprof look`: which command it starts, and how it shows a watched job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterprof import watched
from clusterprof.agent.contracts import paths
from clusterprof.cli import capture, look, main, status
from clusterprof.errors import UsageError
from clusterprof.launch import screen, settings
from clusterprof.run_directory import Window, create
from clusterprof.watched import Row

MS, S = 1_000_000, 1_000_000_000


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("srun -N2 python train.py --lr 1", ("srun", "-N2", "python train.py --lr 1")),
        ("srun -N2 -- ./train --lr 1", ("srun", "-N2", "./train --lr 1")),
        ("srun -N2 torchrun --nproc-per-node 8 t.py",
         ("srun", "-N2", "torchrun --nproc-per-node 8 t.py")),
        ("srun -p gpu /opt/python3.12 -m t", ("srun", "-p gpu", "/opt/python3.12 -m t")),
        ("mpirun -np 4 bash.sh x", ("mpirun", "-np 4", "bash.sh x")),
        ("torchrun --nproc-per-node 8 train.py -- x",
         ("torchrun", "--nproc-per-node 8 train.py", "x")),
        ("torchrun --nproc-per-node 8 train.py", ("torchrun", "--nproc-per-node 8", "train.py")),
        ("ssh --python /env/bin/python --hosts h1,h2 t.py",
         ("ssh", "--python /env/bin/python --hosts h1,h2", "t.py")),
        ("run -- python train.py", ("run", "", "python train.py")),
        ("run python train.py", ("run", "", "python train.py")),
        ("accelerate launch train.py", ("run", "", "accelerate launch train.py")),
        ("/opt/bin/srun -N2 python t.py", ("run", "", "/opt/bin/srun -N2 python t.py")),
    ],
)  # fmt: skip
def test_the_command_that_starts_the_job_is_taken_as_it_is(
    line: str, parts: tuple[str, str, str]
) -> None:
    launcher, options, program = look.split(line.split())
    assert (launcher, " ".join(options), " ".join(program)) == parts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("look", "look -- srun"),
        ("look --", "look -- srun"),
        ("look -- srun", "cannot be told"),
        ("look -- srun -N2 ./train", "write -- before it"),
        ("look -- srun -N2 --", "has no program"),
        ("look srun -N2 -- python train.py", "look -- srun -N2 -- python train.py"),
        ("look --ranks 3 -- srun -N2 python train.py", "capture RUN --ranks late"),
        ("look --wach 1m -- srun -N2 python train.py", "did you mean --watch"),
        ("look --watch 1y -- torchrun train.py", "--watch '1y'"),
    ],
)
def test_what_starts_no_job_is_refused_with_what_to_write(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(line.split()) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder without settings, and an environment without ours."""
    for variable, _ in settings.SETTINGS.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def planned(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run(["look", "--dry-run", *line.split()]) == 0
    return capsys.readouterr().out


def test_a_look_profiles_no_rank_and_watches_all_whatever_else_is_set(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = planned("-- torchrun --nproc-per-node 2 train.py", capsys)
    assert "ranks             none" in shown
    assert "all ranks every 10 min" in shown
    monkeypatch.setenv("CLUSTERPROF_PROFILER", "nsys")
    monkeypatch.setenv("CLUSTERPROF_RANKS", "0,1")
    monkeypatch.setenv("CLUSTERPROF_NSYS", "/opt/nsys")
    (plain / settings.FILE).write_text('trace = "cuda"\nsteps = "20:30"\n')
    shown = planned("--watch 1m -- torchrun --nproc-per-node 2 train.py", capsys)
    assert "ranks             none" in shown
    assert "profiler          none" in shown
    assert "all ranks every 60 s" in shown
    assert "20:30" in shown


# --- the screen


def late(rank: int, host: str, ms: float, *, since: int = 0, number: int = 1) -> Row:
    """A rank that is late in the look with this number, at steps 100 * number on."""
    first = 100 * number
    return Row(number * 10 * S, first, first + 99, 100, 50 * MS, rank, host, "dp", int(ms * MS),
               MS // 10, 1, max(since, first), first + 99)  # fmt: skip


def healthy(number: int, step_ms: int = 50) -> Row:
    return Row(number * 10 * S, 100 * number, 100 * number + 99, 100, step_ms * MS)


def test_the_present_of_512_ranks_is_folded_by_node_worst_first() -> None:
    rows = [healthy(1), healthy(2, 52)]
    rows += [late(rank, f"node{rank // 8}", 5 + rank % 8 / 4, since=350, number=3)
             for rank in range(296, 304)]  # fmt: skip
    rows += [late(16, "node2", 9.0, number=3)]
    lines = screen.lines(rows, 150 * S, "runs/x")
    assert lines[0].startswith("step 399, looked at 2 min ago: 50.0 ms per step (50.0 and 52.0 in")
    assert lines[0].endswith("10 steps/s")
    assert [line.split()[0] for line in lines[1:4]] == ["node", "node2", "node37"]
    assert "296–303     rank 303  6.75 ±0.10 ms  14%    step 350" in lines[3]
    assert lines[4] == "to capture them: clusterprof capture runs/x --ranks late --wait"
    # a job that has ended has none to capture
    assert not any("capture" in line for line in screen.lines(rows, 150 * S))


def test_of_ranks_that_are_as_late_as_each_other_none_is_called_worst() -> None:
    """One of them is late, and the others of its group wait for it: the look's order tells most."""
    rows = [late(rank, "node37", 7.4, number=1) for rank in (301, 300, 296, 302)]
    assert "296, 300–302  all alike  7.40 ±0.10 ms" in screen.lines(rows, 11 * S)[2]
    assert [rank.rank for rank in screen.late_now(rows)] == [301, 300, 296, 302]


def test_ranks_are_all_alike_where_the_least_late_is_as_late_as_the_worst() -> None:
    rows = [late(rank, "n", ms, number=1) for rank, ms in ((3, 9.0), (5, 8.95), (7, 2.0))]
    assert "3, 5, 7     ranks 3, 5  9.00 ±0.10 ms" in screen.lines(rows, 11 * S)[2]


def test_the_readme_shows_what_is_shown_of_512_simulated_ranks() -> None:
    """The look at a simulated job: dp 64, tp 8; from step 4,180 on rank 301's host loses 7.7 ms of
    each step, and its tensor group waits for it.
    """
    numbers = 4150, 4209, 60, 31_396_851
    rows = [Row(600 * S, *numbers, rank, "node37", "data", 7_392_066, 66_475, 1, 4180, 4209)
            for rank in (301, 300, 296, 302, 298, 297, 303, 299)]  # fmt: skip
    shown = screen.lines(rows, 600 * S, "runs/...")
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert "```text\n" + "\n".join(shown) + "\n```" in readme, shown


def test_at_most_a_screenful_of_nodes_is_shown() -> None:
    rows = [late(rank, f"node{rank}", 1 + rank, number=1) for rank in range(40)]
    lines = screen.lines(rows, 10 * S, "r")
    assert len(lines) == screen.MOST_NODES + 4
    assert lines[-2] == "and 32 nodes more"


def test_where_no_rank_is_late_the_present_says_so_in_a_line() -> None:
    assert screen.lines([healthy(1)], 12 * S, "r") == [
        "step 199, looked at 2 s ago: 50.0 ms per step; no rank was late"
    ]
    ended = [late(5, "n", 9.0), healthy(2), healthy(3), healthy(4)]
    assert screen.lines(ended, 41 * S, "r")[0].endswith("no rank was late")


def test_steps_per_second_are_not_known_across_a_restart() -> None:
    assert screen.steps_per_s([healthy(5), replace(healthy(1), wall_ns=99 * S)]) is None
    assert screen.steps_per_s([healthy(1), healthy(2)]) == 10
    assert screen.steps_per_s([healthy(1)]) is None


def test_a_host_s_name_controls_no_terminal() -> None:
    lines = screen.lines([late(5, "n\x1b[2J\n1", 9.0)], 11 * S, "r")
    assert not any("\x1b" in line or "\n" in line for line in lines)


@pytest.fixture
def run(tmp_path: Path) -> Window:
    made = create(tmp_path / "run")
    members: dict[str, Any] = {
        "schema_version": 1, "window": [10, 15], "began": "2026-01-02T03:04:05+00:00",
        "selection": {"text": "none", "kind": "ranks", "ranks": [], "pp": 1, "world_size": None},
    }  # fmt: skip
    made.directory.write_manifest(members)
    return made


def test_status_shows_the_present_and_who_was_late_before(run: Window) -> None:
    rows = [late(5, "n5", 9.0), healthy(2), healthy(3), late(7, "n7", 8.0, number=4)]
    watched.write(run.path / paths.WATCHED, rows)
    shown = status.render(status.look(run), everyone=False)
    assert "n7    7           rank 7  8.00 ±0.10 ms  16%" in shown
    assert "rank 5 (n5) was late by" in shown
    assert "--ranks late --wait" in shown
    assert json.dumps(status.look(run).as_json())


def test_late_now_is_not_late_then(run: Window) -> None:
    with pytest.raises(UsageError, match="waits for later"):
        capture.main("capture", [str(run.path), "--ranks=late", "--when", "late > 5%"], None)


def test_late_ranks_are_refused_where_no_look_shows_one(run: Window) -> None:
    with pytest.raises(UsageError, match="late now"):
        capture.late_ranks(run)
    watched.write(run.path / paths.WATCHED, [late(5, "n", 9.0), healthy(2), healthy(3)])
    with pytest.raises(UsageError, match="late now"):
        capture.late_ranks(run)
    watched.write(run.path / paths.WATCHED, [late(5, "n", 9.0), late(3, "n", 2.0)])
    assert capture.late_ranks(run).ranks[:2] == (5, 3)
