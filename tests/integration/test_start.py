"""What loads when: no one should wait for pandas to be told how to spell an option."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.command import Completed

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "clusterprof" / "agent"
HEAVY = {
    "adbc_driver_sqlite",
    "fabric",
    "jinja2",
    "mpi4py",
    "multiprocessing",
    "numpy",
    "orjson",
    "pandas",
    "plotly",
    "pyarrow",
    "rich",
    "shtab",
    "sqlite3",
    "torch",
}
_SHOW_LOADED = """
import json, sys
from clusterprof.cli.main import main
sys.argv[0] = "clusterprof"
status = "none"
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print("LOADED", json.dumps([status or 0, sorted({name.split(".")[0] for name in sys.modules})]))
"""

Run = Callable[..., Completed]


def _loaded(run_command: Run, *argv: str) -> set[str]:
    done = run_command([sys.executable, "-c", _SHOW_LOADED, *argv])
    assert "LOADED" in done.stdout, done
    status, modules = json.loads(done.stdout.rpartition("LOADED ")[2])
    assert status == 0, done
    return set(modules)


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["torchrun", "--help"], ["merge", "--help"]]
)
def test_help_loads_nothing_heavy(run_command: Run, argv: list[str]) -> None:
    assert _loaded(run_command, *argv) & HEAVY == set()


def test_the_list_of_verbs_loads_neither_a_launcher_nor_what_an_error_takes(
    run_command: Run,
) -> None:
    small = {"dataclasses", "difflib", "inspect", "logging", "pathlib", "pkgutil", "socket"}
    assert _loaded(run_command, "--help") & small == set()


def test_the_agent_loads_no_more_than_it_uses_in_a_rank_that_is_not_chosen(
    run_command: Run, workdir: Path
) -> None:
    (workdir / "run").mkdir()
    plan = {
        "schema_version": 1, "run": str(workdir / "run"), "identity": "environment",
        "selection": {"kind": "ranks", "ranks": [1]}, "window": [10, 15], "step_on": None,
        "profiler": "torch",
    }  # fmt: skip
    (workdir / "plan.json").write_text(json.dumps(plan))
    done = run_command(
        [sys.executable, "-c", "import gc, sys; print(gc.isenabled(), *sys.modules)"],
        env={"PYTHONPATH": str(AGENT / "inject"), "CLUSTERPROF_PLAN": str(workdir / "plan.json"),
             "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    )  # fmt: skip
    collects, *words = done.stdout.split()
    loaded = set(words)
    assert collects == "True"
    assert "_clusterprof_agent.rank.steps" in loaded
    assert loaded & (HEAVY | {"array", "glob", "pathlib", "socket", "subprocess"}) == set()


def test_a_merge_loads_no_pandas(run_command: Run) -> None:
    """Which pyarrow looks for when it is given a list."""
    recording = ROOT / "tests" / "data" / "recordings" / "nsys-2024.2" / "pipeline"
    code = (
        "import sys; from clusterprof.cli.main import main; main();"
        " print('pandas' in sys.modules, 'pyarrow' in sys.modules)"
    )
    done = run_command([sys.executable, "-c", code, "merge", str(recording)])
    assert done.stdout.splitlines()[-1:] == ["False True"], done


def test_importing_the_package_in_a_training_program_loads_nothing_heavy(run_command: Run) -> None:
    code = "import sys, clusterprof; clusterprof.step(); print(*sys.modules)"
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 0, done
    assert set(done.stdout.split()) & HEAVY == set()


def test_the_agent_loads_nothing_heavy_in_an_interpreter_that_is_no_rank(
    run_command: Run, workdir: Path
) -> None:
    done = run_command(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        env={"PYTHONPATH": str(AGENT / "inject")},
    )
    assert done.returncode == 0, done
    assert set(done.stdout.split()) & (HEAVY | {"asyncio", "pathlib", "socket"}) == set()


def _interpreters(oldest: int = 10) -> Iterator[Path]:
    """Each CPython from 3.`oldest` on this machine: beside this one, on PATH, or pyenv's."""
    yield Path(sys.executable)
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += sorted(
        (Path(os.environ.get("PYENV_ROOT", "/nonexistent")) / "versions").glob("*/bin")
    )
    observed = {sys.version_info[:2]}
    for minor in range(oldest, 15):
        for folder in folders:
            program = folder / f"python3.{minor}"
            # pyenv's shims name versions that are not chosen here, and only complain.
            if program.is_file() and folder.name != "shims" and (3, minor) not in observed:
                observed.add((3, minor))
                yield program


@pytest.mark.parametrize("python", list(_interpreters(8)), ids=lambda path: path.name)
def test_the_agent_starts_under_every_interpreter_of_this_machine(
    run_command: Run, workdir: Path, python: Path
) -> None:
    # From 3.8 on: a container has the Python that it has, and needs no clusterprof.
    # -W error: a deprecation today is a rank that does not start with the next Python.
    # -S, then the path by hand: the interpreter's own site-packages are none of our business.
    names = sorted(
        ".".join(path.relative_to(AGENT).with_suffix("").parts)
        for path in AGENT.rglob("*.py")
        if path.stem not in {"__init__", "__main__", "sitecustomize"}
    )
    code = (
        "import importlib, importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_clusterprof_agent', sys.argv[1],"
        " submodule_search_locations=[sys.argv[2]])\n"
        "package = importlib.util.module_from_spec(spec)\n"
        "sys.modules['_clusterprof_agent'] = package\n"
        "spec.loader.exec_module(package)\n"
        "for name in sys.argv[3:]:\n"
        "    importlib.import_module('_clusterprof_agent.' + name)\n"
        "print('imported', len(sys.argv[3:]))\n"
    )
    done = run_command(
        [python, "-S", "-W", "error", "-c", code, AGENT / "__init__.py", AGENT, *names],
        env={"PYTHONPATH": None, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done
    assert done.stdout.split() == ["imported", str(len(names))]


@pytest.mark.parametrize("python", list(_interpreters()), ids=lambda path: path.name)
def test_the_whole_package_compiles_under_every_interpreter_of_this_machine(
    run_command: Run, workdir: Path, python: Path
) -> None:
    code = (
        "import pathlib, sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('**/*.py')):\n"
        "    compile(path.read_bytes(), str(path), 'exec')\n"
    )
    for folder in ("clusterprof", "launchers", "examples"):
        done = run_command([python, "-S", "-c", code, ROOT / folder])
        assert done.returncode == 0, done
