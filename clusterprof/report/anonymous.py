"""Results to share with strangers: without hosts, paths, and what the program was given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa

from clusterprof.masking import UNKNOWN_LAUNCH
from clusterprof.report.whole_job import Job
from clusterprof.results import Results

#: an absolute path, one below the home or current folder, a file in a folder, a script; no GB/s
_PART = r"[\w.@%+=,~-]*[\w@%+~-]"
_PATH = re.compile(
    rf"(?<![\w/])(?:~|\.{{1,2}})?(?:/{_PART})+/?"
    rf"|(?<![\w/])[\w.-]+(?:/{_PART}){{2,}}|(?<![\w/])[\w.-]+/[\w-]+\.\w{{1,8}}\b"
    r"|(?<![\w/])[\w.-]+\.(?:py|sh)\b"
)
#: a GPU's, as notes on what could not be read have it
_UUID = re.compile(r"(?<!\w)(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
#: of a command these options stay, with their values: they tell what is to be captured
_KEPT = ("--ranks", "--profiler", "--pytorch", "--trace", "--cpu-sampling", "--steps")


def anonymous(results: Results, names: Mapping[str, str] | None = None) -> Results:
    """A copy in which hosts are `host-1`, …, paths are `PATH`, and commands name no program.

    Kernels, ranges, communicators and process groups keep their names: findings are about them.
    `names` are those of `host_names`, where more hosts are known than the results name.
    """
    return cast("Results", _without(results, host_names(results) if names is None else names))


def anonymous_table(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """A table's texts in the same way."""
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_string(kind):
            texts = column.cast(pa.string()).combine_chunks().dictionary_encode()
            hidden = [text and _text(text, names) for text in texts.dictionary.to_pylist()]
            column = pa.array(hidden, pa.string()).take(texts.indices).cast(field.type)
        columns.append(column)
    return pa.table(columns, table.schema)


def anonymous_job(job: Job, names: Mapping[str, str]) -> Job:
    """What is known of the whole job in the same way; of its command only the launcher stays."""
    return replace(
        job,
        hosts={rank: _text(host, names) for rank, host in job.hosts.items()},
        shallow=None if job.shallow is None else anonymous_table(job.shallow, names),
        command="",
    )


def host_names(results: Results, others: Iterable[str] = ()) -> dict[str, str]:
    """The new name of each host that the results name, and of `others`, short and in full."""
    hosts = [entry["host"] for entry in results["ranks"]]
    hosts += [row["host"] or "" for row in results.get("hardware", [])]
    if shallow := results["shallow"]:
        hosts += [suspect["host"] or "" for suspect in shallow["suspects"]]
        hosts += [node["host"] for node in shallow["nodes"]]
    hosts += others
    hosts += [name.partition(".")[0] for name in hosts]
    number: dict[str, int] = {}
    for name in filter(None, hosts):
        number.setdefault(name.partition(".")[0], len(number) + 1)
    return {name: f"host-{number[name.partition('.')[0]]}" for name in filter(None, hosts)}


def _without(value: Any, names: Mapping[str, str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without(content, names, name) for name, content in value.items()}
    if isinstance(value, list):
        return [_without(item, names, key) for item in value]
    if not isinstance(value, str):
        return value
    if key == "uuid":
        return None
    if key == "next":
        return _command(value)
    if key == "source":
        return "PATH" if value else ""
    return _text(value, names)


def _text(text: str, names: Mapping[str, str]) -> str:
    """Text with the hosts' names and all paths replaced."""
    if names:
        any_of = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        # and the domain, where only the short name is known
        host = rf"(?<![\w.-])({any_of})(?![\w-])(?:\.\w[\w-]*)*"
        text = re.sub(host, lambda match: names[match[1]], text)
    return _PATH.sub("PATH", _UUID.sub("UUID", text))


def _command(text: str) -> str:
    """A command without the launcher's options, the program and its arguments."""
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    if words[:1] != ["clusterprof"] or len(words) < 2:
        return ""
    kept, options = words[:2], words[: words.index("--") if "--" in words else None]
    for place, word in enumerate(options, 1):
        if word.partition("=")[0] in _KEPT:
            takes_value = word != "--cpu-sampling" and "=" not in word
            kept += [word, *(words[place : place + 1] if takes_value else [])]
    return shlex.join([*kept, *UNKNOWN_LAUNCH])
