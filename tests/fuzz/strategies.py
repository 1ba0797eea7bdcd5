"""Hypothesis, driven by a seed and a number of inputs instead of by pytest."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from fuzz.spoil import Change
from fuzz.targets import TARGETS

CHANGES = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 2**16)), min_size=1, max_size=4)


def falsify(name: str, number: int, inputs: int) -> tuple[Sequence[Change], BaseException] | None:
    """Give the target `inputs` inputs of the seed; returns the smallest that broke it, and how."""
    last: list[Sequence[Change]] = []

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(CHANGES)
    def run(changes: Sequence[Change]) -> None:
        last[:] = [changes]
        TARGETS[name](changes)

    try:
        run()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return last[0], error
    return None
