"""The model behind every saving, against known truths: plain loops, and recordings as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate import Job, simulate
from simulate.cases import KINDS, cases

from clusterprof import threads
from clusterprof.analysis.model import host_activity, recorded
from clusterprof.analysis.model.dataset import Dataset, Ints, connected
from clusterprof.analysis.model.graph import NEVER, Graph, first_of, running_maximum, running_sum
from clusterprof.analysis.model.replay import Replay
from clusterprof.analysis.model.what_if import cut
from clusterprof.ingest import gather
from clusterprof.study import dataset_of, study

RECORDINGS = Path(__file__).resolve().parent.parent / "data" / "recordings"
NAMES = sorted(
    {
        str(file.parent.relative_to(RECORDINGS))
        for pattern in ("*.sqlite.xz", "*.json.gz", "*.json.xz")
        for file in RECORDINGS.rglob(pattern)
    }
)
#: time stamps of one device may overlap by so much
STAMP_NS = 2_000


def longest(
    moments: int, edges: list[tuple[int, int, int]], known: dict[int, int]
) -> dict[int, int]:
    """Each moment's time by relaxing every edge until nothing changes; without NEVER ones."""
    out = dict(known)
    for _ in range(moments + 1):
        for source, target, length in edges:
            if source in out:
                out[target] = max(out.get(target, NEVER), out[source] + length)
    return out


def times(moments: int, edges: list[tuple[int, int, int]], known: dict[int, int]) -> Ints:
    source, target, length = (np.asarray([e[k] for e in edges], dtype=np.int64) for k in range(3))
    begin = np.full(moments, NEVER)
    for moment, at in known.items():
        begin[moment] = at
    made = Graph(moments, source, target)
    return made.times(length[made.edge], begin)


def test_a_moment_is_as_late_as_the_latest_that_it_waits_for() -> None:
    edges = [(0, 2, 5), (1, 2, 1), (2, 3, 4), (0, 3, 7), (2, 4, -3)]
    assert times(5, edges, {0: 10, 1: 100}).tolist() == [10, 100, 101, 105, 98]


def test_a_known_time_of_a_moment_that_also_waits_is_its_least() -> None:
    assert times(3, [(0, 1, 5), (0, 2, 5)], {0: 0, 1: 3, 2: 9}).tolist() == [0, 5, 9]


def test_a_moment_that_waits_for_an_unknown_one_has_no_time() -> None:
    assert times(3, [(0, 1, 5), (1, 2, 5)], {}).max() < NEVER // 2


def test_without_edges_only_the_known_moments_have_times() -> None:
    assert times(2, [], {1: 4}).tolist() == [NEVER, 4]
    assert times(0, [], {}).tolist() == []


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_have_the_times_of_their_longest_ways(seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = int(rng.integers(2, 60))
    # moments in no order that their numbers tell, with edges that come twice
    order = rng.permutation(moments)
    pairs = rng.integers(0, moments, (int(rng.integers(1, 200)), 2))
    pairs = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)
    source, target = order[pairs[:, 0]], order[pairs[:, 1]]
    length = rng.integers(-50, 1000, (len(pairs), 3))
    known = np.full((moments, 3), NEVER)
    known[np.setdiff1d(np.arange(moments), target)] = rng.integers(0, 9999, 3)
    known[rng.integers(0, moments)] = 5_000

    made = Graph(moments, source, target)
    assert not len(made.circular)
    found = made.times(length[made.edge], known)
    for what in range(3):
        edges = list(zip(source.tolist(), target.tolist(), length[:, what].tolist(), strict=True))
        begin = {m: int(at) for m, at in enumerate(known[:, what]) if at != NEVER}
        assert longest(moments, edges, begin) == dict(enumerate(found[:, what].tolist()))
        assert (made.times(length[made.edge, what], known[:, what]) == found[:, what]).all()


def test_moments_on_a_circle_and_behind_it_are_listed_and_all_others_have_times() -> None:
    # 1 -> 2 -> 3 -> 1 is a circle, 4 behind it, 5 not
    edges = [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 1, 1), (3, 4, 1), (0, 5, 7), (6, 6, 2)]
    source, target, length = (np.asarray([e[k] for e in edges]) for k in range(3))
    made = Graph(7, source, target)
    assert made.circular.tolist() == [1, 2, 3, 4, 6]
    known = np.full(7, NEVER)
    known[0] = 0
    assert made.times(length[made.edge], known)[[0, 5]].tolist() == [0, 7]


