"""A job that hangs, while it runs: which ranks, since when, where, and what they wait for.

Each rank's writer notices by itself that no step ends, and leaves what there is to be read here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from clusterprof import words
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.collect.live_windows import sample
from clusterprof.console import say
from clusterprof.errors import ReportError
from clusterprof.results import HangResults
from clusterprof.run_directory import Window

#: how often a job is looked at
LOOK_S = 5.0


@dataclass(frozen=True)
class HangingRank:
    """One rank whose step does not end, by its state."""

    rank: int
    step: int
    #: when the step began, by the wall clock of the rank's host
    since_ns: int
    #: where its training was when it was noticed: `file:line function`
    line: str | None
    #: why there is no dump of its flight recorder
    no_dump: str | None


@dataclass(frozen=True)
class LiveHang:
    """What hangs in a run now, or hung until it ended; and why, if dumps tell."""

    ranks: tuple[HangingRank, ...]
    results: HangResults | None

    def lines(self) -> Iterator[str]:
        """The hang as text: since when, what is waited for, and where each rank is."""
        from clusterprof.report import text

        first = min(self.ranks, key=lambda rank: rank.since_ns)
        began = datetime.fromtimestamp(first.since_ns / 1e9, timezone.utc)
        does = "hangs" if len(self.ranks) == 1 else "hang"
        who = words.ranks(rank.rank for rank in self.ranks)
        yield f"{who} {does} in step {first.step}, since {began:%H:%M:%S} UTC"
        if self.results is None:
            reasons = sorted({rank.no_dump for rank in self.ranks if rank.no_dump})
            yield f"what they wait for cannot be determined: {'; '.join(reasons) or 'no dump yet'}"
        else:
            yield self.results["verdict"]
            yield from map(text.hang_sentence, self.results["hang"][1:])
        ranks_at: dict[str, list[int]] = defaultdict(list)
        for rank in self.ranks:
            ranks_at[rank.line or "an unknown line"].append(rank.rank)
        for line, ranks in sorted(ranks_at.items(), key=lambda pair: len(pair[1])):
            verb = "is" if len(ranks) == 1 else "are"
            yield f"{words.ranks(ranks)} {verb} at {words.plain(line)}"

    def as_json(self) -> dict[str, Any]:
        """What `clusterprof status --json` prints of it."""
        return {"ranks": [asdict(rank) for rank in self.ranks], "results": self.results}


def look(run: Window) -> LiveHang | None:
    """What hangs in the run's last attempt; None for nothing."""
    from clusterprof.ingest.flight.all_dumps import find_dumps
    from clusterprof.merge_run import merge_dumps

    ranks = tuple(_hanging(run, run.ranks()))
    if not ranks:
        return None
    try:
        dumped_ranks = [rank.rank for rank in ranks if rank.no_dump is None]
        dumps = [pair for pair in find_dumps(run.folder, "hang") if pair[1] in dumped_ranks]
        return LiveHang(ranks, merge_dumps(dumps, {}))
    except ReportError:
        return LiveHang(ranks, None)


def _hanging(run: Window, ranks: list[int]) -> Iterator[HangingRank]:
    for rank, state in run.states_of(ranks):
        hangs = state.get("hangs")
        if hangs is not None and hangs["until_ns"] is None:
            members = {name: hangs[name] for name in ("step", "since_ns", "line", "no_dump")}
            yield HangingRank(rank, **members)


def watch(run: Window, clock: Clock = REAL) -> None:
    """Say of each hang what the job waits for, as long as it runs: again if more ranks hang."""
    before: set[int] = set()
    reported: set[int] = set()
    while True:
        clock.sleep(LOOK_S)
        latest = run.attempts()[-1]
        hanging = {rank.rank for rank in _hanging(latest, sample(latest))}
        # Not at first sight: the ranks notice it within a few seconds of each other, and a rank
        # that has not would be taken for one without a dump.
        if hanging == before and not hanging <= reported:
            reported = hanging
            # Where no rank is known to wait for another the step may only be long.
            if (hang := look(latest)) and (hang.results is None or hang.results["waiting"]):
                for line in hang.lines():
                    say(line)
        before, reported = hanging, reported & hanging
