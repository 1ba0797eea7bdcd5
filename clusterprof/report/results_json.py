"""results.json: written the same way for the same results, and checked when read.

Whoever reads one gets exactly the form of `clusterprof.results`, or an error that names
the place in the file; keys that this version does not know are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.results import SCHEMA_VERSION, Results
from clusterprof.run_directory import writing


def dumps(results: Results) -> bytes:
    """`results` as JSON, indented, ending in a newline.

    The order is the contract's for keys; ranks and steps by number, findings by cost,
    operations by what of them is exposed. The same results give the same bytes.
    """
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    ordered = _sorted(results)
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


def read(path: Path) -> Results:
    """Read and check a results.json.

    Raises `ReportError`: not there, not JSON, of another schema version, or not in the
    form of `clusterprof.results` (with the place in the file).
    """
    import orjson

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ReportError(
            f"cannot read {path.name}",
            f"looked for: {path.absolute()}",
            f"the system said: {error.strerror or error}",
            "next: clusterprof merge RUN writes it",
        ) from error
    try:
        loaded = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ReportError(
            f"{path.name} is not JSON" if content.strip() else f"{path.name} is empty",
            f"where: {path.absolute()}, line {error.lineno}: {error.msg}",
            "next: write it again with clusterprof merge RUN",
        ) from error
    _check_version(path, loaded)
    _check(path, loaded, Results, "")
    return cast("Results", loaded)


def _check_version(path: Path, loaded: object) -> None:
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if version is None:
        raise ReportError(
            f"{path.name} holds no results of clusterprof",
            f"where: {path.absolute()} has no schema_version",
            "next: give the results.json of a run, or a run directory",
        )
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ReportError(
            f"{path.name} has schema version {version!r}, this clusterprof reads {SCHEMA_VERSION}",
            f"where: {path.absolute()}",
            "next: read it with the clusterprof that wrote it, or merge the run again",
        )


def _check(path: Path, value: object, expected: Any, place: str) -> None:
    """Walk `value` along the types of the contract; the first difference is an error."""
    origin = get_origin(expected)
    if expected is Any:
        return
    if is_typeddict(expected):
        _check_dict(path, value, expected, place)
    elif origin is list:
        if not isinstance(value, list):
            raise _differs(path, place, "a list", value)
        for index, item in enumerate(value):
            _check(path, item, get_args(expected)[0], f"{place}[{index}]")
    elif origin is Literal:
        if value not in get_args(expected):
            raise _differs(path, place, "one of " + ", ".join(get_args(expected)), value)
    elif origin in (Union, UnionType):
        if value is not None or NoneType not in get_args(expected):
            _check(path, value, next(t for t in get_args(expected) if t is not NoneType), place)
    elif not _IS[origin or expected](value):
        raise _differs(path, place, _CALLED[origin or expected], value)


def _check_dict(path: Path, value: object, expected: Any, place: str) -> None:
    if not isinstance(value, dict):
        raise _differs(path, place, "an object", value)
    for key, kind in get_type_hints(expected).items():
        inner = f"{place}.{key}" if place else key
        if key not in value:
            raise ReportError(
                f"{path.name} is not complete: {inner} is missing",
                f"where: {path.absolute()}",
                "next: write it again with clusterprof merge RUN",
            )
        _check(path, value[key], kind, inner)


def _differs(path: Path, place: str, expected: str, value: object) -> ReportError:
    shown = repr(value)
    return ReportError(
        f"{path.name} is damaged: {place or 'the whole'} should be {expected}",
        f"where: {path.absolute()} has {shown if len(shown) < 60 else shown[:57] + '...'}",
        "next: write it again with clusterprof merge RUN",
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


_IS: dict[Any, Callable[[object], bool]] = {
    int: _is_integer,
    float: _is_number,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    dict: lambda value: isinstance(value, dict),
}
_CALLED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "an object",
}


def _sorted(results: Results) -> Results:
    """A copy with every list in the order that the contract gives it."""
    ordered = results.copy()
    ordered["ranks"] = sorted(results["ranks"], key=lambda entry: entry["rank"])
    ordered["missing"] = sorted(
        results["missing"],
        key=lambda entry: (entry["rank"] is None, entry["rank"] or 0, entry["source"]),
    )
    ordered["clock"] = results["clock"].copy()
    ordered["clock"]["ranks"] = sorted(results["clock"]["ranks"], key=lambda entry: entry["rank"])
    ordered["steps"] = []
    for step in sorted(results["steps"], key=lambda entry: entry["step"]):
        copied = step.copy()
        copied["ranks"] = sorted(step["ranks"], key=lambda account: account["rank"])
        ordered["steps"].append(copied)
    ordered["collectives"] = results["collectives"].copy()
    ordered["collectives"]["by_operation"] = sorted(
        results["collectives"]["by_operation"],
        key=lambda entry: (-entry["exposed_ns"], entry["operation"], entry["communicator"]),
    )
    ordered["findings"] = sorted(
        results["findings"],
        key=lambda finding: (-finding["cost_ns_per_step"], finding["code"], finding["ranks"]),
    )
    return ordered
