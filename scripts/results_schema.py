"""Write docs/results.schema.json, the JSON Schema of results.json, from the types of its form."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_origin

import msgspec

from clusterprof import results

TARGET = Path(__file__).resolve().parent.parent / "docs" / "results.schema.json"
_ENDS = {
    "minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The schema: what each object and each member is, and of each value its type and range."""
    made = msgspec.json.schema(results.Results)
    notes = notes_of(Path(results.__file__))
    for kind, form in made["$defs"].items():
        for name, member in form["properties"].items():
            if note := notes[f"{kind}.{name}"]:
                member["description"] = note
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"results.json of clusterprof, schema version {results.SCHEMA_VERSION}",
        **made,
    }


def ranges() -> Iterator[tuple[str, str]]:
    """The name of each type of numbers, and which these are."""
    for name, kind in vars(results).items():
        if get_origin(kind) is Annotated:
            made = msgspec.json.schema(kind)
            ends = [f"{word} {made[key]:,}" for key, word in _ENDS.items() if key in made]
            yield name, f"{made['type']} {', '.join(ends)}"


def notes_of(path: Path) -> dict[str, str]:
    """The `#:` comments above what a module, or a class in it, assigns: name -> text."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    found = {}
    body = ast.parse(text).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    owned = [("", each) for each in body]
    for owner, node in owned + [
        (f"{each.name}.", field) for each in classes for field in each.body
    ]:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        first = node.lineno - 1
        while first > 0 and lines[first - 1].strip().startswith("#:"):
            first -= 1
        above = (line.strip().removeprefix("#:") for line in lines[first : node.lineno - 1])
        found[owner + name] = " ".join("".join(above).split())
    return found


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
