"""False alarms of `--watch` at healthy jobs, and how soon it names a rank that turns slow.

    PYTHONPATH=tests python3 bench/alarms.py                    # 200 hours at one look a minute
    PYTHONPATH=tests python3 bench/alarms.py --hours 20 --first-seed 7000

A job is simulated once, and cut into looks of `LEAST` steps, the fewest that a look has: a minute
has more steps, of which a recorder keeps few. Each goes through the launching host's own `look` and
`watched.news`, with the rows of the looks before, as dumps on disk. An alarm is a line that is said
of a healthy job: one whose ranks differ by less than is worth a finding (2% of a step) for good.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from simulate import Cause, Job
from simulate.flight import Recorded, leave, measured, recorded

from clusterprof import run_directory, watched
from clusterprof.agent.contracts import paths
from clusterprof.launch.watch import LEAST, look
from clusterprof.watched import Row

#: one job's looks: half an hour at one look a minute
LOOKS = 30
#: so many of the latest steps lie beside a recorder: those of the look before, and none older
LOGGED = 2 * LEAST
MS = 1_000_000
#: nothing was tried on jobs of seeds from here on
HELD_OUT = 20_000
#: a rank turns slow at a step of this look, by this part of a step at least
TURNS, SLOWER = 4, (0.05, 0.15)
_SMALL = Job(
    dp=8, layers=2, kernels_per_layer=2, layer_ns=3_000_000, launch_ns=300_000, first_step=0,
    steps=LOOKS * LEAST, noise_frac=0.01, host_noise_frac=0.1, gpu_speed_frac=0.005,
)  # fmt: skip
_AHEAD = replace(_SMALL, synchronous=False, ahead_steps=3)
_SYNC = replace(_SMALL, synchronous=True)


def paused(job: Job, every: int, length_ns: int, ranks: range, spread: float = 0.2) -> Job:
    """A job whose ranks pause in one step of so many, each time for about so long."""
    rng = np.random.default_rng([job.seed, every])
    lengths = (length_ns * rng.lognormal(0, spread, len(ranks))).astype(int).tolist()
    steps = (*range(job.first_step + every // 2, job.first_step + job.steps, every),)
    more = (Cause("host", rank, length, steps) for rank, length in zip(ranks, lengths, strict=True))
    return replace(job, causes=(*job.causes, *more))


def warmed_up(job: Job) -> Job:
    """A job whose hosts are slow at first, each for as long as it takes."""
    rng = np.random.default_rng([job.seed, 1])
    causes = (
        Cause("host", rank, int(rng.uniform(0.2, 1) * 20 * MS / part), (*range(20 * part),))
        for rank in range(job.world) for part in (1, 2, 3)
    )  # fmt: skip
    return replace(job, causes=(*causes,))


def healthy(kind: str, seed: int) -> Job:
    """A job of a kind of noise that real ones have."""
    sync, ahead = (replace(job, seed=seed) for job in (_SYNC, _AHEAD))
    every = range(_SMALL.world)
    kinds = {
        "waits for its GPU": sync,
        "runs ahead": ahead,
        "launch-bound": replace(ahead, launch_ns=1_600_000, host_noise_frac=0.3),
        "batches of unlike lengths": replace(sync, varied_frac=0.2),
        "lengths that hold for some steps": replace(ahead, varied_frac=0.2, varied_steps=7),
        "pauses of single hosts": replace(sync, hiccup_steps=40, hiccup_ns=15 * MS),
        "pauses that queues hide": replace(ahead, hiccup_steps=40, hiccup_ns=15 * MS),
        "checkpoints": paused(sync, 100, 400 * MS, every),
        "checkpoints of rank 0": paused(ahead, 100, 400 * MS, range(1)),
        "evaluations and warm-up": warmed_up(paused(sync, 150, 600 * MS, every)),
        "a network that is slower now and then": replace(sync, network_noise_frac=0.5),
        "experts": replace(sync, experts_frac=0.3),
        "clocks that drift (gloo)": replace(
            sync, on_host=True, ranks_per_host=4, drift_ppm=(0.0,) * 4 + (20.0,) * 4,
            offset_ns=(0,) * 4 + (3 * MS,) * 4,
        ),
    }  # fmt: skip
    return kinds[kind]


KINDS = (
    "waits for its GPU", "runs ahead", "launch-bound", "batches of unlike lengths",
    "lengths that hold for some steps", "pauses of single hosts", "pauses that queues hide",
    "checkpoints", "checkpoints of rank 0", "evaluations and warm-up",
    "a network that is slower now and then", "experts", "clocks that drift (gloo)",
)  # fmt: skip


def looks(job: Job) -> Iterator[tuple[int, list[str], list[Row]]]:
    """Each look at a job: its number, what is said after it, and the rows of all so far."""
    made, rows = recorded(job, durations=not job.on_host), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        run = run_directory.create(Path(folder) / "run")
        run.directory.write_manifest({"schema_version": 1, "window": [0, 1]})
        for number in range(job.steps // LEAST):
            leave(run, steps_of(made, number), watched=True)
            if job.on_host:
                probed = job.ranks_per_host
                document = measured(made, probed, seconds(made, number))
                (run.rank(probed) / paths.PROBE).write_text(json.dumps(document))
            before = watched.lateness(rows)
            rows = [*rows, *look(run, number + 1, rows)]
            yield number, watched.news(before, watched.lateness(rows)), rows


def steps_of(made: Recorded, number: int) -> Recorded:
    """What is there at a look: the latest steps of all, by calls that each step has as many of."""
    entries, count = made.flight.entries, made.steps[0].num_rows
    calls = entries.num_rows // len(made.steps) // count * LEAST
    turn = pc.floor(pc.divide(pc.cast(entries["record"], "double"), float(calls)))
    flight = replace(made.flight, entries=entries.filter(pc.equal(turn, float(number))))
    begin, end = max((number + 1) * LEAST - LOGGED, 0), (number + 1) * LEAST
    steps = {rank: log.slice(begin, end - begin) for rank, log in made.steps.items()}
    return replace(made, flight=flight, steps=steps)


def seconds(made: Recorded, number: int) -> list[float]:
    """When the looks up to this one measured the clocks, from the job's middle on."""
    log = made.steps[0]
    begin, end = int(log["begin_ns"][0].as_py()), int(log["end_ns"][-1].as_py())
    ends = log["end_ns"].to_numpy()[LEAST - 1 :: LEAST][: number + 1]
    return [(int(time) - (begin + end) // 2) / 1e9 for time in (begin, *ends)]


def alarms(case: tuple[str, int]) -> tuple[str, int, list[str]]:
    """What is said of one healthy job: its kind, how many looks compared ranks, and each alarm."""
    kind, seed = case
    lines, compared = list[str](), 0
    for number, news, rows in looks(healthy(kind, seed)):
        late = [text for text in news if " is late" in text]
        lines += [f"{kind}, seed {seed}, look {number}: {text}" for text in late]
        compared = len({row.wall_ns for row in rows})
    return kind, compared, lines


def turned_slow(seed: int) -> tuple[int, bool, str]:
    """After how many looks a rank of 64 that turns slow is named (0: never), rightly, and whom."""
    rng = np.random.default_rng([seed, 64])
    job = replace((_SYNC, _AHEAD)[seed % 2], dp=64, steps=10 * LEAST, seed=seed)
    rank, since = int(rng.integers(64)), TURNS * LEAST + int(rng.integers(LEAST))
    step_ns = 3 * job.layer_ns * job.layers + 2 * MS
    extra = int(rng.uniform(*SLOWER) * step_ns)
    kind = ("gpu_more", "gpu_slow", "host")[seed % 3] if job.synchronous else "gpu_more"
    cause = Cause(kind, rank, extra, (*range(since, job.steps),))
    for number, news, rows in looks(replace(job, causes=(cause,))):
        if late := [text for text in news if " is late" in text]:
            named = watched.lateness(rows)
            right = [row.rank for row in named] == [rank] and abs(named[0].since_step - since) < 10
            return number + 1 - since // LEAST, right, f"{kind} by {extra / MS:.2f} ms: {late[0]}"
    return 0, False, f"{kind} by {extra / MS:.2f} ms on rank {rank}: not named"


def most_likely(count: int, chance: float = 0.05) -> float:
    """The upper limit of a Poisson mean by a count (95%)."""
    low, high = float(count), count + 10 * math.sqrt(count + 1)
    for _ in range(60):
        mean = (low + high) / 2
        below = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1))
        low, high = (mean, high) if below > chance else (low, mean)
    return high


