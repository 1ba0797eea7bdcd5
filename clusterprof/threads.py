"""Several threads for what numpy computes: it lets go of the interpreter's lock meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

A = TypeVar("A")
B = TypeVar("B")

#: so many activities are looked at together: each of their columns is a megabyte, which a
#: processor's cache holds
AT_ONCE = 1 << 17
#: more take memory, each for its part, and hardly time: a fifth of the work is Python's
_MOST = 4


def blocks(first: npt.NDArray[Any], most: int) -> list[tuple[int, int]]:
    """Return ranges of things that begin within `most` elements.

    `first` [things + 1] is where the elements of each begin, ascending, and the last one's end.
    """
    begins = np.flatnonzero(np.diff(first[:-1] // most, prepend=-1))
    return list(pairwise([*begins.tolist(), len(first) - 1]))


def each(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Return what `function` makes of each of `items`, in order."""
    items = list(items)
    threads = min(_MOST, len(items), len(os.sched_getaffinity(0)))
    if threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
