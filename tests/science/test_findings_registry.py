"""Every finding code is described once; a finding is added by one new file."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from simulate import Job, simulate

from clusterprof.analysis import findings
from clusterprof.analysis.findings import registry
from clusterprof.study import Study, study

ROOT = Path(__file__).resolve().parents[2]


def codes_in_the_source() -> set[str]:
    """String literals of the package that look like the code of a finding."""
    families = {code.partition(".")[0] for code in registry.CODES}
    found = set()
    for path in Path(findings.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                family, dot, name = node.value.partition(".")
                if dot and family in families and name.replace("_", "").isalpha():
                    found.add(node.value)
    return found


def test_every_code_in_the_source_is_described_and_every_described_one_is_used() -> None:
    assert codes_in_the_source() == set(registry.CODES)
    assert all(code == one.code for code, one in registry.CODES.items())


@pytest.mark.parametrize("code", sorted(registry.CODES))
def test_a_code_is_explained_in_full_sentences(code: str) -> None:
    one = registry.CODES[code]
    assert len(one.title) <= 60
    for text in (one.meaning, one.when_wrong, one.recommendation):
        assert text.endswith(".")
        assert text in registry.explain(code)


def documented() -> str:
    made: str = runpy.run_path(str(ROOT / "scripts" / "finding_codes.py"))["reference"]()
    return made


def test_the_page_of_findings_has_all_codes() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert page.endswith(documented()), "run: python scripts/readme.py --findings"


@pytest.mark.parametrize("recording", ["nsys-2025.3/ddp-gpu-straggler"])
def test_the_recording_walked_through_has_the_numbers_of_the_page(
    studied: Callable[[str], Study], recording: str
) -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    section = page.partition("walked through\n")[2].partition("\n## ")[0]
    results = studied(recording).results
    top, path = results["findings"][0], results["critical_path"]
    assert path is not None
    assert top["saving"] is not None
    saving, parts = top["saving"], {part["what"]: part for part in path["parts"]}
    views = [saving["window"], saving["long_run"]]
    numbers = [ns for view in views for ns in (view["step_ns"], view["without_ns"])]
    numbers += [view["step_ns"] - view["without_ns"] for view in views]
    numbers += [parts[what]["path_ns"] for what in ("compute", "copy", "idle")]
    numbers.append(parts["compute"]["mean_ns"])
    for ns in numbers:
        assert f"{ns / 1e6:.2f}" in section, ns
    for ns in [*saving["each_ns"], parts["compute"]["imbalance_gpu_ns"]]:
        assert f"{ns / 1e6:.1f}" in section, ns
    assert f"({top['saved_least_ns'] / 1e6:.2f} to {top['saved_most_ns'] / 1e6:.2f}) ms" in section
    assert (saving["net_of"], saving["stated"]) == ([], "window")


NEW = """
from clusterprof.analysis.findings.finding import Code, Tier, Words, finding

TIER = Tier.REST
CODES = (Code("host.made_up", "A title", "A meaning.", "Never wrong.", "Do nothing."),)


def find(dataset, found):
    say = Words("Made up.", evidence=[{"found": len(found)}], confidence=0.5, advice="Nothing.")
    return [finding(dataset, CODES[0], dataset.ranks, say)]
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A finding module that is one new file."""
    (tmp_path / "made_up.py").write_text(NEW)
    monkeypatch.setattr(findings, "__path__", [*findings.__path__, str(tmp_path)])
    registry.load()
    yield
    monkeypatch.undo()
    registry.load()


@pytest.mark.usefixtures("added")
def test_a_new_file_is_a_new_finding_in_results_in_explain_and_on_the_page() -> None:
    found = study(simulate(Job(steps=4))[0]).results["findings"]
    assert "host.made_up" in [f["code"] for f in found]
    assert "A meaning." in registry.explain("host.made_up")
    assert "## host.made_up" in documented()
