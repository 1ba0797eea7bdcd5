"""Which steps are evidence: none before the ranks have synchronised, nor that in which they do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from clusterprof.analysis.model.timeline import steady_steps

STEPS = 6


def steady(collectives: list[tuple[int, tuple[int, ...]]], ranks: int) -> tuple[int, ...]:
    """The steady-state steps of ranks that all have steps 0 to 5; `collectives`: step, members."""
    rank, step = (each.ravel() for each in np.mgrid[:ranks, :STEPS])
    timelines = SimpleNamespace(
        has_steps=np.ones(ranks, dtype=bool),
        rank=rank,
        step=step,
        begin=step * 10,
        end=step * 10 + 10,
    )
    rows = [
        {"rank": rank, "collective": number, "step": step, "role": "both", "state": "matched"}
        for number, (step, members) in enumerate(collectives)
        for rank in members
    ]
    return steady_steps(cast("Any", timelines), pa.Table.from_pylist(rows))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_the_step_in_which_the_ranks_synchronise_is_no_evidence(first: int) -> None:
    collectives = [(step, (0, 1)) for step in range(first, STEPS)]
    assert steady(collectives, ranks=2) == tuple(range(first + 1, STEPS))


def test_ranks_synchronise_from_communicator_to_communicator() -> None:
    pairs = [(step, members) for step in range(STEPS) for members in ((0, 1), (2, 3))]
    assert steady(pairs, ranks=4) == (1, 2, 3, 4, 5), "no collective connects the two pairs"
    across = [(step, (1, 2)) for step in range(2, STEPS)]
    assert steady([*pairs, *across], ranks=4) == (3, 4, 5)
