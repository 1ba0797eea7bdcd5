"""How numbers are written for people: the only module where ns become ms and fractions %.

An uncertainty is a bound, so it is always rounded up; a value beside it is written as without one,
so that a figure looks the same wherever it stands. A confidence is rounded down. Lists of numbers
come in two forms: `ranks` and `spans` for a sentence, `numbers` for a command line.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

#: decimals of a millisecond beyond which no clock of ours can see (1 µs)
_FINEST_DECIMALS = 3


def milliseconds(ns: float, decimals: int | None = None) -> str:
    """`ns` in ms without the unit: three significant digits, never finer than 1 µs."""
    value = ns / 1e6
    text = f"{value:.{_decimals(value) if decimals is None else decimals}f}"
    return text[1:] if text.startswith("-") and float(text) == 0 else text


def ms(ns: float) -> str:
    """`milliseconds` with the unit: `20.3 ms`."""
    return f"{milliseconds(ns)} ms"


def column_decimals(largest_ns: float) -> int:
    """Decimals of a column of ms whose largest is `largest_ns`, so that it stays narrow."""
    return 0 if largest_ns >= 1e9 else 1 if largest_ns >= 1e8 else 2


def duration(ns: float) -> str:
    """`ns` with the unit that suits its size: `8.2 µs`, `20.3 ms`, `4.06 s`."""
    size = abs(ns)
    if size == 0:
        return "0 ms"
    if size < 999.5:
        return f"{ns:.0f} ns"
    if size < 99_950:
        return f"{ns / 1e3:.1f} µs" if size < 9_950 else f"{ns / 1e3:.0f} µs"
    if size < 999_500_000:
        return ms(ns)
    return f"{ns / 1e9:.{_decimals(ns / 1e9)}f} s"


def age(seconds: float | None) -> str:
    """How long ago something was, in its largest unit of which at least two have passed."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def period(begin_ns: int, end_ns: int) -> str:
    """From when to when (wall clock): `2026-01-02 03:04:05.678 to 03:04:06.789 UTC`."""
    begin, end = (
        datetime.fromtimestamp(ns // 1_000_000 / 1000, timezone.utc) for ns in (begin_ns, end_ns)
    )
    form = "%H:%M:%S.%f" if begin.date() == end.date() else "%Y-%m-%d %H:%M:%S.%f"
    return f"{begin:%Y-%m-%d %H:%M:%S.%f}"[:-3] + f" to {end.strftime(form)[:-3]} UTC"


def minute(ns: int) -> str:
    """A time of the wall clock to the minute, in UTC: `2026-01-02 03:04`."""
    return f"{datetime.fromtimestamp(ns // 1_000_000_000, timezone.utc):%Y-%m-%d %H:%M}"


def wall_time(ns: float) -> str:
    """A time of the wall clock, to the minute, where the reader is."""
    return datetime.fromtimestamp(ns / 1e9).strftime("%H:%M")


def bound(ns: float) -> str:
    """An uncertainty, rounded up to two significant digits, with its unit: `±8.3 µs`."""
    if ns <= 0:
        return "±0 µs"
    unit, scale = ("µs", 1e3) if ns < 99_500 else ("ms", 1e6) if ns < 995_000_000 else ("s", 1e9)
    decimals = max(0, 1 - math.floor(math.log10(ns / scale)))
    return f"±{_rounded_up(ns / scale, min(decimals, _FINEST_DECIMALS))} {unit}"


def with_bound(ns: float, uncertainty_ns: float) -> str:
    """A time and its bound, `20.3 ±1.5 ms`; alone where it has none (one rank's own clock)."""
    if uncertainty_ns <= 0:
        return ms(ns)
    value = milliseconds(ns)
    return f"{value} ±{_rounded_up(uncertainty_ns / 1e6, len(value.partition('.')[2]))} ms"


def between(ns: float, least_ns: float, most_ns: float) -> str:
    """A time and where it lies: `20.3 ±1.5 ms`, off the middle `3.70 (0.10 to 3.92) ms`; from zero
    on `0 to 4.49 ms (best guess 3.99)`.
    """
    if least_ns < ns and reaches_zero(ns, least_ns):
        return f"0 to {ms(most_ns)} (best guess {milliseconds(ns)})"
    less, more = with_bound(ns, ns - least_ns), with_bound(ns, most_ns - ns)
    if less == more:
        return less
    value = milliseconds(ns)
    ends = (milliseconds(end, len(value.partition(".")[2])) for end in (least_ns, most_ns))
    return f"{value} ({' to '.join(ends)}) ms"


def reaches_zero(ns: float, least_ns: float) -> bool:
    """Whether the lower end of where a time lies is none, in as many digits as the time has."""
    return float(milliseconds(least_ns, len(milliseconds(ns).partition(".")[2]))) <= 0


def alone(saved_ns: float, alone_ns: float, step_ns: float) -> str:
    """What a repair saves alone, `20.3 ms alone`; empty where it is the same as `saved_ns`."""
    # savings that differ by a smaller part of the step are one number
    return f"{ms(alone_ns)} alone" if abs(alone_ns - saved_ns) > 0.01 * step_ns else ""


def sentences(text: str) -> list[str]:
    """The sentences of a text: one ends before a space and a capital letter or a number."""
    return re.split(r"(?<=[.!?]) (?=[A-Z0-9])", text)


def capitalised(text: str) -> str:
    """The text as a sentence begins, all else as it is."""
    return text[:1].upper() + text[1:]


def percent(fraction: float) -> str:
    """A share of something: `33%`, `3.2%`, `<0.1%`."""
    value = fraction * 100
    if 0 < abs(value) < 0.1:
        return "<0.1%"
    return f"{value:.1f}%" if 0 < abs(value) < 9.95 else f"{value:.0f}%"


def confidence(fraction: float) -> str:
    """A confidence, rounded down: `100%` is said of certainty only."""
    # 0.57 * 100 is 56.999…: a hair is added before rounding down
    return f"{math.floor(fraction * 100 + 1e-9)}%"


def size(count: float | None) -> str:
    """Bytes in decimal units, as bandwidths are given (`33.6 MB`); an unknown size is `-`."""
    if count is None:
        return "-"
    if abs(count) < 1000:
        return f"{count:.0f} B"
    value, units = count / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.{_decimals(value, 2)}f} {units[0]}"


