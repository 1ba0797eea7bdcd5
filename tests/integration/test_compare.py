"""The loop of docs/compare.md, and the pipelines of docs/ci, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.command import Completed

ROOT = Path(__file__).resolve().parents[2]
LOOP = "## The loop: profile, finding, repair, compare"

pytestmark = pytest.mark.needs_torch


def loop() -> list[str]:
    """The command lines of the page's loop."""
    section = (ROOT / "docs" / "compare.md").read_text("utf-8").partition(LOOP)[2]
    section = section.partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def pipelines() -> list[list[str]]:
    """The command lines of both pipelines, without what installs packages."""
    github: Any = yaml.safe_load((ROOT / "docs/ci/github.yml").read_text())
    gitlab: Any = yaml.safe_load((ROOT / "docs/ci/gitlab.yml").read_text())
    every = [
        [step["run"] for step in github["jobs"]["compare"]["steps"] if "run" in step],
        gitlab["step time"]["script"],
    ]
    return [[line for line in lines if not line.startswith("pip ")] for lines in every]


@pytest.mark.long
def test_the_loop_and_the_pipelines_run_as_documented(
    run_clusterprof: Callable[..., Completed],
    run_command: Callable[..., Completed],
    workdir: Path,
) -> None:
    (workdir / "examples").symlink_to(ROOT / "examples")
    (workdir / "runs").mkdir()
    slow, explain, repaired, compared, saved, gated = loop()

    def run(line: str, status: int = 0) -> Completed:
        words = shlex.split(line)
        assert words.pop(0) == "clusterprof"
        done = run_clusterprof(words)
        assert done.returncode == status, done
        return done

    # the slow one with a gate of its own: the job succeeds
    first = run(slow.replace("torchrun", "torchrun --fail-on input.*>5%", 1), status=122)
    assert re.search(r"(critical|warning) +input\.stall", first.stdout)
    assert "--fail-on input.*>5%: input.stall" in first.stderr
    assert "more DataLoader workers" in run(explain).stdout
    run(repaired)
    change = run(compared).stdout
    assert re.match(r"Steps are [0-9]+% shorter in B: ", change), change
    assert re.search(r"(gone|better) +input\.stall", change), change
    run(saved)
    failed = run(gated, status=1)
    assert "--fail-on step>+3%: the step is " in failed.stderr
    assert "--fail-on input.*>5%: input.stall" in failed.stderr

    # The pipelines: what they profile is the repaired run already; then a change makes it slow.
    (profile, gate), (same_profile, same_gate) = pipelines()
    assert profile == same_profile
    assert shlex.split(profile) == [
        "runs/ci" if word == "runs/repaired" else word for word in shlex.split(repaired)
    ]
    clusterprof = workdir / "bin" / "clusterprof"
    clusterprof.parent.mkdir()
    clusterprof.write_text(f'#!/bin/sh\nexec {sys.executable} -m clusterprof "$@"\n')
    clusterprof.chmod(0o755)
    environment = {
        "PATH": f"{clusterprof.parent}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": "summary.md",
    }  # fmt: skip
    for name, status in (("repaired", 0), ("slow", 1)):
        (workdir / "runs/ci").unlink(missing_ok=True)
        (workdir / "runs/ci").symlink_to(name)
        for line, summary in ((gate, "summary.md"), (same_gate, "step-time.md")):
            (workdir / "runs/ci/change.html").unlink(missing_ok=True)
            done = run_command(["bash", "-ec", line], env=environment)
            assert done.returncode == status, done
            assert (workdir / summary).read_text().startswith("**")
            assert (workdir / "runs/ci/change.html").is_file()
