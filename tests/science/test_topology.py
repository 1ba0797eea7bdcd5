"""The groups of a job follow from what its communicators do, whichever ranks are profiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from simulate.flight import recorded

from clusterprof import api
from clusterprof.align.lateness import host_clock
from clusterprof.align.match import match
from clusterprof.analysis.model.shallow import Shallow, all_ranks
from clusterprof.analysis.model.topology import Peers, median_of_others, topology
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.results import GroupEntry, TopologyEntry
from clusterprof.study import Study, dataset_of, study
from clusterprof.tables import RankTables

SMALL = Job(layers=4, kernels_per_layer=2, launch_ns=60_000, microbatches=4, steps=4)


def groups_of(found: TopologyEntry) -> set[tuple[str, tuple[int, ...]]]:
    return {(g["kind"], tuple(g["ranks"])) for g in found["groups"]}


def planted(groups: dict[str, tuple[int, ...]], kept: set[int]) -> set[tuple[str, tuple[int, ...]]]:
    """The planted groups as far as they have a member among the profiled ranks."""
    profiled = {
        (name.rstrip("0123456789"), tuple(r for r in ranks if r in kept))
        for name, ranks in groups.items()
    }
    return {(kind, ranks) for kind, ranks in profiled if ranks}


DRAWN = given(
    shape=st.sampled_from([(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]),
    sharded=st.booleans(),
    turns=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)


@pytest.mark.parametrize("examples", long_but([4], [30]))
def test_the_groups_are_the_planted_ones_whatever_the_ranks_order_and_selection(
    examples: int,
) -> None:
    settings(max_examples=examples)(DRAWN(groups_are_the_planted_ones))()


def groups_are_the_planted_ones(
    shape: tuple[int, int, int], sharded: bool, turns: bool, seed: int, data: st.DataObject
) -> None:
    dp, tp, pp = shape
    job = replace(
        SMALL, dp=dp, tp=tp, pp=pp, layers=4 * pp, sharded=sharded and pp == 1, one_f_one_b=turns,
        seed=seed,
    )  # fmt: skip
    ranks, truth = simulate(job)
    order = data.draw(st.permutations(ranks))
    kept = order[: data.draw(st.integers(1, len(order)))]
    found = topology(dataset_of(kept))
    assert groups_of(found) == planted(truth.groups, {r.rank for r in kept})
    for group in found["groups"]:
        assert group["size"] == {"data": dp, "tensor": tp, "pipeline": pp}[group["kind"]]
        assert group["why"]
        assert 0 < group["confidence"] <= 1


def described(
    ranks: Sequence[RankTables], shallow: Shallow | None = None
) -> dict[tuple[int, ...], str]:
    dataset = replace(dataset_of(ranks), shallow=shallow.results if shallow else None)
    return {tuple(g["ranks"]): g["description"] for g in topology(dataset)["groups"]}


def test_groups_are_called_as_the_program_calls_them() -> None:
    """By the reports where they say it (torch.profiler), else by the flight recorders."""
    job = replace(SMALL, dp=2, tp=2, steps=12, first_step=10)
    ranks, _ = simulate(job)
    names = {
        name: f"mesh {name[-2:]}"
        for t in ranks
        for name in t.collective_calls["communicator"].to_pylist()
    }
    own = [replace(t, info=replace(t.info, groups=names)) for t in ranks]
    assert all(each.startswith("mesh ") for each in described(own).values())
    made = recorded(job)
    shallow = all_ranks(
        made.flight, host_clock(made.flight, made.readings, made.probe), made.steps, {}
    )
    expected = {g.ranks: g.description for g in made.flight.groups}
    assert described(ranks, shallow=shallow) == expected
    assert described(ranks[:3], shallow=shallow)[0, 1] == expected[0, 1]
    # of two groups with the same members it is unknown which one a communicator is
    groups = [*shallow.results["groups"], {"name": "9", "description": "x", "ranks": [0, 1]}]
    twice = replace(shallow, results={**shallow.results, "groups": groups})
    assert described(ranks, shallow=twice) == {**expected, (0, 1): ""}


def only(found: TopologyEntry, kind: str) -> list[GroupEntry]:
    return [g for g in found["groups"] if g["kind"] == kind]


def test_rank_0_and_one_of_each_stage_give_the_stages_in_order() -> None:
    job = replace(SMALL, dp=2, tp=2, pp=4, layers=8, steps=3, one_f_one_b=True)
    ranks, _ = simulate(job)
    # 0, 5, 10 and 15 exchange nothing with each other
    for kept in ((0, 4, 8, 12), (0, 5, 10, 15)):
        found = topology(dataset_of([ranks[rank] for rank in kept]))
        assert found["stage_count"] == 4
        assert [(s["stage"], s["ranks"]) for s in found["stages"]] == [
            (k, [rank]) for k, rank in enumerate(kept)
        ]


def test_the_middle_stages_alone_know_that_they_are_not_the_first() -> None:
    made = study(simulate(replace(SMALL, dp=1, pp=4, layers=16, one_f_one_b=True))[0][1:3])
    stages = made.results["topology"]["stages"]
    assert [(s["stage"], s["ranks"]) for s in stages] == [(1, [1]), (2, [2])]
    job = what_ifs(made.dataset)
    assert job is not None
    groups = api._groups(job, made.results, None, "stage")
    assert groups == {"stage 1": [1], "stage 2": [2]}


def test_two_of_four_of_a_tensor_group_are_that_groups_with_its_true_size() -> None:
    ranks, _ = simulate(replace(SMALL, dp=2, tp=4))
    found = topology(dataset_of([ranks[1], ranks[3]]))
    (tensor,) = only(found, "tensor")
    assert (tensor["ranks"], tensor["size"]) == ([1, 3], 4)
    assert [g["ranks"] for g in only(found, "data")] == [[1], [3]]


def test_reports_without_communicator_ids_give_the_same_groups_with_less_confidence() -> None:
    job = replace(SMALL, dp=2, tp=2, communicator_ids=False)
    ranks, truth = simulate(job)
    found = topology(dataset_of(ranks))
    assert groups_of(found) == planted(truth.groups, {0, 1, 2, 3})
    with_ids = topology(dataset_of(simulate(replace(job, communicator_ids=True))[0]))
    for kind in ("data", "tensor"):
        for one, other in zip(only(found, kind), only(with_ids, kind), strict=True):
            assert one["confidence"] < other["confidence"]


def test_a_ring_of_sends_is_no_pipeline() -> None:
    found = topology(dataset_of([_ring(r) for r in simulate(replace(SMALL, dp=4))[0]]))
    assert not only(found, "pipeline")
    assert found["stages"] == []
    assert [g for g in only(found, "unknown") if "ring" in g["why"]]


def _ring(tables: RankTables) -> RankTables:
    """The AllReduces turned into a Send to the next rank and a Recv from the one before."""
    import pyarrow as pa

    calls = tables.collective_calls
    order = np.arange(len(calls)) % 2
    there, back = (tables.rank + 1) % 4, (tables.rank - 1) % 4
    operation = pa.array(np.where(order == 0, "Send", "Recv")).dictionary_encode()
    columns = {
        "operation": operation.cast(calls.schema.field("operation").type),
        "peer": pa.array(np.where(order == 0, there, back), pa.int32()),
    }
    for name, values in columns.items():
        calls = calls.set_column(calls.schema.get_field_index(name), name, values)
    return replace(tables, collective_calls=calls.cast(tables.collective_calls.schema))


def test_embeddings_that_the_first_and_last_stage_share_are_no_data_parallel_group() -> None:
    # data groups named so that they join the first stage's ranks with the last one's
    ranks, _ = simulate(replace(SMALL, dp=2, pp=2, layers=8, one_f_one_b=True))
    joined = [_renamed(r, "0xdata", f"0xtied{r.rank % 2}") for r in ranks]
    found = topology(dataset_of(joined))
    assert not only(found, "data")
    (one, other) = only(found, "unknown")
    assert (one["ranks"], other["ranks"]) == ([0, 2], [1, 3])
    assert "several pipeline stages" in one["why"]


def _renamed(tables: RankTables, begin: str, name: str) -> RankTables:
    import pyarrow as pa

    calls = tables.collective_calls
    names = [name if n.startswith(begin) else n for n in calls["communicator"].to_pylist()]
    place = calls.schema.get_field_index("communicator")
    return replace(
        tables, collective_calls=calls.set_column(place, "communicator", pa.array(names))
    )


def _doing(tables: RankTables, begin: str, **columns: Sequence[object]) -> RankTables:
    """The calls of communicators named `begin`… with these values of columns, by turns."""
    import pyarrow as pa

    calls = tables.collective_calls
    mine = [name.startswith(begin) for name in calls["communicator"].to_pylist()]
    for name, values in columns.items():
        turn = itertools.cycle(values)
        column = [
            next(turn) if one else old
            for one, old in zip(mine, calls[name].to_pylist(), strict=True)
        ]
        place = calls.schema.get_field_index(name)
        calls = calls.set_column(place, name, pa.array(column))
    return replace(tables, collective_calls=calls.cast(tables.collective_calls.schema))


def test_activations_gathered_and_scattered_in_the_forward_are_a_tensor_groups() -> None:
    ranks, _ = simulate(replace(SMALL, dp=2, tp=2))
    turns = ("AllGather", "ReduceScatter")
    found = topology(dataset_of([_doing(r, "0xtensor", operation=turns) for r in ranks]))
    assert [g["ranks"] for g in only(found, "tensor")] == [[0, 1], [2, 3]]
    assert all(g["operations"] == list(turns) for g in only(found, "tensor"))


def test_small_messages_in_the_forward_are_statistics_and_no_tensor_groups() -> None:
    ranks, _ = simulate(replace(SMALL, dp=2, tp=2))
    found = topology(dataset_of([_doing(r, "0xtensor", message_bytes=(512,)) for r in ranks]))
    assert not only(found, "tensor")
    assert [g["ranks"] for g in only(found, "unknown")] == [[0, 1], [2, 3]]
    assert [g["ranks"] for g in only(found, "data")] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("recording", "groups"),
    [
        ("nsys-2025.3/ddp", {("data", (0, 1, 2, 3))}),
        ("nsys-2025.3/compile", {("data", (0, 1, 2, 3))}),
        ("nsys-2025.3/fsdp-long", {("data", (0, 1, 2, 3))}),
        ("nsys-2025.3/graph-node", {("data", (0, 1, 2, 3))}),
        ("nsys-2025.3/pipeline-1f1b", {("pipeline", (0, 1, 2, 3))}),
        # rank 3's extra work hides where its group's calls are; the other group's show it
        (
            "nsys-2025.3/tensor-gpu-straggler",
            {("tensor", (0, 1)), ("tensor", (2, 3)), ("data", (0, 2)), ("data", (1, 3))},
        ),
        ("nsys-2024.2/pipeline", {("pipeline", (0, 2)), ("data", (0,)), ("data", (2,))}),
        ("kineto/pipeline", {("pipeline", (0, 2)), ("data", (0,)), ("data", (2,))}),
        # forty bytes per step do not show what they are for
        ("kineto/gloo", {("data", (0, 1, 2)), ("unknown", (0, 1))}),
    ],
)
def test_the_groups_of_a_recording_are_what_its_program_made(
    studied: Callable[[str], Study], recording: str, groups: set[tuple[str, tuple[int, ...]]]
) -> None:
    assert groups_of(studied(recording).results["topology"]) == groups


# --- peers

VALUES = st.sampled_from([0.0, 1.0, 2.0, 5.0, 5.5, -3.0, np.nan])


@given(arrays(float, array_shapes(min_dims=2, max_dims=2, max_side=7), elements=VALUES))
def test_the_median_of_the_others_is_the_one_of_all_rows_but_ones_own(values: np.ndarray) -> None:
    found = median_of_others(values)
    for k in range(len(values)):
        for step in range(values.shape[1]):
            others = np.delete(values[:, step], k)
            others = others[~np.isnan(others)]
            expected = np.median(others) if len(others) else np.nan
            np.testing.assert_equal(found[k, step], expected)


def test_a_rank_without_peers_differs_from_none() -> None:
    circle = Peers((np.array([0, 1]), np.array([2])), np.array([0, 0, 1]))
    more = circle.differences(np.array([[3.0], [1.0], [9.0]]))
    assert more.tolist() == [[2.0], [-2.0], [0.0]]


def test_what_matching_gives_grows_with_the_calls_and_not_with_their_members() -> None:
    def bytes_per_call(count: int) -> float:
        table = match(simulate(Job(dp=count, layers=2, kernels_per_layer=1, steps=2))[0])
        return float(table.nbytes) / table.num_rows

    assert bytes_per_call(128) < 1.1 * bytes_per_call(32)


def test_ranks_that_no_call_ties_take_no_part_in_each_others_savings() -> None:
    late = (Cause("host", 2, 6_000_000),)
    job = Job(dp=2, tp=2, steps=6, layers=4, synchronous=True, causes=late)
    ranks = [of_tensor_groups_alone(tables) for tables in simulate(job)[0]]
    every, alone = study(ranks).results, study(ranks[2:]).results
    (found,), (its_own,) = (
        [f for f in results["findings"] if f["code"] == "straggler.host"]
        for results in (every, alone)
    )
    assert found["ranks"] == its_own["ranks"] == [2]
    assert found["saved_ns_per_step"] == its_own["saved_ns_per_step"] > 5_000_000
    assert every["what_if"]["S"] is None
    assert alone["what_if"]["S"] is not None


def of_tensor_groups_alone(tables: RankTables) -> RankTables:
    """A rank without the calls that tie its tensor group to the others."""
    calls = tables.collective_calls
    mine = pc.starts_with(calls["communicator"], "0xtensor")
    return tables.changed("collective_calls", calls.filter(mine))
