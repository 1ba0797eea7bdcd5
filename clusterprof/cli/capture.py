"""`clusterprof capture RUN`: a later window in a job that runs under clusterprof."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from clusterprof import run_directory, watched, words
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.arguments import (
    RANKS_GRAMMAR,
    Selection,
    StepWindow,
    parse_ranks,
    parse_steps,
    selected,
    shortest,
)
from clusterprof.cli import Parser, verb_parser
from clusterprof.collect import live_windows
from clusterprof.console import say
from clusterprof.errors import UsageError
from clusterprof.launch.planning import MOST_STEPS
from clusterprof.launch.screen import late_now
from clusterprof.run_directory import Manifest, Window

#: How often --wait looks whether the window is over.
LOOK_S = 1.0
T = TypeVar("T")
#: A step that takes longer is one that hangs (`agent/guard/step_log.py`): the ranks notice that.
MOST_TIMES = 20
_FROM_NOW = re.compile(r"\s*\+(\d+)\s*:\s*\+(\d+)\s*")


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb, "Capture further steps of a job that runs under clusterprof, on any of its ranks, by "
        "torch.profiler. The ranks look for such an order once a minute.",
        "capture runs/... --ranks 0,8 --wait                  and print the verdict",
        "capture runs/... --ranks all --steps 5000:5010",
        "capture runs/... --when 'step > 1.3x' --wait         once steps get slower",
        "capture runs/... --when 'late > 5%' --wait           once a rank delays the others",
        run="the run directory of the job",
    )  # fmt: skip
    add = parser.add_argument
    add("--steps", default="+10:+15", metavar="A:B",
        help="steps A to B-1; +A:+B counts from the first step that all ranks can capture "
        "(default +10:+15)")  # fmt: skip
    add("--ranks", metavar="R",
        help=f"the ranks to profile: {RANKS_GRAMMAR}; or late: those that are late by the last "
        "look of --watch, and peers of theirs (default: those of the run)")  # fmt: skip
    add("--profiler", choices=("torch", "none"), default="torch",
        help="none: only flight recorders and steps")  # fmt: skip
    add("--wait", action="store_true", help="wait for the window's end, merge it and print the "
        "verdict")  # fmt: skip
    add("--when", metavar="CONDITION",
        help="order the window once this is so. 'step > 1.3x': a rank's latest steps take longer "
        "than so many times its usual ones; 'late > 5%%': in a run with --watch a rank delays the "
        "others by so much of a step, which is then captured with peers of its groups unless "
        "--ranks names others")  # fmt: skip
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Order a later window; with --wait also merge it and print its verdict."""
    arguments = parser(verb).parse_args([*own, *(program or ())])
    condition = checked_condition(arguments.when, arguments.steps)
    if condition and arguments.ranks == "late":
        raise UsageError(
            "--ranks late names those that are late now, and --when waits for later",
            "leave it out: --when 'late > 5%' captures those that are late then",
        )
    run = run_directory.opened(arguments.run)
    manifest = run.directory.read_manifest()
    for_agent = live_windows.check_running(run, manifest)
    selection = checked_ranks(run, manifest, arguments.ranks)
    what, limit = condition or (None, 0.0)
    if what == "step" and not slows(run, limit, for_agent.log_s):
        return 0
    if what == "late":
        late = comes_late(run, limit, for_agent.watch_s)
        if not late:
            return 0
        if arguments.ranks is None:
            selection = with_peers(run, late)
    steps, wait_s = checked_steps(run, arguments.steps, for_agent.log_s)
    window = live_windows.order(run, steps, selection, arguments.profiler)
    which = selected(selection.text) if arguments.profiler != "none" else "none"
    say(f"window {window.number} profiles {which} in steps {steps}, in about {words.age(wait_s)}")
    if not arguments.wait:
        merging = f"clusterprof collect {shortest(run.path)} --window {window.number}"
        say(f"when it is over: {merging}")
        return 0
    while live_windows.going_on(window):
        REAL.sleep(LOOK_S)
    from clusterprof.cli import collect

    return collect.main("collect", [str(run.path), "--window", str(window.number)], None)


class Condition(NamedTuple):
    """What --when waits for: `step > 1.3x` or `late > 5%`."""

    #: "step": a rank's latest steps take longer than `limit` times its usual ones; "late": a rank
    #: delays the others by more than the share `limit` of a step
    what: str
    limit: float


def checked_condition(when: str | None, steps: str) -> Condition | None:
    """What --when waits for. Raises UsageError."""
    if when is None:
        return None
    number = r"\s*>\s*(\d{1,2}(?:\.\d{1,3})?)\s*"
    slower = re.fullmatch(rf"\s*step{number}x\s*", when)
    late = re.fullmatch(rf"\s*late{number}%\s*", when)
    if slower and 1 < float(slower[1]) <= MOST_TIMES:
        condition = Condition("step", float(slower[1]))
    elif late and float(late[1]) > 0:
        condition = Condition("late", float(late[1]) / 100)
    else:
        raise UsageError(
            f"--when {when!r} is no condition that can be watched",
            "--when 'step > 1.3x', with a number above 1 and at most "
            f"{MOST_TIMES}: a rank's latest steps take longer than so many times its usual ones",
            "--when 'late > 5%': in a run with --watch a rank delays the others by so much of a "
            "step",
        )
    if not _FROM_NOW.fullmatch(steps):
        raise UsageError(
            f"--steps {steps} cannot wait for --when: it is not known when that will be",
            "count from then: --steps +10:+15",
        )
    return condition


