"""Which cases of a test run at every change, and which in `make long` alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def long_but(always: Iterable[Any], long: Iterable[Any]) -> list[Any]:
    """Parameters of which those `always` run at each change, and the others in `make long`."""
    short = list(always)
    return [
        *short,
        *(pytest.param(value, marks=pytest.mark.long) for value in long if value not in short),
    ]


def few(cases: Mapping[str, Any], *short: str) -> list[Any]:
    """All cases for `parametrize`, by their names: but for the `short` ones they are long."""
    assert set(short) <= set(cases)
    return [
        pytest.param(
            *(values if isinstance(values, tuple) else (values,)), id=name,
            marks=[] if name in short else [pytest.mark.long],
        )
        for name, values in cases.items()
    ]  # fmt: skip
