"""Jobs that are ended in some way while they run, with and without clusterprof."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import clusterprof
from clusterprof.agent.contracts import processes
from lab import command
from lab.command import Completed

PROGRAMS = Path(__file__).resolve().parent / "programs"
#: for `programs/ending.py`: twenty milliseconds a step, a window from step 10 to 20
OPTIONS = ["--ranks", "0", "--steps", "10:20", "--step-on", "loop:step", "--profiler=nsys"]

#: what starts so many ranks, and no more
RANKS = PROGRAMS / "ranks.sh"


def state(run: Path, rank: int = 0) -> dict[str, Any]:
    """A rank's state.json. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads((run / f"ranks/{rank:05d}/state.json").read_text())
    return found


def state_if_any(run: Path, rank: int = 0) -> dict[str, Any]:
    """The rank's state; {} where it has left none that can be read."""
    try:
        return state(run, rank)
    except (OSError, ValueError):
        return {}


def outcomes(run: Path) -> dict[int, str]:
    """The state of each profiled rank when its run had ended, as run.json has it."""
    manifest = json.loads((run / "run.json").read_text())
    return {each["rank"]: each["state"] for each in manifest["outcomes"]}


def window(found: Mapping[str, Any]) -> str:
    """By a rank's state: its program ended "before" the window or "inside" it, or it is "whole".

    "inside" is as well one that was closed early, and one that nsys did not open.
    """
    if found.get("whole"):
        return "whole"
    return "inside" if "capturing" in dict(found["history"]) else "before"


def words(text: str) -> list[str]:
    """What the program itself printed, whatever the order of its ranks."""
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def ours_in_tracebacks(text: str) -> list[str]:
    """The lines of clusterprof's own that are in tracebacks."""
    package = re.escape(f"{Path(clusterprof.__file__).resolve().parent}/")
    return re.findall(rf'^.*File "{package}.*$', text, re.MULTILINE)


class Running:
    """A command that is running in a process group of its own, to be ended from outside.

    `run` is the run directory, where there is one; stdout and stderr go to the file `output`.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str | None],
        output: Path,
        run: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.env = env
        self.run = run or output.parent / "run"
        self.output = output
        self.mark = f"LAB_RUN={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        # Appending: several processes write there, and none may move another's place.
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                list(map(str, argv)), env={**command.environment(env), name: value}, cwd=cwd,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        command.ran[(self.mark,)] = self

    def __str__(self) -> str:
        return f"+ {shlex.join(map(str, self.process.args))}\n{self.printed()}"

    def goes_on(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def state(self, rank: int = 0) -> dict[str, Any]:
        """The rank's state as it is now; {} where there is none."""
        return state_if_any(self.run, rank)

    def wait_for(self, wanted: str, rank: int = 0) -> None:
        """Wait until the rank has this state."""
        self.wait_until(lambda: self.state(rank).get("state") == wanted, wanted)

    def wait_until(
        self, holds: Callable[[], bool], what: str, seconds: float = command.PATIENCE_S
    ) -> None:
        """Wait until `holds()`, which is `what`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if holds():
                return
            time.sleep(0.05)
        raise AssertionError(f"never {what}: {self.printed()}")

    def ends(self, seconds: float = command.PATIENCE_S) -> int:
        """The status with which it ended, negative for a signal."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end: {self.printed()}") from None

    @staticmethod
    def settle(seconds: float) -> None:
        """Give what should not happen the time to happen."""
        time.sleep(seconds)

    def ended_within(self, seconds: float) -> bool:
        """Whether it ends by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.goes_on()

    def printed(self) -> str:
        """What it has printed by now."""
        return self.output.read_text(errors="replace")

    def launcher(self) -> int:
        """The launcher that clusterprof runs: of its children no witness and no fork of its own."""
        own = Path(f"/proc/{self.process.pid}/cmdline").read_bytes()
        found = subprocess.run(
            ["pgrep", "-a", "-P", str(self.process.pid)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        (child,) = [
            line for line in found.stdout.splitlines()
            if line.split()[0].isdigit() and " -I -S -c" not in line and len(line.split()) > 1
            and not line.startswith(("import ", "for "))
            and Path(f"/proc/{line.split()[0]}/cmdline").read_bytes() != own
        ]  # fmt: skip
        return int(child.split()[0])

    def left(self, seconds: float = 60) -> list[str]:
        """What still runs of all that it started, on whichever node, after `seconds` at most."""
        deadline = time.monotonic() + seconds
        while (found := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def runs(self, program: str) -> bool:
        """Whether something that it started by this name still runs."""
        return any(line.startswith(f"{program} ") for line in self._marked())

    def _marked(self) -> list[str]:
        return [command for _, command in self.processes()]

    def processes(self) -> list[tuple[int, str]]:
        """Those that it has started and that run, with their command lines."""
        marked = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_text().replace("\0", " ")
                    marked.append((int(folder.name), words))
        return marked

    def close(self) -> None:
        """End what still runs of it: its test is over, however that ended."""
        if self.goes_on():
            for pid, _ in self.processes():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def hangs(self) -> bool:
        """Whether `programs/ending.py` does nothing any more (`hang`)."""
        printed = self.printed()
        return "rank 0 hangs" in printed and "rank 1 ends" in printed

    def waits(self) -> bool:
        """Whether `programs/ending.py` waits until it may go on (`wait`)."""
        printed = self.printed()
        return "rank 0 waits" in printed and "rank 1 ends" in printed

    def job(self) -> str:
        """The only job there is, by its Slurm id."""
        listed = command.run(["squeue", "-h", "-o", "%i"], env=self.env).stdout.split()
        assert len(listed) == 1, listed
        return listed[0]

    def nsys(self, rank: int = 0) -> list[int]:
        """The nsys processes of the rank's session, whose name no other run has."""
        return processes.of_session(self.state(rank).get("session", "no session"))


def check_as_without_us(plain: Completed, done: Completed) -> None:
    """The training ended as it does without us, and no error of ours was shown."""
    assert done.returncode == plain.returncode == 0, (plain, done)
    assert done.stdout == plain.stdout == "trained\n", (plain, done)
    assert "Traceback" not in done.stderr, done
