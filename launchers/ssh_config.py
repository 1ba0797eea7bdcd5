"""Fabric, where it is installed, and what the user's ssh configuration says of a host."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from clusterprof.errors import HostError, LaunchError


def fabric() -> Any:
    """The module fabric. Raises LaunchError where it is not installed."""
    try:
        import fabric as found
    except ImportError as error:
        raise LaunchError(
            "clusterprof ssh needs Fabric, which is not installed here",
            f"python said: {error}",
            "pip install clusterprof[ssh]",
        ) from None
    # What goes wrong is said in our own words; paramiko would print its tracebacks besides.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    return found


def load(path: Path | None) -> Any:
    """Fabric's configuration, with the user's ssh configuration, or with `path` instead.

    Raises LaunchError (no Fabric), HostError (the file cannot be read).
    """
    made = fabric().Config(runtime_ssh_path=None if path is None else str(path), lazy=True)
    try:
        made.load_ssh_config()
    except Exception as error:  # noqa: BLE001 - paramiko raises what it likes on a file it cannot parse
        raise HostError(
            f"the ssh configuration {path or '~/.ssh/config'} cannot be read",
            str(error).split("\n")[0] or type(error).__name__,
        ) from None
    return made


def hostname(name: str, path: Path | None) -> str:
    """The address that the ssh configuration has for `name`. Raises LaunchError, HostError."""
    return str(load(path).base_ssh_config.lookup(name).get("hostname", name))
