"""`clusterprof attach`: what a job that was not started under clusterprof lets one see."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from clusterprof import console, words
from clusterprof.agent.contracts import files
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.arguments import number_of, path, watch_seconds
from clusterprof.cli import Parser, verb_parser
from clusterprof.collect import running_ranks as running
from clusterprof.collect.running_ranks import RunningRank
from clusterprof.errors import ReportError, UsageError
from clusterprof.run_directory import writing

#: for the job script, before the program: what the next job lets one see
NEXT_TIME = (
    'begin="${TMPDIR:-/tmp}/${SLURM_JOB_ID:-$USER}"  # a folder of each node',
    "export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=${begin}_pipe_",
    "export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=${begin}_dump_",
    "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
    "export TORCH_NCCL_ENABLE_TIMING=1               # who is late; some 9 µs per collective",
)
#: the two rounds of dumps
_ROUNDS = ("1", "2")
#: of `--json` without a job
SCHEMA_VERSION = 1
_FORM = {"host": str, "ranks": [range(1 << 31)], "asked_ns": [[int, int]]}


class Job(NamedTuple):
    """The ranks of a job on this host: where their pipes and their dumps are."""

    pipes: Mapping[int, Path]
    dumps: Mapping[int, Path]
    world_size: int | None


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb,
        "Look at a job that was not started under clusterprof, by dumps of PyTorch's flight "
        "recorder: NCCL's watchdog writes one where the job set "
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE. Says whether the job hangs, and for whom; with "
        "TORCH_NCCL_ENABLE_TIMING=1 also who is late. Without arguments: your ranks on this host.",
        "attach                                     your ranks here, and what they allow",
        "attach 4711                                the job of this process",
        "attach --pipes /tmp/pipe_ --dumps /tmp/dump_ -o /shared/look",
        "attach --dumps /tmp/dump_                  of a job that hung: dumps that lie there",
        "attach /shared/look                        what was gathered on all nodes",
    )
    add = parser.add_argument
    add("what", nargs="?", metavar="PID|DIR",
        help="a process of the job on this host, or a folder of an earlier --output")  # fmt: skip
    add("--pipes", metavar="PREFIX", help="what the job set as TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    add("--dumps", metavar="PREFIX",
        help="what it set as TORCH_FR_DUMP_TEMP_FILE or TORCH_NCCL_DEBUG_INFO_TEMP_FILE (default: "
        "where torch writes by itself)")  # fmt: skip
    add("-o", "--output", type=path, metavar="DIR",
        help="gather the dumps in DIR; where all nodes see it, run the same line on each node "
        "(default: attached-<UTC stamp>)")  # fmt: skip
    add("--every", default="30s", metavar="TIME",
        help="how long after the first dumps the second ones are asked for: 30s, 10m "
        "(default 30s)")  # fmt: skip
    add("--wait", type=number_of("seconds"), default=60, metavar="S",
        help="wait for dumps for S seconds at most (default 60)")  # fmt: skip
    add("--json", action="store_true", help="print results as JSON instead of text")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """List ranks, or gather dumps and print what they show; 0, or 1 where there is nothing."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    every_s = _seconds(arguments.every)
    if arguments.what and (arguments.pipes or arguments.dumps):
        raise UsageError("a PID or DIR says itself where pipes and dumps are: leave out --pipes")
    if arguments.what and Path(arguments.what).is_dir():
        return shown(Path(arguments.what), arguments.json)
    if not (arguments.what or arguments.pipes or arguments.dumps):
        return listed(running.running_ranks(), arguments.json)
    job = job_of(arguments)
    folder = arguments.output or Path(f"attached-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}")
    with writing(folder, "--output DIR"):
        gathered = gather(job, folder, every_s, arguments.wait)
    if not gathered:
        return 1
    if job.world_size is not None and job.world_size > len(gathered):
        console.say(
            f"{len(gathered)} of {job.world_size} ranks have a dump; those of other nodes: run the "
            f"same line on each of these, with -o {folder}"
        )
    console.say(f"the dumps are in {folder}; with those of all nodes: clusterprof attach {folder}")
    return shown(folder, arguments.json)


def _seconds(text: str) -> int:
    with contextlib.suppress(UsageError):
        if seconds := watch_seconds(text):
            return seconds
    raise UsageError(f"--every {text!r} is no time", "write 30s, 10m or 1h, a day at most")


