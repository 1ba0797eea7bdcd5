"""What is stored, and how it is compared: a file of text for each case, a difference by lines."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import pytest

STORED = Path(__file__).resolve().parent / "stored"
#: of a long difference the rest is left out: with `--write` git shows all of it
_MOST_LINES = 200


@dataclass(frozen=True)
class Golden:
    """Compares text with what is stored under a name, or (`--write`) stores it."""

    write: bool

    def __call__(self, name: str, text: str) -> None:
        """Fail with the lines that differ: each names its key, old (-) before new (+)."""
        path = STORED / f"{name}.txt"
        if self.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        check_same(name, path.read_text() if path.is_file() else "", text)


def check_same(name: str, before: str, after: str) -> None:
    """Fail with the lines that differ, if there are any."""
    if before != after:
        pytest.fail(f"{name} is not as it was\n{difference(before, after)}", pytrace=False)


def difference(before: str, after: str) -> str:
    """The lines that differ, without what is the same around them."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    shown = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    left_out = len(shown) - _MOST_LINES
    return "\n".join([*shown[:_MOST_LINES], *([f"... {left_out} more"] if left_out > 0 else [])])


def stored(folder: str) -> set[str]:
    """The names of what is stored in a folder."""
    return {
        str(file.relative_to(STORED).with_suffix("")) for file in STORED.glob(f"{folder}/**/*.txt")
    }
