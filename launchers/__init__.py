"""The launchers: one module each, which holds all of it. Its name is the verb.

A launcher turns the user's own command line into a `Job`: what to run, how many ranks there will
be, and which variables tell a process its rank. It runs nothing. What several need is in
`clusterprof.jobs`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import argparse

    from clusterprof.jobs import CommandLine, Job

#: Folders with further launchers, separated as in PATH: modules as those here.
VARIABLE = "CLUSTERPROF_LAUNCHERS"
__path__ += [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


class Launcher(Protocol):
    """What each module of this package provides."""

    #: one line for `clusterprof --help`
    SUMMARY: str
    #: the program that gets the options which clusterprof does not know; "" for none
    PASSES_OPTIONS_TO: str
    # For `--help` a launcher may have EXAMPLES, a tuple of command lines behind its verb, and
    # NEEDS, the options without which it cannot work.

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that are neither clusterprof's in general nor the launcher's own.

        Only of a launcher that has such options; its `job` finds them in `line.options`.
        """

    def job(self, line: CommandLine) -> Job:
        """The job that `LAUNCHER options... program...` starts.

        Raises UsageError where the two cannot work together.
        """


def names() -> list[str]:
    """The verbs of all launchers, by the files that there are: none of them is loaded."""
    return list(_files())


def summary(name: str) -> str:
    """The launcher's SUMMARY, read off its file: `clusterprof --help` loads none of them."""
    import ast

    with open(_files()[name], encoding="utf-8", errors="replace") as file:
        for node in ast.parse(file.read()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SUMMARY":
                return str(ast.literal_eval(node.value))
    return ""


def _files() -> dict[str, str]:
    """Each launcher's file, by its name; as in an import, the first folder that has it counts."""
    launcher_files: dict[str, str] = {}
    for folder in __path__:
        with contextlib.suppress(OSError):
            for file in sorted(os.listdir(folder)):
                name, ending = os.path.splitext(file)
                if ending == ".py" and name.isidentifier() and name != "__init__":
                    launcher_files.setdefault(name, os.path.join(folder, file))
    return launcher_files


def load(name: str) -> Launcher:
    """The launcher called `name`, one of `names()`."""
    return cast("Launcher", importlib.import_module(f"{__name__}.{name}"))


def job(name: str, line: CommandLine) -> Job:
    """What the launcher called `name` makes of a command line. Raises UsageError, LaunchError."""
    import dataclasses

    from clusterprof.jobs import closed

    return dataclasses.replace(load(name).job(line), closed=closed(line.program))
