"""state.json: how far a rank's capture has come. States only move forward."""

from __future__ import annotations

import errno
import os
import time
from typing import Any, Dict, Optional

from . import attempts, documents, files

#: In order. A rank that is not chosen goes counting -> counted. `lost` is an end as well.
STATES = (
    "counting", "counted",
    "armed", "waiting", "capturing", "finishing", "captured", "collected", "lost",
)  # fmt: skip

#: what is read of a state; whoever wrote something else there has written nothing
_FORM = {
    "state": str, "reason": str, "host": str, "machine": str,
    "chosen": bool, "whole": bool, "late": bool,
    "steps": (int, None), "attempt": int, "history": list, "nsys": dict,
}  # fmt: skip


def rank_directory(run: str, rank: int) -> str:
    """The folder of `rank` in the run directory `run`."""
    return os.path.join(run, "ranks", "%05d" % rank)


def make(folder: str) -> None:
    """Make a rank's folder, but not the run directory: one that was deleted stays deleted.

    Nor in another user's that stands in its place: a report holds the environment. Raises OSError.
    """
    run = attempts.root(os.path.dirname(os.path.dirname(os.path.abspath(folder))))
    if not os.path.isdir(run):
        raise FileNotFoundError(errno.ENOENT, "the run directory is gone", run)
    files.check_ours(os.stat(run), run)
    os.makedirs(folder, exist_ok=True)


def read_plan(path: str) -> Dict[str, Any]:
    """plan.json, with the run directory as it is named here. Raises OSError, ValueError.

    A container may have the run directory at another place than the launching host.
    """
    plan: Dict[str, Any] = documents.load(path, ours=True)
    if not documents.fits(plan, {"run": str}):
        raise ValueError("%s is no plan" % path)
    here = os.path.dirname(os.path.abspath(path))
    for folder in (plan["run"], here):
        if os.path.isfile(os.path.join(folder, "run.json")):
            plan["run"] = folder
            break
    return plan


def read(folder: str, ours: bool = False) -> Dict[str, Any]:
    """The state in a rank's folder, without what is not of its form; {} where there is none.

    `ours`: another user's is none (`files.open_ours`), as everywhere where a rank obeys one.
    """
    try:
        state = documents.load(os.path.join(folder, "state.json"), ours)
    except (OSError, ValueError):
        return {}
    if not isinstance(state, dict):
        return {}
    return {
        name: value
        for name, value in state.items()
        if name not in _FORM or documents.fits(value, _FORM[name])
    }


def advance(
    folder: str,
    state: str,
    reason: Optional[str] = None,
    at_ns: Optional[int] = None,
    **facts: Any,
) -> bool:
    """Move the rank's state forward and add `facts`; False where it was further on already.

    A later attempt (a second interpreter in the same rank) may start over from `armed`
    once the earlier one has ended without a report; what was lost may be `collected` when its
    report is found after all. Of two reasons for one state the first stays. `at_ns`: when that was
    (wall clock), by default now. Raises OSError if it cannot be written.
    """
    now = read(folder)
    before = now.get("state")
    if before in STATES and STATES.index(state) < STATES.index(before):
        if before != "lost" or state not in ("armed", "collected"):
            return False
        if state == "armed":
            now = {"attempt": now.get("attempt", 1) + 1}
    make(folder)
    now.update(facts, state=state)
    now.setdefault("host", os.uname().nodename)
    now.setdefault("history", []).append([state, at_ns or time.time_ns()])
    if reason is not None and (state != before or "reason" not in now):
        now["reason"] = reason
    files.write_json(os.path.join(folder, "state.json"), now, indent=1)
    return True
