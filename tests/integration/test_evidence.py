"""A test that fails shows what its commands printed, and what its runs say of each rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lab import command, evidence


def test_a_failure_shows_what_was_printed_and_each_rank_s_reason(tmp_path: Path) -> None:
    command.run([sys.executable, "-c", "print('first')"])
    with pytest.raises(command.StillRunning):
        command.run(["sh", "-c", "echo second >&2; exec sleep 60"], timeout=8)
    (folder := tmp_path / "run/ranks/00001").mkdir(parents=True)
    (folder / "state.json").write_text('{"state": "lost"')  # cut off
    outcomes = [{"rank": 1, "state": "lost", "reason": "nsys did not start the program"}]
    (tmp_path / "run/run.json").write_text(json.dumps({"outcomes": outcomes}))
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt/run.json").write_text("[")
    text = "\n".join(f"{title}: {text}" for title, text in evidence.sections(tmp_path))
    assert "first" in text
    assert "second" in text
    assert "rank 1: lost nsys did not start the program" in text
    assert 'ranks/00001/state.json: {"state": "lost"' in text
