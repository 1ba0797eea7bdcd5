"""Another user of the node holds all names that a rank uses there: its training is as without us.

The torch of these programs is `lab/stub`. What each name is for, and that no other user's file is
written or believed: test_neighbours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import command
from lab.endings import PROGRAMS, check_as_without_us, state_if_any
from lab.stub import OPTIONS, PROGRAM, RANK
from users import MALLORY

from clusterprof.agent.rank.rank import Claim

pytestmark = [
    pytest.mark.long, pytest.mark.needs_root, pytest.mark.usefixtures("scripted"),
]  # fmt: skip


@pytest.mark.parametrize("profiler", ["torch", "nsys"])
def test_a_program_trains_to_its_end_whatever_another_user_of_the_node_holds(
    profiler: str, node: Path, workdir: Path, fault: Callable[..., None]
) -> None:
    (workdir / "train.py").write_text(PROGRAM)
    shutil.copy(PROGRAMS / "holding.py", node)
    claimed = Claim.name(str(workdir / "run/ranks/00000")).replace("\0", "@")
    other = subprocess.Popen(
        ["setpriv", f"--reuid={MALLORY}", f"--regid={MALLORY}", "--clear-groups",
         "/usr/bin/python3", node / "holding.py", node, f"clusterprof-{os.getuid()}.lock", "nvidia",
         claimed],
        stdout=subprocess.PIPE, cwd="/",
    )  # fmt: skip
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"holds\n"
        line, env = ["python", "train.py"], {**RANK, "TMPDIR": str(node)}
        plain = command.run(line, env=env)
        ours = command.clusterprof(["run", *OPTIONS, f"--profiler={profiler}", "--", *line])
        done = command.run(ours, env=env)
        other.kill()
    found, added_s = state_if_any(workdir / "run"), done.seconds - plain.seconds
    fault(f"another user holds all names, {profiler}", 0, done.returncode, added_s, found)
    check_as_without_us(plain, done)
