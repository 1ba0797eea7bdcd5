"""How much a packed file may hold: a kilobyte of gzip, xz or Parquet may hold a gigabyte."""

from __future__ import annotations

import os
import re

from clusterprof.errors import UsageError

#: how many bytes a packed report may hold, in place of what follows from its size: `8G`
VARIABLE = "CLUSTERPROF_MAX_UNPACKED"

#: Traces of torch.profiler pack to a 26th with xz, exports of nsys to an 8th, tables to a 40th.
#: What packs to less than a hundredth was made to; a small file is no danger.
_RATIO = 100
_HARMLESS = 64 << 20

_SIZE = re.compile(r"([0-9]{1,15})([kKMGT]?)i?B?")
_UNITS = {"": 0, "k": 10, "K": 10, "M": 20, "G": 30, "T": 40}


def most(packed: int) -> int:
    """Return how many bytes may be unpacked of so many. Raises UsageError."""
    given = os.environ.get(VARIABLE)
    if not given:
        return max(_HARMLESS, _RATIO * packed)
    match = _SIZE.fullmatch(given.strip())
    if match is None:
        raise UsageError(
            f"{VARIABLE}={given!r} is no size", "write bytes, or for instance 500M, 8G"
        )
    return int(match[1]) << _UNITS[match[2]]
