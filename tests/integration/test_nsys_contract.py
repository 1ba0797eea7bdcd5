"""What clusterprof relies on of nsys, by the real one and by the script that most tests use.

Each test is one fact, and holds for both: so that neither can drift from the other.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import command
from lab.command import Completed
from lab.fakes import scripted_nsys

from clusterprof.agent import nsys as profiler
from clusterprof.agent.contracts import processes
from clusterprof.agent.guard.report_transfer import ends_whole
from clusterprof.ingest.nsys import exported

#: a program that is ready, and goes on until it may end
UNTIL = """
import os, pathlib, signal, sys, time
pathlib.Path("ready").write_text(str(os.getpid()))
while not os.path.exists("go"):
    time.sleep(0.02)
"""
#: nsys 2022.4 wants a program that is found, and takes no shell script for one
PYTHON = str(Path(sys.executable).resolve())


def written(file: Path) -> str:
    """What is in it by now."""
    return file.read_text() if file.exists() else ""


class Session:
    """One nsys with a session of its own over a program."""

    def __init__(self, nsys: Path, folder: Path) -> None:
        self.nsys = nsys
        self.folder = folder
        self.name = f"contract-{uuid.uuid4().hex[:12]}"
        self.env = command.environment({"TMPDIR": str(folder / "tmp"), "LAB_SAID": "a b"})
        (folder / "tmp").mkdir()
        self.report = folder / "report"
        #: what it is until it is imported: Debian's nsys does not find its importer
        self.raw = folder / "report.qdstrm"
        self.over: subprocess.Popen[bytes]

    def call(self, *argv: str | Path) -> Completed:
        return command.run([self.nsys, *argv], env=self.env, cwd=self.folder)

    def launch(
        self, program: str, verb: str = "launch", *options: str, trace: str = "none", **how: Any
    ) -> None:
        """Run a program of Python's over which nsys stays."""
        line = [self.nsys, verb, f"--trace={trace}", f"--session-new={self.name}", *options]
        with (self.folder / "printed").open("ab") as file:
            self.over = subprocess.Popen(
                [*line, PYTHON, "-c", program], env=self.env, cwd=self.folder, stdout=file,
                stderr=file, start_new_session=True, **{"stdin": subprocess.DEVNULL, **how},
            )  # fmt: skip

    def launched(self, then: str = "", trace: str = "none") -> int:
        """Run one until `go` is there, which then does `then`; its process, which is ready.

        An nsys that gives up before the program begins is started again, as clusterprof does.
        """
        ready = self.folder / "ready"
        for _ in range(3):
            self.launch(UNTIL + then, trace=trace)
            self.until(lambda: written(ready) or self.over.poll() is not None)
            if pid := written(ready):
                return int(pid)
        raise AssertionError(self.printed())

    def printed(self) -> str:
        return (self.folder / "printed").read_text()

    def start(self, *options: str) -> Completed:
        collecting = ("--sample=none", "--cpuctxsw=none", f"--output={self.report}")
        return self.call("start", f"--session={self.name}", *collecting, *options)

    def stop(self) -> Completed:
        return self.call("stop", f"--session={self.name}")

    def go(self) -> int:
        """Let the program end; nsys' status."""
        (self.folder / "go").touch()
        return self.over.wait(command.PATIENCE_S)

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + command.PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.02)

    def left(self) -> list[Path]:
        """The reports and what becomes reports, where they were asked for."""
        return sorted(self.folder.glob("report*"))

    def end(self) -> None:
        """Leave nothing behind."""
        (self.folder / "go").touch()
        if hasattr(self, "over"):
            if self.over.poll() is None:
                os.killpg(self.over.pid, signal.SIGKILL)
            self.over.wait()
        for pid in processes.of_session(self.name):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=["script", pytest.param("nsys", marks=pytest.mark.needs_nsys)])
