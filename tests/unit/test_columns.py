"""Columns are put in order by counting where that is faster, with what sorting gives."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from clusterprof.align.columns import coded, places, rows_by


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
