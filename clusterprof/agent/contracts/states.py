"""state.json: how far a rank's capture has come; it only moves forward. And the request to stop.

The request to close all windows now is a file in the run directory, `close`, with the reason in it.
While a rank's window is open its writer looks for it: no file system may delay the training.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional

from . import files, paths
from .timing import REAL, Clock

#: How often a writer looks for the request.
LOOK_S = 0.25
#: How long a state waits for another process that writes the same one; it takes milliseconds.
TURN_S = 1.0
#: A state that is written again, with other facts (each hang of a rank, its end), is noted in the
#: history until that has so many entries; a change of state always is.
MOST_REPEATED = 128


class State(str, enum.Enum):
    """How far a rank has come, in order; `value` is the word in state.json."""

    #: a rank that is not selected counts its steps
    COUNTING = "counting"
    COUNTED = "counted"
    #: a selected rank: its profiler is set up, its program trains, the window is open, the report
    #: is being written, the report is in the run directory, somebody has collected it
    ARMED = "armed"
    WAITING = "waiting"
    CAPTURING = "capturing"
    FINISHING = "finishing"
    CAPTURED = "captured"
    COLLECTED = "collected"
    #: it ended without a report; `reason` says why
    LOST = "lost"

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Optional[State]:
        """The state that the content of a state.json gives; None where it gives none of these."""
        word = state.get("state")
        return next((member for member in cls if member.value == word), None)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the rank's own processes."""
        return self in (State.COUNTED, State.CAPTURED, State.COLLECTED, State.LOST)

    @property
    def has_report(self) -> bool:
        """Whether the rank's report is in the run directory."""
        return self in (State.CAPTURED, State.COLLECTED)

    @property
    def has_captured(self) -> bool:
        """Whether its window was captured: the report is there, or being written."""
        return self.has_report or self is State.FINISHING


#: the highest of a GPU's clock (MHz), PCIe generation or width; as far as it can be
_MOST = range(1 << 20)
#: what is read of a state; a value of another form is left out
_FORM = {
    "state": str, "reason": str, "host": str, "machine": str,
    "chosen": bool, "whole": bool, "late": bool,
    "steps": (int, None), "attempt": int, "history": list, "nsys": dict, "flight": str,
    # which collectives are not timed, and why
    "untimed": str,
    "stall": str,
    # how the rank's program ended where that was not by itself with status 0: the type of the
    # exception that nothing caught, its exit status (128 + n for signal n), and when (wall clock)
    "exception": str, "program_status": int, "ended_ns": int,
    # why there are no tables of its report, and where on its node the report is
    "not_reduced": str, "report_at": str,
    # the step that hangs or hung, between which times (wall clock), at which line of the program,
    # and why its flight recorder was not dumped
    "hangs": {
        "step": int, "since_ns": int, "until_ns": (int, None), "line": (str, None),
        "no_dump": (str, None),
    },
    # what hardware.csv is of (`gpu.Gpu.fixed`), the driver where it is not NVML, the errors of the
    # GPU (`hardware_sampler`), and what could not be read
    "hardware": {
        "uuid?": (str, None), "name?": (str, None), "most_sm_mhz?": (_MOST, None),
        "most_pcie_generation?": (_MOST, None), "most_pcie_width?": (_MOST, None), "note?": str,
        "driver?": str, "xids?": list,
    },
}  # fmt: skip


def make(folder: str) -> None:
    """Make a rank's folder, but neither a run directory that was deleted, nor in another user's:
    a report holds the environment. Raises OSError.
    """
    run = paths.run_of_rank(folder)
    if not os.path.isdir(run):
        raise FileNotFoundError(errno.ENOENT, "the run directory is gone", run)
    files.check_ours(os.stat(run), run)
    os.makedirs(folder, exist_ok=True)


