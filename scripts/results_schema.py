"""Write docs/results.schema.json, the JSON Schema of results.json, from the types of its form."""

from __future__ import annotations

import ast
import inspect
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from clusterprof import results

TARGET = Path(__file__).resolve().parent.parent / "docs" / "results.schema.json"


def schema() -> dict[str, Any]:
    """The schema: what each object and each member is, and of each value its type and range."""
    made = msgspec.json.schema(results.Results)
    for kind, comments in _comments().items():
        members = made["$defs"].get(kind, {}).get("properties", {})
        for name, comment in comments.items():
            if name in members:
                members[name]["description"] = comment
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"results.json of clusterprof, schema version {results.SCHEMA_VERSION}",
        **made,
    }


def _comments() -> dict[str, dict[str, str]]:
    """The comment `#:` above each member of each type in `results.py`."""
    source = inspect.getsource(results)
    lines = source.splitlines()
    return {
        kind.name: {
            member.target.id: " ".join(line.strip().removeprefix("#: ") for line in above[::-1])
            for member in kind.body
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
            if (above := [*takewhile(_is_comment, reversed(lines[: member.lineno - 1]))])
        }
        for kind in ast.parse(source).body
        if isinstance(kind, ast.ClassDef)
    }


def _is_comment(line: str) -> bool:
    return line.strip().startswith("#: ")


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
