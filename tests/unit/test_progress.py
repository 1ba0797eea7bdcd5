"""Long work says on stderr what it does, and leaves nothing of that behind."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
from lab.clock import ManualClock

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


@pytest.fixture
def stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Stderr:
    monkeypatch.setenv("TERM", "xterm")
    return Stderr(capfd, monkeypatch)


def screen(text: str) -> str:
    """What stands on a terminal that got this text."""
    lines = [""]
    for part in text.replace("\x1b[K", "").split("\n"):
        lines[-1] = part.split("\r")[-1]
        lines.append("")
    return "\n".join(lines[:-1])


class Work:
    """Long work, that the thread which draws looks at; here that is the test's own."""

    def __init__(self, clock: ManualClock, stderr: Stderr) -> None:
        self.clock, self.stderr = clock, stderr
        self.over = threading.Event()
        self.progress = console.Progress(clock)
        self.progress._over = self.over
        self.shown: list[str] = []

    def until(self, in_s: float, what: str) -> None:
        """From then on it does something else."""
        self.clock.plan(in_s, lambda: self.goes_on(what))

    def goes_on(self, what: str) -> None:
        self.shown.append(self.stderr.text())
        self.progress.now(what)

    def ends(self, in_s: float) -> None:
        """Draw until then, and take away what is left."""
        self.clock.plan(in_s, self.over.set)
        self.progress._draw()
        self.shown.append(self.stderr.text())
        self.progress.clear()


def test_on_a_terminal_one_line_is_drawn_over_and_taken_away(
    stderr: Stderr, clock: ManualClock
) -> None:
    stderr.terminal(True)
    work = Work(clock, stderr)
    work.progress.now("reading reports: 1 of 8\x1b[2J")
    work.until(console.SOON_S - 0.01, "reading reports: 2 of 8\x1b[2J")
    work.until(console.SOON_S + 0.01, "aligning the clocks")
    work.ends(3.7)
    assert work.shown[0] == ""
    assert "2 of 8\\u001b[2J … 1 s" in work.shown[1]
    assert "aligning the clocks … 2 s" in work.shown[2]
    assert screen(stderr.text()).rstrip() == ""
    assert stderr.text().endswith("\x1b[K")


def test_a_message_stands_where_the_line_was(stderr: Stderr) -> None:
    stderr.terminal(True)
    with console.Progress() as progress:
        progress.now("reading reports: 1 of 8\x1b[2J")
        progress._show()
        console.say("a message")
    text = stderr.text()
    assert "\x1b[2J" not in text
    assert "1 of 8" in text
    assert screen(text).rstrip() == "clusterprof: a message"
    assert text.endswith(("\x1b[K", "a message\n"))


def test_work_that_is_done_soon_says_nothing(stderr: Stderr) -> None:
    for terminal in (True, False):
        stderr.terminal(terminal)
        with console.Progress():
            console.progress("reading reports")
    console.progress("shown nowhere")
    assert stderr.text() == ""


def test_without_a_terminal_long_work_says_one_line(stderr: Stderr, clock: ManualClock) -> None:
    stderr.terminal(False)
    work = Work(clock, stderr)
    work.until(console.LONG_S - 0.01, "reading 64 reports")
    work.until(console.LONG_S + 0.01, "aligning the clocks")
    work.ends(60)
    assert (work.shown[0], "64 reports" in stderr.text()) == ("", True)
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
