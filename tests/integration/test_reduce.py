"""Reports become tables on their node; where that fails the report itself is kept."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.command import PATIENCE_S, Completed, free_port
from lab.disk import small_disk
from lab.endings import PROGRAMS
from lab.fakes import fake_nsys, scripted_nsys
from lab.hosts import Hosts

from clusterprof.agent.contracts import beside, outbox, states
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import Reduction
from clusterprof.agent.guard.report_transfer import Reducing, ReportTransfer
from clusterprof.ingest import reduced
from clusterprof.launch.profiling import reducing_command as reducer

RECORDING = Path(__file__).parents[1] / "data/recordings/nsys-2025.3/ddp/rank0.sqlite.xz"
Cli = Callable[..., Completed]
HANGS_S = 600
#: a reducer that is ended while it writes, and so on; report and folder follow
FAULTS = {
    "it is killed while it writes": (
        ("import os, sys; folder, name = os.path.split(sys.argv[2]); "
        "os.mkdir(f'{folder}/.{name}.1.tmp'); os.kill(os.getpid(), 9)"), "signal 9",
    ),
    "it takes longer than there is": (f"import time; time.sleep({HANGS_S})", "did not end in time"),
    "it has nothing to work with": ("import no_such_module", "No module named"),
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A rank's folder in a run directory, its report being written."""
    folder = tmp_path / "run" / "ranks" / "00000"
    folder.mkdir(parents=True)
    states.advance(str(folder), "finishing")
    return folder


def transfer(
    home: Path, keep_reports: str, words: tuple[str, ...], when: str = "node"
) -> ReportTransfer:
    private = home.parents[2] / "private"
    (private / "nsys").mkdir(parents=True)
    made = ReportTransfer(str(private), str(home))
    made.reducing = Reducing(Reduction(when, keep_reports, words))
    Path(made.made).write_bytes(b"a report")
    return made


def settled(
    home: Path, keep_reports: str, words: tuple[str, ...], seconds: float = PATIENCE_S
) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    transfer(home, keep_reports, words).settle(0, seconds, opened=True)
    return states.read(str(home)), time.monotonic() - began


@pytest.mark.parametrize("what", FAULTS)
def test_a_report_whose_tables_are_not_made_is_not_dropped(
    what: str, home: Path, fault: Callable[..., None]
) -> None:
    script, why = FAULTS[what]
    seconds = 2.0 if "longer" in what else PATIENCE_S
    state, took_s = settled(home, "none", (sys.executable, "-I", "-c", script), seconds)
    fault(f"reducing: {what}", 0, 0, took_s, {**state, "reason": state["not_reduced"]})
    assert state["state"] == "captured"
    assert why in state["not_reduced"]
    assert (home / "report.nsys-rep").read_bytes() == b"a report"
    assert list(home.glob(".*")) == []


@pytest.mark.parametrize("when", ["node", "now"])
def test_a_report_whose_tables_are_all_that_is_kept_does_not_come_home(
    when: str, home: Path
) -> None:
    script = "import os, sys; os.mkdir(sys.argv[2])"
    made = transfer(home, "none", (sys.executable, "-I", "-c", script), when)
    made.settle(0, PATIENCE_S, opened=True)
    assert sorted(each.name for each in home.glob("re*")) == ["reduced"]


def test_a_rank_that_a_signal_ended_has_its_report_brought_before_any_tables(home: Path) -> None:
    script, _ = FAULTS["it takes longer than there is"]
    began = time.monotonic()
    ending = transfer(home, "none", (sys.executable, "-I", "-c", script))
    assert ending.bring(beside=True) is not None, "only once its tables are made"
    ending.settle(128 + signal.SIGTERM, 2 * HANGS_S, opened=True)
    assert time.monotonic() - began < HANGS_S / 2
    state = states.read(str(home))
    assert (state["state"], state["report_at"]) == ("captured", "")
    assert "signal" in state["not_reduced"]
    assert (home / "report.nsys-rep").read_bytes() == b"a report"


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Outbox:
    """That of a rank whose writer is at work; what that is started by ends with the test."""
    monkeypatch.setattr(beside, "_starter", None)
    with beside.prepared():
        pass
    started = outbox.start()
    started.say("folder")
    assert started.wait("begun", PATIENCE_S)
    return started


