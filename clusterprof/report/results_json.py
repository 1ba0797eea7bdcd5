"""results.json: written the same way for the same results, and checked when read.

Whoever reads one gets exactly the form of `clusterprof.results`, or an error that names
the place in the file; keys that this version does not know are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)  # fmt: skip

from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.results import SCHEMA_VERSION, Baseline, Comparison, HangResults, Results
from clusterprof.run_directory import writing

#: bytes; that of a thousand ranks has some tens of millions
_MOST = 1 << 30
_MERGE_AGAIN = "write it again with clusterprof merge RUN"


def dumps(results: Results | HangResults | Comparison | Baseline) -> bytes:
    """`results` as JSON, indented, ending in a newline.

    The order is the contract's, which is declared with its types. The same results give the same
    bytes.
    """
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    # the others are in their order already
    order = _ordering(Results) if "pace" in results else None
    ordered = order(results) if order else results
    try:
        return orjson.dumps(ordered, option=options)
    except TypeError:  # a path whose bytes are no UTF-8
        return orjson.dumps(_encodable(ordered), option=options)


def _encodable(value: Any) -> Any:
    """`value` with what no encoding has (a file name's odd bytes) written as escapes."""
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
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
    for what, actual in _differences(loaded, form, ""):
        raise _refused(path, what, actual)


def _refused(path: Path, what: str, actual: str, advice: str = _MERGE_AGAIN) -> ReportError:
    return ReportError(
        f"{path.name} {what}", f"where: {path.absolute()}{actual}", f"next: {advice}"
    )


#: the JSON types of the contract's: how each is called, and what orjson makes of it
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
    str: ("a text", (str,)),
    list: ("a list", (list,)),
    dict: ("an object", (dict,)),
}


#: the members of a TypedDict with their types: a list has thousands of one form
_members = cache(get_type_hints)


def _differences(value: Any, expected: Any, path_of_keys: str) -> Iterator[tuple[str, str]]:
    """Walk `value` along the types of the contract: what differs, and what is there instead."""
    kind = dict if is_typeddict(expected) else get_origin(expected) or expected
    inner = [form for form in get_args(expected) if form is not NoneType]
    if kind is Any:
        return
    if kind in (Union, UnionType):
        if value is not None:
            yield from _differences(value, inner[0], path_of_keys)
        return
    fits = value in inner if kind is Literal else type(value) in _KINDS[kind][1]
    if not fits:
        called = "one of " + ", ".join(inner) if kind is Literal else _KINDS[kind][0]
        shown = repr(value)
        shown = shown if len(shown) < 60 else shown[:57] + "..."
        yield f"is damaged: {path_of_keys or 'the whole'} should be {called}", f" has {shown}"
    elif is_typeddict(expected):
        for key, of_key in _members(expected).items():
            name = f"{path_of_keys}.{key}" if path_of_keys else key
            if key in value:
                yield from _differences(value[key], of_key, name)
            else:
                yield f"is not complete: {name} is missing", ""
    elif kind is list:
        for index, item in enumerate(value):
            yield from _differences(item, inner[0], f"{path_of_keys}[{index}]")


@cache
def _ordering(kind: Any) -> Callable[[Any], Any] | None:
    """What brings a value of this type into its order (`by`); None where nothing in it has one."""
    if is_typeddict(kind):
        forms = get_type_hints(kind, include_extras=True)
        inner = {name: order for name, form in forms.items() if (order := _ordering(form))}
        return (lambda e: e | {name: inner[name](e[name]) for name in inner}) if inner else None
    if get_origin(kind) is not Annotated:
        return None
    (member,), key = get_args(get_args(kind)[0]), kind.__metadata__[0]
    order = _ordering(member)
    return lambda entries: sorted(map(order, entries) if order else entries, key=key)
