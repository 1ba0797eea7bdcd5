"""How a job under clusterprof ended, what there is of it, and what to do next: four lines, the last
ones that a run prints, whichever way it ended.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterprof import console, masking, next_command, watched, words
from clusterprof.agent.contracts import files, paths
from clusterprof.arguments import StepWindow, shortest
from clusterprof.collect.live_windows import steps_logged
from clusterprof.collect.outcomes import DELETED, Outcome, flights, is_looked_at, newest_step_log
from clusterprof.launch import screen
from clusterprof.results import RANKS, Results
from clusterprof.run_directory import Manifest, Window

#: Hosts' clocks may differ by so much: which of two ranks ended first on two hosts is not known
#: where less lies between them.
CLOCKS_NS = 1_000_000_000
#: a look or a window in a short job leaves out so many steps at its begin, which are warming up
WARM_UP = 3
#: so many steps a window has at least: it begins and ends between two others
FEWEST = 4


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended that did not end by itself with status 0, as far as it is known."""

    rank: int
    host: str
    #: by its host's wall clock
    ended_ns: int
    #: the steps that it had made; None where no step is known
    steps: int | None = None
    #: it was killed, or called os._exit: the last seconds of its steps are not known
    at_least: bool = True
    #: the type of the exception that nothing caught
    exception: str = ""
    #: 128 + n for signal n; None where its parent alone knows it
    status: int | None = None

    def how(self) -> str:
        """By what it ended, and after which step."""
        by = "killed, or by os._exit"
        if self.exception:
            by = f"by {words.plain(self.exception)}"
        elif self.status is not None:
            by = status_in_words(self.status)
        if self.steps is None:
            return by
        return f"{by}, after {_steps(self.steps, at_least=self.at_least)}"


def _steps(count: int, *, at_least: bool) -> str:
    return f"{'at least ' if at_least else ''}{words.counted(count, 'step')}"


def status_in_words(status: int) -> str:
    """`with status 3`, `killed by SIGKILL`; `status` is 128 + n for signal n."""
    try:
        return f"killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"with status {status}"


@dataclass(frozen=True)
class Ending:
    """What is known when a job has ended: the four lines are made of it, and of nothing else."""

    #: the run directory, as it is named in a command
    run: str
    #: of the job; None where clusterprof ended before it
    status: int | None
    #: those that clusterprof got while the job ran
    signals: Sequence[str] = ()
    #: the ranks that did not end by themselves with status 0
    ends: Sequence[RankEnd] = ()
    #: the run directory could be read
    is_read: bool = False
    #: how many steps the rank made that came farthest; None where no rank trained
    steps: int | None = None
    #: it was killed: the last seconds of its steps are not known
    at_least: bool = False
    #: the steps that were to be looked at or captured
    window: StepWindow = field(default_factory=lambda: StepWindow(10, 15))
    saved: str = ""
    #: the verdict, or that of the look; "" for none
    verdict: str = ""
    #: why there is no verdict
    why_none: str = ""
    #: the results are in the run directory; or there is what they can be made of
    is_merged: bool = False
    can_merge: bool = False
    #: what has to be done before that, `free space in ...`
    first_do: str = ""
    #: what to type next, where that is known: of the finding that comes first
    command: str = ""
    #: the command line that starts the job again, with `results.RANKS` in it; () where not known
    again: Sequence[str] = ()
    #: the options by which its ranks and their profiler were chosen
    selected: Sequence[str] = ()
    #: the program's script, where it is not there
    missing_script: str = ""

    def lines(self) -> list[str]:
        """How it ended, what was saved, the verdict so far, and what to do next."""
        verdict = self.verdict or f"none: {self.why_none or 'nothing was captured'}"
        return [
            f"ended:   {self.how()}",
            f"saved:   {self.saved or 'nothing'}",
            f"verdict: {verdict}",
            f"next:    {self.next_step()}",
        ]

    def how(self) -> str:
        """By which rank or signal the job ended, with which status, after which step."""
        after = self._after()
        if self.status is None:
            return f"how the job ended is not known: clusterprof ended before it{after}"
        if self.signals:
            return f"by {words.listed(self.signals)}{after}; the job's status is {self.status}"
        if self.status == 0 or not self.ends:
            return f"with status {self.status}{after}"
        trained = after if self.steps is None else ""
        return f"{self._first_rank()}{trained}; the job's status is {self.status}"

    def _after(self) -> str:
        if not self.is_read:
            return ""
        if self.steps is None:
            return ", before a rank trained"
        return f", after {_steps(self.steps, at_least=self.at_least)}"

    def _first_rank(self) -> str:
        """The rank that ended first, of those that did not end by themselves."""
        if {(end.status, end.exception) for end in self.ends} == {(128 + signal.SIGTERM, "")}:
            return f"{words.ranks(end.rank for end in self.ends)} killed by SIGTERM"
        first = min(self.ends, key=lambda end: end.ended_ns)
        rivals = [
            end.rank
            for end in self.ends
            if end.host != first.host and end.ended_ns - first.ended_ns < CLOCKS_NS
        ]
        if not rivals:
            return f"rank {first.rank} first, {first.how()}"
        others = f"{words.ranks(rivals)} on other hosts at about the same time"
        return f"rank {first.rank} {first.how()}, and {others}: which was first is not known"

    def next_step(self) -> str:
        """The one command to type next, with what has to be done before it."""
        if self.command:
            return self.command
        if self.can_merge and not self.is_merged:
            return f"{self.first_do}clusterprof collect {self.run}"
        if self.is_merged:
            return f"clusterprof view {self.run}"
        return self._run_again()

    def _run_again(self) -> str:
        """The command that runs the job again, so that there is a verdict."""
        if not self.again:
            return "run the job again"
        if self.missing_script and self.steps is None and self.status:
            script = words.plain(self.missing_script)
            return f"there is no file {script} here; with the right name: {self._command()}"
        if self.signals:
            return f"{self.first_do}{self._command()}"
        if self.status:
            return f"{self.first_do or 'once that is repaired: '}{self._command()}"
        if self.steps is None:
            command = self._command("--step-on", "MODULE:FUNCTION")
            return (
                "if the program is Python that keeps PYTHONPATH, and steps without a torch "
                f"optimizer: {command}"
            )
        if self.steps >= self.window.end:
            return self._command("--ranks", "all")
        if self.steps < FEWEST:
            return (
                f"with {FEWEST} steps or more: {self._command('--steps', '1:3', '--ranks', 'all')}"
            )
        last = self.steps - 1
        steps = f"{min(WARM_UP, last - 2)}:{last}"
        return self._command("--steps", steps, "--ranks", "all")

    def _command(self, *options: str) -> str:
        """The job again: with these options, else with those that it was started with."""
        options = options or tuple(self.selected)
        line = [word for part in self.again for word in (options if part == RANKS else [part])]
        return masking.command(line)


