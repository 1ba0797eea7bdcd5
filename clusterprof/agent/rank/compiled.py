"""The step hook of programs that compile their optimizer: torch.compile traces it with the step.

What it finds there is one attribute that is set, of which it makes one instruction behind the
compiled step, and no break. The setting, at each run of that step, is what counts.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable

from . import hooks

Hook = Callable[[Any, Any, Any], None]


class _Stepped(ModuleType):
    """Setting an attribute counts: of a module the compiler does not ask how that is done."""


def _never() -> bool:
    return False


#: torch's `is_dynamo_compiling`, which is true for the compiler alone
_compiling: Callable[[], bool] = _never


def hook(stepped: Callable[[Any], None]) -> Hook:
    """A post hook of optimizers that calls `stepped(optimizer)`, in compiled programs as well."""
    target = _Stepped("clusterprof_stepped")

    def step_post_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            target.optimizer = optimizer  # type: ignore[attr-defined]
        else:
            stepped(optimizer)

    def compiler_can_be_asked(module: ModuleType) -> None:
        global _compiling
        _compiling = getattr(module, "is_dynamo_compiling", _never)

    def compiler_is_there(dynamo: ModuleType) -> None:
        # Nothing below it is to be compiled either.
        count = dynamo.disable(lambda module, name, optimizer: stepped(optimizer))
        _Stepped.__setattr__ = count  # type: ignore[method-assign]

    hooks.after_import(
        {"torch.compiler": compiler_can_be_asked, "torch._dynamo": compiler_is_there}
    )
    return step_post_hook
