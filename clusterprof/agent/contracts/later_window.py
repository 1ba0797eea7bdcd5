"""order.json: a later window of a job that runs, asked for by `clusterprof capture`, or by the
launching verb once it has looked at all ranks (`--ranks auto`).

The order for window 2 is `windows/2/order.json` in the run directory. Each rank's writer looks for
the next one when it writes the step log, and hands it to the rank, which takes part in it unless it
has made its first step already: all ranks that do capture the same steps.
"""

import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import documents, paths
from .plan import LIMITS, Selection, is_window

SCHEMA_VERSION = 1
#: So many looks for an order a file server sees each second of a job that waits for one: as many
#: as of 4,000 ranks that look once a minute, as all ranks do at all times.
LOOKS_A_SECOND = 64
#: After the window by which the ranks of the next one are chosen, an order is looked for so often
#: for so long.
SOON_S = 120.0
MOST_S = 60.0


def look_s(world_size: Optional[int]) -> float:
    """How often a rank looks for an order that is to come soon, in a job of this size."""
    return MOST_S if world_size is None else min(MOST_S, max(1.0, world_size / LOOKS_A_SECOND))


class LaterWindow(NamedTuple):
    """One order."""

    #: from 2 on: the first window is the plan's
    number: int
    #: steps [first, end)
    steps: Tuple[int, int]
    selection: Selection
    #: torch, or none: the flight recorders alone
    profiler: str
    #: who asked for it, in words
    asked_by: str = ""
    #: its result is the run's: of `--ranks auto`
    auto: bool = False

    @classmethod
    def from_json(cls, content: Any, number: int) -> "LaterWindow":
        """What order.json holds, which must be that of window `number`. Raises ValueError."""
        form = {"schema_version": range(1, 1 << 20), **documents.form_of(cls, _LIMITS)}
        if not documents.fits(content, form) or content["number"] != number:
            raise ValueError("it is no order of clusterprof for window %d" % number)
        if content["schema_version"] > SCHEMA_VERSION:
            raise ValueError("it is of version %d" % content["schema_version"])
        order: LaterWindow = documents.built(cls, content)
        return order

    def to_json(self) -> Dict[str, Any]:
        """What order.json holds."""
        return {
            "schema_version": SCHEMA_VERSION, **self._asdict(),
            "selection": self.selection._asdict(),
        }  # fmt: skip


def path(run: str, number: int) -> str:
    """The place of an order."""
    return os.path.join(paths.window_folder(run, number), paths.ORDER)


def numbers(run: str) -> List[int]:
    """The later windows that have a folder, in order. Raises OSError."""
    # A listing: NFS may remember for half a minute that a file is not there, but asks the server
    # whenever a folder is opened.
    names = os.listdir(os.path.join(run, paths.WINDOWS))
    return sorted(filter(None, map(paths.window_number, names)))


def read(run: str, number: int, ours: bool = False) -> LaterWindow:
    """One order; `ours`: only one that no other user wrote. Raises OSError, ValueError."""
    return LaterWindow.from_json(documents.load(path(run, number), ours), number)


def next_after(run: str, number: int) -> Optional[LaterWindow]:
    """The first order after this number that a rank obeys; None while there is none.

    One that is not ours, or is no order, is passed over. Raises OSError.
    """
    for candidate in numbers(run):
        if candidate > number:
            try:
                return read(run, candidate, ours=True)
            except FileNotFoundError:
                return None  # it is being made
            except (OSError, ValueError):
                continue
    return None


_LIMITS = {
    **LIMITS,
    "number": range(2, 1 << 20), "steps": is_window, "profiler": ("torch", "none").__contains__,
}  # fmt: skip