def listed(ranks: Sequence[RunningRank], as_json: bool = False) -> int:
    """Print the ranks of this user on this host, and what they allow; 0."""
    host = socket.gethostname()
    if as_json:
        console.json(json.dumps(_as_json(ranks, host), indent=1).encode())
        return 0
    if not ranks:
        console.say(f"no Python process of yours on {host} has a rank (RANK, SLURM_PROCID, ...)")
        return 0
    rows = [("rank", "pid", "launcher", "dumps on request", "recorder", "durations")]
    for rank in ranks:
        of_job = f" of {rank.world_size}" if rank.world_size else ""
        rows.append(
            (f"{rank.rank}{of_job}", str(rank.pid), rank.launcher, _pipe(rank),
             {None: "torch's default", 0: "off"}.get(rank.calls, f"{rank.calls} calls"),
             "on" if rank.timed else "off")
        )  # fmt: skip
    print("\n".join(console.table(rows, right=(1,))))
    if any(rank.pipe is None for rank in ranks):
        advise("ranks without a pipe cannot be asked for a dump (gloo has none at all)")
    else:
        console.say(f"to look at the job: clusterprof attach {ranks[0].pid}")
    return 0


def _as_json(ranks: Sequence[RunningRank], host: str) -> dict[str, object]:
    """What `--json` prints of the ranks: their paths as text, null for what is not set."""
    entries = [
        {**asdict(rank), "pipe": rank.pipe and str(rank.pipe), "dump": str(rank.dump),
         "can_be_asked": rank.pipe is not None and rank.pipe.is_fifo()}
        for rank in ranks
    ]  # fmt: skip
    for entry in entries:
        del entry["prefixes"]
    return {"schema_version": SCHEMA_VERSION, "host": host, "ranks": entries}


def _pipe(rank: RunningRank) -> str:
    if rank.pipe is None:
        return "no"
    return "yes" if rank.pipe.is_fifo() else "not made (not NCCL, or recorder off)"


def advise(why: str) -> None:
    """Say what cannot be, and the lines by which it can the next time."""
    console.say(f"{why}; for the next time, in the job script:", *NEXT_TIME)


def job_of(arguments: argparse.Namespace) -> Job:
    """The job that is asked for. Raises UsageError, ReportError."""
    if arguments.what:
        return _job_of_process(arguments.what, running.running_ranks())
    prefix = arguments.dumps or running.dumps_of(os.environ)
    try:
        pipes = running.pipes_of(arguments.pipes) if arguments.pipes is not None else {}
        dumps = {} if arguments.pipes is not None else running.dumps_at(prefix)
    except OSError as error:
        raise ReportError(f"{error.filename} cannot be read: {error.strerror}") from None
    if dumps:
        return Job({}, dumps, None)
    if not pipes:
        name = f"dump {prefix}<rank>" if arguments.pipes is None else (
            f"named pipe {arguments.pipes}<rank>.pipe")  # fmt: skip
        raise ReportError(
            f"there is no {name} on this host", "which ranks have one: clusterprof attach"
        )
    return Job(pipes, {rank: Path(f"{prefix}{rank}") for rank in pipes}, None)


def _job_of_process(what: str, ranks: Sequence[RunningRank]) -> Job:
    """The job of a process: ranks of one size whose pipes and dumps are named alike."""
    own = next((rank for rank in ranks if what == str(rank.pid)), None)
    if own is None:
        raise ReportError(
            f"{what} is neither a folder nor a Python process of yours with a rank on this host",
            "which there are: clusterprof attach",
        )
    same = [r for r in ranks if (r.prefixes, r.world_size) == (own.prefixes, own.world_size)]
    pipes = {rank.rank: rank.pipe for rank in same if rank.pipe is not None}
    if not pipes:
        advise(f"process {own.pid} has no pipe: nothing can be asked of its job")
    dumps = {r.rank: r.dump for r in same if r.rank in pipes or r.dump.is_file()}
    if not dumps:
        raise ReportError(f"the job of process {own.pid} has left no dump on this host either")
    return Job(pipes, dumps, own.world_size)


def gather(job: Job, folder: Path, every_s: int, wait_s: int, clock: Clock = REAL) -> list[int]:
    """Gather dumps in a folder: those that lie there, or two of each rank that has a pipe.

    Returns the ranks with a dump. Raises OSError where the folder cannot be written.
    """
    host, spans, ranks, asked = socket.gethostname(), list[list[int]](), list[int](), set[int]()
    for number in _ROUNDS if job.pipes else _ROUNDS[:1]:
        began_ns = clock.wall_ns()
        ranks = _round(job, folder / number, wait_s, clock)
        spans.append([began_ns, clock.wall_ns()])
        asked |= {*ranks} & job.pipes.keys()  # whose process runs here
        if not ranks:
            console.say("no dump could be had")
            break
        if number != _ROUNDS[-1] and job.pipes:
            clock.sleep(every_s)
    about = {"host": host, "ranks": sorted(asked), "asked_ns": spans}
    files.write_json(str(folder / f"host-{host}.json"), about, mode=0o600)
    return ranks


