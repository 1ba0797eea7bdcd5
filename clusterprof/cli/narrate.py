"""What clusterprof tells while it works: on stderr, so that stdout carries results only."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence


def say(line: str) -> None:
    """One line of narration."""
    print(f"clusterprof: {line}", file=sys.stderr, flush=True)


def command(argv: Sequence[str], prefix: str = "") -> None:
    """A command that is about to run, to be pasted."""
    print(f"+ {prefix}{shlex.join(argv)}", file=sys.stderr, flush=True)
