"""What a merge prints and writes does not depend on Python's hash seed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = DATA / "recordings"
MOE = "nsys-2025.3/moe-tokens"


def merged(folder: Path, place: Path, seed: str) -> dict[str, bytes]:
    """What `clusterprof merge` prints, and the bytes of each file that it writes."""
    shutil.rmtree(place, ignore_errors=True)
    printed = printed_by(seed, str(folder), "--output", str(place))
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return {"printed": printed, **{str(p.relative_to(place)): p.read_bytes() for p in files}}


def printed_by(seed: str, *arguments: str) -> bytes:
    made = subprocess.run(
        [sys.executable, "-m", "clusterprof", "merge", *arguments],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        timeout=300,
    )
    return made.stdout


@pytest.mark.parametrize(
    "name",
    [
        "nsys-2024.2/pipeline",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("kineto/gloo", MOE)),
    ],
)
def test_the_same_reports_give_the_same_bytes_with_any_hash_seed(name: str, tmp_path: Path) -> None:
    first, *others = (merged(RECORDINGS / name, tmp_path / "out", seed) for seed in "012")
    assert {"printed", "report.html"} <= set(first)
    assert any(name.endswith("results.json") for name in first)
    for other in others:
        assert {name for name in first | other if first.get(name) != other.get(name)} == set()


@pytest.mark.parametrize(
    "name",
    [
        "gloo/tensor",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gloo/died", "nccl/late")),
    ],
)
def test_the_same_dumps_print_the_same_with_any_hash_seed(name: str) -> None:
    folder = str(DATA / "flight" / name)
    assert len({printed_by(seed, folder, "--json") for seed in "012"}) == 1
    assert len({printed_by(seed, folder) for seed in "012"}) == 1
