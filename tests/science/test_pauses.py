"""Simulated jobs through the rank's own step log: their pauses are named, and healthy jobs have no
series.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from lab.tiers import long_but

from clusterprof import pauses, run_directory
from clusterprof.agent.contracts import states
from clusterprof.agent.guard.step_log import StepLog
from clusterprof.arguments import parse_ranks
from clusterprof.cli import status
from clusterprof.merge_run import run_pauses
from clusterprof.pauses import Attempt, RankLog
from clusterprof.results import PauseEntry
from clusterprof.run_directory import Window

S = 1_000_000_000
NOW = 1_780_000_000 * S
Lengths = npt.NDArray[np.float64]


def job(
    rng: np.random.Generator, steps: int, *, step_s: float = 0.2, noise: float = 0.1
) -> Lengths:
    """The lengths (s) of a job's steps: it compiles, warms up, and varies as hosts do."""
    lengths = step_s * rng.lognormal(0, noise, steps)
    lengths[0] += 30 * step_s
    lengths[1:3] += 5 * step_s
    return lengths


def stragglers(rng: np.random.Generator, lengths: Lengths, count: int) -> None:
    """Make some steps at random longer, by lengths that vary widely."""
    steps = rng.integers(0, len(lengths), count)
    lengths[steps] += np.median(lengths) * rng.lognormal(1.5, 1, count)


def write(folder: Path, lengths: Lengths, *, begin_ns: int = 0, to_ranks: float = 0.01) -> Window:
    """A run whose four ranks have logged these steps, each with a little of its own."""
    run = run_directory.create(folder)
    run.directory.write_manifest(
        {"schema_version": 1, "window": [10, 15], "began": "2026-01-02T03:04:05+00:00",
         "world_size": 4, "selection": parse_ranks("0")._replace(ranks=())._asdict()}
    )  # fmt: skip
    attempt(run, lengths, begin_ns=begin_ns, to_ranks=to_ranks)
    return run


def attempt(run: Window, lengths: Lengths, *, begin_ns: int = 0, to_ranks: float = 0.01) -> None:
    """The logs of one attempt of the job."""
    rng = np.random.default_rng(len(lengths))
    for rank in range(4):
        ends = np.cumsum(lengths * S).astype(np.int64) + begin_ns
        ends += rng.integers(0, int(to_ranks * S), len(ends))
        ends = np.maximum.accumulate(ends)
        states.make(str(run.rank(rank)))
        log = StepLog(str(run.rank(rank)), (10, 15), NOW)
        log.claim()
        begins = [begin_ns, *ends[:-1].tolist()]
        log.add(0, list(zip(begins, ends.tolist(), strict=True)))
        log.write(all_of_it=True)
        states.advance(str(run.rank(rank)), states.State.COUNTING, host="node1")


def entries_of(run: Window) -> list[PauseEntry]:
    results = run_pauses(run)
    return results["entries"] if results else []


def regular(entries: list[PauseEntry]) -> list[tuple[int | None, int]]:
    """After how many steps, and how many of it there are, of each series."""
    return sorted(
        (entry["every_steps"], entry["count"]) for entry in entries if entry["kind"] == "regular"
    )


def test_checkpoints_evaluations_warm_up_and_stragglers_are_told_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    lengths = job(rng, 6000)
    lengths[500::500] += 41 * rng.lognormal(0, 0.05, 11)
    lengths[770::770] += 12 * rng.lognormal(0, 0.05, 7)
    stragglers(rng, lengths, 12)
    run = write(tmp_path / "run", lengths)
    entries = entries_of(run)
    assert regular(entries) == [(500, 11), (770, 7)]
    start, single = (
        next(entry for entry in entries if entry["kind"] == kind) for kind in ("start", "single")
    )
    assert (start["first_step"], start["last_step"]) == (0, 2)
    assert single["count"] <= 12
    checkpoint = next(entry for entry in entries if entry["every_steps"] == 500)
    assert checkpoint["mean_ns"] == pytest.approx(41 * S, rel=0.05)
    assert checkpoint["share_of_run"] == pytest.approx(11 * 41 / lengths.sum(), rel=0.05)
    assert checkpoint["gpu_ns"] == pytest.approx(4 * 11 * 41 * S, rel=0.05)
    shown = status.render(status.look(run), everyone=False)
    assert "every 500 steps (a checkpoint or an evaluation): 11 pauses" in " ".join(shown.split())


def test_a_checkpoint_every_five_minutes_is_named_by_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    lengths = job(rng, 20_000, noise=0.2)
    at_s, last_s = 0.0, 0.0
    for step, length in enumerate(lengths):
        if at_s - last_s >= 300:
            last_s = at_s
            lengths[step] += 10
        at_s += length
    (series,) = [e for e in entries_of(write(tmp_path / "run", lengths)) if e["kind"] == "regular"]
    assert series["every_steps"] is None
    assert series["every_ns"] == pytest.approx(310 * S, rel=0.05)


def test_a_host_that_runs_ahead_and_reads_a_value_has_no_pauses(tmp_path: Path) -> None:
    """It waits for what it has queued: the steps after that are as much shorter."""
    lengths = job(np.random.default_rng(5), 5000)
    for step in range(100, 5000, 50):
        lengths[step] += 1.7
        lengths[step + 1 : step + 11] -= 0.17
    lengths = np.maximum(lengths, 0.01)
    assert regular(entries_of(write(tmp_path / "run", lengths))) == []


