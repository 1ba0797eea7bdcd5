"""How numbers are written for people: the only module where ns become ms and fractions %.

An uncertainty is a bound, so it is always rounded up, and the value beside it gets as
many decimals as the bound leaves meaningful. A confidence is rounded down. Lists of numbers come
in two forms: `ranks` and `spans` for a sentence, `numbers` for a command line.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

#: decimals of a millisecond beyond which no clock of ours can see (1 µs)
_FINEST_DECIMALS = 3


def milliseconds(ns: float, decimals: int | None = None) -> str:
    """`ns` in ms without the unit: three significant digits, never finer than 1 µs.

    >>> milliseconds(20_312_345), milliseconds(4_062_118_000), milliseconds(1_234)
    ('20.3', '4062', '0.001')
    """
    value = ns / 1e6
    if decimals is None:
        decimals = _decimals(value)
    text = f"{value:.{decimals}f}"
    return text[1:] if text.startswith("-") and float(text) == 0 else text


def ms(ns: float) -> str:
    """`milliseconds` with the unit.

    >>> ms(20_312_345)
    '20.3 ms'
    """
    return f"{milliseconds(ns)} ms"


def column_decimals(largest_ns: float) -> int:
    """Decimals of a column of ms whose largest is `largest_ns`, so that it stays narrow.

    >>> column_decimals(61_000_000), column_decimals(4_062_118_000)
    (2, 0)
    """
    return 0 if largest_ns >= 1e9 else 1 if largest_ns >= 1e8 else 2


def duration(ns: float) -> str:
    """`ns` with the unit that suits its size.

    >>> duration(0), duration(8_240), duration(20_312_345), duration(4_062_118_000)
    ('0 ms', '8.2 µs', '20.3 ms', '4.06 s')
    """
    size = abs(ns)
    if size == 0:
        return "0 ms"
    if size < 999.5:
        return f"{ns:.0f} ns"
    if size < 99_950:
        return f"{ns / 1e3:.1f} µs" if size < 9_950 else f"{ns / 1e3:.0f} µs"
    if size < 999_500_000:
        return f"{milliseconds(ns)} ms"
    return f"{ns / 1e9:.{_decimals(ns / 1e9)}f} s"


def age(seconds: float | None) -> str:
    """How long ago something was, in its largest unit of which at least two have passed.

    >>> age(119), age(300), age(172_800), age(None)
    ('119 s', '5 min', '2 d', '-')
    """
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def bound(ns: float) -> str:
    """An uncertainty, rounded up to two significant digits, with its unit.

    >>> bound(8_241), bound(123_456), bound(0)
    ('±8.3 µs', '±0.13 ms', '±0 µs')
    """
    if ns <= 0:
        return "±0 µs"
    unit, scale = ("µs", 1e3) if ns < 99_500 else ("ms", 1e6) if ns < 995_000_000 else ("s", 1e9)
    value = ns / scale
    decimals = max(0, 1 - math.floor(math.log10(value)))
    decimals = min(decimals, _FINEST_DECIMALS)
    return f"±{_ceil(value, decimals):.{decimals}f} {unit}"


def with_bound(ns: float, uncertainty_ns: float) -> str:
    """A time and its uncertainty in ms, with the decimals that the uncertainty allows.

    A value without a bound (0: it comes from one rank's own clock) stands alone.

    >>> with_bound(20_312_345, 8_241), with_bound(20_312_345, 1_500_000)
    ('20.312 ±0.009 ms', '20.3 ±1.5 ms')
    >>> with_bound(20_312_345, 0)
    '20.3 ms'
    """
    if uncertainty_ns <= 0:
        return f"{milliseconds(ns)} ms"
    bound_ms = uncertainty_ns / 1e6
    exponent = math.floor(math.log10(bound_ms))
    decimals = -exponent + (1 if bound_ms / 10.0**exponent < 2 else 0)
    decimals = min(max(decimals, 0), _FINEST_DECIMALS)
    return f"{milliseconds(ns, decimals)} ±{_ceil(bound_ms, decimals):.{decimals}f} ms"


def percent(fraction: float) -> str:
    """A share of something.

    >>> percent(0.334), percent(0.0321), percent(0.0002), percent(0.0)
    ('33%', '3.2%', '<0.1%', '0%')
    """
    value = fraction * 100
    if value == 0:
        return "0%"
    if abs(value) < 0.1:
        return "<0.1%"
    return f"{value:.1f}%" if abs(value) < 9.95 else f"{value:.0f}%"


def confidence(fraction: float) -> str:
    """A confidence, rounded down: 100% is said of certainty only.

    >>> confidence(0.996), confidence(1.0), confidence(0.57)
    ('99%', '100%', '57%')
    """
    # 0.57 * 100 is 56.999…: a hair is added before rounding down
    return f"{math.floor(fraction * 100 + 1e-9)}%"


def size(count: float | None) -> str:
    """Bytes in decimal units, as bandwidths are given; an unknown size is `-`.

    >>> size(8), size(33_554_432), size(None)
    ('8 B', '33.6 MB', '-')
    """
    if count is None:
        return "-"
    value = float(count)
    if abs(value) < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if abs(value) < 999.5 or unit == "PB":
            return f"{value:.{_decimals(value, 2)}f} {unit}"
    raise AssertionError("the last unit takes everything")


def ranks(values: Iterable[int], limit: int | None = 8) -> str:
    """Ranks as a sentence names them; what follows `limit` parts is counted.

    >>> ranks([3]), ranks([8, 0, 1, 2, 3]), ranks(range(0, 40, 8))
    ('rank 3', 'ranks 0–3, 8', 'ranks 0–32:8')
    """
    every = set(values)
    return f"rank{'' if len(every) == 1 else 's'} {spans(every, limit)}"


def spans(values: Iterable[int], limit: int | None = None) -> str:
    """Ranks or steps as a person reads them; what follows `limit` parts is counted.

    >>> spans([0, 1, 2, 3, 8])
    '0–3, 8'
    """
    return _joined(_parts(values), limit, "–", ", ")


def numbers(values: Iterable[int], limit: int | None = None) -> str:
    """Ranks or steps as the command line takes them: runs, strides of four and more, commas.

    With a `limit`, what follows that many parts is counted instead of listed.

    >>> numbers([0, 1, 2, 3, 8]), numbers([0, 8, 16]), numbers([0, 8, 16, 24])
    ('0-3,8', '0,8,16', '0-24:8')
    """
    return _joined(_parts(values), limit, "-", ",")


def listed(items: Iterable[object], limit: int | None = None, last: str = "and") -> str:
    """Items of a sentence; what follows `limit` of them is counted.

    >>> listed(["a"]), listed("ab"), listed("abc", last="or"), listed("abcde", limit=2)
    ('a', 'a and b', 'a, b or c', 'a, b and 3 more')
    """
    texts = [str(item) for item in items]
    if limit is not None and len(texts) > limit:
        return f"{', '.join(texts[:limit])} and {len(texts) - limit} more"
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun.

    >>> counted(1, "rank"), counted(1200, "call")
    ('1 rank', '1,200 calls')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def communicator(name: str, length: int = 14) -> str:
    """A communicator's name, short enough for a column.

    Of an id the end is what differs; one inferred from its ranks has no name of its own.

    >>> communicator("0x55e1a2b3c4d5e6f7"), communicator("dp"), communicator("inferred:0,1")
    ('…c4d5e6f7', 'dp', 'inferred')
    """
    name = plain(name)
    if name.startswith("inferred:"):
        return "inferred"
    if name.startswith("0x") and len(name) > 10:
        return "…" + name[-8:]
    return name if len(name) <= length else name[: length - 1] + "…"


def plain(text: str) -> str:
    """`text` in one line and without anything that steers a terminal.

    Host names, operations and sources come out of reports, that is from anywhere: escape
    sequences, line ends and the characters that turn the writing direction become `?`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join("?" if unicodedata.category(c) in _STEERING else c for c in text)


def quantity(name: str, value: object) -> tuple[str, str]:
    """A column's name and value as a person reads them: the unit moves out of the name.

    >>> quantity("arrival_ns", 20_312_345), quantity("busy_frac", 0.5), quantity("late_in", 12)
    (('arrival', '20.3 ms'), ('busy', '50%'), ('late in', '12'))
    >>> quantity("exposed_ns_per_step", 1_407_584)
    ('exposed per step', '1.41 ms')
    """
    name, _, per = name.partition("_per_")
    stem, _, unit = name.rpartition("_")
    label = plain(stem if stem and unit in {"ns", "frac", "bytes"} else name).replace("_", " ")
    label += f" per {plain(per)}".replace("_", " ") if per else ""
    if value is None:
        return label, "-"
    if isinstance(value, bool):
        return label, "yes" if value else "no"
    if isinstance(value, (int, float)):
        return label, _number(name, unit, value)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return label, spans(value) if not name.endswith("_ns") else _times(value)
        return label, ", ".join(plain(str(item)) for item in value)
    return label, plain(str(value))


_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _number(name: str, unit: str, value: float) -> str:
    if unit == "ns":
        return duration(value)
    if unit == "frac" or name.startswith("share"):
        return percent(value)
    if unit == "bytes":
        return size(int(value))
    if not float(value).is_integer():
        return f"{value:.3g}"
    return f"{int(value):,}" if abs(value) >= 100_000 else f"{int(value)}"


def _times(values: Sequence[int]) -> str:
    return ", ".join(duration(value) for value in values)


def _decimals(value: float, most: int = _FINEST_DECIMALS) -> int:
    """Decimals that give `value` three significant digits, at most `most`."""
    if value == 0:
        return 0
    return min(max(2 - math.floor(math.log10(abs(value))), 0), most)


def _ceil(value: float, decimals: int) -> float:
    scale = 10.0**decimals
    return max(1.0, math.ceil(value * scale - 1e-9)) / scale


def _parts(values: Iterable[int]) -> list[tuple[str, str, int]]:
    """Runs of equally spaced numbers: how each begins, how it ends, and how many it has."""
    rest = sorted(set(values))
    parts = []
    while rest:
        taken = _progression(rest)
        stride = rest[1] - rest[0] if taken > 1 else 1
        if taken < 2 or (stride > 1 and taken < 4):
            taken = 1
        end = f"{rest[taken - 1]}{f':{stride}' if stride > 1 else ''}" if taken > 1 else ""
        parts.append((str(rest[0]), end, taken))
        rest = rest[taken:]
    return parts


def _joined(parts: list[tuple[str, str, int]], limit: int | None, to: str, comma: str) -> str:
    shown = comma.join(begin + (to + end if end else "") for begin, end, _ in parts[:limit])
    left = 0 if limit is None else sum(count for _, _, count in parts[limit:])
    return f"{shown} and {left} more" if left else shown


def _progression(values: Sequence[int]) -> int:
    """How many leading values are equally spaced."""
    if len(values) < 2:
        return len(values)
    stride = values[1] - values[0]
    taken = 2
    while taken < len(values) and values[taken] - values[taken - 1] == stride:
        taken += 1
    return taken
