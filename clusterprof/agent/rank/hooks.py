"""Act when a module has been imported, without importing it: the way into the user's program."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Optional

Action = Callable[[ModuleType], None]


class AfterImport:
    """A finder that finds nothing itself: it lets the others find and acts after the import."""

    def __init__(self, actions: Dict[str, Action]) -> None:
        self.actions = actions
        self._asking = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Wrap the loader of a module that an action waits for; None for every other."""
        if fullname not in self.actions or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        acting: Any = _Acting(spec.loader, self.actions.pop(fullname))
        spec.loader = acting
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)
        return spec


class _Acting:
    """A module's own loader, and the action after it."""

    def __init__(self, loader: Any, action: Action) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Optional[ModuleType]:
        module: Optional[ModuleType] = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if we had never been there: inspect and pickle ask its loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)


def after_import(actions: Dict[str, Action]) -> None:
    """Run each action once its module has been imported, at once where it already is."""
    waiting = {}
    for name, action in actions.items():
        module = sys.modules.get(name)
        if module is not None:
            action(module)
        else:
            waiting[name] = action
    if waiting:
        sys.meta_path.insert(0, AfterImport(waiting))


def wrap(
    module: ModuleType,
    dotted: str,
    after: Optional[Callable[[], None]],
    before: Optional[Callable[[], None]] = None,
) -> None:
    """Call `after` whenever the function `dotted` of `module` returns (`Trainer.step`, `step`).

    `before` is called before it.

    Raises AttributeError where the module has no such function.
    """
    *outer, name = dotted.split(".")
    owner: Any = module
    for part in outer:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    def stepping(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = function(*args, **kwargs)
        if after is not None:
            after()
        return result

    stepping.__dict__.update(getattr(function, "__dict__", {}))
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(stepping, attribute, getattr(function, attribute, None))
    stepping.__wrapped__ = function  # type: ignore[attr-defined]
    setattr(owner, name, stepping)