def test_a_job_that_was_started_over_is_told_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    first = job(rng, 1300)
    first[200::200] += 5
    run = write(tmp_path / "run", first)
    second = run_directory.Window(run.directory, 1, 2)
    lengths = job(rng, 1700)
    lengths[200::200] += 5
    attempt(second, lengths, begin_ns=int((first.sum() + 90) * S))
    entries = [entry for entry in entries_of(run) if entry["kind"] != "single"]
    assert [(entry["kind"], entry["attempt"]) for entry in entries] == [
        ("start", 1), ("regular", 1), ("restart", 2), ("start", 2), ("regular", 2),
    ]  # fmt: skip
    assert entries[2]["mean_ns"] == pytest.approx(90 * S, rel=0.01)


def test_a_damaged_log_leaves_its_rank_out(tmp_path: Path) -> None:
    lengths = job(np.random.default_rng(7), 3000)
    lengths[300::300] += 5
    run = write(tmp_path / "run", lengths)
    (run.rank(0) / "pauses.csv").write_text("no log\n")
    (run.rank(1) / "pauses.csv").unlink()
    (run.rank(2) / "steps.csv").write_bytes(b"\xff\x00" * 99)
    assert regular(entries_of(run)) == [(300, 9)]
    for rank in range(4):
        (run.rank(rank) / "pauses.csv").write_bytes(b"step,begin_ns,end_ns,usual_ns,made_up_ns\n1")
    assert entries_of(run) == []
    for rank in range(4):
        (run.rank(rank) / "steps.csv").unlink()
    assert entries_of(run) == []


def healthy(rng: np.random.Generator) -> Lengths:
    """A job without anything regular: of any length, with more or fewer stragglers."""
    lengths = job(
        rng, int(rng.integers(200, 6000)), step_s=float(rng.choice([0.02, 0.2, 2.0])),
        noise=float(rng.uniform(0.01, 0.3)),
    )  # fmt: skip
    stragglers(rng, lengths, int(rng.integers(0, len(lengths) // 50)))
    return lengths


@pytest.mark.parametrize("seeds", long_but([range(200)], [range(200, 2000)]))
def test_two_hundred_healthy_jobs_have_no_series(seeds: range, long_steps: LongOf) -> None:
    found = []
    for seed in seeds:
        rank = long_steps(healthy(np.random.default_rng(seed)))
        results = pauses.pauses_of([Attempt(1, [rank], [])], 8)
        found += regular(results["entries"]) if results else []
    assert found == []


def bursts(rng: np.random.Generator, lengths: Lengths) -> None:
    """What disturbs a job does so again soon, each time for about as long."""
    for begin in rng.integers(0, len(lengths), rng.integers(1, 15)):
        apart = rng.geometric(1 / rng.uniform(3, 40), rng.integers(2, 20))
        steps = begin + np.cumsum(apart)
        steps = steps[steps < len(lengths)]
        lengths[steps] *= rng.lognormal(2, 0.3, len(steps))


def drifts(rng: np.random.Generator, lengths: Lengths) -> None:
    """Steps become longer and shorter again."""
    lengths *= np.exp(np.cumsum(rng.normal(0, 0.02, len(lengths))))


def has_a_long_tail(rng: np.random.Generator, lengths: Lengths) -> None:
    """A few of its steps take as long as all others together."""
    lengths *= 1 + rng.pareto(1.5, len(lengths)) * 0.2


def changes(rng: np.random.Generator, lengths: Lengths) -> None:
    """Its steps are of other lengths after some time, again and again."""
    stretches = rng.geometric(1 / 60, len(lengths))
    lengths *= np.repeat(rng.lognormal(0, 0.7, len(lengths)), stretches)[: len(lengths)]


@pytest.mark.parametrize("kind", [bursts, drifts, has_a_long_tail, changes])
@pytest.mark.parametrize("seeds", long_but([range(15)], [range(15, 150)]))
def test_a_job_whose_steps_vary_otherwise_has_no_series(
    kind: Callable[[np.random.Generator, Lengths], None], seeds: range, long_steps: LongOf
) -> None:
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        lengths = job(rng, int(rng.integers(500, 6000)), noise=float(rng.uniform(0.02, 0.2)))
        kind(rng, lengths)
        results = pauses.pauses_of([Attempt(1, [long_steps(lengths)], [])], 8)
        found += regular(results["entries"]) if results else []
    # of hundreds of jobs chance may name one
    assert len(found) <= len(seeds) // 100


LongOf = Callable[[Lengths], RankLog]


@pytest.fixture
def long_steps() -> LongOf:
    """A rank's long steps, without files."""
    from clusterprof.agent.guard.long_steps import LongSteps
    from clusterprof.ingest.rank_steps import PAUSE_COLUMNS

    def of(lengths: Lengths) -> RankLog:
        ends = (np.cumsum(lengths) * S).astype(np.int64).tolist()
        log = LongSteps()
        for step, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            log.add(step, begin, end)
        log.close()
        rows = np.array(log.rows, np.int64).reshape(-1, 5).T
        return RankLog(0, 0, ends[-1], dict(zip(PAUSE_COLUMNS, rows, strict=True)))

    return of
