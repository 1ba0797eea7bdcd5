"""The end of a rank under nsys: its report is transferred, or its state says why not.

With `--reduce` a process of idle priority makes a report's tables on its node (`ingest.reduce`).
What it does not finish in time the merge does, which reads the report then. A report that is to
stay on its node, or to be dropped, is transferred after all where its tables could not be made.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import math
import os
import shutil
import subprocess
import tempfile
from typing import IO, Any, Callable, Dict, Iterator, List, Optional, Sequence

from ..contracts import files, identity, messages, paths, processes, states
from ..contracts.plan import Reduction
from ..contracts.states import State
from ..contracts.timing import REAL, Clock
from ..nsys import VARIABLE

#: The last bytes of every report that nsys has written to its end (docs/nsys.md).
_END = b"[END]"
#: What is left of the time for an import to copy what it did not make a report of.
COPYING_S = 1.0
#: Of the time that is left, what a report's tables may take where it is transferred without them.
REDUCING_FRAC = 0.6
_CHUNK = 8 << 20


class Reducing:
    """The reduction of one rank's report; nothing in here raises but MemoryError."""

    def __init__(self, order: Reduction, nsys: Optional[str] = None, clock: Clock = REAL) -> None:
        """`nsys` is the one whose exporter is tried first."""
        self.order = order
        #: it begins beside the training
        self.at_once = order.when == "now"
        self.nsys = nsys
        self.clock = clock
        #: the report in the rank's folder, once it is there
        self.report = ""
        self.child: Optional["subprocess.Popen[bytes]"] = None
        self._printed: IO[bytes] = io.BytesIO()
        #: where the tables are to be
        self._reduced = ""
        #: what its exporter writes, which one that is killed does not remove
        self.temporary = ""
        #: why there are no tables; "" where there are, None where that is open
        self.trouble: Optional[str] = None

    def gathered(self, report: str) -> None:
        """The report is in the rank's folder, as `report`."""
        self.report = report
        if self.at_once:
            self.start(report, os.path.dirname(report))

    def start(self, report: str, folder: str) -> None:
        """Make the tables of `report` in the rank's folder, once."""
        if self.child is not None or self.trouble is not None:
            return
        python, self._reduced = self.order.command[0], os.path.join(folder, paths.REDUCED)
        if not os.access(python, os.X_OK):
            self.trouble = "there is no %s on %s" % (python, os.uname().nodename)
            return
        environment = processes.environment_without((identity.PLAN, "PYTHON"))
        if self.nsys:
            environment[VARIABLE] = self.nsys
        try:
            self.temporary = tempfile.mkdtemp(prefix="clusterprof-")
            # In memory: what it says may be that the disk is full.
            self._printed = os.fdopen(os.memfd_create("clusterprof"), "w+b")
            self.child = subprocess.Popen(
                [*self.order.command, report, self._reduced],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._printed,
                start_new_session=True, env=dict(environment, TMPDIR=self.temporary), cwd="/",
            )  # fmt: skip
        except (OSError, AttributeError) as error:  # not every Python has memfd_create
            self.trouble = "it could not be started: %s" % error
            self._clean()

    def poll(self) -> Optional[str]:
        """None while it runs or has not begun; else "", or why there are no tables."""
        status = None if self.child is None else self.child.poll()
        if self.trouble is None and status is not None:
            why = "it %s; it printed: %s" % (processes.ended(status), last_line(self._printed))
            self.trouble = why if status else ""
            self._clean()
        return self.trouble

    def wait(self, seconds: float, got_on: Callable[[], Any]) -> str:
        """Wait so long for its end, then end it; "", or why there are no tables."""
        self.clock.until(lambda: self.poll() is not None or got_on(), seconds, 0.05)
        self.end("it did not end in time")
        return self.trouble or ""

    def end(self, why: str) -> None:
        """Leave no process behind; `why` where it has not ended by itself."""
        if self.poll() is None:
            self.trouble = why
            if self.child is not None:
                processes.end_group(self.child)
                self._clean()

    def _clean(self) -> None:
        """Remove what one that was killed has left."""
        files.remove_left(self._reduced)
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)


