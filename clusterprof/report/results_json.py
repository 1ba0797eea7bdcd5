"""results.json: written the same way for the same results, and checked when read.

Whoever reads one gets exactly the form of `clusterprof.results`, or an error that names
the place in the file; keys that this version does not know are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.results import SCHEMA_VERSION, Baseline, Comparison, HangResults, Results
from clusterprof.run_directory import writing

#: bytes; that of a thousand ranks has some tens of millions
_MOST = 1 << 30
_MERGE_AGAIN = "write it again with clusterprof merge RUN"


def dumps(results: Results | HangResults | Comparison | Baseline) -> bytes:
    """`results` as JSON, indented, ending in a newline.

    The order is the contract's for keys; ranks and steps by number, findings by saving,
    operations by what of them is exposed. The same results give the same bytes.
    """
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    whole = "pace" in results  # the others are in their order already
    ordered = _sorted(cast("Results", results)) if whole else results
    try:
        return orjson.dumps(ordered, option=options)
    except TypeError:  # a path whose bytes are no UTF-8
        return orjson.dumps(_encodable(ordered), option=options)


def _encodable(value: Any) -> Any:
    """`value` with what no encoding has (a file name's odd bytes) written as escapes."""
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def write(path: Path, results: Results) -> None:
    """Write results.json by rename; raises `RunDirectoryError` if it cannot be written."""
    with writing(path, "--output"):
        files.write(path, dumps(results))


def not_merged(given: Path) -> ReportError:
    """The error for a run without results; `given` is how the user calls it."""
    if not given.exists():
        return ReportError(f"{given} does not exist", "check the path")
    return ReportError(
        f"{given} has not been merged: it has no merged/results.json",
        f"merge it: clusterprof merge {given}",
    )


def read(path: Path) -> Results:
    """Read and check a results.json.

    Raises `ReportError`: not there, not JSON, of another schema version, or not in the
    form of `clusterprof.results` (with the place in the file).
    """
    loaded = load(path)
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if version is None:
        advice = "give the results.json of a run, or a run directory"
        raise _refused(path, "holds no results of clusterprof", " has no schema_version", advice)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        what = f"has schema version {version!r}, this clusterprof reads {SCHEMA_VERSION}"
        advice = "read it with the clusterprof that wrote it, or merge the run again"
        raise _refused(path, what, "", advice)
    check(path, loaded, Results)
    return cast("Results", loaded)


def load(path: Path) -> Any:
    """The JSON of a file. Raises `ReportError`: not there, or not JSON."""
    import orjson

    try:
        content = files.content(path, _MOST, links=True)
    except OSError as error:
        raise ReportError(
            f"cannot read {path.name}",
            f"looked for: {path.absolute()}",
            f"the system said: {error.strerror or error}",
            "next: clusterprof merge RUN writes it",
        ) from error
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        what = "is not JSON" if content.strip() else "is empty"
        raise _refused(path, what, f", line {error.lineno}: {error.msg}") from error


def check(path: Path, loaded: object, form: type) -> None:
    """Raise ReportError where what was read from `path` has not this form, a TypedDict."""
    for what, found in _differences(loaded, form, ""):
        raise _refused(path, what, found)


def _refused(path: Path, what: str, found: str, advice: str = _MERGE_AGAIN) -> ReportError:
    return ReportError(f"{path.name} {what}", f"where: {path.absolute()}{found}", f"next: {advice}")


#: the JSON types of the contract's: how each is called, and what orjson makes of it
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
    str: ("a text", (str,)),
    list: ("a list", (list,)),
    dict: ("an object", (dict,)),
}


def _differences(value: Any, expected: Any, place: str) -> Iterator[tuple[str, str]]:
    """Walk `value` along the types of the contract: what differs, and what is there instead."""
    kind = dict if is_typeddict(expected) else get_origin(expected) or expected
    inner = [each for each in get_args(expected) if each is not NoneType]
    if kind is Any:
        return
    if kind in (Union, UnionType):
        if value is not None:
            yield from _differences(value, inner[0], place)
        return
    fits = value in inner if kind is Literal else type(value) in _KINDS[kind][1]
    if not fits:
        called = "one of " + ", ".join(inner) if kind is Literal else _KINDS[kind][0]
        shown = repr(value)
        shown = shown if len(shown) < 60 else shown[:57] + "..."
        yield f"is damaged: {place or 'the whole'} should be {called}", f" has {shown}"
    elif is_typeddict(expected):
        for key, of_key in _keys(expected).items():
            name = f"{place}.{key}" if place else key
            if key in value:
                yield from _differences(value[key], of_key, name)
            else:
                yield f"is not complete: {name} is missing", ""
    elif kind is list:
        for index, item in enumerate(value):
            yield from _differences(item, inner[0], f"{place}[{index}]")


@cache
def _keys(form: type) -> dict[str, Any]:
    """The keys of a TypedDict with their types: a list has thousands of one form."""
    return get_type_hints(form)


def _sorted(results: Results) -> Results:
    """A copy with every list in the order that the contract gives it."""
    rank = itemgetter("rank")
    steps = sorted(results["steps"], key=itemgetter("step"))
    operations = sorted(
        results["collectives"]["by_operation"],
        key=lambda o: (-o["exposed_ns_per_step"], o["operation"], o["communicator"]),
    )
    return results | {
        "ranks": sorted(results["ranks"], key=rank),
        "missing": sorted(
            results["missing"], key=lambda m: (m["rank"] is None, m["rank"] or 0, m["source"])
        ),
        "clock": results["clock"] | {"ranks": sorted(results["clock"]["ranks"], key=rank)},
        "steps": [step | {"ranks": sorted(step["ranks"], key=rank)} for step in steps],
        "collectives": results["collectives"] | {"by_operation": operations},
        "findings": sorted(
            results["findings"], key=lambda f: (-f["saved_ns_per_step"], f["code"], f["ranks"])
        ),
    }