@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_running_maximum_and_sum_are_those_of_a_loop_over_each_part(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    values = rng.integers(-1000, 1000, shape)
    part = np.sort(rng.integers(0, 9, shape[0]))
    fresh = np.r_[True, part[1:] != part[:-1]]
    highest, total = running_maximum(values, part), running_sum(values, first_of(fresh))
    for begin, end in zip(*_parts(fresh), strict=True):
        for k in range(begin, end):
            assert (highest[k] == values[begin : k + 1].max(axis=0)).all()
            assert (total[k] == values[begin : k + 1].sum(axis=0)).all()


def _parts(fresh: np.ndarray) -> tuple[list[int], list[int]]:
    begins = np.flatnonzero(fresh).tolist()
    return begins, [*begins[1:], len(fresh)]


def test_running_maximum_and_sum_of_nothing_are_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert not len(running_maximum(none, none))
    assert not len(running_sum(none, first_of(none > 0)))


@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_cut_to_a_sum_the_greatest_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1000, int(rng.integers(1, 30)))
    for total in (0, int(values.sum()) // 3, int(values.sum())):
        less = cut(values, total)
        assert (less <= values).all()
        assert total - len(values) < less.sum() <= total
        lower = less < values
        # what was cut is as long as the rest at least
        assert not lower.any() or less[lower].min() >= less[~lower].max(initial=0) - 1


def exact(dataset: Dataset) -> Replay:
    """The replay, which with unchanged lengths must be the recording."""
    job = recorded.replay(dataset)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_of_unchanged_lengths_is_the_recording(name: str) -> None:
    exact(dataset_of(gather([RECORDINGS / name]).ranks))


def simulated(kind: str, seed: int = 7003) -> Dataset:
    (case,) = cases([kind], range(seed, seed + 1))
    ranks, _ = simulate(case.job)
    return dataset_of([t for t in ranks if case.profiled is None or t.rank in case.profiled])


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_of_unchanged_lengths_is_the_simulated_job(kind: str) -> None:
    job = exact(simulated(kind))
    # the simulator has no waiting that the graph lacks
    whole = np.diff(job.times(job.lengths)[job.marks], axis=1).sum()
    assert job.unexplained.sum() <= 0.001 * whole


def test_what_ifs_side_by_side_are_those_one_after_the_other() -> None:
    job = exact(simulated("late in tensor groups"))
    rng = np.random.default_rng(0)
    own, run = (
        np.stack([values * part // 100 for part in rng.integers(50, 150, 3)], axis=1)
        for values in (job.lengths.own, job.lengths.run)
    )
    both = job.times(replace(job.lengths, own=own, run=run))
    for what in range(3):
        one = replace(job.lengths, own=own[:, what], run=run[:, what])
        assert (job.times(one) == both[:, what]).all()
    # one of both may be the same in all what-ifs
    hosts = job.times(replace(job.lengths, own=own))
    assert (hosts[:, 1] == job.times(replace(job.lengths, own=own[:, 1]))).all()


def test_the_long_run_of_a_steady_job_has_the_windows_pace() -> None:
    for kind in ("healthy, data parallel", "healthy, pipeline", "late host, synchronous"):
        dataset = simulated(kind)
        job = exact(dataset)
        assert job.pace(job.lengths) == pytest.approx(dataset.step_ns, rel=0.02), kind


@pytest.mark.parametrize("name", ["nsys-2025.3/ddp-host-hidden", "kineto/gloo", *[*KINDS][::6]])
def test_a_job_of_which_each_rank_is_looked_at_alone_has_the_same_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = RECORDINGS / name
    ranks = gather([known]).ranks if known.exists() else list(simulated(name).tables)
    at_once = study(ranks)
    monkeypatch.setattr(threads, "AT_ONCE", 1)
    alone = study(ranks)
    job = recorded.replay(alone.dataset)
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
    both = replace(job.lengths, own=np.stack([job.lengths.own, prompt.own], axis=1))
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

    job = recorded.replay(crossed)
    assert job is not None
    assert not len(job.graph.circular)
    assert np.diff(job.times(job.lengths)[job.marks], axis=1).mean() == pytest.approx(
        dataset.step_ns, rel=0.01
    )
    (warning,) = recorded.contradictions(crossed)
    assert warning.startswith("2 ")
    assert recorded.contradictions(dataset) == []


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
    job = recorded.replay(dataset)
    assert job is None or np.abs(np.diff(job.times(job.lengths)[job.marks])).max() < 2**50


def test_running_maxima_of_times_that_are_too_large_to_be_raised() -> None:
    values = np.asarray([2**61, -(2**61), 5, 2**60, 7])
    part = np.asarray([0, 0, 1, 1, 1])
    assert running_maximum(values, part).tolist() == [2**61, 2**61, 5, 2**60, 2**60]


@settings(max_examples=200)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=14))
def test_nodes_are_connected_with_the_least_that_any_edges_lead_to(
    count: int, pairs: list[tuple[int, int]]
) -> None:
    nodes = np.arange(count) * 3 + 5
    edges = [(a, b) for a, b in pairs if max(a, b) < count]
    least = list(range(count))
    for _ in nodes:
        for a, b in edges:
            least[a] = least[b] = min(least[a], least[b])
    one, other = (nodes[[pair[k] for pair in edges]] for k in (0, 1))
    assert connected(nodes, one, other).tolist() == least


def test_a_chain_of_ten_thousand_nodes_is_one() -> None:
    nodes = np.arange(10_000)
    assert not connected(nodes, nodes[:-1], nodes[1:]).any()
