"""`make golden` compares with what is stored, `make golden ARGS=--write` stores it anew."""

from __future__ import annotations

import pytest

from golden.store import Golden


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="store what the golden tests compare")


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)`: fails where it is not what is stored under that name."""
    return Golden(bool(request.config.getoption("write", default=False)))