def say(ending: Ending) -> None:
    """Print the four lines: the last ones of a run."""
    first, *others = ending.lines()
    console.say(first, *others)


# -- what is known, by the run directory ---------------------------------------------------------


def of_run(
    run: Window,
    outcomes: Sequence[Outcome],
    manifest: Manifest,
    results: Results | None,
    ending: Ending,
) -> Ending:
    """`ending` with what the ranks of a run have left, where no window is captured any more.

    `run` is the window that has the run's reports, `results` are those that were merged.
    """
    first = run.directory.first(run.attempt)
    states = first.states()
    made = (_steps_of(first, *of_rank) for of_rank in states.items())
    steps, is_whole = max(made, default=(0, True))
    ending = replace(
        _by_command(ending, manifest),
        ends=tuple(_end(first, r, state) for r, state in states.items() if "ended_ns" in state),
        steps=steps or None,
        at_least=not is_whole,
        is_read=True,
        saved=saved(run, outcomes, manifest.world_size, has_results=results is not None),
    )
    if results is not None:
        return _by_results(ending, results, run)
    why = ending.why_none or why_none(ending, outcomes, bool(states), flights(run.results)[1])
    return replace(ending, verdict=looked(run), why_none=why)


def _by_command(ending: Ending, manifest: Manifest) -> Ending:
    """`ending` with what the command line tells; a person who looks sees its values."""
    again = manifest.whole if sys.stderr.isatty() else manifest.again
    window = manifest.window if "window" in manifest.content else ending.window
    missing = missing_script(again) if manifest.launcher != "ssh" else ""
    return replace(
        ending, again=again, window=window, missing_script=missing, selected=selected(manifest)
    )


def selected(manifest: Manifest) -> list[str]:
    """The options by which a run's ranks and their profiler were chosen; [] for a look."""
    profiler = manifest.content.get("profiler")
    name = profiler.get("name") if isinstance(profiler, dict) else None
    if name not in ("nsys", "torch"):
        return []
    chosen = manifest.selection
    ranks = [] if chosen.kind == "auto" or not chosen.text else ["--ranks", chosen.text]
    return [*ranks, "--profiler", name]


