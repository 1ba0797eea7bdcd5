"""The same checks on every node, by one srun; a node that does not answer is a line, not a hang."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from clusterprof.agent.contracts.timing import REAL
from clusterprof.doctor import this_host
from clusterprof.doctor.table import BAD, Check, from_json
from clusterprof.errors import LaunchError

#: From the start of srun: below the ten seconds that the README promises.
PATIENCE_S = 8.5


@dataclass
class Answers:
    """What came back, node by node."""

    nodes: dict[str, list[Check]] = field(default_factory=dict)
    #: nodes that have sent all of their checks
    done: set[str] = field(default_factory=set)
    #: all nodes that were asked, as Slurm writes them (n[1-4]), from the first answer
    asked: str = ""

    def take(self, line: str) -> None:
        """Read a line that a node has printed; one that is not ours is ignored."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(line)
            host = str(fields["host"])
            self.nodes.setdefault(host, [])
            self.asked = self.asked or str(fields.get("asked") or "")
            if fields.get("done"):
                self.done.add(host)
            else:
                self.nodes[host].append(from_json(fields))

    def read(self, lines: Iterable[str]) -> None:
        """Read what the nodes print, to its end."""
        for line in lines:
            self.take(line)

    def of(self, host: str, srun_printed: Sequence[str]) -> list[Check]:
        """A node's checks, and where it has not sent all of them, what srun has printed of it."""
        checks = self.nodes.get(host, [])
        if host in self.done:
            return checks
        none = f"none within {PATIENCE_S:g} s"
        line = next((line for line in srun_printed if host in line or "execve" in line), none)
        advice = f"is the node up (sinfo -R -n {host}), and does it have {sys.executable}?"
        return [*checks, Check("answer", BAD, line, advice)]


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether we are in an allocation, and not one of its tasks that srun has started."""
    step, own_steps = environ.get("SLURM_STEP_ID", ""), 0xFFFFFFF0  # batch, interactive, extern
    return "SLURM_JOB_ID" in environ and not (step.isdigit() and int(step) < own_steps)


def hostnames(names: str) -> list[str]:
    """Slurm's n[1-4] as n1, n2, n3, n4."""
    if not names:
        return []
    command = ["scontrol", "show", "hostnames", names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    return done.stdout.split()


def ask(
    asked: Sequence[str], expected: Sequence[str], folder: Path, arguments: Sequence[str]
) -> dict[str, list[Check]]:
    """Every node's checks, by one task of ours on each, beside the job's own.

    `asked` are srun's options that the user gave, or `expected` the nodes of this allocation;
    `arguments` go on to each node's `doctor`. `folder` is where run directories are made: a probe
    in it has a token for each node to see, and each node leaves a file of its host's name there.
    With options neither the wait in the queue nor Slurm's own for a node that does not answer is
    known: the time counts from the first answer. Raises LaunchError where there is no srun or no
    node answers at all.
    """
    if shutil.which("srun") is None:
        raise LaunchError("srun was not found", "load Slurm: srun runs the checks on the nodes")
    beside = ["--overlap"] if in_allocation(os.environ) else []
    if expected:
        beside += [f"--nodes={len(expected)}", f"--ntasks={len(expected)}"]
    command = [
        "srun", *beside, *asked, "--ntasks-per-node=1", "--export=ALL",
        "--kill-on-bad-exit=0", "--input=none",
        sys.executable, "-m", "clusterprof", "doctor", "--local", "--lines", *arguments,
    ]  # fmt: skip
    answers, srun_printed = _run_with_probe(command, expected, folder)
    if not answers.nodes:
        raise LaunchError("no node answered", *(srun_printed[-3:] or ["srun printed nothing"]))
    hosts = dict.fromkeys([*(expected or hostnames(answers.asked)), *sorted(answers.nodes)])
    return {host: answers.of(host, srun_printed) for host in hosts}


def _run_with_probe(
    command: Sequence[str], expected: Sequence[str], folder: Path
) -> tuple[Answers, list[str]]:
    """See `_run`; with a check that each node's files in `folder` are visible here."""
    with contextlib.ExitStack() as stack:
        try:
            # A folder where run directories are made, for all nodes to see.
            probe = Path(stack.enter_context(tempfile.TemporaryDirectory(
                prefix=".clusterprof-doctor-", dir=folder, ignore_cleanup_errors=True
            )))  # fmt: skip
            (probe / this_host.TOKEN).touch()
        except OSError:
            # we cannot write there: each node says whether it can, for a run directory in it
            return _run([*command, f"--run-dir={folder / 'run'}"], expected)
        answers, srun_printed = _run([*command, f"--probe={probe}"], expected)
        for host, checks in answers.nodes.items():
            is_good = any(c.name == this_host.RUNS and c.level != BAD for c in checks)
            if is_good and not REAL.until((probe / host).exists, 1.0, 0.05):
                not_visible = f"{probe.parent}: its files are not visible here"
                checks.append(Check(this_host.RUNS, BAD, not_visible, this_host.SHARE))
    return answers, srun_printed


def _run(command: Sequence[str], expected: Sequence[str]) -> tuple[Answers, list[str]]:
    """Run srun until all nodes have answered or the time is up; the answers, and srun's stderr."""
    answers = Answers()
    with os.fdopen(os.memfd_create("stderr"), "w+", errors="replace") as stderr:
        srun = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=answers.read, args=[srun.stdout], daemon=True)
        reader.start()
        try:
            if not expected:  # in the queue
                REAL.until(lambda: srun.poll() is not None or answers.nodes, math.inf, 0.1)
            REAL.until(
                lambda: srun.poll() is not None or (expected and answers.done >= {*expected}),
                PATIENCE_S,
            )
        finally:  # end it where it waits for a node that does not answer
            for stop in (srun.poll, srun.terminate, srun.kill):
                stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    srun.wait(0.4)
                    break
        reader.join(0.5)
        stderr.seek(0)
        return answers, [line.strip() for line in stderr]


def own_lines(host: str, checks: Sequence[Check]) -> list[str]:
    """What `--lines` prints: a line for each check, so that no line is too long for srun."""
    short = [replace(check, found=check.found[:300], advice=check.advice[:300]) for check in checks]
    asked = os.environ.get("SLURM_STEP_NODELIST", "")
    rows: list[dict[str, Any]] = [*map(asdict, short), {"done": True, "asked": asked}]
    return [json.dumps({"host": host, **row}) for row in rows]


def leave(status: int) -> NoReturn:
    """End now: a check that hangs in the kernel must not delay the node's answer."""
    sys.stdout.flush()
    os._exit(status)