def main() -> int:
    """Print both figures; 1 where one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--hours", type=int, default=200, help="of healthy jobs, a look a minute")
    parser.add_argument("--slow", type=int, default=24, help="jobs with a rank that turns slow")
    parser.add_argument("--first-seed", type=int, default=HELD_OUT)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    jobs = arguments.hours * 60 // LOOKS
    cases = [(KINDS[k % len(KINDS)], arguments.first_seed + k) for k in range(jobs)]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.slow)
    with ProcessPoolExecutor(arguments.workers) as pool:
        alarmed, compared = Counter[str](), Counter[str]()
        for kind, looked, texts in pool.map(alarms, cases):
            alarmed[kind] += len(texts)
            compared[kind] += looked
            print(*texts, sep="\n", end="\n" if texts else "", flush=True)
        delays = [*pool.map(turned_slow, seeds)]
    count, total = sum(compared.values()), sum(alarmed.values())
    per_100 = 6_000 / max(count, 1)
    for kind in alarmed:
        print(f"{alarmed[kind]:5d} of {compared[kind]:5d} looks: {kind}")
    print(f"{total} alarms in {count / 60:.0f} h of healthy jobs: {total * per_100:.2f} per 100 h, "
          f"at most {most_likely(total) * per_100:.2f} (95%; limit 1)")  # fmt: skip
    soon = [right and 0 < late <= 2 for late, right, _ in delays]
    for late, right, text in delays:
        print(f"{late} looks, {'right' if right else 'WRONG'}: {text}")
    print(f"named, right, within two looks: {sum(soon)} of {len(soon)}")
    return int(total * per_100 > 1 or not all(soon))


if __name__ == "__main__":
    sys.exit(main())