def _round(job: Job, folder: Path, wait_s: int, clock: Clock) -> list[int]:
    """Gather one dump of each rank, and say why there is none; returns the ranks with one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if job.pipes:
        console.say(f"asking {words.ranks(job.pipes)} for a dump, {folder.name} of {len(_ROUNDS)}")
        why = running.gather(job.pipes, job.dumps, folder, wait_s, clock)
    else:
        why = _copied(job.dumps, folder)
    for rank, reason in why.items():
        console.say(f"rank {rank}: {reason}")
    return sorted({*(job.pipes or job.dumps)} - {*why})


def _copied(dumps: Mapping[int, Path], folder: Path) -> dict[int, str]:
    """Copy dumps that lie there, and say when they were written: they may be another job's.

    Returns, by rank, why one cannot be read. Raises OSError where the folder cannot be written.
    """
    copied = {rank: running.copy(dump, folder, rank) for rank, dump in dumps.items()}
    why = {rank: reason for rank, reason in copied.items() if reason}
    times_ns = list[int]()
    for rank in dumps.keys() - why.keys():
        with contextlib.suppress(OSError):
            times_ns.append(dumps[rank].stat().st_mtime_ns)
    if times_ns:
        period = words.period(min(times_ns), max(times_ns))
        console.say(f"dumps of {words.ranks(dumps.keys() - why.keys())}, written {period}")
    return why


def shown(folder: Path, as_json: bool) -> int:
    """Print what the dumps in a folder show: whether the job hangs, else who is late."""
    from clusterprof import merge_run
    from clusterprof.ingest.flight.all_dumps import find_dumps
    from clusterprof.report import results_json, text

    hosts, spans = _hosts(folder)
    rounds = [folder / name for name in _ROUNDS if (folder / name).is_dir()]
    if not rounds:
        raise ReportError(f"{folder} holds no dumps that clusterprof attach has gathered")
    dumps = find_dumps(rounds[-1])
    if not dumps:
        raise ReportError(
            f"no file in {rounds[-1]} is a dump of a flight recorder that can be read"
        )
    if len(rounds) == 1:
        console.say(
            "dumps of one time: a call that was on its way looks like one that does not end"
        )
    runs = len(rounds) > 1 and _runs(merge_run.progress(*rounds))
    try:
        if runs:
            study = merge_run.merge_cycles(dumps, hosts, spans)
            if as_json:
                console.json(results_json.dumps(study.results))
            else:
                merge_run.print_verdict(study.results, None)
            return 0
    except ReportError as error:
        if as_json:
            raise
        console.say(*str(error).split("\n  "))
        return 0
    results = merge_run.merge_dumps(dumps, {})
    if as_json:
        console.json(results_json.dumps(results))
    else:
        console.styled(text.hang_page(results), ())
    return 0


def _runs(progress: Mapping[int, int | None]) -> bool:
    """Whether a job goes on, by how many calls each rank made between two dumps; says so."""
    calls = [count for count in progress.values() if count is not None]
    still = [rank for rank, count in progress.items() if count == 0]
    if without := [rank for rank, count in progress.items() if count is None]:
        console.say(f"{words.ranks(without)} left no second dump that can be read")
    if still:
        console.say(f"{words.ranks(still)} made no call between the two dumps")
    elif calls:
        low, high = f"{min(calls):,}", f"{max(calls):,}"
        count = high if low == high else f"{low} to {high}"
        goes_on = "the job runs: each rank" if not without else "each of the others"
        console.say(f"{goes_on} made {count} calls between the two dumps")
    else:
        console.say("whether the job goes on cannot be determined: no rank has two dumps")
    return bool(calls) and not still


def _hosts(folder: Path) -> tuple[dict[int, str], list[tuple[int, int]]]:
    """The host of each rank, and when dumps were asked for, as each node has written it."""
    hosts, spans = dict[int, str](), list[tuple[int, int]]()
    for file in sorted(folder.glob("host-*.json")):
        with contextlib.suppress(OSError, ValueError):
            about = files.load(str(file))
            if files.fits(about, _FORM):
                hosts.update(dict.fromkeys(about["ranks"], about["host"]))
                spans += [(begin, end) for begin, end in about["asked_ns"]]
    return hosts, spans
