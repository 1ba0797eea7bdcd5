"""Steps that no one marked: where the optimizer's kernels end them, and one number on all ranks."""

from __future__ import annotations

import lzma
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lab.tiers import long_but
from simulate import Job, simulate

from clusterprof.align.match import numbered
from clusterprof.ingest import read_report
from clusterprof.ingest.rank_steps import ends_of_updates, from_ends, updates
from clusterprof.study import study
from clusterprof.tables import RankTables

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings" / "nsys-2025.3"


def kernels(*steps: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Launches 10 µs apart: per step so many kernels of the model, so many of the optimizer."""
    optimizer = np.concatenate([[False] * model + [True] * update for model, update in steps])
    start = 10_000 * np.arange(len(optimizer), dtype=np.int64)
    return start, start + 5_000, optimizer


def test_a_step_ends_with_the_last_launch_of_its_update() -> None:
    steps = from_ends(ends_of_updates(*kernels((40, 6), (40, 6), (40, 6), (25, 0))), -7)
    assert steps["end_ns"].to_pylist() == [455_000, 915_000, 1_375_000]
    assert steps["begin_ns"].to_pylist() == [-7, 455_000, 915_000]
    assert steps["step"].to_pylist() == [0, 1, 2]


def test_a_window_may_begin_and_end_within_an_update() -> None:
    steps = from_ends(ends_of_updates(*kernels((0, 2), (40, 6), (40, 6), (40, 3))), 0)
    assert steps.num_rows == 4


@pytest.mark.parametrize(
    "trained",
    [
        [(40, 6), (40, 6)],
        [(40, 0)] * 5,
        [(0, 30)],
        [(40, 6), (40, 18), (40, 6), (40, 18), (40, 6)],
        [(40, 6), (200, 6), (40, 6), (200, 6), (40, 6)],
    ],
    ids=["two steps", "no update", "updates only", "two models by turns", "two lengths by turns"],
)
def test_what_has_no_rhythm_gives_no_steps(trained: list[tuple[int, int]]) -> None:
    assert ends_of_updates(*kernels(*trained)).size == 0


def test_a_copy_of_many_tensors_is_no_update() -> None:
    metadata = "void at::native::<unnamed>::multi_tensor_apply_kernel<TensorListMetadata<(int)2>, "
    names = [
        metadata + "UnaryOpFunctor<c10::BFloat16>, at::native::Copy<c10::BFloat16, c10::BFloat16>>",
        metadata + "UnaryOpFunctor<c10::BFloat16>, at::native::Sqrt<float>>(T1, T2, T3...)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16>(T1::Params)",
    ]
    assert updates(names).tolist() == [False, True, False]


def without_marks(recording: Path, folder: Path) -> Path:
    """A copy of a rank's recording in which no range marks a step."""
    copy = folder / recording.stem
    with lzma.open(recording) as packed, copy.open("wb") as whole:
        shutil.copyfileobj(packed, whole)
    with sqlite3.connect(copy) as database:
        database.execute("UPDATE NVTX_EVENTS SET text = 'work' WHERE text LIKE 'step %'")
        database.execute("UPDATE StringIds SET value = 'work' WHERE value LIKE 'step %'")
    return copy


@pytest.mark.parametrize(
    "name", long_but(["ddp-intermittent"], ["fsdp-long", "pipeline-imbalance"])
)
def test_recordings_without_marks_have_the_steps_that_were_marked(
    name: str, tmp_path: Path
) -> None:
    for path in sorted((RECORDINGS / name).glob("rank*.sqlite.xz"))[:2]:
        marked = read_report(path).steps
        found = read_report(without_marks(path, tmp_path)).steps
        assert set(found["source"].to_pylist()) == {"optimizer"}
        # the program marks a step's end a few calls after its update
        ends = marked["end_ns"].to_numpy()
        late = ends[:, None] - found["end_ns"].to_numpy()[None, :]
        near = np.abs(late).min(axis=1)
        assert (near[1:-1] < 1_000_000).all(), near


def test_the_verdict_on_a_folder_without_marks_is_that_with_marks(tmp_path: Path) -> None:
    paths = sorted((RECORDINGS / "ddp-gpu-straggler").glob("rank*.sqlite.xz"))
    top = study([read_report(without_marks(path, tmp_path)) for path in paths]).results
    assert (top["findings"][0]["code"], top["findings"][0]["rank"]) == ("straggler.gpu", 1)


def counted(tables: RankTables, dropped: int) -> RankTables:
    """The rank as if its steps had been counted within its report, the first ones missing."""
    steps = tables.steps.slice(dropped)
    number = pa.array(range(steps.num_rows), pa.int64())
    source = pa.array(["optimizer"] * steps.num_rows).dictionary_encode()
    columns = [number, steps["begin_ns"], steps["end_ns"], source]
    return replace(tables, steps=pa.table(columns, schema=steps.schema))


def begins(ranks: list[RankTables]) -> dict[int, list[int]]:
    return {r.rank: r.steps["step"].to_pylist() for r in ranks}


def test_steps_counted_in_each_report_get_one_number_on_all_ranks() -> None:
    ranks, _ = simulate(Job(steps=8))
    found = begins(numbered([counted(r, (0, 2, 1, 0)[r.rank]) for r in ranks]))
    assert {rank: numbers[0] for rank, numbers in found.items()} == {0: 0, 1: 2, 2: 1, 3: 0}
    assert len({numbers[-1] for numbers in found.values()}) == 1


def test_counted_steps_take_the_numbers_of_a_rank_that_has_them() -> None:
    ranks, _ = simulate(Job(steps=8))
    true = begins(ranks)
    found = begins(numbered([ranks[0], *(counted(r, r.rank - 1) for r in ranks[1:])]))
    assert found == {rank: numbers[max(rank - 1, 0) :] for rank, numbers in true.items()}


def test_a_rank_that_shares_no_collective_keeps_its_own_count() -> None:
    ranks, _ = simulate(Job(steps=8))
    alone = counted(ranks[3], 1)
    alone = replace(alone, collective_calls=alone.collective_calls.slice(0, 0))
    found = begins(numbered([*(counted(r, 0) for r in ranks[:3]), alone]))
    assert found[3] == list(range(7))
