"""Which cases of a test are no question at every change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


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
