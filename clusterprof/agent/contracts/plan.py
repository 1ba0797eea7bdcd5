"""plan.json: what the agent does in every rank; and order.json: a later window of a job that runs.
Both are checked where they are read.

A later window is asked for by `clusterprof capture`, or by the launching verb once it has looked at
all ranks (`--ranks auto`). The order for window 2 is `windows/2/order.json` in the run directory.
Each rank's writer looks for the next one when it writes the step log, and hands it to the rank,
which takes part in it unless it has made its first step already: all ranks that do capture the same
steps.

Named tuples: every interpreter of the job reads this, and importing dataclasses takes one 7 ms.
"""

import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from . import files, paths
from .identity import Identity, nodes

SCHEMA_VERSION = 1

#: `NsysPlan.start_s` can be raised to it, seconds
MOST_START_S = 600
#: How long nsys may take to begin to collect, and with what the user lets it take longer; seconds.
#: The agent waits between two steps: an nsys that hangs must not hang the training.
BEGIN_S = 6
MOST_BEGIN_S = 16

#: How often a capture's size is looked at: 0.2 ms, the first time a few (measured, nsys 2022.4).
LOOK_NS = 500_000_000
MB = 1_000_000

#: So many looks for an order a file server sees each second of a job that waits for one, mostly for
#: two seconds: a small part of what it answers.
LOOKS_A_SECOND = 256
#: No rank looks more often: of what is to be quicker than that more is waited for than looks.
LEAST_S = 0.1
#: After the window by which the ranks of the next one are chosen, an order is looked for so often
#: for so long.
SOON_S = 120.0
MOST_S = 60.0

_RANKS = range(10_000_000)  # more than any job has

if TYPE_CHECKING:
    from typing import Type, TypeVar

    _Selection = TypeVar("_Selection", bound="Selection")


