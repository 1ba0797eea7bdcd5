"""`clusterprof status RUN`: how far each rank is, while the job runs."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone

from clusterprof import console, run_directory
from clusterprof.agent.contracts import words
from clusterprof.arguments import StepWindow
from clusterprof.cli import verb_parser
from clusterprof.launch.progress import SILENT_S, RankStatus, Status, look

WATCH_S = 2.0


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print how far the run is; with --watch until it has ended."""
    what = "How far the ranks of a run are, from what they have written so far."
    parser = verb_parser(verb, what, run="a run directory")
    parser.add_argument("--all", action="store_true", help="unprofiled ranks as well")
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    parser.add_argument("--watch", action="store_true", help="repeat until the run has ended")
    arguments = parser.parse_args(list(own))
    run = run_directory.opened(arguments.run)
    if arguments.json:
        print(json.dumps(look(run).as_json(), indent=1))
        return 0
    while True:
        now = look(run)
        print(render(now, everyone=arguments.all), flush=True)
        if not arguments.watch or now.ended:
            return 0
        time.sleep(WATCH_S)
        # A terminal shows the newest in place; a file has one after the other.
        clear = "\033[2J\033[H"
        console.styled(f"{clear if sys.stdout.isatty() else ''}\n", [clear])


def render(status: Status, *, everyone: bool) -> str:
    """The run in one line, then a line for each rank to profile, and one for all others."""
    shown = [each for each in status.ranks if each.chosen or everyone]
    others = [each for each in status.ranks if not each.chosen]
    lines = [_headline(status), "", *(_table(shown, status.window) if shown else ())]
    if others and not everyone:
        states = Counter(each.state for each in others)
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        steps = [each.steps for each in others if each.steps is not None]
        reached = f", {min(steps)} to {max(steps)} steps" if steps else ""
        lines.append(f"and {words.counted(len(others), 'unprofiled rank')}: {counts}{reached}")
    if not status.ranks:
        lines.append("no rank has reported in yet")
    return "\n".join(lines)


def _table(ranks: Sequence[RankStatus], window: StepWindow) -> list[str]:
    rows = [("rank", "state", "steps", "window", "host", "last update", "")]
    rows += [
        (
            str(each.rank), each.state, "-" if each.steps is None else str(each.steps),
            _place(each.steps, window), each.host or "-", words.age(each.silent_s), each.reason,
        )
        for each in ranks
    ]  # fmt: skip
    return console.table(rows)


def _headline(status: Status) -> str:
    began = datetime.fromisoformat(status.began)
    if status.ended:
        took_s = (datetime.fromisoformat(status.ended) - began).total_seconds()
        how = f"ended with status {status.exit_status} after {words.age(took_s)}"
    else:
        how = f"began {words.age((datetime.now(timezone.utc) - began).total_seconds())} ago"
        silent = status.silent_s
        next_step = f"if the job has ended: clusterprof collect {status.run}"
        if silent is not None and silent > SILENT_S:
            how += f"; no update for {words.age(silent)}; {next_step}"
        elif silent is None and any(each.ended for each in status.ranks):
            how += f"; its ranks have ended; {next_step}"
    return f"{status.run}: {how}; window {status.window}"


def _place(steps: int | None, window: StepWindow) -> str:
    if steps is None or steps < window.first:
        return f"in {window.first - (steps or 0)} steps"
    if steps < window.end:
        return f"step {steps - window.first + 1} of {len(window)}"
    return "past"
