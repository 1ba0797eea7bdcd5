"""The command behind `next`, as it runs where and when it is shown.

results.json has the one that shows most, whoever types it: by nsys, with masked values. Each face
shows it as its own machine can run it; the page, which is read later and elsewhere, as the machine
could that merged.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence

from clusterprof import masking
from clusterprof.arguments import shortest
from clusterprof.collect import live_windows
from clusterprof.errors import ClusterprofError, RunDirectoryError
from clusterprof.installed_nsys import installed
from clusterprof.results import FOR_NSYS, RANKS, Results
from clusterprof.run_directory import Window

#: the profiler and its options, as `analysis.findings.finding.capture` writes them behind the ranks
_BY_NSYS = re.compile(
    r" --profiler nsys((?: --pytorch [\w-]+| --trace [\w,-]+| --cpu-sampling| --nsys-arg=[\w=-]+)*)"
)
#: of these, what shows what a host does
_OF_HOST = re.compile(r" --(?:pytorch|cpu-sampling)\b")
_RANKS = re.compile(r" --ranks (\d+(?:,\d+)*)(?!\S)")
_UNKNOWN_LAUNCH = shlex.join(masking.UNKNOWN_LAUNCH)


def runnable(results: Results, run: Window | None = None) -> Results:
    """The results with the commands of their findings as they run on this machine.

    While the job of `run` goes on they capture the ranks in it; else they start it again, without
    nsys where this machine has none. Reports of nsys that were received are of a machine that has
    one: its launch is not known, and a command to fill in (`... -- PROGRAM...`) is for there.
    """
    findings = results["findings"]
    if not any(finding["next"] for finding in findings):
        return results
    capturing = _capturing(run) if run is not None else ""
    has_nsys = bool(installed())
    by_torch = {entry["rank"] for entry in results["ranks"] if "nsys" not in entry["profiler"]}
    of_nsys = len(by_torch) < len(results["ranks"])

    def fitted(command: str) -> str:
        ranks = _RANKS.search(command)
        if ranks is None:
            return command
        if capturing:
            return f"{capturing} --ranks {ranks[1]} --wait"
        if has_nsys or (of_nsys and command.endswith(_UNKNOWN_LAUNCH)):
            return command
        return _by_torch(command, by_torch.issuperset(map(int, ranks[1].split(","))))

    return {**results, "findings": [{**f, "next": fitted(f["next"])} for f in findings]}


def _capturing(run: Window) -> str:
    """What captures further steps of a job; "" where it has ended, or looks for no order."""
    with contextlib.suppress(ClusterprofError, OSError):
        live_windows.check_running(run.directory.first(), run.directory.read_manifest())
        return f"clusterprof capture {shlex.quote(shortest(run.directory.path))}"
    return ""


def _by_torch(command: str, is_captured: bool) -> str:
    """A command by torch.profiler; "" where it `is_captured` by that, with all that this can show.

    It samples no host: flight recorders show the line of the program to which a late rank comes
    latest. What its user asked of nsys stays.
    """
    found = _BY_NSYS.search(command)
    if found is None:
        return command
    before, rest = command[: found.start()], command[found.end() :]
    own = {word.partition("=")[0] for word in before.split()}
    if own & FOR_NSYS:
        return command
    if not _OF_HOST.search(found[1]):
        return f"{before} --profiler torch{rest}"
    if "--stacks" not in own:
        return f"{before} --profiler torch --stacks{rest}"
    return "" if is_captured else f"{before} --profiler torch{rest}"


def with_values(results: Results, run: Window) -> Results:
    """The results with the values in their commands that the launch kept for its user alone."""
    try:
        manifest = run.directory.read_manifest()
    except RunDirectoryError:
        return results  # of reports that clusterprof did not launch
    masked, whole = (_around_the_ranks(argv) for argv in (manifest.again, manifest.whole))
    findings = [finding.copy() for finding in results["findings"]]
    for finding in findings if masked[1] else ():
        command = finding["next"]
        if command.startswith(masked[0]) and command.endswith(masked[1]):
            shown = command[len(masked[0]) : -len(masked[1])]
            finding["next"] = whole[0] + shown + whole[1]
    return {**results, "findings": findings}


def _around_the_ranks(again: Sequence[str]) -> tuple[str, str]:
    """A run's command line before `--ranks` and behind it."""
    if RANKS not in again:
        return "", ""
    at = again.index(RANKS)
    return masking.command(again[:at]), masking.command(again[at + 1 :])
