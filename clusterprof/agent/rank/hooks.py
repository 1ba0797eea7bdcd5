"""The ways into the user's program: act when it has imported a module, or has called a function."""

from __future__ import annotations

import functools
import operator
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from .entry import entry

Action = Callable[[ModuleType], None]


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
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        # Whoever asks for a spec need not import the module.
        acting: Any = _Acting(spec.loader, lambda module: self.act(fullname, module))
        spec.loader = acting
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

    `dotted` is `Trainer.step` or `step`. `lets_wait`: the program's signal handlers, see `entry`;
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
    for base in getattr(owner, "__mro__", ()) if isinstance(owner, type) else ():
        if name in vars(base):
            member = vars(base)[name]
            if isinstance(member, classmethod):
                return classmethod
            binds = hasattr(member, "__get__") and not isinstance(member, staticmethod)
            return None if binds else staticmethod
    return staticmethod if isinstance(owner, type) else None


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
