"""The present of a watched job, as a person reads it: how long steps take, which nodes have late
ranks, and the one command that captures these.

`clusterprof look` prints it after each look, `clusterprof status` at any time. Nothing is drawn in
place where the training prints: its lines and a screen would overwrite each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from clusterprof import console, watched, words
from clusterprof.watched import Late, Row

#: the nodes that are shown, worst first: what is left of a screen is the training's
MOST_NODES = 8
#: the looks before the last one whose steps are shown
EARLIER = 3
_COLUMNS = ("node", "late ranks", "worst", "late per step", "of it", "since")


def lines(rows: Sequence[Row], now_ns: int, run: str = "") -> list[str]:
    """The present after the looks `rows` (one at least).

    The first line has the last look's age at `now_ns` (wall clock) and how long steps take; then
    come the nodes with late ranks, worst first, and the command that captures these ranks where
    the job still runs: `run` is its run directory.
    """
    late = late_now(rows)
    if not late:
        return [f"{pace(rows, now_ns)}; no rank was late"]
    return [
        pace(rows, now_ns),
        *nodes(late),
        *([f"to capture them: {command(run)}"] if run else []),
    ]


def late_now(rows: Sequence[Row]) -> list[Late]:
    """The ranks that are late by the last look, worst first; of equals as that look has them."""
    late = [rank for rank in watched.lateness(rows) if rank.until_step is None]
    place = {row.rank: place for place, row in enumerate(rows)}
    return sorted(late, key=lambda rank: (-rank.lateness_ns, place[rank.rank]))


def pace(rows: Sequence[Row], now_ns: int) -> str:
    """How long steps take: in the last look, in those before it, and how many there are a second.

    Steps per second are those between the last two looks, with all pauses.
    """
    looks = [next(rows_of_look) for _, rows_of_look in groupby(rows, attrgetter("wall_ns"))]
    last, before = looks[-1], looks[-1 - EARLIER : -1]
    age = words.age(max(0.0, (now_ns - last.wall_ns) / 1e9))
    text = f"step {last.last_step}, looked at {age} ago: {words.ms(last.step_ns)} per step"
    if before:
        each = words.listed(words.milliseconds(row.step_ns) for row in before)
        text += f" ({each} in the {'look' if len(before) == 1 else 'looks'} before)"
    rate = steps_per_s(looks[-2:])
    return f"{text}, {rate:.3g} steps/s" if rate else text


def steps_per_s(looks: Sequence[Row]) -> float | None:
    """Steps per second between two looks; None where that is not known: of one look, or where the
    job was started again, which counts its steps anew.
    """
    first, last = looks[0], looks[-1]
    steps, ns = last.last_step - first.last_step, last.wall_ns - first.wall_ns
    return steps / (ns / 1e9) if steps > 0 and ns > 0 else None


def nodes(late: Sequence[Late]) -> list[str]:
    """A table with a row for each node of late ranks, worst first: `MOST_NODES` at most."""
    by_node = defaultdict[str, list[Late]](list)
    for rank in late:
        by_node[rank.host].append(rank)
    shown = [_node(host, ranks) for host, ranks in [*by_node.items()][:MOST_NODES]]
    more = len(by_node) - len(shown)
    table = console.table([_COLUMNS, *shown])
    return [*table, f"and {words.counted(more, 'node')} more"] if more else table


def _node(host: str, late: Sequence[Late]) -> tuple[str, ...]:
    """One node's row; `late` are its ranks, worst first."""
    worst = late[0]
    # the members of a group that wait for one of them are as late as that one
    alike = [rank.rank for rank in late if worst.lateness_ns - rank.lateness_ns <= worst.bound_ns]
    are_all = len(late) > 1 and len(alike) == len(late)
    since = "the start" if worst.from_start else f"step {worst.since_step}"
    return (
        words.plain(host) or "-",
        words.spans((rank.rank for rank in late), 4),
        "all alike" if are_all else words.ranks(alike),
        words.with_bound(worst.lateness_ns, worst.bound_ns),
        words.percent(worst.lateness_ns / max(worst.step_ns, 1.0)),
        f"{since}, chronic" if worst.is_chronic else since,
    )


def command(run: str) -> str:
    """What captures the ranks that are late now, with peers, and prints the verdict."""
    return f"clusterprof capture {run} --ranks late --wait"
