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
#: each has a processor of its own, as in a job: a dump takes one for as long as it lasts
WATCHED_RANKS = 2
#: entries of a recorder, and intervals of `--watch`
FULL = 2_000
INTERVALS_S = (10, 60, 600)


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


def watch(pairs: int) -> list[Figure]:
    """What a look of `--watch` adds to a job, and to its steps at some intervals, of longer steps
    and of short ones.
    """
    return [
        figure
        for device_ms, steps in ((10, 20), (1, 100))
        for figure in _watched(pairs, steps, device_ms)
    ]


def _watched(pairs: int, steps: int, device_ms: int) -> list[Figure]:
    """The same of blocks of so many steps, half of which begin with a look."""
    ranks = _ranks_that_look(pairs, steps, device_ms)
    by_pair = [*zip(*(rank["pairs"] for rank in ranks), strict=True)]
    # ranks wait for each other: what one of them takes, the job takes
    added_ms = [max(looked - bare for looked, bare in pair) * 1e3 for pair in by_pair]
    low, high = spread(added_ms)
    step_ms = median([bare for rank in ranks for _, bare in rank["pairs"]]) * 1e3 / steps
    savings_ms = sorted(saving * 1e3 for rank in ranks for saving in rank["savings"])
    p99_ms = savings_ms[len(savings_ms) * 99 // 100]
    percent = {seconds: median(added_ms) / 10 / seconds for seconds in INTERVALS_S}
    at_each = ", ".join(f"{value:.3f}% at {seconds} s" for seconds, value in percent.items())
    of_what = f"steps of {device_ms} ms on the device"
    return [
        Figure(f"a look of --watch, added to {of_what}", "ms", 100.0, median(added_ms),
               f"of it the saving: {median(savings_ms):.1f} ms, p99 {p99_ms:.1f}",
               f"{len(added_ms)} pairs of {steps} steps of {step_ms:.1f} ms",
               runs=added_ms, interval=(low, high)),
        Figure(f"--watch 1m, added to {of_what}", "%", 0.5, percent[60], at_each,
               f"below 0.5% from {high / 10 / 0.5:.0f} s on", interval=(low / 600, high / 600)),
    ]  # fmt: skip


def _ranks_that_look(pairs: int, steps: int, device_ms: int) -> list[Any]:
    """What each rank of the program has measured; its looks have saved full recorders."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = folder / "results"
        # none comes by itself: the program looks
        environ = {**armed(folder, "torchrun", (2, 4), watch_s=86_400), "OMP_NUM_THREADS": "1"}
        results.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program = [_PROGRAMS / "watched.py", results, str(pairs), str(steps), str(device_ms)]
        done = run([*torchrun, f"--nproc-per-node={WATCHED_RANKS}", *program], environ)
        dumps = [*(folder / "run" / "ranks").glob("*/watch.json.gz")]
        entries = [len(json.loads(gzip.decompress(dump.read_bytes()))["entries"]) for dump in dumps]
        if len(entries) < WATCHED_RANKS or min(entries) < FULL:
            raise Failed(f"the looks' dumps have {entries} collectives {done.stderr}")
        return [json.loads((results / f"{k}.json").read_text()) for k in range(WATCHED_RANKS)]


def _excess(pair: Any) -> float:
    """By how many percent the step with the hook is longer than the one beside it without.

    Each side is the sum over the ranks (they wait for each other and are not independent). What
    else the machine does lengthens one side as often as the other: which goes first is drawn.
    """
    with_hook, without = (sum(rank[side] for rank in pair) for side in (0, 1))
    return (with_hook / without - 1) * 100
