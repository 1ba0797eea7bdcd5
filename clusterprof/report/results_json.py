"""results.json: written the same way for the same results, and checked when read.

Whoever reads one gets exactly the form of `clusterprof.results`, or an error that names
the place in the file; keys that this version does not know are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from clusterprof.agent.contracts import files
from clusterprof.errors import ReportError
from clusterprof.results import (
    SCHEMA_VERSION,
    Baseline,
    Comparison,
    HangResults,
    Results,
    Verification,
)
from clusterprof.run_directory import writing


def dumps(results: Results | HangResults | Comparison | Verification | Baseline) -> bytes:
    """`results` as indented JSON and a newline; the same results give the same bytes."""
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(results, option=options)
    except TypeError:  # a path whose bytes are no UTF-8
        return orjson.dumps(_encodable(results), option=options)


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
    if version != SCHEMA_VERSION:
        problem = f"has schema version {version!r}, this clusterprof reads {SCHEMA_VERSION}"
        advice = "read it with the clusterprof that wrote it, or merge the run again"
        raise _refused(path, problem, "", advice)
    check(path, loaded, Results)
    return cast("Results", loaded)


def load(path: Path) -> Any:
    """The JSON of a file. Raises `ReportError`: not there, or not JSON."""
    import orjson

    try:
        # that of a thousand ranks has some tens of millions of bytes
        content = files.content(path, 1 << 30, links=True)
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
        problem = "is not JSON" if content.strip() else "is empty"
        raise _refused(path, problem, f", line {error.lineno}: {error.msg}") from error


def check(path: Path, loaded: object, form: type) -> None:
    """Raise ReportError where what was read from `path` has not this form, a TypedDict."""
    import msgspec

    try:
        msgspec.convert(loaded, form)
    except msgspec.ValidationError as error:
        raise _refused(path, "is damaged", f": {error}") from None


def _refused(path: Path, problem: str, actual: str, advice: str = "") -> ReportError:
    advice = advice or "write it again with clusterprof merge RUN"
    where = f"where: {path.absolute()}{actual}"
    return ReportError(f"{path.name} {problem}", where, f"next: {advice}")
