"""`make golden` compares with what is stored, `make golden ARGS=--write` stores it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden.store import Golden

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="store what the golden tests compare")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden: of the whole set, that `make golden` runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The whole set is run where this folder is named, or `-m golden`; else the short one."""
    named = [Path(config.invocation_params.dir, word.split("::")[0]) for word in config.args]
    if "golden" in config.option.markexpr or any(HERE in (p, *p.parents) for p in named):
        return
    left_out = [item for item in items if item.get_closest_marker("golden")]
    items[:] = [item for item in items if not item.get_closest_marker("golden")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)`: fails where it is not what is stored under that name."""
    return Golden(bool(request.config.getoption("write", default=False)))
