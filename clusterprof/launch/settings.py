"""Settings and where they came from: a flag, over CLUSTERPROF_*, over the default."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from clusterprof.errors import UsageError

#: The settings that can be given by environment: option -> (variable, default).
SETTINGS = {
    "ranks": ("CLUSTERPROF_RANKS", "0"),
    "steps": ("CLUSTERPROF_STEPS", "10:15"),
    "profiler": ("CLUSTERPROF_PROFILER", "auto"),
    "nsys": ("CLUSTERPROF_NSYS", None),
    "run_dir": ("CLUSTERPROF_RUN_DIR", None),
    "step_on": ("CLUSTERPROF_STEP_ON", None),
}


class Settings:
    """The values in force, each with its origin."""

    def __init__(self, arguments: argparse.Namespace, environ: Mapping[str, str] | None = None):
        self._arguments = arguments
        self._environ = os.environ if environ is None else environ
        self.origins: dict[str, str] = {}

    def get(self, name: str) -> str | None:
        """The value of the setting `name` (a key of SETTINGS); remembers where it came from."""
        variable, default = SETTINGS[name]
        given = getattr(self._arguments, name)
        if given is not None:
            self.origins[name] = "--" + name.replace("_", "-")
            return str(given)
        if self._environ.get(variable):
            self.origins[name] = variable
            return self._environ[variable]
        self.origins[name] = "default"
        return default


def check_free(target: Path, force: bool, ours: Callable[[Path], bool]) -> None:
    """Raise UsageError where something stands at `target` that may not be replaced.

    `--force` replaces what clusterprof wrote, which `ours` tells by its content, and nothing else.
    """
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(f"{target} exists already", "replace it with --force")
    if not ours(target):
        raise UsageError(
            f"{target} exists already, and is not what clusterprof writes there",
            "--force replaces nothing else: choose another place, or remove it",
        )


def path(text: str) -> Path:
    """A path argument, `~` expanded; an empty one (an unset variable) is none."""
    if not text:
        raise argparse.ArgumentTypeError("a path is empty")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such user: a file may be called so
        return Path(text)
