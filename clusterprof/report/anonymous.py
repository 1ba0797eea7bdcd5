"""Results to share with strangers: without hosts, paths, and what the program was given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, cast

from clusterprof.results import Results

#: an absolute path, one below the home or current folder, a file in a folder, a script; no GB/s
_PART = r"[\w.@%+=,~-]*[\w@%+~-]"
_PATH = re.compile(
    rf"(?<![\w/])(?:~|\.{{1,2}})?(?:/{_PART})+/?"
    rf"|(?<![\w/])[\w.-]+(?:/{_PART}){{2,}}|(?<![\w/])[\w.-]+/[\w-]+\.\w{{1,8}}\b"
    r"|(?<![\w/])[\w.-]+\.(?:py|sh)\b"
)
#: of a command these options stay, with their values: they tell what is to be captured
_KEPT = ("--ranks", "--profiler", "--pytorch", "--trace", "--cpu-sampling", "--steps")


def anonymous(results: Results) -> Results:
    """A copy in which hosts are `host-1`, …, paths are `PATH`, and commands name no program.

    Kernels, ranges, communicators and process groups keep their names: findings are about them.
    """
    hosts = [each["host"] for each in results["ranks"]]
    if shallow := results["shallow"]:
        hosts += [each["host"] or "" for each in shallow["suspects"]]
        hosts += [each["host"] for each in shallow["nodes"]]
    hosts += [name.partition(".")[0] for name in hosts]
    known = [name for name in dict.fromkeys(hosts) if name]
    short = list(dict.fromkeys(name.partition(".")[0] for name in known))
    names = {name: f"host-{short.index(name.partition('.')[0]) + 1}" for name in known}
    return cast("Results", _without(results, names))


def _without(value: Any, names: Mapping[str, str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without(each, names, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_without(each, names, key) for each in value]
    if not isinstance(value, str):
        return value
    if key == "next":
        return _command(value)
    if key == "source":
        return "PATH" if value else ""
    return _text(value, names)


def _text(text: str, names: Mapping[str, str]) -> str:
    """Text with the hosts' names and all paths replaced."""
    if names:
        longest_first = sorted(names, key=len, reverse=True)
        any_of = "|".join(map(re.escape, longest_first))
        text = re.sub(rf"(?<![\w.-])(?:{any_of})(?![\w-])", lambda m: names[m[0]], text)
    return _PATH.sub("PATH", text)


def _command(text: str) -> str:
    """A command without the launcher's options, the program and its arguments."""
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    if len(words) < 2 or words[0] != "clusterprof":
        return ""
    kept = words[:2]
    for place, word in enumerate(words[: words.index("--") if "--" in words else None]):
        if word.partition("=")[0] in _KEPT:
            follows = words[place + 1 : place + 2]
            takes = word != "--cpu-sampling" and "=" not in word
            kept += [word, *(follows if takes else [])]
    return f"{shlex.join(kept)} ... -- PROGRAM..."