def _by_results(ending: Ending, results: Results, run: Window) -> Ending:
    """`ending` with the verdict, and the command of the finding that comes first."""
    results = next_command.runnable(results)
    if sys.stderr.isatty():
        results = next_command.with_values(results, run)
    # of the finding that the verdict is about, if it has one
    in_verdict = [(sentence["code"], sentence["ranks"]) for sentence in results["headline"]]
    findings = sorted(
        results["findings"],
        key=lambda finding: (finding["code"], finding["ranks"]) not in in_verdict,
    )
    commands = (finding["next"] for finding in findings if ending.is_merged)
    command = next(filter(None, commands), ending.command)
    return replace(ending, verdict=results["verdict"], command=command)


def can_merge(run: Window, outcomes: Sequence[Outcome]) -> bool:
    """Whether there is something of which results can be made."""
    return any(outcome.report for outcome in outcomes) or is_looked_at(run)


def _end(run: Window, rank: int, state: Mapping[str, Any]) -> RankEnd:
    """How a rank ended, by its state."""
    steps, is_whole = _steps_of(run, rank, state)
    return RankEnd(
        rank, str(state.get("host", "")), state["ended_ns"], steps or None, not is_whole,
        str(state.get("exception", "")), state.get("program_status"),
    )  # fmt: skip


def _steps_of(run: Window, rank: int, state: Mapping[str, Any]) -> tuple[int, bool]:
    """How many steps a rank made, and whether these are all: of a killed one the last may lack."""
    steps = state.get("steps")
    if isinstance(steps, int):
        return steps, True
    return steps_logged(run.rank(rank)) or 0, "exception" in state


def saved(
    run: Window, outcomes: Sequence[Outcome], world_size: int | None, *, has_results: bool
) -> str:
    """What there is of a run, and where."""
    where, attempts = shortest(run.results.path), len(run.attempts())
    if not run.path.is_dir():
        return f"nothing: {where} {DELETED}"
    if not run.directory.first(run.attempt).ranks():
        return f"nothing in {where}: no rank reported in"
    of_attempt = f", of attempt {run.attempt} of {attempts}" if attempts > 1 else ""
    page = f"; {shortest(run.html)}" if has_results and run.html.exists() else ""
    return f"{_kinds_saved(run, outcomes, world_size)} in {where}{of_attempt}{page}"


def _kinds_saved(run: Window, outcomes: Sequence[Outcome], world_size: int | None) -> str:
    """How many reports and flight recorders there are; without any, how many ranks' steps."""
    first, dumps = run.directory.first(run.attempt), flights(run.results)[0]
    ranks = first.ranks()
    size = words.counted(max(world_size or 0, len(ranks)), "rank")
    present = sum(not outcome.is_lost for outcome in outcomes)
    kinds = [f"{present} of {words.counted(len(outcomes), 'report')}"] if outcomes else []
    if dumps:
        kinds.append(f"flight recorders of {len(dumps)} of {size}")
    logs = [rank for rank in ranks if newest_step_log(first.rank(rank))]
    if logs and not kinds:
        return f"the steps of {len(logs)} of {size}, no flight recorder,"
    return " and ".join(kinds) or "nothing"


def looked(run: Window) -> str:
    """What all ranks have shown while the job ran: at the latest look of `--watch`, else at the
    first look; "" where there was none.
    """
    rows = watched.read(watched.path_of(run.directory.path))
    if late := screen.late_now(rows) if rows else []:
        return f"{watched.sentences(late)[0]} (by the look up to step {rows[-1].last_step})"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        first_look = files.content(str(run.directory.path / paths.LOOKED), 1 << 12)
        return first_look.decode().strip()
    return ""


def why_none(ending: Ending, outcomes: Sequence[Outcome], has_ranks: bool, no_dump: str) -> str:
    """Why there is no verdict; `has_ranks`: some have reported in, `no_dump`: why a rank has left
    no flight recorder.
    """
    if not has_ranks and not ending.status:
        return ("no rank reported in: is the program Python, does it train with a torch optimizer "
                "(else --step-on), do its scripts keep PYTHONPATH, and is this run directory "
                "visible on the nodes?")  # fmt: skip
    if ending.steps is None:
        return "no rank trained"
    if ending.steps < ending.window.end:
        if ending.status:
            return f"the job ended before the end of the steps to look at, {ending.window}"
        made = words.counted(ending.steps, "step")
        return f"the job made {made}, and the steps to look at were {ending.window}"
    return next((str(outcome) for outcome in outcomes if outcome.is_lost), no_dump)


def missing_script(command: Sequence[str]) -> str:
    """The program's script, where a command line names one that is not there; else ""."""
    program = itertools.takewhile(lambda word: word != "--", reversed(command))
    script = next((word for word in reversed([*program]) if word.endswith(".py")), "")
    return script if script and not Path(script).exists() else ""
