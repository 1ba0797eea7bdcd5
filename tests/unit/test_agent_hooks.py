"""Acting after an import, without being seen."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from clusterprof.agent.rank import hooks


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hooked_package").mkdir()
    (tmp_path / "hooked_package" / "__init__.py").write_text("")
    (tmp_path / "hooked_package" / "train.py").write_text(
        "class Trainer:\n"
        "    def step(self, value):\n        return value + 1\n"
        "    @staticmethod\n    def fixed(value):\n        return value + 1\n"
        "    @classmethod\n    def common(cls, value):\n        return value + len(cls.__mro__)\n"
        "    ready = min\n"
        "class Special(Trainer):\n    pass\n"
        "def once(value):\n    'Docs.'\n    return value * 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    sys.meta_path[:] = [finder for finder in before if not isinstance(finder, hooks.AfterImport)]
    yield "hooked_package.train"
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def test_the_action_runs_once_after_the_import_and_leaves_no_finder(package: str) -> None:
    observed: list[ModuleType] = []
    hooks.after_import({package: observed.append})
    module = importlib.import_module(package)
    importlib.import_module(package)
    assert observed == [module]
    assert not any(isinstance(finder, hooks.AfterImport) for finder in sys.meta_path)


def test_two_actions_that_wait_for_one_module_both_run(package: str) -> None:
    observed: list[ModuleType] = []
    for _ in range(2):
        hooks.after_import({package: observed.append})
    module = importlib.import_module(package)
    assert observed == [module, module]


def test_looking_for_the_module_before_its_import_changes_nothing(
    package: str,
) -> None:
    observed: list[ModuleType] = []
    hooks.after_import({package: observed.append})
    assert importlib.util.find_spec(package) is not None
    assert importlib.util.find_spec(package) is not None
    assert observed == []
    assert [importlib.import_module(package)] == observed


def test_the_module_keeps_its_own_loader(package: str) -> None:
    hooks.after_import({package: lambda module: None})
    module = importlib.import_module(package)
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_module_that_is_there_already_is_acted_on_at_once(package: str) -> None:
    module = importlib.import_module(package)
    observed: list[ModuleType] = []
    hooks.after_import({package: observed.append})
    assert observed == [module]


def test_a_module_that_does_not_exist_stays_an_import_error(package: str) -> None:
    hooks.after_import({"hooked_package.missing": lambda module: None})
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_package.missing")


@pytest.mark.parametrize("dotted", ["once", "Trainer.step"])
def test_a_wrapped_function_does_what_it_did_and_is_counted(package: str, dotted: str) -> None:
    module = importlib.import_module(package)
    calls: list[int] = []
    hooks.wrap(module, dotted, lambda: calls.append(1))
    assert module.once(4) == 8
    assert module.Trainer().step(4) == 5
    assert calls == [1]
    assert module.once.__name__ == "once"
    assert module.once.__doc__ == "Docs."


def test_a_function_that_the_module_has_not_is_an_attribute_error(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError):
        hooks.wrap(module, "Trainer.missing", lambda: None)


@pytest.mark.parametrize("owner", ["Trainer", "Special"])
@pytest.mark.parametrize("name", ["step", "fixed", "common", "ready"])
def test_a_class_keeps_what_kind_of_function_it_has(package: str, owner: str, name: str) -> None:
    module = importlib.import_module(package)
    arguments = (4, 9) if name == "ready" else (4,)

    def results() -> list[object]:
        found = [getattr(each(), name)(*arguments) for each in (module.Trainer, module.Special)]
        if name != "step":
            found += [getattr(each, name)(*arguments) for each in (module.Trainer, module.Special)]
        return found

    before, calls = results(), []
    hooks.wrap(module, f"{owner}.{name}", lambda: calls.append(1))
    assert results() == before
    assert len(calls) == len(before) // (1 if owner == "Trainer" else 2)
