"""Where a run's reports become tables: on the nodes, or where they are merged."""

from __future__ import annotations

import sys
from pathlib import Path

import clusterprof
from clusterprof.agent.contracts.plan import Reduction
from clusterprof.errors import UsageError

#: `--reduce`
REDUCE = ("auto", "node", "now", "none")
#: `--keep-reports`
KEEP_REPORTS = ("gather", "node", "none")
#: with more profiled ranks, merging reads for longer than one waits for at a terminal
MANY_RANKS = 8

#: The working directory is not looked for modules, nor PYTHONPATH: the job's.
_START = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from clusterprof import priority; priority.end_with_parent(); priority.step_aside(); "
    "from clusterprof.ingest.reduce import main; sys.exit(main(sys.argv[1:]))"
)


def command() -> tuple[str, ...]:
    """What makes the tables of a report: this Python, where a node has it under the same path."""
    home = str(Path(clusterprof.__file__).resolve().parents[1])
    # -B: on a full disk half a module would be left for the next start
    return (sys.executable, "-EB", "-c", _START, home)


def decided(when: str, keep_reports: str, profiler: str) -> Reduction | None:
    """What is done on the nodes for these options; None for nothing. Raises UsageError.

    With `auto` each rank decides, in each window: it knows how many ranks there are.
    """
    if keep_reports != "gather" and when == "none" and profiler != "none":
        raise UsageError(
            f"--keep-reports {keep_reports} needs the reports' tables, which --reduce none leaves "
            "to the merge",
            "leave out --reduce none, or keep the reports: --keep-reports gather",
        )
    if keep_reports == "node" and profiler == "torch":
        raise UsageError(
            "--keep-reports node is for nsys: torch.profiler's traces are packed into the run "
            "directory",
            "use --keep-reports gather or none",
        )
    if "none" in (when, profiler):
        return None
    beyond = MANY_RANKS if when == "auto" and keep_reports == "gather" else 0
    return Reduction("node" if when == "auto" else when, keep_reports, command(), beyond)


def shown(reduction: Reduction | None, expected: tuple[int, ...] | None) -> str:
    """For --dry-run; "" where nothing is done on the nodes of the ranks to profile.

    `expected` are these; None where only the ranks know.
    """
    if reduction is None:
        return ""
    beyond = ""
    if reduction.beyond and expected is None:
        beyond = f"of more than {reduction.beyond} ranks, "
    elif reduction.beyond and len(expected or ()) <= reduction.beyond:
        return ""
    begins = {"node": "once its program has ended", "now": "once its window was captured"}
    reports = {
        "gather": "the reports are gathered too",
        "node": "the reports stay on their nodes",
        "none": "each report is removed then",
    }
    return f"{beyond}on each node, {begins[reduction.when]}; {reports[reduction.keep_reports]}"