def test_a_rank_that_torch_profiles_ends_in_time_though_its_tables_are_never_made(
    home: Path, fault: Callable[..., None], rank: Outbox
) -> None:
    script, why = FAULTS["it takes longer than there is"]
    order = Reduction("now", "none", (sys.executable, "-I", "-c", script))
    rank.say(
        "begin", run=str(home.parents[1]), folder=str(home), window=[5, 10], wall_ns=0, log_s=0
    )
    rank.say("reducing", **order._asdict())
    trace = home.parents[2] / "trace.json"
    trace.write_text("{}")
    rank.say("trace", path=str(trace), facts={})
    began = time.monotonic()
    rank.finish()
    took_s = time.monotonic() - began
    state = states.read(str(home))
    found = {**state, "reason": state.get("not_reduced", "")}
    fault("reducing: never ends, torch.profiler", 0, 0, took_s, found)
    assert why in found["reason"]
    assert (home / "trace.json.gz").exists()
    assert took_s < HANGS_S / 2


def test_each_window_has_its_own_tables_and_no_trace_is_dropped_for_another_s(
    home: Path, workdir: Path, rank: Outbox
) -> None:
    # The first window's tables are made, the second's never.
    script = "import os, sys; os.makedirs(sys.argv[2]) if 'windows' not in sys.argv[2] else 1 / 0"
    order = Reduction("now", "none", (sys.executable, "-I", "-c", script))
    rank.say(
        "begin", run=str(home.parents[1]), folder=str(home), window=[5, 10], wall_ns=0, log_s=0
    )
    for number, window in enumerate((rank, rank.of_window(2))):
        window.say("reducing", **order._asdict())
        trace = workdir / f"trace{number}.json"
        trace.write_text("{}")
        window.say("trace", path=str(trace), facts={})
    rank.finish()
    later = home.parents[1] / "windows/2/ranks/00000"
    assert [each.name for each in home.glob("[rt]*")] == ["reduced"]
    assert [each.name for each in later.glob("[rt]*")] == ["trace.json.gz"]
    assert "ZeroDivisionError" in states.read(str(later))["not_reduced"]


def test_a_node_without_this_python_says_so(home: Path) -> None:
    state, _ = settled(home, "node", ("/nowhere/python",))
    assert "there is no /nowhere/python on" in state["not_reduced"]
    assert (home / "report.nsys-rep").exists()


def test_a_disk_that_is_full_costs_the_tables_alone(home: Path, fault: Callable[..., None]) -> None:
    # What the kernel does at a limit of a file's size it does on a disk without space.
    python, flags, _, code, place = reducer()
    limit = f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); \
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); {code}"
    report = home / "trace.sqlite.xz"
    shutil.copy(RECORDING, report)
    reducing = Reducing(Reduction("node", "gather", (python, flags, "-c", limit, place)))
    reducing.start(str(report), str(home))
    trouble = reducing.wait(PATIENCE_S, lambda: None)
    assert "cannot be" in trouble
    fault("reducing: the disk is full", 0, 0, 0.0, {"state": "captured", "reason": trouble})
    assert sorted(each.name for each in home.iterdir()) == ["state.json", "trace.sqlite.xz"]


def test_the_tables_of_a_report_are_made_beside_it(home: Path) -> None:
    report = home / "rank0.sqlite.xz"
    shutil.copy(RECORDING, report)
    reducing = Reducing(Reduction("node", "gather", reducer()))
    reducing.start(str(report), str(home))
    assert reducing.wait(PATIENCE_S, lambda: None) == ""
    assert reduced.read(home / "reduced", report).info.rank == 0
    assert not Path(reducing.temporary).exists()


@pytest.fixture
def exporter(tmp_path: Path) -> Path:
    """An nsys that never ends its export, of which half is there."""
    script = fake_nsys(tmp_path, "2024.2.1")
    # no program for the file: of one that is ending the disk's class is not known any more
    script.write_text("#!/bin/sh\n: >$TMPDIR/half.sqlite; exec sleep 600 >/dev/null 2>&1\n")
    return script


def exporting(folder: str) -> bool:
    return (Path(folder) / "half.sqlite").exists()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def of_session(session: int) -> list[Path]:
    """Folders in /proc of all processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == session:
                found.append(entry)
    return found


def priorities(session: int) -> set[tuple[int, str, str, str]]:
    """Policy, niceness, class of the disk and score of the kernel's of all processes in it."""
    found = set()
    for entry in of_session(session):
        with contextlib.suppress(OSError):
            nice = (entry / "stat").read_text().rpartition(")")[2].split()[16]
            shown = subprocess.run(["ionice", "-p", entry.name], capture_output=True, text=True)
            score = (entry / "oom_score_adj").read_text().strip()
            found.add((os.sched_getscheduler(int(entry.name)), nice, shown.stdout.strip(), score))
    return found


