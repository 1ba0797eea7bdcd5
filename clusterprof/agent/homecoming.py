"""The end of a rank under nsys: its report comes home, or its state says why not."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import Any, Dict, List, Optional

if __package__:
    from . import states
else:
    import states  # type: ignore[import-not-found,no-redef]


class Homecoming:
    """What nsys left in a private folder on the node, on its way to the rank's folder."""

    def __init__(self, private: str, folder: str, nsys: Dict[str, Any]) -> None:
        self.private = private
        self.folder = folder
        self.nsys = nsys
        self.report = os.path.join(private, "report")
        self.log = os.path.join(private, "log")
        #: the report is in the rank's folder already
        self.brought = False

    def settle(self, status: int, patience_s: float) -> None:
        """Move the report and say in the state what became of it; `status` is the program's."""
        before = states.read(self.folder).get("state")
        rescued = os.path.exists(self.report + ".qdstrm")
        if not os.path.exists(self.report + ".nsys-rep"):
            self.rescue(max(patience_s, 1.0))
        problem = None if self.brought else self.bring()
        self.keep("log")
        end = "" if status == 0 else " (the program ended with status %d)" % status
        reason, state = None, "lost"
        if before == "lost":
            pass  # the agent has said why
        elif problem is None:
            state = "captured"
            if before == "capturing":
                reason = "the program ended inside the window" + end
        elif before in ("armed", "waiting"):
            reason = "the program ended before the window began" + end
        else:
            reason = "%s; nsys said: %s" % (problem, self.last_words())
        how = "nsys left a .qdstrm, its importer was called by hand" if rescued else None
        self.say(state, reason, rescued=how, program_status=status)
        shutil.rmtree(self.private, ignore_errors=True)

    def import_command(self) -> Optional[List[str]]:
        """Debian's nsys does not find its importer and leaves a .qdstrm: call it by hand."""
        raw, importer = self.report + ".qdstrm", self.nsys.get("importer")
        if not importer or not os.path.exists(raw) or os.path.exists(self.report + ".nsys-rep"):
            return None
        return [importer, "-i", raw, "-o", self.report + ".nsys-rep"]

    def rescue(self, patience_s: float) -> None:
        """Import what nsys left; what is not imported in time is kept, to be imported later."""
        command = self.import_command()
        if command is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired), open(self.log, "ab") as log:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=patience_s
            )
        if not os.path.exists(self.report + ".nsys-rep"):
            self.keep("report", ".qdstrm")

    def bring(self) -> Optional[str]:
        """Copy the report to the rank's folder; what went wrong, or None."""
        problem = self.keep("report", ".nsys-rep")
        self.brought = problem is None
        return problem

    def keep(self, name: str, ending: str = "") -> Optional[str]:
        """Copy a private file to the rank's folder, by rename; what went wrong, or None."""
        source = os.path.join(self.private, name + ending)
        if not os.path.exists(source):
            return "nsys wrote no report"
        target = os.path.join(self.folder, name + ending)
        beside = "%s.%d.tmp" % (target, os.getpid())
        try:
            shutil.copyfile(source, beside)
            os.replace(beside, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            return "the report could not be written to %s: %s" % (self.folder, error.strerror)
        return None

    def last_words(self) -> str:
        """The last line that nsys wrote."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as log:
                lines = [line.strip() for line in log if line.strip()]
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"

    def say(self, state: str, reason: Optional[str] = None, **facts: Any) -> None:
        """Advance the state; a run directory that is gone or full must not hurt the program."""
        facts = {name: fact for name, fact in facts.items() if fact is not None}
        with contextlib.suppress(OSError):
            states.advance(self.folder, state, reason, **facts)