def slows(run: Window, times: float, log_s: float, clock: Clock = REAL) -> bool:
    """Wait until the job's steps take longer; False where it ends before."""
    say(f"waiting until steps take longer than {times:g} times the usual")
    slow = _awaited(run, lambda: live_windows.slower(run, times), log_s / 2, clock)
    if slow is None:
        say(f"the job of {run.path} has ended, and its steps took no longer than {times:g} times "
            "the usual")  # fmt: skip
        return False
    now, usual = (words.duration(ns) for ns in (slow.step_ns, slow.usual_ns))
    longer = slow.step_ns / slow.usual_ns
    say(f"rank {slow.rank}: its latest steps take {now}, {longer:.2f} times its usual {usual}")
    return True


def comes_late(run: Window, share: float, every_s: int, clock: Clock = REAL) -> list[watched.Late]:
    """Wait until the watch, which looks `every_s`, shows ranks that delay the others so; [] where
    the job ends before. Raises UsageError where there is no watch.
    """
    if not every_s:
        raise UsageError(
            f"{run.path} has no watch that shows which rank is late",
            "start the job with --watch 10m",
        )
    least = f"more than {words.percent(share)} of a step"
    say(f"waiting until a rank delays the others by {least}")
    table = watched.path_of(run.directory.path)

    def look() -> list[watched.Late]:
        ranks = [rank for rank in watched.lateness(watched.read(table)) if rank.until_step is None]
        return [rank for rank in ranks if rank.lateness_ns > share * rank.step_ns]

    late = _awaited(run, look, every_s / 10, clock) or []
    for sentence in watched.sentences(late):
        say(sentence)
    if not late:
        say(f"the job of {run.path} has ended, and no rank delayed the others by {least}")
    return sorted(late, key=lambda rank: -rank.lateness_ns)


def _awaited(run: Window, look: Callable[[], T], every_s: float, clock: Clock) -> T | None:
    """What `look` shows once it shows anything; None where the job ends before."""
    while not (shown := look()):
        if live_windows.is_silent(run) or run.directory.read_manifest().ended:
            return None
        clock.sleep(max(LOOK_S, every_s))
    return shown


def with_peers(run: Window, late: Sequence[watched.Late]) -> Selection:
    """The ranks that are late, each with a peer of each of its groups."""
    from clusterprof.launch.watch import chosen
    from clusterprof.merge_run import look

    looked = look(live_windows.current(run))
    ranks = chosen(looked._replace(suspects=[rank.suspect() for rank in late]), (), ())
    return Selection(",".join(map(str, ranks)), "ranks", tuple(ranks))


def late_ranks(run: Window) -> Selection:
    """The ranks that are late by the last look, with peers. Raises UsageError for none."""
    if late := late_now(watched.read(watched.path_of(run.directory.path))):
        return with_peers(run, late)
    raise UsageError(
        f"--ranks late: no look at {run.path} shows a rank that is late now",
        "name the ranks: --ranks 0,8",
    )


def checked_ranks(run: Window, manifest: Manifest, text: str | None) -> Selection:
    """The ranks to profile. Raises UsageError for those that the job does not have."""
    if text == "late":
        return late_ranks(run)
    if text is None:
        selection = (run.deep().order() or manifest).selection
        return Selection(*selection) if selection.text not in ("none", "auto") else parse_ranks("0")
    selection = parse_ranks(text)
    if selection.kind == "auto":
        raise UsageError("--ranks auto is for the launching verbs", "name the ranks: --ranks 0,8")
    ranks = live_windows.current(run).ranks()
    size = manifest.world_size or (ranks[-1] + 1 if ranks else None)
    selection.check(size, "the run")
    return selection


def checked_steps(run: Window, text: str, log_s: int) -> tuple[StepWindow, float]:
    """The steps to capture, and about when they begin, s from now. Raises UsageError."""
    possible = live_windows.possible(run, log_s, REAL.wall_ns() / 1e9)
    first = possible.first
    if from_now := _FROM_NOW.fullmatch(text):
        begin, end = map(int, from_now.groups())
        if end <= begin:
            raise UsageError(
                f"--steps {text} contains no step", f"try --steps +{begin}:+{begin + 5}"
            )
        steps = StepWindow(first + begin, first + end)
    else:
        steps = parse_steps(text)
        if steps.first < first:
            raise UsageError(
                f"--steps {text}: ranks may have reached step {steps.first} before they see the "
                f"order; the first possible step is {first}",
                f"give them time: --steps {first + 10}:{first + 10 + len(steps)}",
                "or count from there: --steps +10:+15",
            )
    if len(steps) > MOST_STEPS:
        raise UsageError(f"--steps {text} has {len(steps)} steps, more than {MOST_STEPS}")
    return steps, max(0.0, possible.at_s(steps.first) - REAL.wall_ns() / 1e9)
