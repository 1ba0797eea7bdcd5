"""Programs that need torch, run without each loading it: `programs/warm.py` as tests see it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab import command
from lab.command import Completed, StillRunning

PROGRAM = Path(__file__).resolve().parent / "programs" / "warm.py"


class Warm:
    """Runs Python programs, one at a time, in forks of a process that has torch already."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _answer(self, seconds: float) -> int | None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        return int(self._process.stdout.readline())

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        timeout: float = command.PATIENCE_S,
        cwd: Path | None = None,
    ) -> Completed:
        """As `lab.command.run`, of a line that begins with this interpreter.

        Raises:
            StillRunning: it did not end within `timeout` seconds.
        """
        python, *words = map(str, argv)
        assert python == sys.executable
        assert self._process.stdin is not None
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            printed = [Path(folder, name) for name in ("stdout", "stderr")]
            request = {
                "argv": words, "env": command.environment(env), "cwd": str(cwd or Path.cwd()),
                "stdout": str(printed[0]), "stderr": str(printed[1]),
            }  # fmt: skip
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            pid = self._answer(command.PATIENCE_S)
            assert pid is not None
            status = self._answer(timeout)
            if status is None:
                os.killpg(pid, signal.SIGKILL)
                self._answer(command.PATIENCE_S)
            stdout, stderr = (
                path.read_text(errors="replace") if path.exists() else "" for path in printed
            )
        line = (python, *words)
        done = Completed(line, status or 0, stdout, stderr, time.monotonic() - began)
        command.ran[line] = done
        if status is None:
            raise StillRunning(f"still running after {timeout:g} s, killed\n{done}")
        return done


@contextlib.contextmanager
def warm() -> Iterator[Warm]:
    """One such process, for as long as the context."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM], env=command.environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield Warm(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(command.PATIENCE_S)
