"""The window of steps that is captured: half open, counted in optimizer steps from 0."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterprof.errors import UsageError


@dataclass(frozen=True)
class StepWindow:
    """Steps [first, end)."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"

    def __len__(self) -> int:
        return self.end - self.first


def parse(text: str) -> StepWindow:
    """Read `10:15`. Raises UsageError for anything else, an empty window, or one from step 0."""
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if match is None:
        raise UsageError(
            f"--steps {text!r} is no window of steps",
            "expected FIRST:END, half open: 10:15 captures the five steps 10 to 14",
        )
    window = StepWindow(int(match[1]), int(match[2]))
    if window.first < 1:
        raise UsageError(
            f"--steps {text}: the window begins at step 1 or later",
            "in step 0 CUDA, NCCL and the allocator are still setting up: it shows nothing else",
            f"try --steps 10:{10 + max(1, len(window))}",
        )
    if window.end <= window.first:
        raise UsageError(
            f"--steps {text} holds no step", f"try --steps {window.first}:{window.first + 5}"
        )
    return window
