"""`--ranks auto`: look at all ranks, then capture those that delay the others, in the same run.

The first window is captured on no rank: each leaves its steps, clock and flight recorder. Once they
are there, the ranks of a second window are chosen, and ordered as `clusterprof capture` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from clusterprof import words
from clusterprof.agent.contracts import plan as plans
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.arguments import Selection, StepWindow, parse_ranks
from clusterprof.collect import live_windows
from clusterprof.collect.outcomes import flights_over
from clusterprof.console import say
from clusterprof.launch.planning import LaunchPlan
from clusterprof.run_directory import Window

if TYPE_CHECKING:
    from clusterprof.merge_run import Look

#: As many ranks as one reads reports of, and as many as a job should have stalled for it.
MOST = 8
#: So often the second window is ordered, where the orders before came too late.
TRIES = 3
#: A rank whose window ends so much later than those of all that came before it is not waited for.
PATIENCE_S = 10.0


def look_first(plan: LaunchPlan, run: Window, clock: Clock = REAL) -> None:
    """Wait for the first window's end, look at all ranks, and order the second window: again where
    the order came too late, since steps got shorter or the run directory is slow.
    """
    size = wait_for_ranks(plan, run, clock)
    if size == 0:
        return
    from clusterprof.merge_run import look

    run = live_windows.current(run)
    looked = look(run)
    why = sentence(looked)
    armed = {rank for rank, state in run.states().items() if "path" in state.get("nsys", {})}
    stages = parse_ranks("stages", pp=plan.arguments.pp or 1).stage_ranks(size)
    look_s = plans.look_s(size)
    for _ in range(TRIES):
        ranks = chosen(looked, armed, stages)
        possible = live_windows.possible(run, look_s, clock.wall_ns() / 1e9)
        steps = StepWindow(possible.first, possible.first + len(plan.window))
        selection = Selection(",".join(map(str, ranks)), "ranks", tuple(ranks))
        window = live_windows.order(run, steps, selection, "torch", auto=True)
        began = clock.now()
        wait_s = max(0.0, possible.at_s(steps.first) - clock.wall_ns() / 1e9)
        say(f"{why}; capturing {words.ranks(ranks)} in steps {steps}, "
            f"in about {words.age(wait_s)}")  # fmt: skip
        late, reached = wait_for_order(window, ranks, look_s, wait_s + plans.SOON_S, clock)
        if not late:
            return
        # The next one may be on its way for as long. An nsys that has it captures no other.
        look_s = max(look_s, clock.now() - began)
        looked, armed = without(looked, armed & reached), armed - reached
        why = f"the order came too late for {words.ranks(late)}"
    say(f"{why}, the last of {TRIES}: the result is that of the look at all ranks")


def wait_for_order(
    window: Window, ranks: Sequence[int], every_s: float, seconds: float, clock: Clock = REAL
) -> tuple[list[int], set[int]]:
    """Wait until the ranks to be captured have the order, or one had it too late.

    Returns those that had it too late, and those that had it in time.
    """
    until, complete = clock.now() + seconds, False
    while True:
        clock.sleep(every_s)
        states = dict(live_windows.current(window).states_of(ranks))
        late = [rank for rank in states if states[rank].get("late")]
        # A rank's first state comes a moment before the one that says so.
        if late or complete or clock.now() > until:
            return late, {*states} - {*late}
        complete = len(states) == len(ranks)


def wait_for_ranks(plan: LaunchPlan, run: Window, clock: Clock = REAL) -> int:
    """Wait until all ranks have left what is to be looked at, or most have and the others are
    not coming; returns how many ranks there are, 0 where one is captured already.
    """
    came: set[int] = set()
    came_at = clock.now()
    size, every_s = plan.job.world_size, 1.0
    while True:
        clock.sleep(every_s)
        now = live_windows.current(run)
        states = now.states()
        if any(state.get("chosen") for state in states.values()):
            return 0
        sizes = [state.get("world_size") for state in states.values()]
        size = next((known_size for known_size in sizes if isinstance(known_size, int)), size)
        # Those of a job of unknown size may all be there the next moment.
        every_s = plans.look_s(size or 1)
        over = flights_over(now, states)
        if not over <= came:
            came, came_at = came | over, clock.now()
        if size is not None and len(over) >= size:
            return size
        if came and clock.now() > came_at + PATIENCE_S + every_s:
            return size or len(over)


def sentence(looked: Look) -> str:
    """What was seen, in words."""
    if not looked.ranks:
        return f"no rank can be looked at ({'; '.join(looked.warnings[:1])})"
    if not looked.suspects:
        return "no rank delays the other ranks, by their flight recorders"
    suspect = looked.suspects[0]
    late = words.ms(suspect["lateness_ns"])
    if not suspect["delays"]:
        return f"the other ranks wait {late} per step for rank {suspect['rank']}"
    some = words.in_some(suspect["late_steps"], looked.steps)
    delays = f"rank {suspect['rank']} delays the other ranks by {late} per step"
    return f"{delays}, {some}" if some else delays


def chosen(
    looked: Look, armed: Iterable[int], stages: Iterable[int], limit: int = MOST
) -> list[int]:
    """The ranks to capture: suspects, each with a peer in each of its groups; at most `limit`.

    Where no rank stands out these are rank 0 and the first rank of each stage, `stages` where the
    look shows none. Those that are `armed` are taken as peers before others, and up to the limit.
    """
    armed = sorted({*armed})
    suspects = [suspect["rank"] for suspect in looked.suspects]
    suspects = suspects or [0, *([min(stage) for stage in looked.stages] or stages)]
    ranks: list[int] = []
    for suspect in suspects:
        ranks.append(suspect)
        for members in looked.groups:
            if suspect in members:
                peers = [rank for rank in members if rank not in suspects]
                # of those that are captured anyway, if there is one
                ranks += [rank for rank in peers if rank in (*ranks, *armed)][:1] or peers[:1]
    return list(dict.fromkeys([*ranks, *armed]))[:limit]


def without(looked: Look, spent: Collection[int]) -> Look:
    """The same, where these ranks are no peers."""
    groups = [tuple(r for r in members if r not in spent) for members in looked.groups]
    return looked._replace(groups=groups)
