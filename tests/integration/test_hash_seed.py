"""What a merge prints and writes does not depend on Python's hash seed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = DATA / "recordings"
#: each may have a set in another order; many find more than two
FEW, MANY = "02", "01234"
PIPE, MOE = "nsys-2024.2/pipeline", "nsys-2025.3/moe-tokens"


def long(values: tuple[str, str]) -> Any:
    """These, in `make long` alone."""
    return pytest.param(*values, marks=pytest.mark.long)


def merged(folder: Path, place: Path, seed: str) -> dict[str, bytes]:
    """What `clusterprof merge` prints, and the bytes of each file that it writes."""
    shutil.rmtree(place, ignore_errors=True)
    printed = printed_by(seed, [str(folder), "--output", str(place)])
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return {"printed": printed, **{str(p.relative_to(place)): p.read_bytes() for p in files}}


#: merges by each of some lines, in one process
MERGES = (
    "import json, sys; from clusterprof.cli import main; "
    "sys.exit(max(main.run(['merge', *line]) for line in json.loads(sys.argv[1])))"
)


def printed_by(seed: str, *lines: list[str]) -> bytes:
    """What merges by these lines print."""
    done = subprocess.run(
        [sys.executable, "-c", MERGES, json.dumps(lines)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        timeout=300,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("name", "seeds"),
    [(PIPE, FEW), *(long((each, MANY)) for each in ("kineto/gloo", PIPE, MOE))],
)
def test_the_same_reports_give_the_same_bytes_with_any_hash_seed(
    name: str, seeds: str, tmp_path: Path
) -> None:
    first, *others = (merged(RECORDINGS / name, tmp_path / "out", seed) for seed in seeds)
    assert {"printed", "report.html"} <= set(first)
    assert any(name.endswith("results.json") for name in first)
    for other in others:
        assert {name for name in first | other if first.get(name) != other.get(name)} == set()


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("gloo/tensor", FEW),
        *(long((each, MANY)) for each in ("gloo/tensor", "gloo/died", "nccl/late")),
    ],
)
def test_the_same_dumps_print_the_same_with_any_hash_seed(name: str, seeds: str) -> None:
    folder = str(DATA / "flight" / name)
    assert len({printed_by(seed, [folder, "--json"], [folder]) for seed in seeds}) == 1