class Selection(NamedTuple):
    """Which ranks are profiled: decided in each rank, where its place in the job is known."""

    #: as the user wrote it
    text: str = ""
    kind: str = "ranks"
    ranks: Tuple[int, ...] = ()
    #: pipeline stages
    pp: int = 1
    #: known from --tp, --cp and --dp, or None: each rank knows it
    world_size: Optional[int] = None

    @classmethod
    def from_json(cls: "Type[_Selection]", content: Mapping[str, Any]) -> "_Selection":
        """What stands in run.json, of the form that was checked."""
        return cls(*files.built(Selection, content))

    def includes(self, identity: Identity) -> bool:
        """Whether this rank is selected. `one-per-node` is local rank 0 of every node."""
        if self.kind == "all":
            return True
        if self.kind == "one-per-node":
            return identity.local_rank == 0
        if self.kind == "auto":  # they are chosen once all ranks were looked at
            return False
        if self.kind == "stages":
            return identity.rank in self.stage_ranks(identity.world_size)
        return identity.rank in self.ranks

    def stage_ranks(self, world_size: Optional[int]) -> List[int]:
        """The first rank of each pipeline stage; [0] if the sizes do not fit.

        The pipeline is the slowest dimension (Megatron's order): a stage is consecutive ranks.
        """
        size = self.world_size or world_size
        return list(range(0, size, size // self.pp)) if size and size % self.pp == 0 else [0]


class NsysPlan(NamedTuple):
    """The launching host's nsys, and its verbs' arguments; a rank fills in {session} and so on."""

    path: str
    version: str
    importer: Optional[str]
    #: what --trace is for a rank that sees a GPU ("gpu"), and for others ("cpu")
    trace: Dict[str, str]
    #: the arguments by which the window opens: with cudaProfilerStart, or by a session's start
    profile: List[str]
    launch: List[str]
    start: List[str]
    stop: List[str]
    #: how long it may take until it has started the program, in seconds
    start_s: int = 6

    @property
    def longer_s(self) -> int:
        """What the user lets it take beyond the usual, at its end as well; seconds."""
        usual: int = NsysPlan._field_defaults["start_s"]
        return max(0, self.start_s - usual)

    @property
    def begin_s(self) -> int:
        """How long it may take to begin to collect: the training waits."""
        return min(BEGIN_S + self.longer_s, MOST_BEGIN_S)

    def verbs(self, window_by: str) -> List[str]:
        """The verbs that are used where the window opens so."""
        return ["profile"] if window_by == "cuda" else ["launch", "start", "stop"]


class Meeting(NamedTuple):
    """How the probers of hosts that share no folder find each other; kept on these hosts only."""

    #: in hexadecimal digits
    secret: str
    hosts: Tuple[str, ...]


class Reduction(NamedTuple):
    """What becomes of a report on its node: see `guard.report_transfer`."""

    #: node: once the rank's program has ended; now: once its window has been captured
    when: str
    #: gather: in the run directory; node: where they were written; none: dropped
    keep_reports: str
    #: what makes the tables; report and folder follow
    command: Tuple[str, ...]
    #: only where more ranks than these are profiled
    beyond: int = 0


class Plan(NamedTuple):
    """What the agent does in the ranks of one job."""

    #: the run directory; in a rank the folder of its attempt
    run: str
    selection: Selection
    #: steps [first, end)
    window: Tuple[int, int]
    #: nsys, torch, or none: no rank is profiled, whatever the selection says
    profiler: str
    #: the launcher whose variables say a process's rank; None for any
    identity: Optional[str] = None
    #: `module:function` that ends a step; None for the optimizer's
    step_on: Optional[str] = None
    #: how nsys' window opens: session or cuda
    window_by: str = "session"
    emit_nvtx: bool = False
    nsys: Optional[NsysPlan] = None
    #: off, on, or auto: where the job has several nodes
    clock_probe: str = "off"
    #: a window closes early beyond it; 0 for no limit
    max_report_mb: int = 0
    #: the flight recorder's dump has the Python stack of each collective
    stacks: bool = False
    #: a step that lasts so many seconds, and 20 times the usual, hangs; 0: none does
    hang_after: int = 60
    meeting: Optional[Meeting] = None
    #: the ranks that start under nsys to be captured by it in a later window
    armed: Optional[Selection] = None
    #: how often, in seconds, a rank's step log is written and a later window looked for; 0: the log
    #: once a minute, and no window is looked for
    log_s: int = 0
    #: see `reduces`
    reduction: Optional[Reduction] = None
    #: how often, in seconds, every rank's flight recorder is saved while the job runs; 0: never
    watch_s: int = 0

    @classmethod
    def from_json(cls, content: Any) -> "Plan":
        """The plan that a parsed plan.json holds. Raises ValueError with what is wrong in it."""
        if not files.fits(content, {"schema_version?": int}):
            raise ValueError("it is no plan of clusterprof")
        version = content.get("schema_version", 1)
        if version > SCHEMA_VERSION:
            raise ValueError("it is of version %d, and this agent reads version %d: both must come "
                             "from one clusterprof" % (version, SCHEMA_VERSION))  # fmt: skip
        for name, form in _FORM.items():
            if not files.fits(content, {name: form}):
                key = name.rstrip("?")
                value = "%.60r" % (content[key],) if key in content else "missing"
                raise ValueError("its %r is %s" % (key, value))
        if content["profiler"] == "nsys" and not content.get("nsys"):
            raise ValueError("its 'nsys' is missing")
        plan: Plan = files.built(cls, content)
        return plan

    def to_json(self) -> Dict[str, Any]:
        """What plan.json holds; a part that there is not is left out."""
        content: Dict[str, Any] = {"schema_version": SCHEMA_VERSION, **self._asdict()}
        for name in ("selection", "nsys", "meeting", "armed", "reduction"):
            section = content.pop(name)
            if section is not None:
                content[name] = section._asdict()
        return content

    def profiles(self, me: Identity) -> bool:
        """Whether this rank is to be profiled."""
        return self.profiler != "none" and self.selection.includes(me)

    def reduces(self, me: Identity, environ: Mapping[str, str]) -> Optional[Reduction]:
        """What becomes of this rank's report on its node; None: whoever merges reads it."""
        order, selection = self.reduction, self.selection
        if order is None or not order.beyond:
            return order
        if selection.kind == "one-per-node":
            profiled = nodes(me, environ)
        elif selection.kind == "stages":
            profiled = len(selection.stage_ranks(me.world_size))
        else:
            profiled = me.world_size or 0 if selection.kind == "all" else len(selection.ranks)
        return order if profiled > order.beyond else None

    @property
    def looks_first(self) -> bool:
        """Whether the first window only shows which ranks a second one is to capture."""
        return self.profiler != "none" and self.selection.kind == "auto"

    def arms(self, me: Identity) -> bool:
        """Whether this rank is to start under an nsys that waits for an order for a window."""
        return self.profiler == "nsys" and self.armed is not None and self.armed.includes(me)

    def of_attempt(self, environ: Mapping[str, str]) -> "Plan":
        """The plan for a rank: `run` is the folder that its attempt writes to."""
        return self._replace(run=paths.attempt_folder(self.run, paths.attempt_of(environ)))


def read(path: str) -> Plan:
    """plan.json, with the run directory as it is named here. Raises OSError, ValueError.

    A container may have the run directory at another place than the launching host.
    """
    try:
        plan = Plan.from_json(files.load(path, ours=True))
    except ValueError as error:
        raise ValueError("%s cannot be used: %s" % (path, error)) from None
    for folder in (plan.run, os.path.dirname(os.path.abspath(path))):
        if os.path.isfile(os.path.join(folder, paths.MANIFEST)):
            return plan._replace(run=folder)
    return plan


class LaterWindow(NamedTuple):
    """One order."""

    #: from 2 on: the first window is the plan's
    number: int
    #: steps [first, end)
    steps: Tuple[int, int]
    selection: Selection
    #: torch, or none: the flight recorders alone
    profiler: str
    #: who asked for it, in words
    asked_by: str = ""
    #: its result is the run's: of `--ranks auto`
    auto: bool = False

    @classmethod
    def from_json(cls, content: Any, number: int) -> "LaterWindow":
        """What order.json holds, which must be that of window `number`. Raises ValueError."""
        limits = {**LIMITS, "profiler": ("torch", "none").__contains__}
        form = {"schema_version": range(1, 1 << 20), **files.form_of(cls, limits)}
        if not files.fits(content, form) or content["number"] != number:
            raise ValueError("it is no order of clusterprof for window %d" % number)
        if content["schema_version"] > SCHEMA_VERSION:
            raise ValueError("it is of version %d" % content["schema_version"])
        order: LaterWindow = files.built(cls, content)
        return order

    def to_json(self) -> Dict[str, Any]:
        """What order.json holds."""
        return {
            "schema_version": SCHEMA_VERSION, **self._asdict(),
            "selection": self.selection._asdict(),
        }  # fmt: skip


def order_path(run: str, number: int) -> str:
    """The place of an order."""
    return os.path.join(paths.window_folder(run, number), paths.ORDER)


def order_numbers(run: str) -> List[int]:
    """The later windows that have a folder, in order. Raises OSError."""
    # A listing: NFS may remember for half a minute that a file is not there, but asks the server
    # whenever a folder is opened.
    names = os.listdir(os.path.join(run, paths.WINDOWS))
    return sorted(filter(None, map(paths.window_number, names)))


def read_order(run: str, number: int, ours: bool = False) -> LaterWindow:
    """One order; `ours`: only one that no other user wrote. Raises OSError, ValueError."""
    return LaterWindow.from_json(files.load(order_path(run, number), ours), number)


def next_order(run: str, number: int) -> Optional[LaterWindow]:
    """The first order after this number that a rank obeys; None while there is none.

    One that is not ours, or is no order, is passed over. Raises OSError.
    """
    for candidate in order_numbers(run):
        if candidate > number:
            try:
                return read_order(run, candidate, ours=True)
            except FileNotFoundError:
                return None  # it is being made
            except (OSError, ValueError):
                continue
    return None


def look_s(world_size: Optional[int]) -> float:
    """How often a rank looks for an order that is to come soon, in a job of this size."""
    return MOST_S if world_size is None else min(MOST_S, max(LEAST_S, world_size / LOOKS_A_SECOND))


def is_window(value: Any) -> bool:
    """Whether it is [first, end) of steps."""
    return files.fits(value, [int, int]) and 0 <= value[0] < value[1]


#: what the types above leave open
LIMITS: Dict[str, Any] = {
    "kind": ("ranks", "all", "one-per-node", "stages", "auto").__contains__,
    "ranks": [_RANKS], "pp": _RANKS[1:], "world_size": (_RANKS[1:], None),
    "window": is_window, "steps": is_window, "number": range(2, 1 << 20),
    "profiler": ("nsys", "torch", "none").__contains__,
    "window_by": ("session", "cuda").__contains__,
    "trace": {"gpu": str, "cpu": str},
    "start_s": range(1, MOST_START_S + 1),
    "clock_probe": ("off", "on", "auto").__contains__,
    "max_report_mb": range(1 << 40),
    "hang_after": range(1 << 30),
    "log_s": range(3601),
    "watch_s": range(86_401),
    "when": ("node", "now").__contains__,
    "keep_reports": ("gather", "node", "none").__contains__,
    "command": lambda words: files.fits(words, [str]) and len(words) > 0,
    "beyond": _RANKS,
}  # fmt: skip
_FORM = files.form_of(Plan, LIMITS)
