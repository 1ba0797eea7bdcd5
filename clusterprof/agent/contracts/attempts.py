"""The attempts of an elastic job: torchrun starts all its ranks over when one has failed.

What the ranks of a later attempt leave is kept apart from what those before them left: a report
that the writer of a killed rank still brings home, or a prober that still answers, belongs to
another attempt, and a rank may have another number by now.
"""

from __future__ import annotations

import os
import re
from typing import Mapping

_FOLDER = re.compile(r"attempt-\d+")


def number(environ: Mapping[str, str]) -> int:
    """Which attempt this is, from 1."""
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) + 1 if count.isdigit() else 1


def folder(run: str, attempt: int) -> str:
    """Where an attempt's ranks write: the run directory itself, `attempt-2` in it, and so on."""
    return run if attempt == 1 else os.path.join(run, "attempt-%d" % attempt)


def root(run: str) -> str:
    """The run directory, from the folder of any attempt."""
    before, name = os.path.split(run)
    return before if _FOLDER.fullmatch(name) else run
