"""The names of a run's files and folders, which stand in this module alone.

docs/design.md shows what is in them.

Later attempts (torchrun starts all ranks over when one has failed) are kept apart: a report that
the writer of a killed rank still transfers, or a prober that still answers, belongs to another
attempt, and a rank may have another number.
"""

from __future__ import annotations

import os
import re
from typing import Mapping

MANIFEST = "run.json"
PLAN = "plan.json"
#: the command line with its values, for its owner alone
AGAIN = "again.json"
CLOSE = "close"
WINDOWS = "windows"
ORDER = "order.json"
RANKS = "ranks"
PROBED = "probe"
CLOCK_PROBE = "clock_probe.json"
TABLES = "tables"
MERGED = "merged"
RESULTS = "results.json"
#: who was late in each look at all ranks while the job ran (`--watch`)
WATCHED = "watched.csv"
#: what the first look at all ranks has shown, in a sentence
LOOKED = "looked.txt"
#: locked while a merge writes
MERGING = ".merging"
HTML = "report.html"

# -- in a rank's folder
STATE = "state.json"
#: of two reports of one window nsys' is read, with torch.profiler's trace beside it
REPORT = "report.nsys-rep"
TRACE = "trace.json.gz"
#: what nsys leaves where it was stopped, or found no importer, before it made the report
QDSTRM = ".qdstrm"
RAW = "report" + QDSTRM
#: what nsys printed
LOG = "log"
STEPS = "steps.csv"
PACE = "pace.csv"
#: the steps that took far longer than those before them
PAUSES = "pauses.csv"
GARBAGE = "gc.csv"
CLOCK = "clock.json"
#: what its GPU and its node said of themselves, once a second around looks and captures
HARDWARE = "hardware.csv"
#: PyTorch's flight recorder as torch gave it, compressed: its JSON; or its pickle, where stacks are
#: asked for (JSON has none) and where torch has no other (2.4). Either has all that is read
FLIGHT = "flight.json.gz"
FLIGHT_PICKLE = "flight.pickle.gz"
#: the same, taken while the rank's training hung; of several hangs the last
HANG = "hang.json.gz"
HANG_PICKLE = "hang.pickle.gz"
#: the newest that `--watch` has saved of a job that runs, and the steps until then
WATCH = "watch.json.gz"
WATCH_PICKLE = "watch.pickle.gz"
WATCH_STEPS = "watch.csv"
#: the ranks of its process groups, beside dumps of gloo's recorder, which lists none
GROUPS = "groups.json.gz"
#: the report's canonical tables, and which report they are of
REDUCED = "reduced"
REDUCED_RANK = "rank.json"
PROBE = "probe.json"
PROBE_ADDRESS = "probe-address.json"


def rank_folder(run: str, rank: int) -> str:
    """The folder of `rank` in the run directory, or in the folder of an attempt."""
    return os.path.join(run, RANKS, "%05d" % rank)


def run_of_rank(folder: str) -> str:
    """The run directory, from a rank's folder in any attempt and window."""
    run = run_of(os.path.dirname(os.path.dirname(os.path.abspath(folder))))
    return os.path.dirname(os.path.dirname(run)) if window_of(run) else run


def attempt_of(environ: Mapping[str, str]) -> int:
    """Which attempt this process belongs to, from 1."""
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) + 1 if count.isdigit() else 1


def attempt_folder(run: str, attempt: int) -> str:
    """Where an attempt's ranks write: the run directory itself, `attempt-2` in it, and so on."""
    return run if attempt == 1 else os.path.join(run, "attempt-%d" % attempt)


def attempt_number(name: str) -> int:
    """The number of the attempt whose folder has this name; 0 for any other folder."""
    match = re.fullmatch(r"attempt-([1-9][0-9]{0,8})", name)
    return int(match[1]) if match else 0


def window_folder(run: str, number: int) -> str:
    """Where a window's files are: the run directory itself, then `windows/2` in it, and so on."""
    return run if number == 1 else os.path.join(run, WINDOWS, str(number))


def window_number(name: str) -> int:
    """The number of the later window whose folder has this name; 0 for any other."""
    return int(name) if re.fullmatch(r"[1-9][0-9]{0,5}", name) and int(name) > 1 else 0


def window_of(folder: str) -> int:
    """The number of the later window whose folder has this path; 0 for any other."""
    windows, name = os.path.split(folder)
    return window_number(name) if os.path.basename(windows) == WINDOWS else 0


def in_window(folder: str, number: int) -> str:
    """What a rank's folder, of the first window, is in another one."""
    run = run_of(os.path.dirname(os.path.dirname(folder)))
    return os.path.join(window_folder(run, number), os.path.relpath(folder, run))


def run_of(folder: str) -> str:
    """The run directory, from itself or the folder of an attempt."""
    before, name = os.path.split(folder)
    return before if attempt_number(name) else folder


def numbered(name: str, number: int) -> str:
    """`steps.2.csv`, `flight.2.json.gz` of a second process in one rank."""
    stem, _, ending = name.partition(".")
    return name if number < 2 else "%s.%d.%s" % (stem, number, ending)