def killed(process: Path) -> bool:
    """Whether it has ended, or SIGKILL is on its way to it."""
    try:
        stated = dict(line.split(":\t") for line in (process / "status").read_text().splitlines())
    except OSError:
        return True
    pending = int(stated["SigPnd"], 16) | int(stated["ShdPnd"], 16)
    return stated["State"][0] in "XZ" or bool(pending >> (signal.SIGKILL - 1) & 1)


def test_what_makes_tables_and_its_exporter_take_only_what_is_left_over(
    home: Path, exporter: Path
) -> None:
    report = home / "report.nsys-rep"
    report.write_bytes(b"a report")
    reducing = Reducing(Reduction("node", "gather", reducer()), str(exporter))
    reducing.start(str(report), str(home))
    assert reducing.child is not None
    wait_until(lambda: exporting(reducing.temporary))
    assert priorities(reducing.child.pid) == {(os.SCHED_IDLE, "19", "idle", "1000")}
    assert "did not end in time" in reducing.wait(0, lambda: None)
    assert not Path(reducing.temporary).exists(), "what was exported is removed"
    session = reducing.child.pid
    # one that never gets a processor cannot end either
    wait_until(lambda: all(map(killed, of_session(session))))


def test_what_makes_tables_ends_with_the_rank_s_writer(home: Path, exporter: Path) -> None:
    report = home / "report.nsys-rep"
    report.write_bytes(b"a report")
    script = (
        "import sys, time; from clusterprof.agent.contracts.plan import Reduction;"
        "from clusterprof.agent.guard.report_transfer import Reducing;"
        "from clusterprof.launch.profiling import reducing_command;"
        "made = Reducing(Reduction('now', 'gather', reducing_command()), sys.argv[1]);"
        "made.start(*sys.argv[2:]); print(made.child.pid, made.temporary, flush=True);"
        "time.sleep(600)"
    )
    line = [sys.executable, "-c", script, exporter, report, home]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        pid, temporary = writer.stdout.readline().split()
        wait_until(lambda: exporting(temporary))
        writer.kill()
    wait_until(lambda: not Path(f"/proc/{pid}/exe").exists())
    os.killpg(int(pid), signal.SIGKILL)  # an exporter that has its processor goes on to its end
    shutil.rmtree(temporary)
    assert sorted(each.name for each in home.iterdir()) == ["report.nsys-rep", "state.json"]


@pytest.fixture
def training(workdir: Path) -> Callable[..., list[str]]:
    """A command line of a rank under nsys, whose program is `train.py`."""
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "train.py").write_text("import loop\nfor _ in range(30): loop.step()\n")

    def line(*options: str, launcher: str = "run") -> list[str]:
        return [launcher, "--ranks=0", "--steps=5:10", "--step-on=loop:step", "--profiler=nsys",
                *options, "--run-dir=run"]  # fmt: skip

    return line


@pytest.mark.usefixtures("scripted")
def test_with_now_tables_are_gathered_and_the_reports_dropped(
    run_clusterprof: Cli, workdir: Path, training: Callable[..., list[str]]
) -> None:
    line = training("--reduce=now", "--keep-reports=none")
    done = run_clusterprof([*line, "--", "python", "train.py"])
    assert done.returncode == 0, done
    assert tables_alone(workdir / "run/ranks/00000"), done
    before = (workdir / "run/merged/results.json").read_bytes()
    assert run_clusterprof(["merge", "run"]).returncode == 0
    assert (workdir / "run/merged/results.json").read_bytes() == before


def tables_alone(rank: Path) -> bool:
    state = json.loads((rank / "state.json").read_text())
    names = sorted(each.name for each in rank.glob("re*"))
    return names == ["reduced"] and state["state"] == "collected" and "not_reduced" not in state


