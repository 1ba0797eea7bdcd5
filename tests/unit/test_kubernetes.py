"""The templates for Kubernetes fit the schemas that their controllers publish."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterprof.launch.planning import INJECT

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "tests" / "data" / "kubernetes"
TEMPLATES = sorted((ROOT / "kubernetes").glob("*.yaml"))

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def misfits(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """What does not fit a structural schema of Kubernetes; what it does not name is unknown."""
    if schema.get("x-kubernetes-int-or-string"):
        if type(value) not in (int, str):
            yield f"{where} is {value!r}, neither a number nor a text"
        elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
            yield f"{where} is {value!r}"
        return
    kind = schema.get("type")
    if kind and type(value) is not TYPES[kind]:
        yield f"{where} is {value!r}, no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}"
    if isinstance(value, int) and not schema.get("minimum", value) <= value:
        yield f"{where} is {value}, too small"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{where} is {value!r}"
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from misfits(each, schema["items"], f"{where}[{place}]")
    if isinstance(value, dict):
        missing = set(schema.get("required", ())) - set(value)
        yield from (f"{where} has no {name}" for name in sorted(missing))
        named = schema.get("properties", {})
        for name, each in value.items():
            if name in named:
                yield from misfits(each, named[name], f"{where}.{name}")
            elif "additionalProperties" in schema:
                yield from misfits(each, schema["additionalProperties"], f"{where}.{name}")
            elif kind == "object" and "properties" in schema and where:
                yield f"{where} has an unknown {name}"


def published(template: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SCHEMAS / f"{template.stem}.json").read_text())
    assert content["license"] == "Apache-2.0"
    assert content["source"].startswith("https://github.com/")
    return content


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_fits_the_schema_of_its_kind(template: Path) -> None:
    resource, schema = yaml.safe_load(template.read_text()), published(template)
    assert resource["apiVersion"] == f"{schema['group']}/{schema['version']}"
    assert resource["kind"] == schema["kind"]
    assert list(misfits(resource, schema["schema"])) == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_what_is_wrong_in_a_template_is_found(template: Path) -> None:
    resource, schema = yaml.safe_load(template.read_text()), published(template)["schema"]
    wrong = copy.deepcopy(resource)
    wrong["spec"]["nodes"] = 2
    assert len(list(misfits(wrong, schema))) == 1
    for found in containers(wrong := copy.deepcopy(resource)):
        found["comand"] = found.pop("image")
    assert len(list(misfits(wrong, schema))) >= 1


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Every container in a resource."""
    if isinstance(value, dict) and "image" in value:
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from containers(each)


def test_there_is_a_template_for_each_schema() -> None:
    assert [path.stem for path in TEMPLATES] == ["jobset", "pytorchjob", "rayjob"]
    assert {path.stem for path in SCHEMAS.glob("*.json")} == {path.stem for path in TEMPLATES}


def test_ray_s_workers_get_the_plan_of_the_run_that_is_begun() -> None:
    spec = yaml.safe_load((ROOT / "kubernetes" / "rayjob.yaml").read_text())["spec"]
    words = spec["entrypoint"].split()
    given = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert given["CLUSTERPROF_PLAN"] == words[words.index("--run-dir") + 1] + "/plan.json"
    assert given["PYTHONPATH"].endswith("/clusterprof/" + "/".join(INJECT.parts[-2:]))
