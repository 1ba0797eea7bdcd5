"""What the documentation shows is what the program does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from lab.command import Completed

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., Completed]


def test_the_outputs_in_the_readme_are_what_its_commands_print(run_command: Run) -> None:
    done = run_command([sys.executable, ROOT / "scripts" / "readme.py", "--check"])
    assert done.returncode == 0, done


def test_every_make_target_is_listed_by_make_help(run_command: Run) -> None:
    phony = {
        word
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith(".PHONY:")
        for word in line.split()[1:]
    }
    done = run_command(["make", "-C", ROOT, "help"], env={"MAKEFLAGS": None})
    assert done.returncode == 0, done
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")}
    assert listed == phony
