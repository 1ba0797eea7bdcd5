"""Ctrl-C while the command line starts: at any moment a message and a status, no traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import tomllib
from lab.command import Completed

Run = Callable[..., Completed]
ROOT = Path(__file__).resolve().parents[2]
#: interrupts its own process when it begins to import, or has ended, what is named
_AT = """
import atexit, os, signal, sys
moment = os.environ["INTERRUPT_AT"]
def interrupt(event=None, arguments=()):
    global moment
    if event is None or event == "import" and arguments[0] == moment:
        moment = None
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
if moment == "end":
    atexit.register(interrupt)
"""


@pytest.fixture
def hooked(workdir: Path) -> dict[str, str]:
    (workdir / "sitecustomize.py").write_text(_AT)
    return {"PYTHONPATH": str(workdir)}


@pytest.fixture(autouse=True)
def _heeded() -> Iterator[None]:
    """Tests in the background of a script are started with interrupts ignored, and hand that on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(run_command: Run, environ: dict[str, str], moment: str, *words: str) -> Completed:
    return run_command(
        [sys.executable, "-m", "clusterprof", *words], env={**environ, "INTERRUPT_AT": moment}
    )


@pytest.mark.parametrize(
    "moment",
    ["clusterprof.cli", "argparse", "clusterprof.cli.main",
     "clusterprof.analysis.findings.registry", "numpy", "pyarrow", "end"],
)  # fmt: skip
def test_an_interrupt_while_python_imports_ends_in_words(
    run_command: Run, hooked: dict[str, str], moment: str
) -> None:
    done = interrupted(run_command, hooked, moment, "explain")
    assert (done.returncode, done.stderr) == (130, "clusterprof: interrupted\n"), done


def test_where_the_shell_ignores_interrupts_they_stay_ignored(
    run_command: Run, hooked: dict[str, str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `clusterprof ... &` in a script
    try:
        done = interrupted(run_command, hooked, "clusterprof.cli.main", "--version")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (0, ""), done


def test_the_installed_command_is_what_is_tested_here() -> None:
    (place,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    module, _, name = place.partition(":")
    run: Callable[[], int] = getattr(import_module(module), name)
    assert run.__module__ == "clusterprof.__main__"
