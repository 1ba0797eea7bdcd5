"""Small reports, to be spoilt: what the tests of hostile input and the fuzzing begin with."""

from __future__ import annotations

import json
import lzma
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

MS = 1000


class Hostile:
    """Would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def content(rank: Any = 0, **distributed: Any) -> dict[str, Any]:
    """A small Kineto trace: four steps, with a kernel and its launch in each."""
    events: list[dict[str, Any]] = []
    for step in range(4):
        at = 100 * MS * step
        events += [
            span("user_annotation", f"ProfilerStep#{step}", at, 90 * MS),
            span("cuda_runtime", "cudaLaunchKernel", at + MS, MS, correlation=step + 1),
            span("kernel", "gemm", at + 3 * MS, 50 * MS, correlation=step + 1, device=0, stream=7),
        ]
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2, **distributed},
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": events,
    }


def span(category: str, name: str, at: int, length: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": at, "dur": length,
        "args": args,
    }  # fmt: skip


def trace(path: Path, found: dict[str, Any]) -> Path:
    path.write_text(json.dumps(found))
    return path


def sqlite(path: Path, recordings: Path, sql: str, *values: object) -> Path:
    path.write_bytes(lzma.decompress((recordings / "nsys-2025.3/ddp/rank1.sqlite.xz").read_bytes()))
    with closing(sqlite3.connect(path)) as database:
        database.execute(sql, values)
        database.commit()
    return path
