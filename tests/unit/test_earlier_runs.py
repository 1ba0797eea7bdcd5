"""What an earlier run found about a program decides which profiler captures the next one."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import report_sample

from clusterprof import merge_run, run_directory
from clusterprof.agent import nsys
from clusterprof.agent.contracts import paths
from clusterprof.arguments import parse_ranks
from clusterprof.cli import main
from clusterprof.launch.planning import latest, runs_in
from clusterprof.report import results_json
from clusterprof.results import NODES, RANKS, CaptureCost, Finding
from clusterprof.run_directory import Window
from clusterprof.tables import SCHEMAS

PROGRAM = ("train.py", "--layers", "8", "--api-key", "hunter2")
MS = 1_000_000


def bound() -> Finding:
    return cast("Finding", {**report_sample.straggler(), "code": "host.launch_bound"})


def cost(after_ms: int) -> CaptureCost:
    times = {"before_ns": 20 * MS, "inside_ns": 30 * MS, "after_ns": after_ms * MS}
    return cast(
        "CaptureCost",
        {"stall_start_ns": MS, "stall_stop_ns": MS, "unprofiled": None,
         "profiled": {**times, "after_uncertainty_ns": MS}},
    )  # fmt: skip


def earlier(
    parent: Path, name: str, program: Sequence[str] = PROGRAM, minute: int = 0,
    merged: bool = True, launches: str = "", **results: Any,
) -> Window:  # fmt: skip
    """A run that has ended, with these members of its results; `launches`: a call of its ranks."""
    run = run_directory.create(parent / name)
    run.directory.write_manifest(
        {"schema_version": 1, "began": f"2026-01-02T03:{minute:02d}:05+00:00", "window": [10, 15],
         "selection": parse_ranks("0")._asdict(),
         "again": ["clusterprof", "torchrun", "--", *program] if program else []}
    )  # fmt: skip
    if merged:
        run.merged.mkdir()
        sample = report_sample.healthy() | results  # type: ignore[operator]
        results_json.write(run.merged / paths.RESULTS, sample)
    for rank in (0, 1) if launches else ():
        target = run.path / paths.TABLES / f"{rank:05d}/host_calls.parquet"
        target.parent.mkdir(parents=True)
        call = {"start_ns": 0, "end_ns": 1, "kind": "cuda", "name": launches, "thread": 1}
        merge_run.write_table(pa.Table.from_pylist([call], SCHEMAS["host_calls"]), target)
    return run


def masked(program: Sequence[str]) -> list[str]:
    from clusterprof import masking

    return masking.suspected(program)


def launch_bound(parent: Path, program: Sequence[str]) -> Window | None:
    last = latest(parent, program)
    return last.run if last and last.was_launch_bound() else None


def with_graphs(parent: Path, program: Sequence[str]) -> Window | None:
    last = latest(parent, program)
    return last.run if last and last.had_graphs() else None


def test_the_last_merged_run_of_the_same_program_says_whether_it_was_launch_bound(
    tmp_path: Path,
) -> None:
    mine = masked(PROGRAM)
    assert launch_bound(tmp_path / "nowhere", PROGRAM) is None
    run = earlier(tmp_path, "a", mine, 1, findings=[bound()])
    assert launch_bound(tmp_path, PROGRAM) == run
    assert launch_bound(tmp_path, [*PROGRAM, "--compile"]) is None
    earlier(tmp_path, "b", mine, 2, merged=False)
    earlier(tmp_path, "c", ["other.py"], 3)
    assert launch_bound(tmp_path, PROGRAM) == run
    earlier(tmp_path, "d", mine, 4)
    assert launch_bound(tmp_path, PROGRAM) is None


@pytest.mark.parametrize(
    ("profiler", "after_ms", "found"),
    [("nsys 2025.3", 26, True), ("nsys 2025.3", 20, False), ("torch.profiler", 26, False)],
)
def test_steps_that_stayed_longer_after_nsys_say_it_as_well(
    tmp_path: Path, profiler: str, after_ms: int, found: bool
) -> None:
    ranks = [{**each, "profiler": profiler} for each in report_sample.healthy()["ranks"]]
    earlier(tmp_path, "a", masked(PROGRAM), ranks=ranks, capture=cost(after_ms))
    assert (launch_bound(tmp_path, PROGRAM) is not None) == found


def test_what_is_damaged_linked_or_another_user_s_says_nothing(tmp_path: Path) -> None:
    run = earlier(tmp_path, "a", masked(PROGRAM), findings=[bound()])
    (tmp_path / "linked").symlink_to(run.path)
    (tmp_path / "file").touch()
    os.mkfifo(run_directory.create(tmp_path / "waits").directory.manifest)
    run_directory.create(tmp_path / "damaged").directory.manifest.write_text('{"schema_version": 1')
    assert [found.path for found, _ in runs_in(tmp_path)] == [run.path]
    (run.merged / paths.RESULTS).write_text("{}")
    assert launch_bound(tmp_path, PROGRAM) is None
    if os.geteuid() == 0:
        os.chown(run.directory.manifest, 12345, 12345)
        assert runs_in(tmp_path) == []


@pytest.fixture
def with_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An nsys on this host, and a current folder with a launch-bound run in `runs/`."""
    help_text = "--trace= cuda nvtx osrt --sample= --session-new= --output= --cuda-graph-trace="
    monkeypatch.setattr(nsys, "ask", lambda *_: f"version 2025.6.1.190-1 {help_text}")
    monkeypatch.setattr(nsys, "PLACES", ())
    (tmp_path / "nsys").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("RANKS", "STEPS", "PROFILER", "NSYS", "RUN_DIR"):
        monkeypatch.delenv(f"CLUSTERPROF_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    earlier(tmp_path / "runs", "then", masked(PROGRAM), findings=[bound()])


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The line on the profiler in what --dry-run prints, and the notes."""
    assert main.main(["torchrun", "--dry-run", *options, "--nproc-per-node", "2", "--", *PROGRAM])\
        == 0  # fmt: skip
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if line.startswith("profiler"))
    return f"{line}\n{printed.partition('notes:')[2]}"


@pytest.mark.usefixtures("with_nsys")
def test_auto_takes_torch_s_profiler_for_a_program_that_was_launch_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = planned(capsys)
    line, _, notes = printed.partition("\n")
    assert line.split()[1] == "torch"
    assert line.endswith("auto: launch-bound in runs/then")
    assert "--profiler nsys" in notes
    assert "under nsys" not in printed  # none is armed


@pytest.mark.usefixtures("with_nsys")
def test_nsys_records_what_is_in_cuda_graphs_where_it_has_seen_some(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert NODES not in planned(capsys, "--profiler", "nsys")
    earlier(tmp_path / "runs", "graphs", masked(PROGRAM), 1, launches="cudaGraphLaunch_v10000")
    assert f"({NODES}), since runs/graphs" in planned(capsys, "--profiler", "nsys")
    assert NODES not in planned(capsys, "--profiler", "nsys", "--nsys-arg=--cuda-graph-trace=graph")
    assert with_graphs(tmp_path / "runs", [*PROGRAM, "--compile"]) is None
    earlier(tmp_path / "runs", "plain", masked(PROGRAM), 2, launches="cudaLaunchKernel")
    assert with_graphs(tmp_path / "runs", PROGRAM) is None
    # by whatever profiler, and whatever became of the others' tables
    run = earlier(tmp_path / "runs", "again", masked(PROGRAM), 3, launches="cudaGraphLaunch")
    (run.path / "tables/00000/host_calls.parquet").rename(run.path / "tables/x")
    assert with_graphs(tmp_path / "runs", PROGRAM) == run


@pytest.mark.usefixtures("with_nsys")
@pytest.mark.parametrize(
    "options",
    [
        ("--profiler", "nsys"), ("--trace", "cuda,nvtx"), ("--arm", "0"), ("--window-by", "cuda"),
        ("--run-dir", "elsewhere/x"),
    ],
)  # fmt: skip
def test_what_asks_for_nsys_and_another_place_s_runs_get_nsys(
    capsys: pytest.CaptureFixture[str], options: Sequence[str]
) -> None:
    assert planned(capsys, *options).split()[1] == "nsys"


def test_runs_are_listed_the_newest_first(tmp_path: Path) -> None:
    made = [earlier(tmp_path, name, minute=minute) for name, minute in (("z", 1), ("a", 9))]
    times = [manifest.began for _, manifest in runs_in(tmp_path)]
    assert [run for run, _ in runs_in(tmp_path)] == made[::-1]
    assert times == sorted(times, reverse=True)
    assert dt.datetime.fromisoformat(times[0]).minute == 9


def test_the_next_command_of_a_launch_bound_run_names_torch_s_profiler() -> None:
    from simulate import Job, simulate

    from clusterprof.analysis.findings.finding import LAUNCH_BOUND, capture, job_of, lighter
    from clusterprof.study import dataset_of

    ranks, _ = simulate(Job())
    line = ["clusterprof", "srun", RANKS, "-N2", "--", "python", "train.py"]
    dataset = dataset_of(ranks, again=line)
    assert lighter(dataset) == "nsys"
    asked = dataset_of(ranks, again=[*line[:2], "--trace=cuda,nvtx", *line[2:]])
    for each in (dataset, asked):
        job_of(each).repaired = ((LAUNCH_BOUND, (0, 1)),)
    assert lighter(dataset) == "torch"
    assert "--profiler torch -N2" in capture(dataset, [1], profiler=lighter(dataset))
    assert lighter(asked) == "nsys"
