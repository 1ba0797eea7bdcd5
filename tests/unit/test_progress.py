"""Long work says on stderr what it does, and leaves nothing of that behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from lab.command import PATIENCE_S

from clusterprof import console
from clusterprof.cli import main


class Stderr:
    """Descriptor 2, which may be taken for a terminal."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd, self._patch, self._text = capfd, monkeypatch, ""

    def terminal(self, there: bool) -> None:
        self._patch.setattr(os, "isatty", lambda descriptor: there)

    def text(self) -> str:
        self._text += self._capfd.readouterr().err
        return self._text

    def comes(self, fits: Callable[[str], bool]) -> str:
        until = time.monotonic() + PATIENCE_S
        while not fits(self.text()):
            assert time.monotonic() < until
            time.sleep(0.005)
        return self.text()


@pytest.fixture
def stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Stderr:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "_DRAW_S", 0.005)
    return Stderr(capfd, monkeypatch)


def screen(text: str) -> str:
    """What stands on a terminal that got this text."""
    lines = [""]
    for part in text.replace("\x1b[K", "").split("\n"):
        lines[-1] = part.split("\r")[-1]
        lines.append("")
    return "\n".join(lines[:-1])


def test_on_a_terminal_one_line_is_drawn_over_and_taken_away(
    stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr.terminal(True)
    monkeypatch.setattr(console, "SOON_S", 0.005)
    with console.Progress():
        console.progress("reading reports: 1 of 8\x1b[2J")
        stderr.comes(lambda text: "1 of 8" in text)
        console.progress("aligning the clocks")
        stderr.comes(lambda text: "clocks" in text)
        console.say("a message")
    text = stderr.text()
    assert "\x1b[2J" not in text
    assert screen(text).rstrip() == "clusterprof: a message"
    assert text.endswith(("\x1b[K", "a message\n"))


def test_work_that_is_done_soon_says_nothing(stderr: Stderr) -> None:
    for terminal in (True, False):
        stderr.terminal(terminal)
        with console.Progress():
            console.progress("reading reports")
    console.progress("shown nowhere")
    assert stderr.text() == ""


def test_without_a_terminal_long_work_says_one_line(
    stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr.terminal(False)
    monkeypatch.setattr(console, "LONG_S", 0.005)
    with console.Progress() as progress:
        progress.now("reading 64 reports")
        stderr.comes(lambda text: text.endswith("\n"))
        progress._thread.join(PATIENCE_S)
        progress.now("aligning the clocks")
    assert stderr.text().count("\n") == 1
    assert stderr.text().startswith("clusterprof: ")


def test_ctrl_c_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "verb_module", lambda verb: SimpleNamespace(main=interrupted))
    assert main.main(["merge", "x"]) == 130
    assert capsys.readouterr() == ("", "clusterprof: interrupted\n")
