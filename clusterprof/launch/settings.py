"""Where the launching verbs' settings come from: options, environment, clusterprof.toml, defaults.

The first that names one decides. A clusterprof.toml is the project's (in the current folder, or the
nearest one above it) or the user's own; its keys are the options' names, for all launching verbs or
in a table for one of them:

    profiler = "torch"
    [srun]
    steps = "50:60"

Looking upwards may find a file of whoever can write there. So it says figures, and which of several
ways is taken: programs, files, hosts and variables are named by the user's own file alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import stat
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from clusterprof import launchers, masking
from clusterprof.agent.contracts import files as contents
from clusterprof.arguments import path, shortest
from clusterprof.console import say
from clusterprof.errors import UsageError
from clusterprof.run_directory import others_can_write

FILE = "clusterprof.toml"
#: The settings that can be given by environment: option -> (variable, default).
SETTINGS = {
    "ranks": ("CLUSTERPROF_RANKS", "auto"),
    "steps": ("CLUSTERPROF_STEPS", "10:15"),
    "step_on": ("CLUSTERPROF_STEP_ON", None),
    "nsys": ("CLUSTERPROF_NSYS", None),
    "profiler": ("CLUSTERPROF_PROFILER", "auto"),
    "run_dir": ("CLUSTERPROF_RUN_DIR", None),
}
#: what a file does not decide: it would replace a run, or run nothing, each time
_NOT_IN_FILES = {"help", "color", "debug", "force", "dry_run"}
#: the only texts that a project's file gives, besides numbers, flags and choices; and a price
_TEXTS = {"ranks", "arm", "steps", "step_on", "trace", "fail_on", "gpu_hour"}
#: in the user's own file alone: options whose values are no secrets (`masking.harmless`)
_HARMLESS = "harmless"


def settle(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, words: Sequence[str], verb: str
) -> dict[str, str]:
    """Give the settings that were not given their values; returns where each came from.

    `parser` has the options of `verb` and `words` are the command line that it parsed. Raises
    UsageError for a file that cannot be used.
    """
    flags = {word.partition("=")[0] for word in words}
    from_files = read(verb, parser, files())
    origins = {}
    for name, action in options_of(parser).items():
        variable, default = SETTINGS.get(name, ("", None))
        is_set = name in SETTINGS and getattr(arguments, name) is not None
        if is_set or flags & {*action.option_strings}:
            origins[name] = "--" + name.replace("_", "-")
        elif variable and os.environ.get(variable):
            origins[name] = variable
            setattr(arguments, name, os.environ[variable])
        elif name in from_files:
            value, file = from_files[name]
            origins[name] = shortest(file)
            setattr(arguments, name, value)
        elif name in SETTINGS:
            origins[name] = "default"
            setattr(arguments, name, default)
    return origins


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """A parser's options, by the names of their values."""
    return {action.dest: action for action in parser._actions if action.option_strings}


def as_words(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, without: Collection[str]
) -> list[str]:
    """The options that were given, as words of a command line; `without` those of these names."""
    words: list[str] = []
    for action in parser._actions:
        given = getattr(arguments, action.dest, action.default)
        if action.dest in without or given == action.default:
            continue
        flag = action.option_strings[-1]
        values = given if isinstance(given, list) else [given]
        words += [flag] if given is True else [f"{flag}={value}" for value in values]
    return words


def files() -> list[Path]:
    """The files of settings that there are, the project's before the user's own."""
    folder, own = Path.cwd(), _own()
    project = next(
        (parent / FILE for parent in (folder, *folder.parents) if (parent / FILE).is_file()), own
    )
    return [file for file in dict.fromkeys((project, own)) if file.is_file()]


def _own() -> Path:
    """The user's own file, whether it is there or not."""
    config = os.environ.get("XDG_CONFIG_HOME") or path("~/.config")
    return Path(config, "clusterprof", FILE)