def ranks(values: Iterable[int], limit: int | None = 8) -> str:
    """`rank 3`, `ranks 0–3, 8` as a sentence names them; what follows `limit` parts is counted."""
    every = set(values)
    return f"rank{'' if len(every) == 1 else 's'} {spans(every, limit)}"


def spans(values: Iterable[int], limit: int | None = None) -> str:
    """Ranks or steps as a person reads them; what follows `limit` parts is counted."""
    return _joined(values, limit, "–", ", ")


def numbers(values: Iterable[int], limit: int | None = None) -> str:
    """Ranks or steps for a command line, `0-3,8`, `0-24:8`; those after `limit` are counted."""
    return _joined(values, limit, "-", ",")


def listed(items: Iterable[object], limit: int | None = None, last: str = "and") -> str:
    """Items of a sentence, `a, b and c`; what follows `limit` of them is counted."""
    texts = [str(item) for item in items]
    if limit is not None and len(texts) > limit:
        return f"{', '.join(texts[:limit])} and {len(texts) - limit} more"
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 rank`, `1,200 calls`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def in_some(steps: Sequence[int] | None, all_steps: Sequence[int]) -> str:
    """In how many of several steps it is: `in 4 of 12 steps`; empty where it is in all (None)."""
    return "" if steps is None else f"in {len(steps)} of {counted(len(all_steps), 'step')}"


def communicator(name: str, length: int = 14) -> str:
    """A name for a column: `dp`, `inferred`, or of an id the end, which differs: `…c4d5e6f7`."""
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
    steering = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join("?" if unicodedata.category(c) in steering else c for c in text)


def base_name(kernel: str) -> str:
    """A kernel's function as ncu names it: `layer_norm` of `void at::layer_norm<float>(int)`."""
    left = kernel.strip().replace("(anonymous namespace)", "")
    for opened, closed in ("()", "<>"):
        if left.endswith(closed):
            depth = 0
            for length in range(len(left) - 1, -1, -1):
                depth += (left[length] == closed) - (left[length] == opened)
                if not depth:
                    left = left[:length].rstrip()
                    break
    return re.split(r"::|\s", left)[-1] or kernel


def quantity(name: str, value: object) -> tuple[str, str]:
    """A column's name and value in words: `arrival_ns` 20312345 is `arrival` and `20.3 ms`."""
    name, _, per = name.partition("_per_")
    stem, _, unit = name.rpartition("_")
    label = plain(stem if stem and unit in {"ns", "frac", "bytes"} else name).replace("_", " ")
    label += f" per {plain(per)}".replace("_", " ") if per else ""
    items = value if isinstance(value, (list, tuple)) else []
    if value is None:
        text = "-"
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, (int, float)):
        text = _number(name, unit, value)
    elif items and all(type(item) is int for item in items):
        text = ", ".join(map(duration, items)) if name.endswith("_ns") else spans(items)
    elif isinstance(value, (list, tuple)):
        text = ", ".join(plain(str(item)) for item in items)
    else:
        text = plain(str(value))
    return label, text


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


def _decimals(value: float, most: int = _FINEST_DECIMALS) -> int:
    """Decimals that give `value` three significant digits, at most `most`."""
    return min(max(2 - math.floor(math.log10(abs(value))), 0), most) if value else 0


def _rounded_up(value: float, decimals: int) -> str:
    scale = 10.0**decimals
    return f"{max(1.0, math.ceil(value * scale - 1e-9)) / scale:.{decimals}f}"


def _joined(values: Iterable[int], limit: int | None, to: str, comma: str) -> str:
    """Runs of equally spaced numbers; those behind `limit` of them are counted."""
    rest = sorted(set(values))
    parts: list[str] = []
    while rest and (limit is None or len(parts) < limit):
        stride = rest[1] - rest[0] if len(rest) > 1 else 1
        # up to where the run of this stride goes on
        taken = next((k for k, n in enumerate(rest) if n != rest[0] + k * stride), len(rest))
        if stride > 1 and taken < 4:
            taken = 1
        step = f":{stride}" if stride > 1 else ""
        parts.append(f"{rest[0]}{to}{rest[taken - 1]}{step}" if taken > 1 else f"{rest[0]}")
        rest = rest[taken:]
    return comma.join(parts) + (f" and {len(rest)} more" if rest else "")


def group(name: str, description: str) -> str:
    """A process group by its description (`mesh_dp`), which several may have, and its number."""
    return f"{description} {name}" if description else name
