"""By how many calls two ranks are displaced, where neither ids nor steps say."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from lab.tiers import long_but

from clusterprof.align.match import shift
from clusterprof.align.match.calls import UNKNOWN, Calls
from clusterprof.align.time_stamps import deviations, spread
from clusterprof.columns import Bools, Ints


def calls(rank: int, begin: Ints, end: Ints, has: Bools) -> Calls:
    n = len(begin)
    unknown, nothing = np.full(n, UNKNOWN), np.full(n, None, dtype=object)
    return Calls(
        rank, np.arange(n), np.full(n, "AllReduce", dtype=object), nothing, nothing,
        unknown, np.zeros(n, np.int64), np.full(n, 1024), unknown, unknown, unknown, unknown, begin,
        np.where(has, begin, 0), np.where(has, end, 0), has, unknown, unknown, nothing, nothing,
    )  # fmt: skip


def pair(
    seed: int, n: int, gone: int, kept: int, uneven: float, lost: float = 0.0
) -> tuple[Calls, Calls]:
    """Two ranks' calls, of `n`; the second lacks the first `gone` and has `kept` after them."""
    rng = np.random.default_rng(seed)
    begin = np.cumsum(1_000_000 + (uneven * 1e6 * rng.random(n)).astype(np.int64))
    late = rng.integers(0, 200_000, (2, n))
    end = begin + 250_000 + rng.integers(0, 3_000, (2, n))
    has = rng.random((2, n)) >= lost
    one, two = (calls(k, begin + late[k], end[k] + k * 7_000_000, has[k]) for k in (0, 1))
    return one, two.take(np.arange(gone, gone + kept))


UNEVEN, LOST = (0.0, 0.1, 3.0), (0.0, 0.3, 1.0)
WINDOWS = [(0, 700), (3, 600), (200, 90), (690, 3)]


@pytest.mark.parametrize(
    "displaced",
    long_but(
        [*product(UNEVEN, LOST, WINDOWS[3:]), *product((3.0,), (0.3,), WINDOWS[:3])],
        product(UNEVEN, LOST, WINDOWS),
    ),
)
def test_a_glance_changes_no_result(
    monkeypatch: pytest.MonkeyPatch, displaced: tuple[float, float, tuple[int, int]]
) -> None:
    uneven, lost, (gone, kept) = displaced
    one, two = pair(gone, 700, gone, kept, uneven, lost)
    for a, b in ((one, two), (two, one)):
        found = shift.find_shift(a, b)
        with monkeypatch.context() as patched:
            patched.setattr(shift, "_at_a_glance", lambda _a, _b, by: by)
            assert shift.find_shift(a, b) == found
    if uneven == 3.0 and lost < 1.0 and kept > 3:
        assert found is not None
        assert found.by == -gone


def test_calls_that_are_weighed_grow_with_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with their square, where one report is much longer than the other."""
    weighed: list[int] = []
    original = shift._try

    def counted(a: Calls, b: Calls, by: int, directed: bool) -> shift._Trial | None:
        one, _ = shift.Shift(by, 0.0, 0).overlap(a, b)
        weighed.append(one.stop - one.start)
        return original(a, b, by, directed)

    monkeypatch.setattr(shift, "_try", counted)
    for n in (2_000, 8_000):
        weighed.clear()
        found = shift.find_shift(*pair(1, n, n // 4, n // 2, 3.0))
        assert found is not None
        assert found.by == n // 4
        # the right one, and few beside it; all would be more than n / 2 of them
        assert sum(weighed) <= 8 * n


@pytest.mark.parametrize(("expected_s", "confidence"), [(-0.007, 0.8), (100, shift.BY_WALL_CLOCK)])
def test_an_expected_offset_that_no_displacement_comes_near_makes_none_surer(
    expected_s: float, confidence: float
) -> None:
    one, two = pair(1, 12, 0, 12, 0.0)
    found = shift.find_shift(one, two, expected_ns=round(expected_s * 1e9))
    assert found is not None
    assert found.confidence == confidence


@pytest.mark.parametrize(
    ("calls_count", "drift_ppm"), [(3, 0.0), (3, 90.0), (40, 0.0), (40, -90.0)]
)
def test_calls_end_together_on_clocks_that_differ_and_drift(
    calls_count: int, drift_ppm: float
) -> None:
    time = np.arange(calls_count) * 1_000_000_000
    apart = 7_000_000_000 + (time * drift_ppm * 1e-6).astype(np.int64)
    assert spread(deviations(apart, time)) < 10
    apart[0] += 1_000_000
    assert (spread(deviations(apart, time)) < 10) == (calls_count > 10)  # one in ten may not


def test_calls_that_drift_apart_as_no_clocks_do_end_apart() -> None:
    time = np.arange(40) * 1_000_000
    assert spread(deviations(time // 100, time)) > 100_000
    assert spread(deviations(np.array([5]), np.array([7]))) == 0
