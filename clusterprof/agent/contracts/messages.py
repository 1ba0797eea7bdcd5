"""What clusterprof says on a terminal: nothing that a terminal obeys, and never at anybody's cost.

Names in a message may be anybody's (a host's, a report's): control characters would move the
cursor or retitle the window, bidirectional ones show text in another order than it has.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Iterable, Iterator, Optional, Tuple

#: C0, DEL, C1, the separators, bidirectional embeddings and isolates of Unicode, which end a line
#: or move a column, as JSON escapes them, so that JSON remains the same JSON
_IN_A_LINE = {code: "\\u%04x" % code for code in (
    *range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A),
)}  # fmt: skip
#: those of them that a terminal obeys where a text has several lines
_SHOWN = {code: _IN_A_LINE[code] for code in _IN_A_LINE if code not in (9, 10, 0x2028, 0x2029)}
#: source files of torch, Python, and ours
_NOT_THE_USERS = (
    r"/(site|dist)-packages/torch/|/torch/distributed/|/lib/python3\.\d+/(?!site-|dist-)|^<"
    r"|/clusterprof/agent/"
)


def neutral(text: str) -> str:
    """The text with what a terminal would obey written as escapes; line ends and tabs stay."""
    return text.translate(_SHOWN)


def line(text: str) -> str:
    """The text as one line: with line ends and tabs as escapes too, so that it forges no other."""
    return text.translate(_IN_A_LINE)


def users_line(frames: Iterable[Tuple[str, int, str]]) -> Optional[str]:
    """`file:line function` of the innermost frame that is the user's; without one, the innermost.

    `frames`: file, line and function of each, innermost first. None where there are none.
    """
    frames = list(frames)
    own = [frame for frame in frames if not re.search(_NOT_THE_USERS, frame[0])]
    return next(("%s:%s %s" % frame for frame in own or frames), None)


def complain(text: str) -> None:
    """One line on the stderr of a rank, from its agent or guard; never raises.

    Nothing stays in the program's buffer, whose flush at its end would fail, nor gets into a file
    that has the descriptor of a closed stderr.
    """
    if sys.__stderr__ is not None and not sys.__stderr__.closed:
        write(2, "clusterprof: %s\n" % line(text))


def write(descriptor: int, text: str) -> None:
    """Write what can be written. Never raises, nor signals the process."""
    with contextlib.suppress(OSError, ValueError), unsignalled():
        left = neutral(text).encode("utf-8", "backslashreplace")
        while left:
            left = left[os.write(descriptor, left) :]


@contextlib.contextmanager
def unsignalled() -> Iterator[None]:
    """What this thread writes in here has the process signalled neither for a pipe that no process
    reads nor for a file that may grow no further.
    """
    import signal

    own = {signal.SIGPIPE, signal.SIGXFSZ}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, own)
    try:
        yield
    finally:
        signal.sigtimedwait(own, 0)  # ours, not the program's; one that is ignored never waits
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
