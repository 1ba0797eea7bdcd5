"""What is fuzzed: each target spoils one thing that a stranger may have written, and reads it.

The property: nothing but ClusterprofError leaves what the verbs call, the good rank beside the bad
one stays in the results, and each input takes seconds at most.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import lzma
import shutil
import signal
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
import report_sample
import strangers
from hardware_sample import FACTS, lines, load, row
from seeds import content
from simulate import Cause, Job, simulate

from clusterprof import baselines, comparison, gate, hardware, merge_run, run_directory
from clusterprof.agent.contracts import paths, plan as plans, states
from clusterprof.cli import collect, export as cli_export, merge, report, status
from clusterprof.cli.main import parser_of
from clusterprof.collect import answers
from clusterprof.collect.host_keys import Known
from clusterprof.errors import ClusterprofError, MergeError, ReportError
from clusterprof.ingest import assembler, gather, reports
from clusterprof.ingest.flight.dump_file import unpickled
from clusterprof.launch import settings
from clusterprof.report import (
    comparison_text,
    html,
    results_json,
    text,
)
from clusterprof.results import Results
from clusterprof.study import Study, study
from clusterprof.tables import RankTables
from fuzz.spoil import ODD, Change, spoilt, spoilt_bytes

FLIGHT = Path(__file__).parent.parent / "data/flight/nccl/recv"
RUNNING = Path(__file__).parent.parent / "data/flight/pipe/timed"
RECORDING = Path(__file__).parent.parent / "data/recordings/nsys-2025.3/ddp/rank1.sqlite.xz"
#: s of processor time: a busy machine makes no input slow
PATIENCE_S = 30

Target = Callable[[Sequence[Change]], None]
TARGETS: dict[str, Target] = {}


class TooSlow(BaseException):
    """Not an Exception, so that no boundary of the code under test takes it for its own."""


def target(check: Target) -> Target:
    """Register a target by its name, bounded in processor time."""

    @functools.wraps(check)
    def bounded(changes: Sequence[Change]) -> None:
        before = signal.signal(signal.SIGPROF, _too_slow)
        signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
        try:
            check(changes)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    TARGETS[check.__name__] = bounded
    return bounded


def _too_slow(*_: object) -> None:
    raise TooSlow(f"an input took longer than {PATIENCE_S} s")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder for one input."""
    path = Path(tempfile.mkdtemp(prefix="clusterprof-fuzz-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@functools.cache
def traces() -> tuple[bytes, bytes]:
    """Kineto traces of two ranks of one job, NCCL and all."""
    job = Job(dp=2, layers=2, steps=4, kernels_per_layer=1)
    with folder() as at:
        made = [
            strangers.trace(each, at, arguments="kernel").read_bytes() for each in simulate(job)[0]
        ]
    return made[0], made[1]


@functools.cache
def export() -> bytes:
    """A small nsys export: a recording's, of its first steps."""
    with folder() as at:
        path = at / "r.sqlite"
        path.write_bytes(lzma.decompress(RECORDING.read_bytes()))
        with contextlib.closing(sqlite3.connect(path)) as database:
            for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS", "OSRT_API"):
                database.execute(f'DELETE FROM "{table}" WHERE rowid % 5 AND rowid > 400')
            database.commit()
            database.execute("VACUUM")
        return path.read_bytes()


def merged(at: Path) -> None:
    """Merge the reports in a folder whose rank 0 is good, and write all that is written of it."""
    try:
        found = gather([at])
    except MergeError:
        return  # a bad rank may say that it is of another job, or rank 0 as well
    made = study(found.ranks, missing=found.missing, warnings=found.warnings, source=str(at))
    assert 0 in [each["rank"] for each in made.results["ranks"]], "the good rank is gone"
    written_and_read(made.results)
    text.render(made.results, colour=False, width=100).encode(errors="surrogateescape")
    html.render(made.results, made.collectives, made.lanes, title="fuzz")


def written_and_read(made: Results) -> None:
    """What is written is of the form that is read."""
    results_json.check(Path("results.json"), json.loads(results_json.dumps(made)), Results)


@functools.cache
def flight() -> tuple[bytes, dict[str, Any]]:
    """A pickled dump of the flight recorder, real and with frames, and what it holds."""
    content = gzip.decompress((FLIGHT / "rank_1.gz").read_bytes())
    return content, unpickled(content)


def joined(at: Path) -> None:
    """Join the dumps in a folder whose rank 0 is good."""
    shutil.copy(FLIGHT / "rank_0.gz", at / "rank_0.gz")
    found = merge_run.merge_dumps([(at / "rank_0.gz", 0), (at / "rank_1", 1)], {})
    assert 0 in found["dumps"]
    results_json.dumps(found)
    text.hang_page(found).encode(errors="surrogateescape")


@target
def flight_pickle(changes: Sequence[Change]) -> None:
    """The bytes of a pickled dump."""
    with folder() as at:
        (at / "rank_1").write_bytes(spoilt_bytes(flight()[0], changes))
        joined(at)


@target
def flight_values(changes: Sequence[Change]) -> None:
    """The values in a dump."""
    with folder() as at:
        (at / "rank_1").write_text(json.dumps(spoilt(flight()[1], changes)))
        joined(at)


@functools.cache
def cycling() -> tuple[bytes, dict[str, Any]]:
    """Rank 0's dump of a job that ran, packed, and what rank 1's holds: each with 200 calls."""
    good, bad = (
        unpickled(gzip.decompress((RUNNING / f"rank_{rank}.gz").read_bytes())) for rank in (0, 1)
    )
    for dump in (good, bad):
        dump["entries"] = dump["entries"][-200:]
    return gzip.compress(json.dumps(good).encode(), 1), bad


@target
def flight_cycles(changes: Sequence[Change]) -> None:
    """The values in a dump of a job that runs, whose steps are taken from its calls."""
    good, bad = cycling()
    with folder() as at, contextlib.suppress(ReportError):
        (at / "rank_0.json.gz").write_bytes(good)
        (at / "rank_1").write_text(json.dumps(spoilt(bad, changes)))
        dumps = [(at / "rank_0.json.gz", 0), (at / "rank_1", 1)]
        made = merge_run.merge_cycles(dumps, {0: "a", 1: "a"})
        written_and_read(made.results)
        text.render(made.results, colour=False, width=100).encode(errors="surrogateescape")


@target
def flight_groups(changes: Sequence[Change]) -> None:
    """The ranks of the groups beside a dump of a run."""
    listed = {"pg_config": {"0": {"ranks": [0, 1]}, "1": {"ranks": [1, 0, 2]}}}
    with folder() as at:
        shutil.copy(FLIGHT / "rank_1.gz", at / "hang.pickle.gz")
        content = _written(listed, changes)
        (at / "groups.json.gz").write_bytes(gzip.compress(content, 1))
        found = merge_run.merge_dumps([(at / "hang.pickle.gz", 1)], {})
        assert found["dumps"] == [1]
        text.hang_page(found).encode(errors="surrogateescape")


@target
def kineto_values(changes: Sequence[Change]) -> None:
    """Values in a trace."""
    good, bad = traces()
    with folder() as at:
        (at / "rank0.json").write_bytes(good)
        (at / "rank1.json").write_text(json.dumps(spoilt(json.loads(bad), changes)))
        merged(at)


@target
def kineto_events(changes: Sequence[Change]) -> None:
    """The values in a small trace with every kind of event, of which each change hits one."""
    with folder() as at:
        (at / "rank0.json").write_text(json.dumps(content(0)))
        (at / "rank1.json").write_text(json.dumps(spoilt(_small(), changes)))
        merged(at)


def _small() -> dict[str, Any]:
    found = content(1, pg_config=[{"pg_name": "0", "ranks": [0, 1]}])
    found["traceEvents"] = [
        *found["traceEvents"][:3],
        {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "pt_gloo_runloop"}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "ts": 5,
         "dur": 9, "tid": 7, "args": {"device": 0, "stream": 7, "bytes": 64, "correlation": 3}},
        {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "ts": 7.125, "dur": 9,
         "tid": 8, "args": {"Input Dims": [[2, 3]], "Input type": ["float"]}, "finished": "false"},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 50, "dur": 9.5,
         "tid": 7, "args": {"device": 0, "stream": 9, "correlation": 1, "dtype": "Float",
         "Collective name": "allreduce", "Group size": 2, "In msg nelems": 8, "Dst Rank": 1,
         "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 1}},
        {"ph": "X", "cat": "python_function", "name": "<built-in> at 0x7f>", "ts": 60, "dur": 90,
         "tid": 1, "args": {"Python id": 2, "Python parent id": 1}},
        {"ph": "X", "cat": "Operator", "name": "ProfilerStep#3", "ts": 1, "dur": 9, "tid": "12"},
    ]  # fmt: skip
    return found


@target
def kineto_bytes(changes: Sequence[Change]) -> None:
    """Bytes of a trace, and of a packed one."""
    good, bad = traces()
    with folder() as at:
        (at / "rank0.json").write_bytes(good)
        name, packed = (
            ("r.json.gz", gzip.compress(bad, 1)), ("r.json.xz", lzma.compress(bad, preset=0)),
            ("r.json", bad), ("r.json", bad.decode().encode("utf-16")),
        )[sum(what for _, what in changes) % 4]  # fmt: skip
        (at / name).write_bytes(spoilt_bytes(packed, changes))
        merged(at)


@target
def export_cells(changes: Sequence[Change]) -> None:
    """Cells of an nsys export, whole columns of it, and its tables."""
    with folder() as at:
        path = at / "rank1.sqlite"
        path.write_bytes(export())
        with contextlib.closing(sqlite3.connect(path)) as database:
            for where, what in changes:
                _spoil_table(database, where, what)
            database.commit()
        _beside_a_good_one(at)


def _spoil_table(database: sqlite3.Connection, where: int, what: int) -> None:
    tables = [row[0] for row in database.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rootpage, name"
    )]  # fmt: skip
    table = tables[where % len(tables)]
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    column = columns[(where // len(tables)) % len(columns)]
    odd = ODD[what % len(ODD)]
    if not isinstance(odd, (int, float, str, type(None))) or isinstance(odd, bool):
        odd = bytes(range(0, 250, 7))
    if isinstance(odd, int) and abs(odd) >= 2**63:
        odd = -(2**63)
    if isinstance(odd, str):
        odd = odd.encode(errors="surrogatepass")
    value = "CAST(? AS TEXT)" if isinstance(ODD[what % len(ODD)], str) else "?"
    rows = ("rowid = 1 + abs(?) % (SELECT max(rowid) FROM {0})", "rowid % 3 = abs(?) % 3", "?")
    kind = (what // len(ODD)) % 5
    with contextlib.suppress(sqlite3.Error):
        if kind < 3:
            row = rows[kind].format(f'"{table}"')
            sql = f'UPDATE OR IGNORE "{table}" SET "{column}" = {value} WHERE {row}'
            database.execute(sql, (odd, where + 1))
        elif kind == 3:
            database.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "was_{column}"')
        else:
            database.execute(f'DELETE FROM "{table}" WHERE rowid % 2')


def _beside_a_good_one(at: Path) -> None:
    good = content(0)
    good["distributedInfo"]["world_size"] = 4
    # as near to the recording's time as one job's windows are
    good["baseTimeNanoseconds"] = _epoch()
    (at / "rank0.json").write_text(json.dumps(good))
    merged(at)


@functools.cache
def _epoch() -> int:
    from clusterprof.ingest import read_report

    return read_report(RECORDING).info.begin_ns


@target
def export_bytes(changes: Sequence[Change]) -> None:
    """Bytes of an nsys export."""
    with folder() as at:
        (at / "rank1.sqlite").write_bytes(spoilt_bytes(export(), changes))
        _beside_a_good_one(at)


STEPS = "step,begin_ns,end_ns\n" + "".join(
    f"{k},{1_700_000_000_000_000_000 + 100_000_000 * (k - 9)},"
    f"{1_700_000_000_000_000_000 + 100_000_000 * (k - 9) + 90_000_000}\n"
    for k in range(12)
)
MARK = {"name": "clusterprof:clock:1", "before_ns": 1_700_000_000_000_000_000,
        "after_ns": 1_700_000_000_000_001_000}  # fmt: skip
READING = {
    "event": "open", "wall_ns": 1_700_000_000_000_000_000, "monotonic_ns": 5_000_000_000,
    "gap_ns": 100, "marks": [MARK], "kernel": {"maxerror_ns": 500, "synchronised": True},
}  # fmt: skip
BOUND = {
    "rank": 1, "other": 0, "machine": "a h1", "other_machine": "b h2", "when": "before",
    "at_ns": 1_700_000_000_000_000_000, "low_ns": -500, "high_ns": 700, "round_trip_ns": 1200,
    "exchanges": 9,
}  # fmt: skip
ORDER = "windows/2/order.json"
FILES: dict[str, Any] = {
    "ranks/00001/state.json": {
        "state": "captured", "chosen": True, "host": "h2", "machine": "b h2", "whole": True,
        "steps": 9, "attempt": 1, "history": [["armed", 1]], "clock": READING, "rank": 1,
        "reason": "", "nsys": {"path": "/nowhere/nsys", "version": "1"},
    },
    "ranks/00001/clock.json": {"schema_version": 1, "machine": "b h2", "readings": [READING] * 3},
    "ranks/00001/probe.json": {"bounds": [BOUND], "notes": ["n"]},
    "clock_probe.json": {"schema_version": 1, "method": "m", "bounds": [BOUND] * 2, "notes": []},
    "plan.json": {"schema_version": 1, "run": "/nowhere", "window": [9, 12]},
    "run.json": {
        "schema_version": 1, "window": [9, 12], "world_size": 2, "launcher": "torchrun",
        "selection": {"text": "all", "kind": "all", "ranks": [], "pp": 1, "world_size": None},
        "profiler": {"name": "torch", "version": "2", "path": None}, "attempt": 1,
        "began": "2026-01-02T03:04:05.000+00:00", "ended": None, "exit_status": None,
    },
    "ranks/00001/steps.csv": STEPS,
    "ranks/00001/gc.csv": "begin_ns,end_ns,generation,collected\n"
    "1700000000000000000,1700000000009000000,2,5\n",
    "ranks/00001/pace.csv": "first_step,count,begin_ns,end_ns,median_ns,q1_ns,q3_ns,longest_ns\n"
    "0,9,1699999999000000000,1699999999900000000,90000000,90000000,90000000,95000000\n",
    "ranks/00001/pauses.csv": "step,begin_ns,end_ns,usual_ns,made_up_ns\n"
    + "".join(
        f"{step},{1_699_999_000_000_000_000 + step * 100_000_000},"
        f"{1_699_999_000_900_000_000 + step * 100_000_000},90000000,0\n"
        for step in (0, 40, 80, 120, 160, 200)
    ),
    ORDER: {
        "schema_version": 1, "number": 2, "steps": [40, 45], "profiler": "torch",
        "selection": {"text": "1", "kind": "ranks", "ranks": [1], "pp": 1, "world_size": None},
        "asked_by": "somebody on h1", "auto": False,
    },
}  # fmt: skip


@target
def files_of_a_run(changes: Sequence[Change]) -> None:
    """The small files of a run directory: the first change says which of them is spoilt."""
    names = sorted(each for each in FILES if each != ORDER)
    chosen = names[changes[0][0] % len(names)] if changes else ""
    _verbs_read(chosen, changes[1:])


#: what the hardware of few ranks has
ODDS = {"driver": "amdgpu", "xids": [{"xid": 79, "after_ns": 10, "until_ns": 20}]}


@target
def hardware_samples(changes: Sequence[Change]) -> None:
    """hardware.csv of a rank, and what its state says of its GPU: compared, and shown."""
    with folder() as at:
        (at / "0.csv").write_text(lines(load()))
        (at / "1.csv").write_bytes(spoilt_bytes(lines(load()).encode(), changes[:2]))
        (at / paths.STATE).write_bytes(
            _written({"hardware": {**FACTS, **ODDS}, "host": "h1"}, changes[2:])
        )
        each = dict.fromkeys((0, 1), states.read(str(at)))
        rows, _ = hardware.of_ranks({rank: at / f"{rank}.csv" for rank in each}, each)
        assert rows[0]["rank"] == 0
        shown: Any = {**results(), "hardware": hardware.with_energy(rows, 50_000_000)}
        results_json.check(at, json.loads(results_json.dumps(shown)), Results)
        text.render(shown)


@functools.cache
def tables_kept() -> dict[str, bytes]:
    """The files of a report's reduced tables, by name."""
    with folder() as at:
        report = at / "trace.json"
        report.write_text(json.dumps(content(1)))
        reports.keep(report, at / "reduced")
        return {each.name: each.read_bytes() for each in (at / "reduced").iterdir()}


@target
def reduced_tables(changes: Sequence[Change]) -> None:
    """A report's reduced tables without the report: the first change says which file is spoilt."""
    names = sorted(tables_kept())
    chosen = names[changes[0][0] % len(names)] if changes else ""
    with folder() as at:
        (at / "ranks/00000").mkdir(parents=True)
        (at / "ranks/00000/trace.json").write_text(json.dumps(content(0)))
        (at / "ranks/00001/reduced").mkdir(parents=True)
        for name, found in tables_kept().items():
            form = json.loads(found) if name.endswith(".json") else None
            if name == chosen:
                rest = changes[1:]
                found = _written(form, rest) if form else spoilt_bytes(found, rest)
            (at / "ranks/00001/reduced" / name).write_bytes(found)
        merged(at)


@target
def later_windows(changes: Sequence[Change]) -> None:
    """The order for a later window."""
    _verbs_read(ORDER, changes)


def _verbs_read(chosen: str, changes: Sequence[Change]) -> None:
    """Have the verbs read a run of which one file is spoilt, and a writer its order."""
    with folder() as at:
        run = run_directory.create(at / "run")
        for rank in range(2):
            run.rank(rank).mkdir()
            trace = json.dumps(content(rank)).encode()
            (run.rank(rank) / "trace.json.gz").write_bytes(gzip.compress(trace, 1))
        states.advance(str(run.rank(0)), "captured", chosen=True)
        for name, found in FILES.items():
            mine = changes if name == chosen else ()
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_bytes(_written(found, mine))
        plans.next_order(str(run.path), 1)
        window = ["--window", "2"] if chosen == ORDER else []
        for verb in (status, collect, merge, status, report):
            with quiet(), contextlib.suppress(ClusterprofError):
                own = [str(run.path), *(window if verb is collect else ())]
                verb.main(verb.__name__.rpartition(".")[2], own, None)
        if chosen.startswith("ranks/"):
            results = results_json.read(run.merged / "results.json")
            assert 0 in [each["rank"] for each in results["ranks"]], "the good rank is gone"


def _written(found: Any, changes: Sequence[Change]) -> bytes:
    if isinstance(found, str):
        return spoilt_bytes(found.encode(), changes)
    odd = spoilt(found, [each for each in changes if each[1] % 5])
    rough = [each for each in changes if each[1] % 5 == 0]
    return spoilt_bytes(json.dumps(odd).encode(), rough)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the verbs print goes nowhere, but is encoded as for a terminal."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


@functools.cache
def results() -> Any:
    """The results of a good job."""
    made = merging_of(traces())
    return json.loads(results_json.dumps(made.results))


def merging_of(made: Sequence[bytes]) -> Any:
    """The study of good traces."""
    with folder() as at:
        for rank, each in enumerate(made):
            (at / f"rank{rank}.json").write_bytes(each)
        return merge_run.merge_reports([at], {})


@target
def results_of_a_run(changes: Sequence[Change]) -> None:
    """results.json, shown again."""
    _shown_again(spoilt(results(), changes))


@target
def hardware_in_results(changes: Sequence[Change]) -> None:
    """What results.json says of hardware and of the run's size, shown again."""
    rows = [row(rank, f"node{rank}", sm_mhz=1400 + 200 * rank) for rank in range(4)]
    rows[0]["driver"] = "amdgpu"
    xid: Any = {"xid": 79, "after_ns": 1, "until_ns": 2, "first_step": 3, "last_step": None}
    rows[1]["xids"] = [xid, xid]
    of_run = {"hardware": rows, "run_size": {"steps": 100_000, "gpus": 64, "gpu_hour": 2.5}}
    _shown_again({**results(), **spoilt(json.loads(json.dumps(of_run)), changes)})


@target
def run_in_results(changes: Sequence[Change]) -> None:
    """What results.json says of pauses and looks, and the evidence's rows, shown again."""
    sample = report_sample.paused()
    assert sample["shallow"]
    sample["shallow"]["watch"] = {
        "looks": 3, "first_step": 100, "last_step": 400, "steps": 300, "step_ns": 61_000_000,
        "late_ranks": [2],
    }  # fmt: skip
    of_run = {
        "pauses": sample["pauses"],
        "shallow": sample["shallow"],
        "evidence_table": results()["evidence_table"],
    }
    _shown_again({**results(), **spoilt(json.loads(json.dumps(of_run)), changes)})


def _shown_again(content: Any) -> None:
    with folder() as at:
        (at / "merged").mkdir()
        (at / "merged/results.json").write_text(json.dumps(content))
        for form in ((), ("--markdown", "--anonymous"), ("--csv",), ("--json", "--anonymous")):
            with quiet(), contextlib.suppress(ClusterprofError):
                report.main("report", [str(at), *form], None)


@target
def settings_of_a_project(changes: Sequence[Change]) -> None:
    """clusterprof.toml: any bytes, and values that its options have not."""
    text = 'steps = "50:60"\nhang-after = 120\nstacks = true\n[srun]\nnsys-arg = ["-x"]\n'
    with folder() as at:
        file = at / settings.FILE
        file.write_bytes(spoilt_bytes(text.encode(), changes))
        with contextlib.suppress(ClusterprofError):
            settings.read("srun", parser_of("srun"), [file])
        odd = [json.dumps(str(ODD[what % len(ODD)])) for _, what in changes]
        file.write_text("\n".join(f"hang-after = {each}" for each in odd[:1]), errors="replace")
        with contextlib.suppress(ClusterprofError):
            settings.read("srun", parser_of("srun"), [file])


@target
def runs_that_are_compared(changes: Sequence[Change]) -> None:
    """results.json or a baseline, compared with the good one."""
    good = comparison.of_results("good", results())
    half = len(changes) // 2
    with folder() as at, quiet(), contextlib.suppress(ClusterprofError):
        (at / "results.json").write_text(json.dumps(spoilt(results(), changes[:half])))
        kept = {"baseline_version": 2, "clusterprof_version": "", "runs": [good, good]}
        (at / "kept.json").write_text(json.dumps(spoilt(kept, changes[half:])))
        sides = [baselines.runs_named(name, at) for name in (str(at / "results.json"), "kept")]
        made = comparison.compare(*sides)
        results_json.dumps(made)
        for render in (
            comparison_text.render, comparison_text.markdown, comparison_text.page,
        ):  # fmt: skip
            render(made).encode(errors="surrogateescape")
        comparison.fails(gate.parse("critical,step>+3%", compares=True), made)


@target
def tables_of_ranks(changes: Sequence[Change]) -> None:
    """Times, steps and streams in the tables of a job's ranks, and rows that are missing.

    As they are behind the readers: one that is refused there gets no further.
    """
    ranks = list(tables_of_a_job())
    for where, what in changes:
        at, names = where % len(ranks), ("activity", "collective_calls", "steps", "host_calls")
        name = names[where // len(ranks) % len(names)]
        table = _spoil_column(getattr(ranks[at], name), where // 16, what)
        ranks[at] = replace(ranks[at], **{name: table})
    with contextlib.suppress(ReportError):
        ranks = [assembler.checked(each, None) for each in ranks]
    results = study(ranks).results
    longest = max((step["duration_ns"] for step in results["steps"]), default=0)
    for finding in results["findings"]:
        assert 0 <= finding["share_of_step"] <= 1
        assert finding["saved_ns_per_step"] <= longest
        assert abs(finding["saved_uncertainty_ns"]) < 2**60


@target
def exports_of_a_run(changes: Sequence[Change]) -> None:
    """results.json and the tables of a merged run, exported in every format."""
    made = study_of_a_job()
    with folder() as at:
        run = run_directory.Window.at(at / "run")
        run.path.mkdir()
        merge_run.save(made, run)
        files = sorted(run.path.rglob("*.parquet"))
        for where, what in changes:
            file = files[where % len(files)]
            if what % 4 == 0:
                path = run.merged / "results.json"
                with contextlib.suppress(ValueError):
                    document = spoilt(json.loads(path.read_bytes()), [(where, what // 4)])
                    path.write_text(json.dumps(document))
            elif what % 4 == 1:
                file.write_bytes(spoilt_bytes(file.read_bytes(), [(where // 16, what // 4)]))
            else:
                with contextlib.suppress(OSError, pa.ArrowException):
                    table = parquet.read_table(file)
                    merge_run.write_table(_spoil_column(table, where // 16, what // 4), file)
        for form in cli_export.FORMATS:
            with quiet(), contextlib.suppress(ClusterprofError):
                target = str(at / form)
                own = [str(run.path), "--format", form, "-o", target, "--max-mb", "1"]
                cli_export.main("export", own, None)


@functools.cache
def study_of_a_job() -> Study:
    """The study of that job."""
    return study(tables_of_a_job())


@functools.cache
def tables_of_a_job() -> list[RankTables]:
    """A small pipeline with a tensor group in each stage, and a late host."""
    job = Job(
        dp=1, tp=2, pp=2, layers=2, kernels_per_layer=2, steps=4, microbatches=2,
        synchronous=True, causes=(Cause("host", 1, 8_000_000),),
    )  # fmt: skip
    return simulate(job)[0]


def _spoil_column(table: pa.Table, where: int, what: int) -> pa.Table:
    """A table with odd numbers in some rows of a column, sorted again as readers do."""
    rows = table.num_rows
    names = [n for n in table.schema.names if n.endswith("_ns") or n in ("step", "stream", "call")]
    name, how = names[where % len(names)], what % 7
    if not rows or how == 6:
        return table.slice(0, rows * (what // 7 % 4) // 4)
    field = table.schema.field(name)
    absent = np.asarray(pc.is_null(table[name]).to_numpy())
    values = np.array(pc.fill_null(table[name], 0).to_numpy(), dtype=np.int64)
    chosen = np.arange(where // len(names) % rows, rows, (1, 7, rows)[what // 7 % 3])
    # farther off than decades no clock can be aligned
    power = 2 ** (10, 20, 33, 47)[what // 21 % 4]
    if how == 0:
        values[chosen] = values[0] + (power, -power, 0)[what // 84 % 3]
    elif how == 1:
        values[chosen] += (power, -power)[what // 84 % 2]
    elif how == 2:
        values[chosen] = values[chosen[0]]
    elif how == 3:
        values[chosen] = values[chosen[::-1]]
    elif how == 4:
        values[chosen] = values[0] + (values[chosen] - values[0]) // 1000
    else:
        values = np.roll(values, 1 + what // 7 % 5)
    if field.type != pa.int64():
        values = values.clip(-(2**31), 2**31 - 1)
    column = pa.array(values.clip(-(2**62), 2**62), field.type, mask=absent)
    order = next(n for n in table.schema.names if n.endswith("_ns"))
    return table.set_column(table.schema.get_field_index(name), field, column).sort_by(order)


LOOKED = {
    "host": "h1", "machine": "a h1", "temporary": "/tmp", "folder": True, "program": True,
    "nsys": True, "other_nsys": None, "port": 4711,
}  # fmt: skip
LISTED = [
    {"path": "00001/state.json", "size": 9, "sha256": "0" * 64},
    {"path": "attempt-2/00001/report.nsys-rep", "size": 9, "sha256": "1" * 64},
]


@target
def answers_of_a_host(changes: Sequence[Change]) -> None:
    """What a host answers over SSH."""
    for found, read in (
        (LOOKED, lambda answer: answers.description(answer, 22)),
        (LISTED, answers.offered),
    ):
        rough = [each for each in changes if each[1] % 4 == 0]
        odd = spoilt(found, [each for each in changes if each[1] % 4])
        answer = b"welcome\n" + json.dumps(odd).encode() + b"\n"
        with contextlib.suppress(ClusterprofError):
            read(spoilt_bytes(answer, rough))


KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIIFCuUI4wjUrGFfDxOQRwHkQ9qNKuDGZ8CsyS0hZvjkn"
KNOWN_HOSTS = f"""# Host h1 found: line 1
h1,10.0.0.1 ssh-ed25519 {KEY} a comment
@revoked h2 ssh-ed25519 {KEY}
@cert-authority *.cluster ssh-ed25519 {KEY}
|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ssh-ed25519 {KEY}
"""


@target
def known_hosts(changes: Sequence[Change]) -> None:
    """Lines of known_hosts, as ssh-keygen prints them."""
    lines = spoilt_bytes(KNOWN_HOSTS.encode(), changes).decode(errors="replace")
    known = Known()
    known.read(lines)
    assert all(isinstance(each, bytes) for each in (*known.keys, *known.revoked))


def replay(path: Path) -> None:
    """Read one file of the corpus: a target's name, and the changes that once broke it."""
    found = json.loads(path.read_text())
    TARGETS[found["target"]]([(where, what) for where, what in found["changes"]])


def kept(at: Path, name: str, changes: Sequence[Change]) -> Path:
    """Write what broke a target into the corpus."""
    at.mkdir(parents=True, exist_ok=True)
    found = json.dumps({"target": name, "changes": [list(each) for each in changes]})
    path = at / f"{name}-{zlib.crc32(found.encode()):08x}.json"
    path.write_text(found + "\n")
    return path
