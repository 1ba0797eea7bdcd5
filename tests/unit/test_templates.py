"""The byte code of the pages' templates is kept, and believed only where it is of this template."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterprof.report import html


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Python is told to keep byte code."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path


def drawn() -> str:
    html.environment.cache_clear()
    template = html.environment().get_template("provenance.html.j2")
    return template.render(provenance=[])


def byte_code(kept: Path) -> Path:
    (file,) = kept.rglob("provenance.html*.pyc")
    return file


def test_byte_code_is_kept_and_found_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn()
    file = byte_code(kept)
    written = file.stat().st_mtime_ns

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(html.jinja2.Environment, "_generate", refuse)
    assert drawn() == first
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("kept_bytes", [0, 3, 60, 300])
def test_damaged_byte_code_is_none(kept: Path, kept_bytes: int) -> None:
    first = drawn()
    file = byte_code(kept)
    content = file.read_bytes()
    file.write_bytes(content[:kept_bytes] + b"x" * 20)
    assert drawn() == first
    assert file.read_bytes() == content


def test_without_a_place_for_it_the_page_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "file"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert drawn()
