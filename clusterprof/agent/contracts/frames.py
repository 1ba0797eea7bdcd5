"""Where a program is, of the frames of one of its threads: the line that its user wrote."""

from __future__ import annotations

import re
from typing import Iterable, Optional, Tuple

#: source files of torch, Python, and ours
_NOT_THE_USERS = (
    r"/(site|dist)-packages/torch/|/torch/distributed/|/lib/python3\.\d+/(?!site-|dist-)|^<"
    r"|/clusterprof/agent/"
)


def users_line(frames: Iterable[Tuple[str, int, str]]) -> Optional[str]:
    """`file:line function` of the innermost frame that is the user's; without one, the innermost.

    `frames`: file, line and function of each, innermost first. None where there are none.
    """
    frames = list(frames)
    own = [each for each in frames if not re.search(_NOT_THE_USERS, each[0])]
    return next(("%s:%s %s" % each for each in own or frames), None)