def nsys(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "script":
        return scripted_nsys(tmp_path / "script")
    found = shutil.which("nsys")
    assert found is not None
    return Path(found)


@pytest.fixture
def session(nsys: Path, workdir: Path) -> Iterator[Session]:
    made = Session(nsys, workdir)
    yield made
    made.end()


def test_it_says_its_version(nsys: Path) -> None:
    assert profiler.Nsys(str(nsys)).checked().version.startswith("2022.4.2")


def test_its_help_names_what_a_plan_has(nsys: Path) -> None:
    tracing = ("--trace", "--session-new", "--trace-fork-before-exec", "cuda", "nvtx", "osrt")
    collecting = ("--sample", "--cpuctxsw", "--force-overwrite", "--output")
    there = {
        "profile": (*tracing, *collecting, "--capture-range", "--capture-range-end",
                    "cudaProfilerApi"),
        "launch": tracing,
        "start": ("--session", *collecting),
        "export": ("--type", "--force-overwrite", "--output", "sqlite"),
    }  # fmt: skip
    absent = ("--nccl-trace", "--discard-environment", "--include-blobs", "arrowdir", "cuda-sw")
    asked = profiler.Nsys(str(nsys))
    for verb, flags in there.items():
        assert [flag for flag in flags if not asked.offers(verb, flag)] == []
        assert [flag for flag in absent if asked.offers(verb, flag)] == []


def test_what_it_does_not_know_it_refuses_and_names(session: Session) -> None:
    for line, named in (
        (["frobnicate"], "frobnicate"),
        (["launch", "--frobnicate=1", "true"], "--frobnicate"),
        (["launch", f"--session-new={session.name}", "/no/program"], "/no/program"),
    ):
        refused = session.call(*line)
        assert refused.returncode == 1, refused
        assert named in refused.stdout + refused.stderr
    assert session.left() == []


def test_a_program_has_its_streams_environment_folder_and_descriptors(session: Session) -> None:
    read, write = os.pipe()
    shown = (
        "import os, sys; print(sys.stdin.read(), os.environ['LAB_SAID'], os.getcwd());"
        f"print('wrong', file=sys.stderr); os.write({write}, b'given')"
    )
    typed = session.folder / "typed"
    typed.write_text("typed")
    with typed.open("rb") as stdin:
        session.launch(shown, stdin=stdin, pass_fds=[write])
    assert session.over.wait(command.PATIENCE_S) == 0
    os.close(write)
    printed = session.printed()
    assert f"typed a b {session.folder}\n" in printed
    assert "wrong\n" in printed
    assert os.read(read, 99) == b"given"
    os.close(read)


def test_the_processes_of_a_session_are_found_by_its_name_but_for_the_launcher(
    session: Session,
) -> None:
    pid = session.launched()
    found = processes.of_session(session.name)
    assert session.over.pid in found
    assert len(found) == 2, "and the agent, which has no parent"
    launcher = processes.parent(pid)
    assert launcher not in found
    assert processes.parent(launcher) == session.over.pid


def test_a_session_is_listed_for_as_long_as_its_program_runs(session: Session) -> None:
    session.launched()
    assert session.name in session.call("sessions", "list").stdout
    assert session.go() == 0
    session.until(lambda: session.name not in session.call("sessions", "list").stdout)


def test_a_program_that_ends_before_the_window_leaves_its_status_and_no_report(
    session: Session,
) -> None:
    session.launched("sys.exit(5)")
    assert session.go() == 5
    assert session.left() == []


def test_what_is_collected_is_there_once_it_is_stopped_and_the_program_goes_on(
    session: Session,
) -> None:
    pid = session.launched("sys.exit(5)")
    assert session.start().returncode == 0
    assert session.left() == []
    session.until(lambda: list((session.folder / "tmp").glob("nsys-report-*")))
    assert session.stop().returncode == 0
    assert session.left() == [session.raw]
    assert processes.running(pid)
    assert session.go() == 5


def test_a_stop_without_a_start_fails_and_so_does_a_second_start(session: Session) -> None:
    session.launched()
    calls = [session.stop, session.start, session.start, session.stop]
    assert [call().returncode for call in calls] == [1, 0, 1, 0]


def test_a_session_that_is_not_there_cannot_be_stopped_and_its_start_says_nothing(
    session: Session,
) -> None:
    session.launched()
    other = f"{session.name}-other"
    stopped = session.call("stop", f"--session={other}")
    assert stopped.returncode == 1
    assert other in stopped.stdout + stopped.stderr
    # nsys makes a session of its own, without a program.
    assert session.call("start", f"--session={other}", "--output=other").returncode == 0
    assert not list(session.folder.glob("other*"))


def test_what_is_there_is_overwritten_only_where_that_is_asked_for(session: Session) -> None:
    session.launched()
    session.raw.write_text("mine")
    session.start()
    assert session.stop().returncode == 0
    assert session.raw.read_text() == "mine"
    session.start("--force-overwrite=true")
    assert session.stop().returncode == 0
    assert session.raw.stat().st_size > 1000


def test_a_sigterm_is_the_program_s_and_the_report_is_written(session: Session) -> None:
    pid = session.launched()
    session.start()
    session.over.send_signal(signal.SIGTERM)
    # nsys gives the program some two seconds, and ends with 0 where it has not seen it end by then.
    assert session.over.wait(command.PATIENCE_S) in (0, 143), session.printed()
    session.until(lambda: not processes.running(pid))
    assert session.left() == [session.raw]


def test_a_hangup_ends_nsys_and_nothing_else(session: Session) -> None:
    pid = session.launched()
    session.start()
    session.over.send_signal(signal.SIGHUP)
    assert session.over.wait(command.PATIENCE_S) == -signal.SIGHUP
    assert session.left() == []
    assert processes.running(pid)
    assert len(processes.of_session(session.name)) == 1, "its agent"


def test_a_program_that_is_killed_inside_the_window_leaves_a_report(session: Session) -> None:
    session.launched("os.kill(os.getpid(), signal.SIGKILL)")
    session.start()
    assert session.go() == 137
    assert session.left() == [session.raw]


def test_a_program_that_ends_inside_the_window_leaves_its_status_and_a_report(
    session: Session,
) -> None:
    session.launched("sys.exit(5)")
    session.start()
    assert session.go() == 5
    assert session.left() == [session.raw]


def test_the_agent_of_a_killed_nsys_writes_the_report_when_the_program_ends(
    session: Session,
) -> None:
    pid = session.launched()
    session.start()
    session.over.kill()
    session.over.wait()
    assert processes.running(pid)
    assert len(processes.of_session(session.name)) == 1, "its agent"
    session.go()
    session.until(lambda: not processes.of_session(session.name))
    assert session.left() == [session.raw]


def test_an_nsys_whose_agent_is_killed_ends_at_once_with_status_0(session: Session) -> None:
    pid = session.launched()
    session.start()
    (agent,) = {*processes.of_session(session.name)} - {session.over.pid}
    os.kill(agent, signal.SIGKILL)
    assert session.over.wait(command.PATIENCE_S) == 0
    assert processes.running(pid)
    assert session.stop().returncode == 1
    assert session.left() == []


def test_a_shutdown_ends_the_program_and_leaves_no_report(session: Session) -> None:
    pid = session.launched()
    session.start()
    assert session.call("shutdown", f"--session={session.name}").returncode == 0
    assert session.over.wait(command.PATIENCE_S) in (0, 143), session.printed()
    session.until(lambda: not processes.running(pid))
    assert session.left() == []


def test_a_profile_without_a_range_is_of_the_whole_program(session: Session) -> None:
    session.launch("import sys; sys.exit(5)", "profile", "--sample=none", "--cpuctxsw=none",
                   f"--output={session.report}")  # fmt: skip
    assert session.over.wait(command.PATIENCE_S) == 5
    assert session.left() == [session.raw]


def sleeps(pid: int) -> int:
    """How often a process has gone to sleep."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", status)[1])


def test_the_importer_makes_a_report_that_is_whole_and_its_tables_are_read(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = session.launched(trace="osrt")
    session.start()
    before = sleeps(pid)
    session.until(lambda: sleeps(pid) > before + 10)  # what is collected
    assert session.stop().returncode == 0
    nsys = profiler.Nsys(str(session.nsys))
    assert nsys.importer is not None
    made = session.folder / "made.nsys-rep"
    done = command.run([nsys.importer, "-i", session.raw, "-o", made], env=session.env)
    assert done.returncode == 0, done
    assert ends_whole(str(made))
    monkeypatch.setenv(profiler.VARIABLE, str(session.nsys))
    (recording,) = exported.read(made, alone=True)
    assert recording.has_events
    assert recording.info.profiler.startswith("nsys 2022.4.2")
