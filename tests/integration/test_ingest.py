"""Reading reports in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.errors import ReportError
from clusterprof.ingest import gather, gathered
from clusterprof.tables import SCHEMAS


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of any size are worth a process."""
    monkeypatch.setattr(gathered, "_WORTH_PROCESSES", 0)


def test_traces_read_in_processes_are_as_read_in_this_one(
    recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recordings / "kineto" / "gloo"
    here = gather([folder])
    monkeypatch.setattr(gathered, "_WORTH_PROCESSES", 0)
    apart = gather([folder], workers=2)
    assert [ranks.info for ranks in here.ranks] == [ranks.info for ranks in apart.ranks]
    for one, other in zip(here.ranks, apart.ranks, strict=True):
        for name in SCHEMAS:
            assert getattr(one, name).equals(getattr(other, name))


@pytest.mark.usefixtures("in_processes")
def test_an_error_comes_back_from_a_process_with_all_its_lines(
    recordings: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "rank7.json.gz"
    bad.write_bytes(b"garbage")
    found = gather([recordings / "kineto" / "gloo", bad], workers=2)
    assert [ranks.rank for ranks in found.ranks] == [0, 1, 2]
    (hole,) = found.missing
    assert "not a whole gz file" in hole["reason"]
    assert "compare the sizes" in found.warnings[0]


@pytest.mark.usefixtures("in_processes")
def test_where_all_processes_fail_all_reasons_are_said(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_bytes(b'{"schemaVersion": 1,')
    with pytest.raises(ReportError, match="none of the 2 reports can be read") as caught:
        gather([tmp_path], workers=2)
    assert [str(tmp_path / f"rank{rank}.json") in caught.value.details[rank] for rank in range(2)]
