"""Reading reports in processes of their own."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import strangers
from lab import command
from lab.command import Completed, clusterprof as command_line
from lab.tiers import long_but
from seeds import content, span, trace
from simulate import Cause, Job, simulate

from clusterprof.errors import ReportError
from clusterprof.ingest import gather
from clusterprof.ingest.engines import Processes
from clusterprof.ingest.flight import all_dumps
from clusterprof.tables import SCHEMAS

Run = Callable[..., Completed]
DATA = Path(__file__).resolve().parents[1] / "data"


#: reports of any size are worth a process
APART = Processes(2, always=True)


def test_traces_read_in_processes_are_as_read_in_this_one(recordings: Path) -> None:
    folder = recordings / "kineto" / "gloo"
    here, apart = gather([folder]), gather([folder], engine=APART)
    assert [ranks.info for ranks in here.ranks] == [ranks.info for ranks in apart.ranks]
    for one, other in zip(here.ranks, apart.ranks, strict=True):
        for name in SCHEMAS:
            assert getattr(one, name).equals(getattr(other, name))


def test_dumps_of_flight_recorders_are_the_same_by_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_dumps, "_SHARE", 2)
    shutil.copytree(DATA / "flight/gloo/skip", tmp_path, dirs_exist_ok=True)
    (tmp_path / "rank_9").write_bytes(b"\x80\x02garbage")
    found = [all_dumps.read_dumps(all_dumps.find_dumps(tmp_path), workers=n) for n in (1, 2)]
    assert len(found[0].ranks) == 8
    assert len(found[0].missing) == 1
    assert found[0] == found[1]
    assert all(each.entries.equals(found[0].entries) for each in found)


READS = """
from clusterprof.ingest.engines import Readers
if __name__ == "__main__":
    print(Readers().read(sorted, [2, 1], 600.0))
"""


@pytest.mark.parametrize("temporary", ["short", "long" * 30])
def test_a_process_that_reads_imports_nothing_of_the_current_folder(
    tmp_path: Path, temporary: str
) -> None:
    (tmp_path / temporary).mkdir()
    (tmp_path / "reads.py").write_text(READS)
    for name in "clusterprof", "numpy", "queue":
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text("raise SystemExit(__name__)")
    done = command.run(
        [sys.executable, tmp_path / "reads.py"],
        cwd=tmp_path / "here",
        env={"TMPDIR": str(tmp_path / temporary)},
    )
    assert (done.stdout, done.stderr) == ("[1, 2]\n", ""), done


ENDED = """
import os, sys, threading, time
from clusterprof.ingest.engines import Readers
def end(readers):
    while len(readers._running) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), int(sys.argv[1]))
if __name__ == "__main__":
    readers = Readers()
    threading.Thread(target=end, args=[readers]).start()
    readers.read_each(time.sleep, [(600, 600.0)] * 3, 2, "naps")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_processes_that_read_end_with_one_that_is_killed_or_interrupted(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "reads.py").write_text(ENDED)
    (tmp_path / "temporary").mkdir()
    # it returns once no process holds its output any more
    done = command.run(
        [sys.executable, tmp_path / "reads.py", str(int(number))],
        env={"TMPDIR": str(tmp_path / "temporary")},
    )
    assert done.returncode == -number, done
    if number == signal.SIGINT:
        assert list((tmp_path / "temporary").glob("clusterprof-*")) == []


