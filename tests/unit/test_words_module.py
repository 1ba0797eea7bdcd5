"""How numbers are written for people."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from clusterprof import words


def test_numbers_as_they_are_written() -> None:
    table = [
        (words.milliseconds(20_312_345), "20.3"),
        (words.milliseconds(4_062_118_000), "4062"),
        (words.milliseconds(1_234), "0.001"),
        (words.ms(20_312_345), "20.3 ms"),
        (words.column_decimals(61_000_000), 2),
        (words.column_decimals(4_062_118_000), 0),
        (words.duration(8_240), "8.2 µs"),
        (words.duration(20_312_345), "20.3 ms"),
        (words.duration(4_062_118_000), "4.06 s"),
        (words.age(119), "119 s"),
        (words.age(300), "5 min"),
        (words.age(172_800), "2 d"),
        (words.age(None), "-"),
        (
            words.period(10**18 + 1_234_567, 10**18 + 10**10),
            "2001-09-09 01:46:40.001 to 01:46:50.000 UTC",
        ),
        (
            words.period(10**18, 10**18 + 10**14),
            "2001-09-09 01:46:40.000 to 2001-09-10 05:33:20.000 UTC",
        ),
        (words.alone(3_700_000, 20_312_345, 60_000_000), "20.3 ms alone"),
        (words.alone(20_000_000, 20_312_345, 60_000_000), ""),
        (words.bound(8_241), "±8.3 µs"),
        (words.bound(123_456), "±0.13 ms"),
        (words.bound(0), "±0 µs"),
        (words.with_bound(20_312_345, 8_241), "20.3 ±0.1 ms"),
        (words.with_bound(20_312_345, 1_500_000), "20.3 ±1.5 ms"),
        (words.with_bound(20_312_345, 0), "20.3 ms"),
        (words.between(20_312_345, 18_812_345, 21_812_345), "20.3 ±1.5 ms"),
        (words.between(20_312_345, 20_312_345, 20_312_345), "20.3 ms"),
        (words.between(3_700_000, 52_000, 3_912_000), "3.70 (0.05 to 3.91) ms"),
        (words.between(3_990_000, 4_000, 4_490_000), "0 to 4.49 ms (best guess 3.99)"),
        (words.percent(0.334), "33%"),
        (words.percent(0.0321), "3.2%"),
        (words.percent(0.0002), "<0.1%"),
        (words.percent(0.0), "0%"),
        (words.confidence(0.996), "99%"),
        (words.confidence(1.0), "100%"),
        (words.confidence(0.57), "57%"),
        (words.size(8), "8 B"),
        (words.size(33_554_432), "33.6 MB"),
        (words.size(None), "-"),
        (words.size(10**19), "10000 PB"),
        (words.ranks([3]), "rank 3"),
        (words.ranks([8, 0, 1, 2, 3]), "ranks 0–3, 8"),
        (words.ranks(range(0, 40, 8)), "ranks 0–32:8"),
        (words.spans([0, 1, 2, 3, 8]), "0–3, 8"),
        (words.numbers([0, 1, 2, 3, 8]), "0-3,8"),
        (words.numbers([0, 8, 16]), "0,8,16"),
        (words.numbers([0, 8, 16, 24]), "0-24:8"),
        (words.listed(["a"]), "a"),
        (words.listed("ab"), "a and b"),
        (words.listed("abc", last="or"), "a, b or c"),
        (words.listed("abcde", limit=2), "a, b and 3 more"),
        (words.counted(1, "rank"), "1 rank"),
        (words.counted(1200, "call"), "1,200 calls"),
        (words.communicator("0x55e1a2b3c4d5e6f7"), "…c4d5e6f7"),
        (words.communicator("dp"), "dp"),
        (words.communicator("inferred:0,1"), "inferred"),
        (words.quantity("exposed_ns_per_step", 1_407_584), ("exposed per step", "1.41 ms")),
    ]
    assert [written for written, _ in table] == [expected for _, expected in table]


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ms"),
        (999, "999 ns"),
        (1_000, "1.0 µs"),
        (99_949, "100 µs"),
        (99_951, "0.100 ms"),
        (999_499_999, "999 ms"),
        (1_000_000_000, "1.00 s"),
        (-8_240, "-8.2 µs"),
        (400_000_000_000, "400 s"),
    ],
)
def test_a_duration_takes_the_unit_of_its_size(ns: int, text: str) -> None:
    assert words.duration(ns) == text


@given(st.integers(min_value=1, max_value=10**12))
def test_an_uncertainty_is_never_written_smaller_than_it_is(ns: int) -> None:
    number, unit = words.bound(ns).removeprefix("±").split()
    written = float(number) * {"µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert written >= ns * (1 - 1e-9)
    assert written <= ns * 1.1 + 1


@given(st.integers(1, 10**11), st.integers(1, 10**10))
def test_a_value_with_a_bound_contains_the_value_it_was_made_of(ns: int, uncertainty: int) -> None:
    value, bound, _ = words.with_bound(ns, uncertainty).split()
    bound = bound.removeprefix("±")
    assert float(bound) * 1e6 >= uncertainty * (1 - 1e-9)
    decimals = len(value.partition(".")[2])
    assert decimals == len(bound.partition(".")[2])
    assert abs(float(value) * 1e6 - ns) <= 0.5 * 10 ** (6 - decimals) * (1 + 1e-6)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.995, 0.9999, 1.0])
def test_a_confidence_is_rounded_down(fraction: float) -> None:
    assert int(words.confidence(fraction).rstrip("%")) <= fraction * 100
    assert (words.confidence(fraction) == "100%") == (fraction == 1.0)


@given(st.sets(st.integers(0, 600), max_size=40))
def test_a_list_of_ranks_reads_back_as_the_same_ranks(ranks: set[int]) -> None:
    in_a_sentence = words.ranks(ranks, None).partition(" ")[2].replace("–", "-").replace(" ", "")
    for text in (words.numbers(ranks), in_a_sentence):
        read: set[int] = set()
        for part in filter(None, text.split(",")):
            span, _, stride = part.partition(":")
            begin, _, end = span.partition("-")
            read |= set(range(int(begin), int(end or begin) + 1, int(stride or 1)))
        assert read == ranks


@given(st.lists(st.integers(0, 600), min_size=1, max_size=40), st.integers(1, 5))
def test_what_a_list_leaves_out_is_counted(items: list[int], limit: int) -> None:
    shown, _, left = words.listed(items, limit).removesuffix(" more").rpartition(" and ")
    if len(items) > limit:
        assert (shown.split(", "), int(left)) == (
            [str(n) for n in items[:limit]],
            len(items) - limit,
        )
    else:
        assert words.listed(items, limit).replace(" and ", ", ").split(", ") == list(
            map(str, items)
        )


def test_a_long_list_of_ranks_counts_what_it_leaves_out() -> None:
    assert words.numbers([0, 1, 5, 9, 10, 11, 20], limit=2) == "0-1,5 and 4 more"


def test_text_from_a_report_cannot_steer_a_terminal_or_turn_the_line() -> None:
    assert words.plain("gpu\x1b[31m-07\n\u202egnp.exe\u2028") == "gpu?[31m-07??gnp.exe?"
    assert words.plain("größe µs «x»") == "größe µs «x»"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("arrival_ns", 20_312_345, ("arrival", "20.3 ms")),
        ("busy_frac", 0.5, ("busy", "50%")),
        ("share_of_step", 0.25, ("share of step", "25%")),
        ("copied_bytes", 33_554_432, ("copied", "33.6 MB")),
        ("pageable", True, ("pageable", "yes")),
        ("late_in", 12, ("late in", "12")),
        ("steps", [7, 8, 9], ("steps", "7–9")),
        ("lateness_ns", [1_000_000, 2_000_000], ("lateness", "1.00 ms, 2.00 ms")),
        ("ratio", 1.23456, ("ratio", "1.23")),
        ("ratio", float("nan"), ("ratio", "nan")),
        ("source", None, ("source", "-")),
        ("name", "a\x1bb", ("name", "a?b")),
    ],
)
def test_evidence_is_written_by_the_unit_in_its_name(
    name: str, value: object, expected: tuple[str, str]
) -> None:
    assert words.quantity(name, value) == expected
