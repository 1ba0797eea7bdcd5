"""results.json: written the same way for the same results, and checked when read.

Whoever reads one gets exactly the form of `clusterprof.results`, or an error that names
the place in the file; keys that this version does not know are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def check(path: Path, loaded: Any, form: type) -> None:
    """Raise ReportError where what was read from `path` has not this form, a TypedDict: a member
    is not there, of another type or beyond its range, or contradicts others.
    """
    import msgspec

    try:
        msgspec.convert(loaded, form)
    except msgspec.ValidationError as error:
        raise _refused(path, "is damaged", f": {error}") from None
    for contradiction in _contradictions(loaded) if form is Results else ():
        raise _refused(path, "is damaged", f": {contradiction}")


#: members of one object of which the first is never beyond the second
_ORDERED = (
    ("first_step", "last_step"), ("first_ns", "last_ns"), ("least_ns", "most_ns"),
    ("least_ns", "mean_ns"), ("mean_ns", "most_ns"), ("saved_least_ns", "saved_most_ns"),
    ("working_samples", "samples"),
)  # fmt: skip


def _contradictions(results: Results) -> Iterator[str]:
    """What no results have although each value may be, with its place."""
    ranks, rows = _rank_count(results), len(results.get("evidence_table", ()))
    first_step = min((0, *(step["step"] for step in results["steps"])))
    combined = results["combined"]
    if combined and len(combined["remaining_ns"]) != 1 << len(combined["findings"]):
        yield "There is no step for each choice of `findings` - at `$.combined.remaining_ns`"
    for place, record in _records(results):
        problems = (*_unordered(record), *_beyond(record, ranks, rows, first_step))
        yield from (f"{problem} - at `${place}`" for problem in problems)


def _unordered(record: Mapping[str, Any]) -> Iterator[str]:
    for lower, upper in _ORDERED:
        low, high = record.get(lower), record.get(upper)
        if low is not None and high is not None and low > high:
            yield f"`{lower}` {low} is beyond `{upper}` {high}"


def _beyond(record: Mapping[str, Any], ranks: int, rows: int, first_step: int) -> Iterator[str]:
    """What a record says of ranks, rows of the evidence and steps that there are not."""
    named = *record.get("ranks", ()), record.get("rank") or 0
    yield from (f"Rank {rank} is none of {ranks} ranks" for rank in named if rank >= ranks > 0)
    for row in record.get("rows", ()):
        if row > rows:
            yield f"Row {row} is none of {rows} rows of evidence"
    if (record.get("first_step") or 0) < first_step:
        yield f"No step has the number {record['first_step']}"


def _records(results: Results) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects that say something of ranks, steps and rows; each with its place."""
    shallow, pauses = results["shallow"], results.get("pauses")
    watch = shallow.get("watch") if shallow else None
    lists: dict[str, Sequence[Any]] = {
        "findings": results["findings"],
        "headline": results["headline"],
        "evidence_table": results.get("evidence_table", ()),
        "hardware": results.get("hardware", ()),
        "shallow.suspects": shallow["suspects"] if shallow else (),
        "shallow.watch.late": watch.get("late", ()) if watch else (),
        "pauses.entries": pauses["entries"] if pauses else (),
    }
    for name, records in lists.items():
        yield from ((f".{name}[{k}]", record) for k, record in enumerate(records))
    if watch:
        yield ".shallow.watch", watch


def _rank_count(results: Results) -> int:
    """How many ranks the job has at least, by all that tells it; 0 where nothing does."""
    shallow, pauses = results["shallow"], results.get("pauses")
    sizes = [entry["world_size"] or 0 for entry in results["ranks"]]
    sizes += [pauses["world_size"]] if pauses else []
    entries = [*results["ranks"], *results["missing"], *(shallow["missing"] if shallow else ())]
    ranks = [entry["rank"] for entry in entries if entry["rank"] is not None]
    ranks += shallow["ranks"] if shallow else []
    return max((*sizes, *(rank + 1 for rank in ranks)), default=0) if any(sizes) else 0


def _refused(path: Path, problem: str, actual: str, advice: str = "") -> ReportError:
    advice = advice or "write it again with clusterprof merge RUN"
    where = f"where: {path.absolute()}{actual}"
    return ReportError(f"{path.name} {problem}", where, f"next: {advice}")
