"""The window of steps."""

from __future__ import annotations

import pytest

from clusterprof.arguments import parse_steps
from clusterprof.errors import UsageError


def test_a_window_is_half_open() -> None:
    parsed = parse_steps("10:15")
    assert (parsed.first, parsed.end, len(parsed)) == (10, 15, 5)


@pytest.mark.parametrize("text", ["10", "10:", "a:b", "15:10", "10:10", "10-15", "-1:3"])
def test_what_is_no_window_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_steps(text)
    assert error.value.details


def test_a_window_from_step_0_is_refused_since_it_shows_the_start_up_only() -> None:
    with pytest.raises(UsageError, match="0:5") as error:
        parse_steps("0:5")
    assert "--steps 10:15" in error.value.details[-1]