def read(
    verb: str, parser: argparse.ArgumentParser, places: Sequence[Path]
) -> dict[str, tuple[Any, Path]]:
    """The settings of files for this verb (its options are in `parser`), and the file of each: of
    one file its own table comes before all else, and of several the first. Raises UsageError.
    """
    settings: dict[str, tuple[Any, Path]] = {}
    for file in places:
        content, is_own = _content(file), file == _own()
        harmless = content.pop(_HARMLESS, []) if is_own else []
        if not contents.fits(harmless, [str]):
            what = f"{_HARMLESS} is a list of options"
            raise _refused(file, what, f'write {_HARMLESS} = ["lr"]')
        masking.harmless.update(name.lstrip("-").replace("_", "-") for name in harmless)
        tables = {name: value for name, value in content.items() if isinstance(value, dict)}
        general = {name: value for name, value in content.items() if name not in tables}
        if unknown := tables.keys() - {*launchers.names()}:
            whose = f"a table is for one of them: {', '.join(launchers.names())}"
            raise _refused(file, f"[{min(unknown)}] is not a launching verb", whose,
                           "what is for all of them stands before any table")  # fmt: skip
        for key, value in [*tables.get(verb, {}).items(), *general.items()]:
            option = _option(file, parser, key, is_own)
            try:
                setting = _value(parser, option, key, value), file
            except UsageError as error:
                raise _refused(file, f"{key} = {value!r}: {error.what}", *error.details) from None
            settings.setdefault(key.replace("-", "_"), setting)
    return settings


def _option(
    file: Path, parser: argparse.ArgumentParser, key: str, is_own: bool
) -> argparse.Action | None:
    """The option of which this is the name in a file; None where there is none. Raises UsageError
    where the file may not give it.
    """
    name = key.replace("-", "_")
    if not name or name in _NOT_IN_FILES:
        raise _refused(file, f"{key} is no setting", "give it on the command line")
    option = options_of(parser).get(name)
    if option is None or is_own or name in _TEXTS:
        return option
    if not (option.nargs == 0 or option.choices or option.type in (int, float)):
        reason = f"{key} would name a program, a file, a host or a variable"
        raise _refused(file, reason, f"your own settings may: {shortest(_own())}")
    return option


def _value(
    parser: argparse.ArgumentParser, option: argparse.Action | None, key: str, value: Any
) -> Any:
    """An option's value, as its parser makes it of what a file says. Raises UsageError."""
    flag = f"--{key.replace('_', '-')}"
    if option is None:
        return parser.parse_args([flag])  # which says that there is none, and what may be meant
    texts = ([str],) if isinstance(option.default, list) else ()
    if not contents.fits(value, bool if option.nargs == 0 else (str, int, float, *texts)):
        raise UsageError(
            "a flag is true or false, any other option has one value",
            "or a list of texts, where it may be repeated",
        )
    values = value if isinstance(value, list) else [value]
    words = [flag] * value if option.nargs == 0 else [f"{flag}={item}" for item in values]
    return getattr(parser.parse_args(words), option.dest)


def _content(file: Path) -> dict[str, Any]:
    """What a file says; nothing of one that others can write, and whose they are is said."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with contents.opened(file, links=True) as opened:
            status = os.fstat(opened.fileno())  # not of the path, which may be another by now
            anybody = bool(status.st_mode & stat.S_IWOTH)
            others = others_can_write(status) if file == _own() else anybody
            if others or status.st_uid not in (0, os.geteuid()):
                say(f"{shortest(file)} is not read: others can write it")
                return {}
            return dict(toml.loads(opened.read(1 << 20).decode()))
    except (OSError, ValueError, RecursionError) as error:  # TOML's own error is a ValueError
        raise _refused(file, str(error), "its form: https://toml.io") from None


def _refused(file: Path, problem: str, *details: str) -> UsageError:
    return UsageError(f"{shortest(file)}: {problem}", *details)
