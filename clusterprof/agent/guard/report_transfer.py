"""The end of a rank under nsys: its report is transferred, or its state says why not."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import subprocess
import time
from typing import IO, Any, Callable, Dict, List, Optional, Sequence

from ..contracts import files, messages, paths, processes, states
from ..contracts.states import State

#: The last bytes of every report that nsys has written to its end (docs/nsys.md).
_END = b"[END]"

#: What is left of the time for an import to copy what it did not make a report of.
COPYING_S = 1.0
_CHUNK = 8 << 20


class ReportTransfer:
    """What nsys left in a private folder on the node, on its way to the rank's folder."""

    def __init__(self, private: str, folder: str) -> None:
        self.private = private
        #: the rank's; only its writer comes near it (see `writer`)
        self.folder = folder
        #: what nsys is told to write, the report that becomes of it, and what it may leave instead
        self.report = os.path.join(private, "report")
        self.made = os.path.join(private, paths.REPORT)
        self.raw = os.path.join(private, paths.RAW)
        self.log = os.path.join(private, paths.LOG)
        #: nsys' importer on this node, None without one
        self.importer: Optional[str] = None
        #: the report is in the rank's folder already
        self.brought = False
        self.rescued = False
        self.import_tried = False
        self.import_ended = False
        #: the report is safe where it is, and named in the state: it must not be removed
        self.stays = False
        #: nsys was ended, or failed, while it may have been writing the report
        self.torn = False
        #: if the rank has been a program, it was another one than ours (see `claim`)
        self.others = False
        #: what the importer did not do, in words
        self.import_trouble = "nsys has no importer on this node"
        #: whether there is still time to copy
        self.may_go_on: Callable[[], bool] = lambda: True
        #: called whenever the run directory has taken something
        self.got_on: Callable[[], None] = lambda: None

    def known(self) -> Dict[str, Any]:
        """What whoever started nsys knows of its end, for whoever takes home what it left."""
        names = ("rescued", "import_tried", "import_ended", "import_trouble", "torn", "others")
        return {name: vars(self)[name] for name in names}

    def settle(
        self, status: int, patience_s: float, *, opened: bool, troubles: Sequence[str] = ()
    ) -> None:
        """Move the report and say in the state what became of it.

        `status` is the program's, `opened` whether nsys had begun to collect, `troubles` what it
        did not do. Takes `patience_s` and little more.
        """
        deadline = time.monotonic() + patience_s
        self.may_go_on = lambda: time.monotonic() < deadline
        was = states.read(self.folder)
        if self.others and "program_pid" in was:
            shutil.rmtree(self.private, ignore_errors=True)
            return
        before = State.of(was)
        if not self.brought:
            self.leave_torn()
            self.rescue(max(0.2, patience_s - COPYING_S))
        problem = None if self.brought else self.bring()
        raw = self.left_raw() if problem is not None else None
        end = "" if status == 0 else " (the program ended with status %d)" % status
        reasons, state = list(troubles), State.LOST
        if before is State.LOST:
            reasons = []  # the agent has said why
        elif problem is None:
            state = State.CAPTURED
            if reasons and was.get("reason"):
                reasons.insert(0, was["reason"])  # why the window was cut stays beside what failed
            if before is State.CAPTURING:
                reasons.append("the program ended inside the window" + end)
            killed = status > 128 and not {"closed", "reason"} & set(was)
            if before is State.FINISHING and killed:
                reasons.append("the program ended while its window was closed" + end)
        elif raw:
            reasons.append("%s; %s" % (self.import_trouble, raw))
        elif not opened and before in (State.ARMED, State.WAITING):
            reasons.append("the program ended before the window began" + end)
        elif self.stays:
            reasons.append(problem)
        else:
            reasons.append("%s; nsys said: %s" % (problem, self.last_words()))
        how = "nsys left a .qdstrm, its importer was called by hand" if self.rescued else None
        reason = "; ".join(reasons)
        advanced = self.say(state, reason or None, rescued=how, program_status=status)
        self.keep(paths.LOG)
        if self.stays and not advanced:
            if self.deleted():
                self.stays = False
                reason = "the run directory was deleted while the job ran, and its report with it"
            messages.complain("rank %d: %s" % (int(os.path.basename(self.folder)), reason))
        shutil.rmtree(
            os.path.join(self.private, "nsys") if self.stays else self.private, ignore_errors=True
        )

    def deleted(self) -> bool:
        """Whether the run directory is gone: no report in it would ever be found."""
        run = paths.run_of_rank(self.folder)
        return not os.path.lexists(run) and os.path.isdir(os.path.dirname(run))

    def leave_torn(self) -> None:
        """Where nsys was ended while it wrote the report, go back to what it made it of."""
        if not self.torn or not os.path.exists(self.made) or ends_whole(self.made):
            return
        with contextlib.suppress(OSError):
            os.unlink(self.made)
        self.import_trouble = "nsys did not write the report to its end"
        # nsys that makes the report by itself has the raw one under a name of its own.
        found = glob.glob(os.path.join(glob.escape(self.private), "nsys", "**", "*.qdstrm"),
                          recursive=True)  # fmt: skip
        if len(found) == 1 and not os.path.exists(self.raw):
            with contextlib.suppress(OSError):
                os.replace(found[0], self.raw)

    def import_command(self) -> Optional[List[str]]:
        """Debian's nsys does not find its importer and leaves a .qdstrm: call it by hand.

        The report gets its name when it is whole: see `imported`.
        """
        if not self.importer or not os.path.exists(self.raw) or os.path.exists(self.made):
            return None
        return [self.importer, "-i", self.raw, "-o", self.report + ".made.nsys-rep"]

    def imported(self, status: int) -> bool:
        """The importer has ended: whether there is a report of it."""
        self.import_ended = True
        self.import_trouble = "nsys' importer %s" % processes.ended(status)
        if status == 0:
            with contextlib.suppress(OSError):
                os.replace(self.report + ".made.nsys-rep", self.made)
                self.rescued = True
        return self.rescued

    def rescue(self, patience_s: float) -> None:
        """Import what nsys left, if there is time; what is not imported is kept as it is."""
        if self.import_tried:
            return
        if self.importer and os.path.exists(self.raw):
            # Both are there: nsys was ended while it made the one of the other.
            with contextlib.suppress(OSError):
                os.unlink(self.made)
        command = self.import_command()
        if command is None:
            return
        self.import_tried = True
        self.import_trouble = "nsys' importer did not end in time"
        with contextlib.suppress(OSError), open(self.log, "ab") as log:
            importing = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=dict(os.environ, TMPDIR=self.private),
            )  # fmt: skip
            try:
                self.imported(importing.wait(patience_s))
            except subprocess.TimeoutExpired:
                importing.kill()
                importing.wait()

    def bring(self) -> Optional[str]:
        """Copy the report to the rank's folder; what went wrong, or None."""
        if not os.path.exists(self.made):
            return "nsys wrote no report"
        problem = self.keep(paths.REPORT)
        self.brought = problem is None
        self.stays = problem is not None
        return problem

    def left_raw(self) -> Optional[str]:
        """Keep what nsys left of a report that was not made; in words, None where there is none."""
        if self.stays or not os.path.exists(self.raw) or os.path.getsize(self.raw) == 0:
            return None
        problem = self.keep(paths.RAW)
        self.stays = problem is not None
        return problem or "clusterprof collect makes the report of the %s that is kept" % paths.RAW

    def keep(self, name: str) -> Optional[str]:
        """Copy a private file to the rank's folder, by rename; what went wrong, or None."""
        source = os.path.join(self.private, name)
        target = os.path.join(self.folder, name)
        here = "it stays on %s as %s" % (os.uname().nodename, source)
        try:
            states.make(self.folder)
            with open(source, "rb") as read, files.new(target) as written:
                self.copy(read, written)
        except TimeoutError:
            problem = "copying the report to %s took too long" % self.folder
        except OSError as error:
            problem = "the report could not be written to %s: %s" % (self.folder, error.strerror)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                problem = "no space left on %s for the report" % self.folder
        else:
            return None
        return "%s; %s" % (problem, here)

    def copy(self, read: IO[bytes], written: IO[bytes]) -> None:
        """Copy a file piece by piece. Raises TimeoutError where the time is up before its end."""
        while True:
            piece = read.read(_CHUNK)
            if not piece:
                return
            written.write(piece)
            self.got_on()
            if len(piece) == _CHUNK and not self.may_go_on():
                raise TimeoutError

    def last_words(self) -> str:
        """The last line that nsys wrote."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as log:
                lines = [line.strip() for line in log if line.strip()]
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"

    def say(self, state: State, reason: Optional[str] = None, **facts: Any) -> bool:
        """Advance the state, and whether that could be written.

        A run directory that is gone or full must not hurt the program.
        """
        known: Dict[str, Any] = {name: fact for name, fact in facts.items() if fact is not None}
        try:
            states.advance(self.folder, state, reason, **known)
        except OSError:
            return False
        self.got_on()
        return True


def ends_whole(report: str) -> bool:
    """Whether nsys has written this report to its end."""
    try:
        with open(report, "rb") as file:
            file.seek(-len(_END), os.SEEK_END)
            return file.read() == _END
    except OSError:
        return False
