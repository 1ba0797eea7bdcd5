"""The model behind every saving: a replay of unchanged lengths is what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from simulate.cases import KINDS
from studies import FOLDER, SEED, TRUTH, Simulated, gathered

from clusterprof import threads
from clusterprof.analysis.model import host_activity, recorded
from clusterprof.analysis.model.accounts import activity_of
from clusterprof.analysis.model.by_report import NEVER
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Replay
from clusterprof.columns import Ints, last_at_or_before, rows_by
from clusterprof.study import Study, dataset_of, study
from clusterprof.tables import RankTables

NAMES = sorted(
    {
        str(file.parent.relative_to(FOLDER))
        for pattern in ("*.sqlite.xz", "*.json.gz", "*.json.xz")
        for file in FOLDER.rglob(pattern)
    }
)
#: time stamps of one device may overlap by so much
STAMP_NS = 2_000


def exact(dataset: Dataset) -> Replay:
    """The replay, which with unchanged lengths must be the recording."""
    job = recorded.replay_of(dataset)
    assert job is not None
    assert not len(job.graph.circular)
    times = job.times(job.lengths)
    ends = np.maximum(host_activity.ends(dataset), dataset.activities.start)
    moments = job.host_at, dataset.activities.start[job.activity], ends[job.activity]
    of_recording = np.concatenate(moments)
    replayed = times[: len(of_recording)]
    reached = replayed > NEVER // 2
    # all moments that others wait for: what a queue's kernels are in between is not asked
    assert reached.mean() > 0.04
    assert np.abs(replayed - of_recording)[reached].max() <= STAMP_NS
    steps = np.diff(times[job.marks], axis=1)
    at = np.searchsorted(dataset.steady_steps, job.steps)
    assert (
        np.abs(steps - dataset.account("duration_ns")[job.ranks][:, at]).max()
        <= 0.01 * steps.mean()
    )
    return job


@pytest.mark.parametrize("recording", long_but(NAMES[::3], NAMES))
def test_a_replay_of_unchanged_lengths_is_the_recording(
    studied: Callable[[str], Study], recording: str
) -> None:
    whole = recording in TRUTH
    exact(studied(recording).dataset if whole else dataset_of(gathered(recording).ranks))


@pytest.mark.parametrize("seed", long_but([SEED], [7003]))
@pytest.mark.parametrize("job_kind", long_but([*KINDS][::4], KINDS))
def test_a_replay_of_unchanged_lengths_is_the_simulated_job(
    simulated: Callable[..., Simulated], job_kind: str, seed: int
) -> None:
    job = exact(simulated(job_kind, seed).study.dataset)
    # the simulator has no waiting that the graph lacks
    whole = np.diff(job.times(job.lengths)[job.marks], axis=1).sum()
    assert job.unexplained.sum() <= 0.001 * whole


@pytest.mark.parametrize("job_kind", ["late in tensor groups"])
def test_what_ifs_side_by_side_are_those_one_after_the_other(
    simulated: Callable[..., Simulated], job_kind: str
) -> None:
    job = exact(simulated(job_kind).study.dataset)
    rng = np.random.default_rng(0)
    own, run = (
        np.stack([values * part // 100 for part in rng.integers(50, 150, 3)])
        for values in (job.lengths.own, job.lengths.run)
    )
    both = job.times(replace(job.lengths, own=own, run=run))
    for what in range(3):
        one = replace(job.lengths, own=own[what], run=run[what])
        assert (job.times(one) == both[what]).all()
    # one of both may be the same in all what-ifs
    hosts = job.times(replace(job.lengths, own=own))
    assert (hosts[1] == job.times(replace(job.lengths, own=own[1]))).all()


@pytest.mark.parametrize("seed", long_but([SEED], [7003]))
@pytest.mark.parametrize(
    "job_kind", ["healthy, data parallel", "healthy, pipeline", "late host, synchronous"]
)
def test_the_long_run_of_a_steady_job_has_the_windows_pace(
    simulated: Callable[..., Simulated], job_kind: str, seed: int
) -> None:
    dataset = simulated(job_kind, seed).study.dataset
    job = exact(dataset)
    assert job.pace(job.lengths) == pytest.approx(dataset.step_ns, rel=0.02)


def test_a_host_slower_than_its_gpu_sets_the_long_runs_pace_however_much_work_is_queued() -> None:
    """By 1 ms a step, of a queue of four steps of 22.7 ms: the window shows none of it."""
    dataset = dataset_of(simulate(Job(steps=6, causes=(Cause("host", 1, 12_500_000),)))[0])
    job = exact(dataset)
    its_own = job.lengths.own[job.host_rank == 1].sum() / len(job.steps)
    assert dataset.step_ns < 0.96 * its_own
    assert job.pace(job.lengths) == pytest.approx(its_own, rel=0.001)


@pytest.mark.parametrize("recording", long_but(["kineto/gloo"], ["nsys-2025.3/ddp-host-hidden"]))
def test_a_recording_of_which_each_rank_is_looked_at_alone_has_the_same_results(
    studied: Callable[[str], Study], recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone_as_at_once(studied(recording).ranks, monkeypatch)


@pytest.mark.parametrize("job_kind", long_but([], [*KINDS][::6]))
def test_a_job_of_which_each_rank_is_looked_at_alone_has_the_same_results(
    simulated: Callable[..., Simulated], job_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone_as_at_once(simulated(job_kind).ranks, monkeypatch)


def alone_as_at_once(ranks: Sequence[RankTables], monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = study(ranks)
    monkeypatch.setattr(threads, "AT_ONCE", 1)
    alone = study(ranks)
    job = recorded.replay_of(alone.dataset)
    assert job is not None
    assert len(job.blocks) == len(job.ranks) > 1
    assert alone.results == at_once.results


@pytest.mark.parametrize("layout", [{"dp": 8}, {"dp": 2, "tp": 2, "pp": 2, "layers": 2}])
def test_a_long_run_that_goes_on_is_that_of_all_its_rounds(
    layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # hosts of different pace get further and further apart: no two rounds are alike
    ranks, _ = simulate(Job(**layout, steps=4, host_noise_frac=0.1, host_pace_frac=0.03))
    job, passes = exact(dataset_of(ranks)), []
    each = Replay.one_pass

    def counted(job: Replay, length: Ints, begin: Ints | None = None) -> Ints:
        passes.append(length)
        return each(job, length, begin)

    monkeypatch.setattr(Replay, "one_pass", counted)
    prompt = replace(job.lengths, own=np.zeros_like(job.lengths.own))
    both = replace(job.lengths, own=np.stack([job.lengths.own, prompt.own]))
    paces = [job.pace(lengths) for lengths in (job.lengths, prompt, both)]
    few = len(passes)
    assert job.pace(prompt) == paces[1]
    # what was replayed is known
    assert len(passes) == few
    job = replace(job)
    monkeypatch.setattr(Replay, "_goes_on", lambda *_: False)
    for lengths, pace in zip((job.lengths, prompt, both), paces, strict=True):
        assert (job.pace(lengths) == pace).all()
    assert few < len(passes) - few


def test_collectives_in_contradicting_orders_are_taken_apart_with_a_warning() -> None:
    # so short that each call may have waited for the one after it
    job = Job(layers=8, kernels_per_layer=1, layer_ns=4_000, launch_ns=1_000, transfer_ns=5_000)
    dataset = dataset_of(simulate(replace(job, latency_ns=5_000, phase_ns=500))[0])
    placed = dataset.placed
    rank, step, stream = (placed[name].to_numpy() for name in ("rank", "step", "stream"))
    mine = np.flatnonzero((rank == 0) & (step == dataset.steady_steps[0]) & (stream == stream[0]))
    mine = mine[np.argsort(placed["start_ns"].to_numpy()[mine])]
    # one rank has two calls of its stream the other way round
    number = placed["collective"].to_numpy().copy()
    number[mine[:2]] = number[mine[:2]][::-1]
    at = placed.schema.get_field_index("collective")
    placed = placed.set_column(at, placed.schema.field(at), pa.array(number))
    crossed = replace(dataset, placed=placed)

    job = recorded.replay_of(crossed)
    assert job is not None
    assert not len(job.graph.circular)
    assert np.diff(job.times(job.lengths)[job.marks], axis=1).mean() == pytest.approx(
        dataset.step_ns, rel=0.01
    )
    (warning,) = recorded.contradictions(crossed)
    assert warning.startswith("2 ")
    assert recorded.contradictions(dataset) == []


def starting_with_another(table: pa.Table, starts: dict[int, int]) -> pa.Table:
    """A table in which what begins at these times (ns) begins at others."""
    at = table.schema.get_field_index("start_ns")
    moved = [starts.get(each, each) for each in table["start_ns"].to_pylist()]
    return table.set_column(at, table.schema.field(at), pa.array(moved, pa.int64()))


def test_of_calls_that_begin_at_once_each_has_the_kernel_on_its_stream() -> None:
    first, *others = simulate(Job(dp=2, tp=2))[0]
    calls = first.collective_calls.to_pylist()
    pairs = [
        (one, other)
        for one, other in pairwise(sorted(calls, key=lambda call: call["start_ns"]))
        if one["stream"] != other["stream"]
    ]
    assert len(pairs) > 3
    # of each pair the second one begins with the first
    starts = {other["start_ns"]: one["start_ns"] for one, other in pairs}
    for name in ("activity", "collective_calls"):
        first = first.changed(name, starting_with_another(getattr(first, name), starts))
    dataset = dataset_of([first, *others])
    place = activity_of(dataset)
    assert (place >= 0).sum() > 50
    streams = dataset.activities.column("stream")[place]
    assert (streams == dataset.collectives.stream)[place >= 0].all()
    c = dataset.collectives
    kernels = np.stack([c.rank, c.kernels(np.arange(len(c.rank)))])
    assert np.unique(kernels, axis=1).shape[1] == np.unique(place).size - (place < 0).any()


def test_a_window_in_which_less_is_launched_than_before_it_is_replayed() -> None:
    rank = simulate(Job(steps=6))[0][0]
    begins, launches = rank.steps["begin_ns"], rank.activity["launch_start_ns"]
    of_steps = rows_by(last_at_or_before(begins.to_numpy(), launches.to_numpy()))
    # of each step but the one before the window only three
    rows = np.concatenate([of_steps.pop(0), *(launched[:3] for launched in of_steps.values())])
    job = exact(dataset_of([rank.changed("activity", rank.activity.take(pa.array(rows)))]))
    assert len(job.early) > 2 * len(job.activity)


def test_a_window_of_years_is_not_replayed_and_said_to_be_wrong() -> None:
    ranks, _ = simulate(Job(steps=4, layers=2))
    steps = ranks[1].steps
    end = steps["end_ns"].to_numpy().copy()
    begin = steps["begin_ns"].to_numpy().copy()
    begin[2:] += 2**58
    end[2:] += 2**58
    table = steps.set_column(1, steps.schema.field(1), pa.array(begin))
    table = table.set_column(2, steps.schema.field(2), pa.array(end))
    dataset = dataset_of([ranks[0], replace(ranks[1], steps=table)])
    job = recorded.replay_of(dataset)
    assert job is None or np.abs(np.diff(job.times(job.lengths)[job.marks])).max() < 2**50


@pytest.mark.parametrize("layout", [{"dp": 4, "tp": 2}, {"dp": 2, "tp": 2, "pp": 2, "layers": 2}])
def test_what_a_replay_points_at_is_what_its_fields_types_name(layout: dict[str, int]) -> None:
    ranks, _ = simulate(Job(**layout))
    dataset = dataset_of(ranks[1:])  # so that a rank's number is not its place
    job = exact(dataset)
    rows = {
        "RankPlaces": len(dataset.ranks),
        "StepPlaces": len(job.steps) + 1,  # a host goes on as the last one ends
        "ActivityRows": len(dataset.activities.rank),
        "ReplayRows": len(job.activity),
        "StreamPlaces": len(job.stream_rank),
        "HostMoments": len(job.host_at),
        "ReplayRows | HostMoments": max(len(job.activity), len(job.host_at)),
        "Moments": job.graph.moments,
        "MomentPlaces": job.graph.size,
    }
    named = [
        (field.name, str(field.type), getattr(of, field.name))
        for of in (job, job.contention)
        for field in fields(of)
        if field.type in rows
    ]
    assert {kind for _, kind, _ in named} == {*rows}
    for name, kind, points_at in named:
        assert points_at.min(initial=0) >= -1, name
        assert points_at.max(initial=0) < rows[kind], name
    # what one field says of a row, another says of the row that it points at
    assert (dataset.activities.rank[job.activity] == job.rank).all()
    assert (job.stream_rank[job.stream] == job.rank).all()
    assert (job.host_rank[job.launch_moment] == job.rank).all()
    assert (dataset.activities.rank[job.woken_by] == job.host_rank[job.woken]).all()
    assert (job.host_rank[job.step_begins] == job.ranks[:, None]).all()
