"""The ways into the user's program: after an import, at a step, around a function, in a forked
child, and at its end. What goes wrong behind them does not reach the training.

Here, and nowhere behind, everything is caught: then our hooks are taken out, one line says so, and
the training goes on.

Python calls a program's signal handlers wherever its main thread is, and what a handler raises (a
preemption, a time-out) is for the training. So the handlers wait while we act, but not at a step,
which takes half a microsecond: what they raise there goes through.
"""

from __future__ import annotations

# `signal` makes an enum of each, at its import too.
import _signal  # type: ignore[import-not-found]
import contextlib
import functools
import operator
import os
import sys
from _thread import get_ident
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ..contracts.messages import complain

Action = Callable[[ModuleType], None]
Handler = Callable[[int, Any], Any]

#: all code of ours is below
_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
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

    # more than any system's `struct sigaction`
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(512)
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
    code, calling = last.tb_frame.f_code, ("called_later", "call_those_that_came")
    return not code.co_filename.startswith(_FOLDER) or code.co_name in calling


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
            with contextlib.suppress(Exception):
                self.undo.pop()(why)


#: This process's.
entry = Entry()


class AfterImport:
    """A finder that lets the others find, and acts after the import."""

    def __init__(self, actions: Dict[str, Action]) -> None:
        self.actions = actions

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Wrap the loader of a module that an action waits for; None for every other."""
        if fullname not in self.actions or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        finders = (finder for finder in later if hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec: Any = next((spec for spec in specs if spec is not None), None)
        if not hasattr(getattr(spec, "loader", None), "exec_module"):
            return None
        # Whoever asks for a spec need not import the module.
        spec.loader = _Acting(spec.loader, lambda module: self.act(fullname, module))
        return spec

    def act(self, name: str, module: ModuleType) -> None:
        """The module `name` has been imported; the last one ends the finding."""
        action = self.actions.pop(name, None)
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)
        if action is not None:
            action(module)


class _Acting:
    """A module's own loader, and the action after it."""

    def __init__(self, loader: Any, action: Action) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if we had never been there: inspect and pickle ask its loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        entry.run(self._action, module)


def after_import(actions: Dict[str, Action]) -> None:
    """Run each action once its module has been imported, at once where it already is."""
    waiting = {name: act for name, act in actions.items() if sys.modules.get(name) is None}
    for name, act in actions.items():
        if name not in waiting:
            act(sys.modules[name])
    if waiting:
        finder = AfterImport(waiting)
        sys.meta_path.insert(0, finder)
        entry.undo.append(lambda why: finder.actions.clear())


def wrap(
    module: ModuleType,
    dotted: str,
    after: Optional[Callable[[], None]],
    before: Optional[Callable[[], None]] = None,
    lets_wait: bool = True,
) -> None:
    """Call `after` whenever the function `dotted` of `module` returns, and `before` before it.

    `dotted` is `Trainer.step` or `step`. `lets_wait`: the program's signal handlers, see `Entry`;
    else both catch what goes wrong by themselves. Raises AttributeError where the module has none.
    """
    outer, _, name = dotted.rpartition(".")
    owner: Any = operator.attrgetter(outer)(module) if outer else module
    function, kind = getattr(owner, name), _kind(owner, name)
    if kind is classmethod:
        function = function.__func__
    run: Callable[..., Any] = entry.run if lets_wait else lambda act: act()

    def stepping(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            run(before)
        result = function(*args, **kwargs)
        if after is not None:
            run(after)
        return result

    functools.update_wrapper(stepping, function)
    setattr(owner, name, stepping if kind is None else kind(stepping))


def _kind(owner: Any, name: str) -> Optional[Callable[[Any], Any]]:
    """What a class has to keep a function in for it to be called as the one of this name is."""
    if not isinstance(owner, type):
        return None
    member = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)
    if isinstance(member, classmethod):
        return classmethod
    binds = hasattr(member, "__get__") and not isinstance(member, staticmethod)
    return None if binds else staticmethod


class _Stepped(ModuleType):
    """Setting an attribute counts: of a module the compiler does not ask how that is done."""


def after_step(stepped: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
    """A post hook of optimizers that calls `stepped(optimizer)`, in compiled programs as well.

    A program that compiles its optimizer has torch.compile trace the hook with the step. What it
    finds there is one attribute that is set, of which it makes one instruction behind the compiled
    step, and no break. The setting, at each run of that step, is what counts.
    """
    target: Any = _Stepped("clusterprof_stepped")

    def step_post_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            target.optimizer = optimizer
        else:
            stepped(optimizer)

    def compiler_can_be_asked(module: ModuleType) -> None:
        global _compiling
        _compiling = getattr(module, "is_dynamo_compiling", bool)

    def compiler_is_there(dynamo: ModuleType) -> None:
        # Nothing below it is to be compiled either.
        count = dynamo.disable(lambda module, name, optimizer: stepped(optimizer))
        _Stepped.__setattr__ = count  # type: ignore[method-assign]

    after_import({"torch.compiler": compiler_can_be_asked, "torch._dynamo": compiler_is_there})
    return step_post_hook


#: torch's `is_dynamo_compiling`, which is true for the compiler alone; without a compiler, False
_compiling: Callable[[], bool] = bool
