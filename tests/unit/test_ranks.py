"""The grammar of --ranks, and who is chosen by it."""

from __future__ import annotations

import json

import pytest

from clusterprof.agent.contracts.identity import Identity
from clusterprof.arguments import Selection, parse_ranks
from clusterprof.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", (0,)),
        ("0,8,16", (0, 8, 16)),
        ("16,0,8,8", (0, 8, 16)),
        ("0-63:8", (0, 8, 16, 24, 32, 40, 48, 56)),
        ("0-3", (0, 1, 2, 3)),
        ("0, 8-15:2", (0, 8, 10, 12, 14)),
    ],
)
def test_lists_and_ranges_name_their_ranks(text: str, expected: tuple[int, ...]) -> None:
    assert parse_ranks(text).ranks == expected


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0-8:0", "-1", "0,,1", "1:2", "0-", "0-999999999"]
)
def test_what_the_grammar_does_not_know_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_ranks(text)
    assert error.value.details


def picked(selection: Selection, world: int, per_node: int) -> list[int]:
    return [
        rank
        for rank in range(world)
        if selection.includes(Identity(rank, world, rank % per_node, "torchrun"))
    ]


def test_all_takes_every_rank() -> None:
    assert picked(parse_ranks("all"), 4, 2) == [0, 1, 2, 3]


def test_one_per_node_takes_local_rank_0() -> None:
    assert picked(parse_ranks("one-per-node"), 8, 4) == [0, 4]


def test_auto_takes_none_at_first() -> None:
    selection = parse_ranks("auto")
    assert picked(selection, 4, 2) == []
    assert selection.expected(4) == ()


def test_stages_takes_the_first_rank_of_each_pipeline_stage() -> None:
    selection = parse_ranks("stages", pp=4, tp=2)
    assert picked(selection, 16, 8) == [0, 4, 8, 12]
    assert selection.expected(16) == (0, 4, 8, 12)


def test_stages_knows_the_world_from_all_its_sizes() -> None:
    assert parse_ranks("stages", pp=2, tp=2, cp=1, dp=4).expected(None) == (0, 8)


def test_stages_without_pp_is_refused() -> None:
    with pytest.raises(UsageError, match="--ranks stages"):
        parse_ranks("stages")


def test_stages_that_do_not_divide_the_world_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\b8\b.*-n8.*\b3\b"):
        parse_ranks("stages", pp=3).check(8, "-n8")


def test_sizes_that_make_another_world_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\b16\b.*-n8.*\b8\b"):
        parse_ranks("stages", pp=2, dp=8).check(8, "-n8")


def test_a_rank_outside_of_a_known_world_is_refused_by_number() -> None:
    with pytest.raises(UsageError, match=r"\b16\b") as error:
        parse_ranks("0,16").check(16, "-N2 --ntasks-per-node=8")
    assert "0–15" in str(error.value)


def test_a_world_that_is_not_known_refuses_nothing() -> None:
    parse_ranks("0,1000").check(None, "")


def test_a_selection_is_read_as_it_was_written() -> None:
    for selection in (parse_ranks("0,8-15:2"), parse_ranks("stages", pp=4, dp=2)):
        assert Selection.from_json(json.loads(json.dumps(selection._asdict()))) == selection