def test_an_error_comes_back_from_a_process_with_all_its_lines(
    recordings: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "rank7.json.gz"
    bad.write_bytes(b"garbage")
    found = gather([recordings / "kineto" / "gloo", bad], engine=APART)
    assert [ranks.rank for ranks in found.ranks] == [0, 1, 2]
    (lost,) = found.missing
    assert lost["source"] == str(bad)
    assert str(bad) in lost["reason"]
    assert str(bad) in found.warnings[0]


def test_where_all_processes_fail_all_reasons_are_said(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_bytes(b'{"schemaVersion": 1,')
    with pytest.raises(ReportError, match="2 reports") as caught:
        gather([tmp_path], engine=APART)
    for rank in range(2):
        assert str(tmp_path / f"rank{rank}.json") in caught.value.details[rank]


def clock_of(*hosts: str) -> dict[str, object]:
    """What `clusterprof clock` writes of these hosts, the first of them rank 0's."""
    at = 1_760_000_000_000_000_000
    bound = {"low_ns": -9_000, "high_ns": 9_000, "at_ns": at, "round_trip_ns": 9, "exchanges": 400}
    rows = [
        {
            "rank": k,
            "other": 0,
            "machine": f"b{k} {host}",
            "other_machine": f"b0 {hosts[0]}",
            **bound,
        }
        for k, host in enumerate(hosts[1:], 1)
    ]
    return {"schema_version": 1, "method": "UDP", "bounds": rows, "notes": []}


def test_reports_are_merged_with_a_measurement_of_their_hosts_or_told_that_it_is_of_others(
    run_clusterprof: Run, workdir: Path, recordings: Path
) -> None:
    for rank in range(2):  # without what ties the ranks to each other
        packed = recordings / "nsys-2025.3" / "ddp" / f"rank{rank}.sqlite.xz"
        Path(f"rank{rank}.sqlite").write_bytes(lzma.decompress(packed.read_bytes()))
        with closing(sqlite3.connect(f"rank{rank}.sqlite")) as database:
            database.execute("DROP TABLE NVTX_EVENTS")
            database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    Path("clock.json").write_text(json.dumps(clock_of("vm", "n2")))
    Path("others.json").write_text(json.dumps(clock_of("n1", "n2")))
    line = ["merge", "rank0.sqlite", "rank1.sqlite", "--json", "--clock"]
    merged = run_clusterprof([*line, "clock.json"])
    assert merged.returncode == 0, merged
    assert "measured" in json.loads(merged.stdout)["clock"]["method"]
    refused = run_clusterprof([*line, "others.json"])
    assert refused.returncode == 4
    assert "host vm " in refused.stderr
    assert "measured: n1, n2" in refused.stderr
    assert refused.stdout == ""


def test_a_folder_that_may_not_be_seen_is_said_to_be_one(
    run_command: Run, workdir: Path, recordings: Path
) -> None:
    shutil.copy(recordings / "nsys-2025.3" / "ddp" / "rank0.sqlite.xz", workdir)
    closed = Path("closed")
    closed.mkdir(mode=0o000)
    # What root may see beyond the permissions is taken from it.
    ordinary = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    prefix = [] if os.geteuid() else ordinary
    for path in (closed, closed / "rank1.sqlite", closed / "rank1.nsys-rep"):
        done = run_command([*prefix, *command_line(["merge", path])])
        assert done.returncode == 3, done
        assert [f"{path} " in done.stderr, "permission denied" in done.stderr] == [True, True]
    both = command_line(["merge", "rank0.sqlite.xz", closed / "rank1.json"])
    done = run_command([*prefix, *both])
    assert done.returncode == 0, done
    assert ["closed/rank1.json " in done.stdout, "permission denied" in done.stdout] == [True, True]
    closed.chmod(0o700)


def test_a_verdict_has_the_same_words_in_every_process(
    run_clusterprof: Run, tmp_path: Path
) -> None:
    causes = tuple(Cause("host", rank, 60_000_000) for rank in range(4))
    ranks, _ = simulate(Job(steps=6, communicator_ids=False, causes=causes))
    for tables in ranks:
        path = strangers.trace(tables, tmp_path)
        # what the host does has another name in each step: none of them is the most frequent
        parts = path.read_text().split("clock_nanosleep")
        path.write_text("".join(f"{part}sleep{k}" for k, part in enumerate(parts)).removesuffix(
            f"sleep{len(parts) - 1}"
        ))  # fmt: skip
    printed = {
        run_clusterprof(["merge", tmp_path], env={"PYTHONHASHSEED": str(seed)}).stdout
        for seed in range(1, 3)
    }
    assert len(printed) == 1, printed
    assert "Host-bound: pauses cost" in printed.pop()


#: reads one trace and prints the most memory that it took, MB
_PEAK = """
import sys
from pathlib import Path
class NoPandas:
    # clusterprof needs none; where there is one pyarrow loads it, which takes 40 MB.
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoPandas())
from clusterprof.ingest import read_report
read_report(Path(sys.argv[1]), rank=0)
# ru_maxrss would have that of the process that started this one as well.
(peak,) = [row for row in open("/proc/self/status") if row.startswith("VmHWM:")]
print(int(peak.split()[1]) >> 10)
"""


@pytest.mark.parametrize("size_b", long_but([25_000_000], [60_000_000]))
def test_a_trace_in_one_line_takes_no_more_memory_than_its_events(
    run_command: Run, tmp_path: Path, size_b: int
) -> None:
    small, large = content(0), content(0)
    operators = "".join(
        json.dumps(span("cpu_op", f"aten::op{k % 50}", k, 1, shapes=[[k, 1]] * 9)) + ","
        for k in range(1000)
    )
    whole = json.dumps(large)
    at = whole.index("[", whole.index("traceEvents")) + 1
    many = size_b // len(operators)
    (tmp_path / "large.json").write_text(whole[:at] + operators * many + whole[at:])
    trace(tmp_path / "small.json", small)
    assert (tmp_path / "large.json").stat().st_size > 0.98 * size_b
    peak = {}
    for name in ("small", "large"):
        done = run_command([sys.executable, "-c", _PEAK, str(tmp_path / f"{name}.json")])
        assert done.returncode == 0, done
        peak[name] = int(done.stdout)
    # Parsed at once it takes eight times its size more than a small one; what stays are rows.
    assert peak["large"] - peak["small"] < 80, peak