def read(folder: str, ours: bool = False) -> Dict[str, Any]:
    """The state in a rank's folder, without what is not of its form; {} where there is none.

    `ours`: another user's is none (`files.check_ours`), as everywhere where a rank obeys one.
    """
    try:
        state = files.load(os.path.join(folder, paths.STATE), ours)
    except (OSError, ValueError):
        return {}
    members = state.items() if isinstance(state, dict) else ()
    return {name: value for name, value in members
            if name not in _FORM or files.fits(value, _FORM[name])}  # fmt: skip


@contextlib.contextmanager
def _alone(folder: str, clock: Clock = REAL) -> Iterator[None]:
    """Where another process of this node is in here for the same folder, wait for it.

    By a Unix socket without a file, whose name one process has until it ends: a lock of the file
    system is not on all of them, and may never answer. Who has waited `TURN_S` waits no more.
    """
    import socket

    status = os.stat(folder)
    name = "\0clusterprof-state-%d-%x-%x" % (os.getuid(), status.st_dev, status.st_ino)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:

        def bound() -> bool:
            with contextlib.suppress(OSError):
                turn.bind(name)
                return True
            return False

        clock.until(bound, TURN_S, 0.002)
        yield


def advance(
    folder: str, state: Optional[str], reason: Optional[str] = None, at_ns: Optional[int] = None,
    by: Clock = REAL, **facts: Any,
) -> bool:  # fmt: skip
    """Move the rank to a `State` and add `facts`; False where it was further on already.

    None: its state stays what it is, or is that of a rank whose report is being written.
    A second interpreter in the same rank may start over from `armed` once the first has ended
    without a report. Of two reasons for one state the first stays. `at_ns`: when that was (wall
    clock), by default now. `by`: the clock by which we wait. Raises OSError.
    """
    make(folder)
    with _alone(folder, by):
        now = read(folder)
        before = State.of(now)
        new, order = State(state or before or State.FINISHING), list(State)
        is_found = before is State.LOST and new is State.COLLECTED
        if before is State.LOST and new is State.ARMED:
            now = {"attempt": now.get("attempt", 1) + 1}
        elif before is not None and not is_found and order.index(before) > order.index(new):
            return False
        now.update(facts, state=new)
        now.setdefault("host", os.uname().nodename)
        is_change = new is not before
        _note(now.setdefault("history", []), [new, at_ns or by.wall_ns()], is_change)
        if reason is not None and (is_change or "reason" not in now):
            now["reason"] = reason
        files.write_json(os.path.join(folder, paths.STATE), now, indent=1)
        return True


def _note(history: List[Any], entry: List[Any], is_change: bool) -> None:
    """Add a state to a history, which those that were written again fill to `MOST_REPEATED`."""
    if is_change or len(history) < MOST_REPEATED:
        history.append(entry)


def captured_before(folder: str) -> bool:
    """Whether the rank with this folder has captured its window: in an earlier attempt than the
    folder's, if that was the whole window.
    """
    home, rank = os.path.dirname(os.path.dirname(folder)), int(os.path.basename(folder))
    attempt = paths.attempt_number(os.path.basename(home)) or 1
    first = os.path.dirname(home) if attempt > 1 else home
    for number in range(1, attempt + 1):
        before = read(paths.rank_folder(paths.attempt_folder(first, number), rank), ours=True)
        state = State.of(before)
        if state and state.has_captured and (number == attempt or before.get("whole")):
            return True
    return False


def stop_requested(run: str) -> Optional[str]:
    """The request's reason; None where none is ours, or the run directory cannot be read.

    `run`: the run directory, or the folder of an attempt in it.
    """
    try:
        run = paths.run_of(run)
        # The listing first: NFS may remember for half a minute that a file is not there, but
        # asks the server whenever a folder is opened.
        if paths.CLOSE not in os.listdir(run):
            return None
        with files.opened(os.path.join(run, paths.CLOSE), ours=True) as file:
            return file.readline().decode().strip()
    except (OSError, ValueError):
        return None