class ReportTransfer:
    """What nsys left in a private folder on the node, on its way to the rank's folder."""

    def __init__(
        self, private: str, folder: str, importer: Optional[str] = None, clock: Clock = REAL
    ) -> None:
        self.private = private
        self.clock = clock
        #: what makes the report's tables, where that is done on the node
        self.reducing: Optional[Reducing] = None
        #: the rank's; only its writer comes near it (see `writer`)
        self.folder = folder
        #: nsys' importer on this node, None without one
        self.importer = importer
        #: what nsys is told to write, the report that becomes of it, and what it may leave instead
        self.report = os.path.join(private, "report")
        self.made = os.path.join(private, paths.REPORT)
        self.raw = os.path.join(private, paths.RAW)
        self.log = os.path.join(private, paths.LOG)
        #: the report is in the rank's folder already
        self.brought = False
        #: the importer was started; the report is of it; what it did not do, in words
        self.import_tried = self.rescued = False
        self.import_trouble = "nsys has no importer on this node"
        #: the report is safe where it is, and named in the state: it must not be removed
        self.stays = False
        #: the state says where the report is on this node
        self.place_known = False
        #: nsys was ended, or failed, while it may have been writing the report
        self.torn = False
        #: if the rank has been a program, it was another one than ours (see `claim`)
        self.others = False
        #: when copying must have ended (monotonic)
        self.deadline = math.inf
        #: called whenever the run directory has taken something
        self.got_on: Callable[[], None] = lambda: None

    def known(self) -> Dict[str, Any]:
        """What whoever started nsys knows of its end, for whoever transfers what it left."""
        names = ("rescued", "import_tried", "import_trouble", "torn", "others")
        return {name: vars(self)[name] for name in names}

    def settle(
        self, status: int, patience_s: float, opened: bool, troubles: Sequence[str] = ()
    ) -> None:
        """Move the report and write to the state what became of it.

        `status` is the program's, `opened` whether nsys had begun to collect, `troubles` what it
        did not do. Takes `patience_s` and little more.
        """
        self.deadline = self.clock.now() + patience_s
        was = states.read(self.folder)
        if self.others and "program_pid" in was:
            shutil.rmtree(self.private, ignore_errors=True)
            return
        if self.reducing is not None and status > 128:
            # Whoever sent the signal waits, and may kill us next: the report comes first.
            self.reducing.end("the rank was ended by a signal")
        problem = None
        if not self.brought:
            self.rescue(patience_s)
            problem = self.bring()
        facts: Dict[str, Any] = {"program_status": status}
        if self.rescued:
            facts["rescued"] = "nsys left a .qdstrm, its importer was called by hand"
        if self.place_known or (problem is None and self.stays):
            facts["report_at"] = self.made if self.stays else ""
        if self.reducing is not None and self.reducing.trouble:
            facts["not_reduced"] = self.reducing.trouble
        self.tell(was, problem, self.reasons(was, problem, status, opened, troubles), facts)
        self.keep(paths.LOG)
        scratch = os.path.join(self.private, "nsys")
        shutil.rmtree(scratch if self.stays else self.private, ignore_errors=True)

    def tell(
        self, was: Dict[str, Any], problem: Optional[str], reasons: List[str], facts: Dict[str, Any]
    ) -> None:
        """Write to the state, as it `was` before, what became of the report."""
        # Of one that was lost somebody may have collected the report as soon as it was there.
        kept = problem is None and State.of(was) is State.LOST
        became = None if kept else State.CAPTURED if problem is None else State.LOST
        why = "; ".join(reasons)
        try:
            states.advance(self.folder, became, why or None, **facts)
            self.got_on()
        except OSError:  # one that is gone or full must not hurt the program
            if not self.stays:
                return
            run = paths.run_of_rank(self.folder)
            if not os.path.lexists(run) and os.path.isdir(os.path.dirname(run)):
                self.stays = False  # no report in there would ever be found
                why = "the run directory was deleted while the job ran, and its report with it"
            messages.complain("rank %d: %s" % (int(os.path.basename(self.folder)), why))

    def reasons(
        self, was: Dict[str, Any], problem: Optional[str], status: int, opened: bool,
        troubles: Sequence[str],
    ) -> List[str]:  # fmt: skip
        """What the state says of the report, by the state that `was` before; keeps a raw one."""
        before = State.of(was)
        raw = self.kept_raw() if problem and not self.stays else ""
        if before is State.LOST:
            return []  # the agent has given its reason
        # why the window was cut stays beside what failed
        cut = [was["reason"]] if was.get("reason") and (troubles or problem) else []
        end = "" if status == 0 else " (the program ended with status %d)" % status
        closed = "the program ended while its window was closed" + end
        killed = status > 128 and not {"closed", "reason"} & set(was)
        by_report: Dict[Optional[State], str] = {
            State.CAPTURING: "the program ended inside the window" + end,
            State.FINISHING: closed if killed else "",
        }
        if problem is None:
            last = by_report.get(before, "")
        elif raw:
            last = "%s; %s" % (self.import_trouble, raw)
        elif not opened and before in (State.ARMED, State.WAITING):
            last = "the program ended before the window began" + end
        else:
            printed = "" if self.stays else "; nsys printed: %s" % self.last_line()
            last = problem + printed
        return [*cut, *troubles, *filter(None, [last])]

    def kept_raw(self) -> str:
        """Keep what nsys left instead of a report; says where, "" where there is none."""
        if not os.path.exists(self.raw) or not os.path.getsize(self.raw):
            return ""
        problem = self.keep(paths.RAW)
        self.stays = problem is not None
        return problem or "clusterprof collect makes the report of the %s that is kept" % paths.RAW

    def leave_torn(self) -> None:
        """Where nsys was ended while it wrote the report, go back to what it made it of."""
        if not self.torn or not os.path.exists(self.made) or ends_whole(self.made):
            return
        self.import_trouble = "nsys did not write the report to its end"
        # nsys that makes the report by itself has the raw one under a name of its own.
        inside = os.path.join(glob.escape(self.private), "nsys", "**", "*" + paths.QDSTRM)
        raw_reports = glob.glob(inside, recursive=True)
        with contextlib.suppress(OSError):
            os.unlink(self.made)
            if len(raw_reports) == 1 and not os.path.exists(self.raw):
                os.replace(raw_reports[0], self.raw)

    def import_command(self) -> Optional[List[str]]:
        """Once, how to import what Debian's nsys leaves, which does not find its importer."""
        needed = os.path.exists(self.raw) and not os.path.exists(self.made)
        if self.import_tried or not self.importer or not needed:
            return None
        self.import_tried, self.import_trouble = True, "nsys' importer did not end in time"
        return [self.importer, "-i", self.raw, "-o", self.report + ".made.nsys-rep"]

    def imported(self, status: int) -> None:
        """The importer has ended: the report that it made gets its name."""
        self.import_trouble = "nsys' importer %s" % processes.ended(status)
        if status == 0:
            with contextlib.suppress(OSError):
                os.replace(self.report + ".made.nsys-rep", self.made)
                self.rescued = True

    def rescue(self, patience_s: float) -> None:
        """Import what nsys left, if there is time; what is not imported is kept as it is."""
        self.leave_torn()
        if self.import_tried:
            return
        with contextlib.suppress(OSError), open(self.log, "ab") as log:
            if self.importer and os.path.exists(self.raw) and os.path.exists(self.made):
                os.unlink(self.made)  # nsys was ended while it made the one of the other
            command = self.import_command()
            if command:
                importer = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=dict(os.environ, TMPDIR=self.private), start_new_session=True,
                )  # fmt: skip
                within_s = max(0.2, patience_s - COPYING_S)
                status = processes.status_within(importer, within_s, self.clock)
                if status is not None:
                    self.imported(status)

    def bring(self, beside: bool = False) -> Optional[str]:
        """Copy the report to the rank's folder; what went wrong, or None.

        Where only its tables are to be there, make these, and copy the report where that fails.
        `beside`: the training goes on, and nothing waits for the tables.
        """
        if not os.path.exists(self.made):
            return "nsys wrote no report"
        reducing = self.reducing
        if reducing is not None and reducing.order.keep_reports != "gather":
            trouble = self.reduce(reducing, beside)
            if trouble is None:
                return "its tables are not made yet"
            if not trouble:
                self.brought, self.stays = True, reducing.order.keep_reports == "node"
                return None
        problem = self.keep(paths.REPORT)
        self.brought, self.stays = problem is None, problem is not None
        if self.brought and reducing is not None:
            reducing.gathered(os.path.join(self.folder, paths.REPORT))
        return problem

    def reduce(self, reducing: Reducing, beside: bool) -> Optional[str]:
        """Make the report's tables where it is; "", or why there are none, or None: still open."""
        if beside and not self.place_known:  # until then it is on the node alone
            self.place_known = True
            with contextlib.suppress(OSError):
                states.advance(self.folder, None, report_at=self.made)
        if beside and not reducing.at_once:
            return None
        with contextlib.suppress(OSError):  # then its tables cannot be written either
            states.make(self.folder)
        reducing.start(self.made, self.folder)
        if beside:
            return reducing.poll()
        return reducing.wait(REDUCING_FRAC * (self.deadline - self.clock.now()), self.got_on)

    def keep(self, name: str) -> Optional[str]:
        """Copy a private file to the rank's folder, by rename; what went wrong, or None."""
        source = os.path.join(self.private, name)
        try:
            states.make(self.folder)
            with open(source, "rb") as read, files.new(os.path.join(self.folder, name)) as written:
                written.writelines(self.pieces(read))
        except TimeoutError:
            problem = "copying the report to %s took too long" % self.folder
        except OSError as error:
            problem = "the report could not be written to %s: %s" % (self.folder, error.strerror)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                problem = "no space left on %s for the report" % self.folder
        else:
            return None
        return "%s; it stays on %s as %s" % (problem, os.uname().nodename, source)

    def pieces(self, read: IO[bytes]) -> Iterator[bytes]:
        """A file piece by piece. Raises TimeoutError where the time is up before its end."""
        for piece in iter(lambda: read.read(_CHUNK), b""):
            yield piece
            self.got_on()
            if len(piece) == _CHUNK and self.clock.now() >= self.deadline:
                raise TimeoutError

    def last_line(self) -> str:
        """The last line that nsys printed."""
        with contextlib.suppress(OSError), open(self.log, "rb") as log:
            return last_line(log)
        return "nothing"


def ends_whole(report: str) -> bool:
    """Whether nsys has written this report to its end."""
    with contextlib.suppress(OSError), open(report, "rb") as file:
        file.seek(-len(_END), os.SEEK_END)
        return file.read() == _END
    return False


def last_line(printed: IO[bytes]) -> str:
    """The last line that a program has printed to this file; "nothing" for none."""
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - 65536))
    lines = printed.read().decode("utf-8", "replace").splitlines()
    return ([line.strip() for line in lines if line.strip()] or ["nothing"])[-1][:400]
