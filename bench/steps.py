"""What a step costs outside the window: the hook itself, and a training with and without it."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent import armed, counted
from figure import Figure, median, spread
from process import Failed, run

_PROGRAMS = Path(__file__).resolve().parent / "programs"
RANKS = 4


def hook_cost(pairs: int) -> Figure:
    """The hook on a real optimizer's step, its share of writing the step log included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**armed(folder, "environment"), "RANK": "1", "WORLD_SIZE": "4"}
        done = run([sys.executable, _PROGRAMS / "hook.py", str(pairs)], environ)
        times = json.loads(done.stdout)
        if counted(folder) != {1: times["counted"]} or not times["counted"]:
            raise Failed(f"the step log does not hold the steps: {counted(folder)} {done.stderr}")
    pairwise = zip(times["with"], times["without"], strict=True)
    added = [(a - b) / 1e3 for a, b in pairwise]
    return Figure(
        "step hook, per step outside the window",
        "µs",
        5.0,
        median(added),
        f"the bare optimizer step: {median(times['without']) / 1e3:.1f} µs",
        runs=added,
    )


def unprofiled_rank(pairs: int) -> Figure:
    """The steps of ranks that are not chosen, as a ratio to the same steps without the hook.

    All are steps of the window, in which the flight recorder runs, and after which it is saved.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = folder / "results"
        environ = {**armed(folder, "torchrun", (2, pairs)), "OMP_NUM_THREADS": "1"}
        results.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program = [_PROGRAMS / "ranks.py", results, str(pairs)]
        done = run([*torchrun, f"--nproc-per-node={RANKS}", *program], environ)
        ranks = [json.loads((results / f"{rank}.json").read_text()) for rank in range(RANKS)]
        if counted(folder) != {rank: each["steps"] for rank, each in enumerate(ranks)}:
            raise Failed(f"the step logs do not hold the steps: {counted(folder)} {done.stderr}")
    pairwise = [_excess(pair) for pair in zip(*(each["pairs"] for each in ranks), strict=True)]
    bare = median([without for each in ranks for _, without in each["pairs"]]) * 1e3
    return Figure(
        f"steps of {RANKS} ranks that are not chosen, excess",
        "%",
        0.5,
        median(pairwise),
        f"a step without it: {bare:.1f} ms",
        f"{len(pairwise)} pairs of steps",
        runs=pairwise,
        interval=spread(pairwise),
    )


def flight_recorder(rounds: int) -> list[Figure]:
    """What saving torch's flight recorder takes of a rank, and of the run directory's disk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**armed(folder, "environment"), "RANK": "1", "WORLD_SIZE": "4"}
        done = run([sys.executable, _PROGRAMS / "recorded.py", str(rounds)], environ)
        found = json.loads(done.stdout)
        packed = (folder / "run" / "ranks" / "00001" / "flight.json.gz").read_bytes()
    entries = len(json.loads(gzip.decompress(packed))["entries"])
    if entries != found["entries"]:
        raise Failed(f"{entries} collectives were saved of {found['entries']} {done.stderr}")
    saving, bare = ([ns / 1e6 for ns in found[which]] for which in ("saving", "bare"))
    return [
        Figure("flight recorder, saved after the window", "ms", 50.0, median(saving),
               f"torch's own dump of it: {median(bare):.1f} ms",
               f"processor time; {entries} collectives", runs=saving, interval=spread(saving)),
        Figure("flight recorder, per rank and step of 100 collectives", "kB", 2.7,
               len(packed) / entries * 100 / 1e3, f"{len(packed)} bytes in all"),
    ]  # fmt: skip


def _excess(pair: Any) -> float:
    """By how many percent the step with the hook is longer than the one beside it without.

    Each side is the sum over the ranks (they wait for each other and are not independent). What
    else the machine does lengthens one side as often as the other: which goes first is drawn.
    """
    with_hook, without = (sum(rank[side] for rank in pair) for side in (0, 1))
    return (with_hook / without - 1) * 100
