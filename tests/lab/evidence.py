"""What the jobs of a failed test printed and left, for its report: a failure that happens once, on
another machine, has to tell what happened from what is printed of it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import command

#: of one command's output, of one rank's state
_MOST_CHARS, _MOST_STATE_CHARS = 12_000, 2_000
#: the last so many commands and ranks, and run directories
_MOST = 16


def sections(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Title and text of what the test's commands printed, and of the runs in its `folder`."""
    for each in list(command.ran.values())[-_MOST:]:
        yield "what a command printed", str(each)[-_MOST_CHARS:]
    if folder is not None and folder.is_dir():
        for run in sorted(folder.glob("**/run.json"))[:_MOST]:
            yield f"what {run.parent} holds", "\n".join(_lines(run))


def _lines(run: Path) -> Iterator[str]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        outcomes: list[dict[str, Any]] = json.loads(run.read_text()).get("outcomes", [])
        for each in outcomes:
            yield f"run.json: rank {each.get('rank')}: {each.get('state')} {each.get('reason', '')}"
    for state in sorted(run.parent.glob("**/state.json"))[:_MOST]:
        with contextlib.suppress(OSError):
            text = state.read_text(errors="replace")[:_MOST_STATE_CHARS]
            yield f"{state.relative_to(run.parent)}: {text}"