@pytest.mark.parametrize(
    "nsys", ["script", pytest.param("real", marks=[pytest.mark.long, pytest.mark.needs_nsys])]
)
def test_reports_stay_on_their_nodes_and_the_run_says_where(
    run_clusterprof: Cli,
    workdir: Path,
    training: Callable[..., list[str]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    nsys: str,
) -> None:
    if nsys == "script":
        request.getfixturevalue("scripted")
    done = run_clusterprof([*training("--keep-reports=node"), "--", "python", "train.py"])
    assert done.returncode == 0, done
    rank = workdir / "run/ranks/00000"
    assert tables_alone(rank), done
    report = Path(json.loads((rank / "state.json").read_text())["report_at"])
    assert f"rank 0's is {report} on {os.uname().nodename}" in done.stderr
    first = (workdir / "run/merged/results.json").read_bytes()
    assert run_clusterprof(["merge", "run"]).returncode == 0
    assert (workdir / "run/merged/results.json").read_bytes() == first
    # The tables are those of that very report, which can be put beside them.
    assert reduced.read(rank / "reduced", report).host_calls.num_rows
    shutil.copy(report, rank)
    assert run_clusterprof(["merge", "run"]).returncode == 0
    assert (workdir / "run/merged/results.json").read_bytes() == first
    # A node that has no exporter leaves the report to a host that has one, and says so.
    shutil.rmtree(rank / "reduced")
    *python, code, place = reducer()
    without = f"import clusterprof.agent.nsys as nsys; nsys.PLACES = (); {code}"
    without = f"import sys; sys.path.insert(0, sys.argv[1]); {without}"
    reducing = Reducing(Reduction("node", "none", (*python, without, place)), "/nowhere/nsys")
    with monkeypatch.context() as node:
        node.setenv("PATH", "/nowhere")
        reducing.start(str(rank / "report.nsys-rep"), str(rank))
    why = reducing.wait(PATIENCE_S, lambda: None)
    assert "cannot be read without nsys, which is not installed on this host" in why
    assert run_clusterprof(["merge", "run"]).returncode == 0
    assert (workdir / "run/merged/results.json").read_bytes() == first
    shutil.rmtree(report.parent)


@pytest.mark.needs_root
def test_a_node_whose_disk_is_full_gives_the_report_itself_and_says_so(
    run_clusterprof: Cli, workdir: Path, training: Callable[..., list[str]],
    fault: Callable[..., None],
) -> None:  # fmt: skip
    with small_disk("160m") as disk:
        # What fills it does so when tables are to be made: nsys itself would hang at its end.
        fills = f"""
with open({str(disk / "filler")!r}, "wb", buffering=0) as file, contextlib.suppress(OSError):
    while file.write(bytes(1 << 20)):
        pass
"""
        nsys = scripted_nsys(workdir / "nsys", {"*:export": fills})
        line = training("--keep-reports=none", "--no-merge", f"--nsys={nsys}")
        done = run_clusterprof([*line, "--", "python", "train.py"], env={"TMPDIR": str(disk)})
        state = json.loads((workdir / "run/ranks/00000/state.json").read_text())
        assert (disk / "filler").stat().st_size > 0, done
        left = [each for each in disk.glob("clusterprof-*") if each.is_dir()]
    why = state.get("not_reduced", "")
    fault("reducing: the node's disk is full", 0, done.returncode, 0.0, {**state, "reason": why})
    assert done.returncode == 0, done
    assert state["state"] == "collected", done
    assert f"the disk of {disk}/clusterprof-" in why, done
    assert why in done.stderr, done
    assert left == []
    assert not (workdir / "run/ranks/00000/reduced").exists()
    (workdir / "nsys/faults.json").write_text("{}")
    assert run_clusterprof(["merge", "run", f"--nsys={nsys}"]).returncode == 0
    ranks = json.loads((workdir / "run/merged/results.json").read_text())["ranks"]
    assert [each["rank"] for each in ranks] == [0]


@pytest.mark.long
@pytest.mark.usefixtures("scripted")
@pytest.mark.needs_fabric
def test_over_ssh_tables_are_brought_and_no_reports(
    run_clusterprof: Cli,
    workdir: Path,
    ssh_hosts: Hosts,
    light_python: Path,
    training: Callable[..., list[str]],
) -> None:
    _, *options = training("--ranks=all", "--reduce=now", "--keep-reports=none")
    done = run_clusterprof(
        ["ssh", "-F", ssh_hosts.config, f"--master-port={free_port()}", "--hosts", "h1,h2",
         "--python", light_python, *options, "--nproc-per-node", "1", "--", "python", "train.py"],
    )  # fmt: skip
    run = workdir / "run"
    assert done.returncode == 0, done
    assert "of ranks 0–1 the tables were gathered, and no report" in done.stderr, done
    for rank, host in enumerate(("h1", "h2")):
        folder = run / f"ranks/{rank:05d}"
        assert tables_alone(folder), done
        assert json.loads((folder / "state.json").read_text())["host"] == host
    results = json.loads((run / "merged/results.json").read_text())
    assert ([each["rank"] for each in results["ranks"]], results["missing"]) == ([0, 1], [])
    left = (ssh_hosts.state / "local").glob("*/clusterprof-*/report*")
    assert list(left) == []
