"""The one way in: what goes wrong behind it does not reach the training, nor are we in its way.

The program comes to us at five places: after an import, at a step, around a function, in a forked
child, and at its end. Here, and nowhere behind, everything is caught: then our hooks are taken out,
one line says so, and the training goes on.

Python calls a program's signal handlers wherever its main thread is, and what a handler raises (a
preemption, a time-out) is for the training. So the handlers wait while we act, but not at a step,
which takes half a microsecond: what they raise there goes through.
"""

from __future__ import annotations

# `signal` makes an enum of each, at its import too.
import _signal  # type: ignore[import-not-found]
import os
import sys
from _thread import get_ident
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ..contracts.messages import complain

Handler = Callable[[int, Any], Any]

#: all code of ours is below
_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
#: of which these call the program's
_CALLING = ("called_later", "call_those_that_came")
#: more than any system's `struct sigaction`
_ACTION_B = 512
#: calls that we, and torch for us, may nest: the program may be as deep as its limit lets it
_DEEPER = 500


class Handlers:
    """The program's signal handlers; while `waiting`, a signal is noted and its handler waits."""

    def __init__(self) -> None:
        self.waiting = False
        #: the handlers of the signals that came meanwhile, with their arguments
        self.came: List[Tuple[Handler, int, Any]] = []
        #: by signal the program's handler, and ours in its place
        self._replaced: Dict[int, Tuple[Handler, Handler]] = {}

    def wait(self) -> None:
        """From now on. What a handler raises before comes out of here."""
        for number in range(1, _signal.NSIG):
            handler: Any = _signal.getsignal(number)
            if callable(handler) and handler is not self._replaced.get(number, (None, None))[1]:
                later = self._later(handler)
                self._replaced[number] = handler, later
                _call_for(number, later)
        self.waiting = True

    def go_on(self) -> None:
        """No longer; call those that came. What these raise comes out of here."""
        try:
            self.waiting = False
            self._give_back()
        finally:
            self._give_back()  # one was called meanwhile, and has raised
            self.call_those_that_came()

    def call_those_that_came(self) -> None:
        """All of them, whatever one raises."""
        if self.came:
            handler, *arguments = self.came.pop(0)
            try:
                handler(*arguments)
            finally:
                self.call_those_that_came()

    def _give_back(self) -> None:
        for number, (handler, later) in tuple(self._replaced.items()):
            if _signal.getsignal(number) is later:
                _call_for(number, handler)
            del self._replaced[number]

    def _later(self, handler: Handler) -> Handler:
        pid = os.getpid()

        def called_later(number: int, frame: Any) -> None:
            if self.waiting and os.getpid() == pid:
                self.came.append((handler, number, frame))
            else:  # also in a child that another thread has forked meanwhile
                handler(number, frame)

        return called_later


def _call_for(number: int, handler: Handler) -> None:
    """Have Python call this handler. What the kernel calls stays as it is: it may be another
    library's over Python's (faulthandler), or start calls over (siginterrupt).
    """
    import ctypes

    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(_ACTION_B)
    libc.sigaction(number, None, action)
    try:
        _signal.signal(number, handler)
    finally:
        libc.sigaction(number, action, None)


def is_the_program_s(error: Exception) -> bool:
    """Whether a handler of the program's has raised it, and none of our own functions."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    return not code.co_filename.startswith(_FOLDER) or code.co_name in _CALLING


class Entry:
    """See above; there is one in a process, `entry`."""

    def __init__(self) -> None:
        #: the thread that Python calls signal handlers on
        self.main = get_ident()
        self.handlers = Handlers()
        self.is_shut = False
        #: what takes us out of the program, the last one first; each is told why
        self.undo: List[Callable[[str], None]] = []
        #: what a handler has raised where nothing can come out
        self.owed: Optional[BaseException] = None
        self._inside: Set[int] = set()
        #: the program's recursion limit and ours, while a thread of it is inside; 0 while none is
        self._limits = (0, 0)

    def run(self, act: Callable[..., Any], *arguments: Any) -> None:
        """Act; the program's handlers wait meanwhile."""
        me = get_ident()
        if me in self._inside:
            act(*arguments)
        if self.is_shut or me in self._inside:
            return
        limit = sys.getrecursionlimit()
        try:
            if limit != self._limits[1]:
                self._limits = (limit, limit + _DEEPER)
                sys.setrecursionlimit(limit + _DEEPER)
            self._inside.add(me)
            if me == self.main:
                self.handlers.wait()
            act(*arguments)
        except Exception as error:
            if me == self.main and not self.handlers.waiting and is_the_program_s(error):
                raise
            self._shut(error)
        finally:
            self._inside.discard(me)
            if not self._inside and sys.getrecursionlimit() == self._limits[1]:
                try:
                    sys.setrecursionlimit(self._limits[0])
                    self._limits = (0, 0)
                except RecursionError:
                    pass  # so deep that a later one does it
            if me == self.main:
                self.handlers.go_on()
        owed, self.owed = self.owed, None
        if owed is not None:
            raise owed

    def failed(self, error: Exception) -> None:
        """Where no handler waited: what one has raised goes on, and an error of ours does not."""
        if is_the_program_s(error):
            raise error
        self.run(self._shut, error)

    def forked(self) -> None:
        """In a child: it has one thread, and its signals are its own."""
        self.main, self.handlers = get_ident(), Handlers()
        self._inside.clear()

    def _shut(self, error: Exception) -> None:
        """Take us out of the program."""
        if self.is_shut:
            return
        self.is_shut = True
        reason = str(error) if isinstance(error, OSError) else repr(error)
        why = "this process runs without profiling from here on: %s" % reason
        complain(why)
        while self.undo:
            try:
                self.undo.pop()(why)
            except Exception:
                pass


#: This process's.
entry = Entry()
