"""The verbs on columns: what each says of rows is what a plain loop finds."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from clusterprof import columns
from clusterprof.columns import coded, places, rows_by


@pytest.mark.parametrize(
    "values", [[], [3], [5, 3, 5, 4], [-2, 7, -2], [10**15, 1, 10**15], [70_000, 0, 70_000] * 9]
)
def test_places_and_rows_are_those_of_sorting(values: list[int]) -> None:
    column = np.array(values, np.int64)
    found, place = places(column)
    known, inverse = np.unique(column, return_inverse=True)
    assert (found.tolist(), place.tolist()) == (known.tolist(), inverse.tolist())
    rows = {each: rows.tolist() for each, rows in rows_by(column).items()}
    assert rows == {each: np.flatnonzero(column == each).tolist() for each in known.tolist()}


def test_more_values_than_16_bits_have_their_rows() -> None:
    column = np.arange(1 << 17, dtype=np.int64)[::-1]
    rows = rows_by(column)
    assert [*rows] == [*range(1 << 17)]
    assert rows[0].tolist() == [(1 << 17) - 1]


@pytest.mark.parametrize("parts", [[], [["b", "a"]], [["b", "a"], ["a", "c", "b"]]])
def test_a_column_of_strings_is_its_different_values_and_their_places(
    parts: list[list[str]],
) -> None:
    plain = pa.chunked_array([pa.array(each, pa.string()) for each in parts], pa.string())
    chunks = [pa.array(each, pa.string()).dictionary_encode() for each in parts]
    kind = pa.dictionary(pa.int32(), pa.string())
    for column in (plain, pa.chunked_array(chunks, kind)):
        names, codes = coded(pa.table({"name": column}), "name")
        assert names[codes].tolist() == plain.to_pylist()
        assert len({*names.tolist()}) == len(names)


def test_every_example_in_the_module_is_true() -> None:
    failed, tried = doctest.testmod(columns)
    assert (failed, tried) == (0, Path(columns.__file__).read_text().count(">>> "))


some_rows = st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=30)


@given(some_rows)
def test_rows_are_ordered_and_grouped_as_a_loop_would(rows: list[tuple[int, int]]) -> None:
    group = np.array([first for first, _ in rows], dtype=np.int64)
    values = np.array([second for _, second in rows], dtype=np.int64)
    order = columns.order_by(group, values)
    assert order.tolist() == sorted(range(len(rows)), key=lambda k: rows[k])
    assert columns.inverse(order)[order].tolist() == [*range(len(rows))]
    by_group = {g: [v for k, v in rows if k == g] for g in range(5)}
    assert columns.count_by(group, 5).tolist() == [len(v) for v in by_group.values()]
    assert columns.sum_by(group, values, 5).tolist() == [sum(v) for v in by_group.values()]
    start = np.zeros(5, dtype=np.int64)
    assert columns.least_by(group, values, start).tolist() == [
        min([0, *v]) for v in by_group.values()
    ]
    assert columns.greatest_by(group, values, start).tolist() == [
        max([0, *v]) for v in by_group.values()
    ]
    stretches = columns.Stretches.of(group[order])
    full = [sorted(v) for v in by_group.values() if v]
    assert stretches.size.tolist() == [len(v) for v in full]
    assert stretches.sum(values[order]).tolist() == [sum(v) for v in full]
    assert stretches.least(values[order]).tolist() == [v[0] for v in full]
    assert stretches.greatest(values[order]).tolist() == [v[-1] for v in full]
    assert values[order][stretches.last].tolist() == [v[-1] for v in full]
    assert stretches.of_row.tolist() == [k for k, v in enumerate(full) for _ in v]


@given(st.lists(st.integers(-9, 9), max_size=20).map(sorted), st.lists(st.integers(-9, 9)))
def test_rows_of_an_ascending_column_are_those_a_loop_finds(
    column: list[int], wanted: list[int]
) -> None:
    ascending, asked = np.array(column, dtype=np.int64), np.array(wanted, dtype=np.int64)
    count = len(column)
    assert columns.last_at_or_before(ascending, asked).tolist() == [
        max((k for k in range(count) if column[k] <= value), default=-1) for value in wanted
    ]
    assert columns.first_at_or_after(ascending, asked).tolist() == [
        min((k for k in range(count) if column[k] >= value), default=count) for value in wanted
    ]
    assert columns.first_after(ascending, asked).tolist() == [
        min((k for k in range(count) if column[k] > value), default=count) for value in wanted
    ]
    rows = columns.first_places(ascending, asked)
    assert rows.tolist() == [column.index(value) if value in column else -1 for value in wanted]
    assert columns.where_known(ascending, rows, 99).tolist() == [
        value if value in column else 99 for value in wanted
    ]
