"""What clusterprof prints: messages on stderr, so that stdout has results only.

All of it loses here what would control a terminal. Printing a message never fails, since the job
comes first; printing a result may (`Unwritable`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TextIO, cast

from clusterprof.agent.contracts import descriptors, messages
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.errors import ClusterprofError

#: `--color`: auto, always or never
colour = "auto"


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour what is printed on `stream`: as `--color` or else the environment says, or
    for people only, on a terminal that is not a dumb one.
    """
    if colour != "auto":
        return colour == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def say(line: str, *more: str) -> None:
    """Print one message, with details in the lines below: no part of it makes a line of its own."""
    _write("clusterprof: " + "\n  ".join(map(messages.line, (line, *more))) + "\n")


def error(line: str, *more: str) -> None:
    """Print an error, with details in the lines below."""
    say(f"error: {line}", *more)


def show(line: str) -> None:
    """Print one line of a result."""
    print(messages.line(line), flush=True)


def command(argv: Sequence[str], prefix: str = "") -> None:
    """Print a command that is about to run, to be pasted; secrets are masked."""
    from clusterprof import masking

    _write(f"+ {prefix}{shlex.join(masking.words(argv))}\n")


def _write(text: str) -> None:
    """Write it in one piece: lines of two processes must not mix."""
    if _progress is not None:
        _progress.clear()
    sys.stderr.write(text)
    sys.stderr.flush()


#: Work that takes less is done before one would look at its progress.
SOON_S = 1.0
#: Where stderr is not a terminal, work that takes longer is said once.
LONG_S = 10.0


class Progress:
    """What long work is doing, on stderr: on a terminal a line that is drawn over, else one line.

    As a context it ends the line; an error or a message stands where it was.
    """

    def __init__(self, clock: Clock = REAL) -> None:
        import threading

        self._what = "working"
        self._clock = clock
        self._began = clock.now()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._drawn = False
        self._terminal = os.isatty(2) and os.environ.get("TERM") != "dumb"
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> Progress:  # noqa: PYI034 - typing.Self is Python 3.11's
        global _progress
        _progress = self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _progress
        _progress = None
        self._over.set()
        self._thread.join()
        self.clear()

    def now(self, activity: str) -> None:
        """Say what is being done from now on."""
        self._what = activity

    def clear(self) -> None:
        """Take the line away, until it is drawn again."""
        with self._lock:
            if self._drawn:
                self._drawn = False
                self._raw("\r\x1b[K")

    def _draw(self) -> None:
        wait_s = SOON_S if self._terminal else LONG_S
        while not self._clock.happens(self._over, wait_s):
            if not self._terminal:
                say(self._what)
                return
            wait_s = 0.2
            self._show()

    def _show(self) -> None:
        age = f"{self._clock.now() - self._began:.0f} s"
        with self._lock:
            columns = shutil.get_terminal_size((80, 24)).columns
            text = messages.neutral(f"clusterprof: {self._what} … {age}")[: columns - 1]
            self._drawn = True
            self._raw(f"\r{text}\x1b[K")

    def _raw(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))


_progress: Progress | None = None


def progress(activity: str) -> None:
    """Say what long work does from now on, where somebody shows that (`Progress`)."""
    if _progress is not None:
        _progress.now(activity)


def width(elsewhere: int) -> int:
    """How many columns stdout has, 60 at least; `elsewhere` where it is not a terminal."""
    return max(60, shutil.get_terminal_size((elsewhere, 24)).columns)


#: what is to be copied
_COMMAND = re.compile(r"clusterprof \w+( -\S+)* \S+")


def wrapped(
    line: str, columns: int, indent: str = "", whole: re.Pattern[str] = _COMMAND
) -> list[str]:
    """A line in several where it is too long, but for words, and what `whole` finds.

    `indent` stands before all lines but the first. No part of it makes a line of its own.
    """
    line = messages.line(line)
    if len(line) <= columns:
        return [line]
    kept = whole.sub(lambda match: match[0].replace(" ", "\0"), line)
    parts = textwrap.wrap(
        kept, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [row.replace("\0", " ") for row in parts]


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table; the columns `right` end at one place, the others begin at one.

    No cell makes a line of its own.
    """
    rows = [[messages.line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'>' if n in right else '<'}{width}}}" for n, width in enumerate(widths)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]


def json(document: bytes) -> None:
    """A JSON document (UTF-8) on stdout."""
    with _writing():
        sys.stdout.buffer.write(messages.neutral(document.decode()).encode())
        sys.stdout.buffer.flush()


class Unwritable(ClusterprofError):  # noqa: N818 - it says what is the matter
    """A result cannot be printed."""

    def __init__(self, error: OSError) -> None:
        super().__init__("stdout cannot be written", error.strerror or str(error))
        #: the reader is gone (`| head`)
        self.unread = error.errno == errno.EPIPE


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # When it exits, Python would try again to write what could not be written.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        raise Unwritable(error) from None


class _Shown:
    """A text stream without what would control a terminal; Unwritable where it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self.as_it_is(messages.neutral(text))

    def as_it_is(self, text: str) -> int:
        """Write our own text, with our own control codes."""
        with _writing():
            return self._stream.write(text)

    def flush(self) -> None:
        with _writing():
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _Quiet(_Shown):
    """The same for the real stderr: writing never fails, and nothing is buffered."""

    def write(self, text: str) -> int:
        messages.write(2, text)
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""

    @property
    def buffer(self) -> io.RawIOBase:
        """The same for bytes, unbuffered; writing may fail."""
        return io.FileIO(2, "w", closefd=False)


def styled(page: str, codes: Iterable[str]) -> None:
    """Print a result on stdout; of all control codes only `codes`, our own, are kept."""
    parts = re.split(f"({'|'.join(map(re.escape, codes))})", page)
    shown = "".join(messages.neutral(text) if n % 2 == 0 else text for n, text in enumerate(parts))
    stream = sys.stdout
    (stream.as_it_is if isinstance(stream, _Shown) else stream.write)(shown)
    stream.flush()


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Replace Python's streams by our own.

    Closed descriptors 0 to 2 are occupied first: the next file that is opened would become the
    stream and get our messages. They stay closed for what we start (O_CLOEXEC).
    """
    descriptors.fill_streams()
    before = sys.stdout, sys.stderr
    stdout = sys.stdout or cast("TextIO", open(1, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    stderr = sys.stderr or cast("TextIO", open(2, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(stdout, io.TextIOWrapper):
        # file names that are not valid text: as they are, or else escaped
        utf8 = stdout.encoding.lower().replace("-", "") == "utf8"
        stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")
    sys.stdout = cast("TextIO", _Shown(stdout))
    real = sys.stderr is None or sys.stderr is sys.__stderr__
    sys.stderr = cast("TextIO", (_Quiet if real else _Shown)(stderr))
    try:
        yield
    finally:
        with harmless():
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def harmless() -> Iterator[None]:
    """A result that cannot be printed in here is no failure of the verb."""
    try:
        yield
    except Unwritable as error:
        if not error.unread:
            say(error.what, *error.details)
