"""What clusterprof prints: narration on stderr, so that stdout carries results only.

All of it passes through here, where it loses what a terminal would obey. Narration never fails:
the job that it tells of comes first. Results may, for those whose whole purpose they are.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, cast

from clusterprof import masking
from clusterprof.agent.contracts import descriptors, messages
from clusterprof.errors import ClusterprofError


def say(line: str) -> None:
    """One line of narration."""
    _write(f"clusterprof: {line}\n")


def error(what: object, *more: str) -> None:
    """What went wrong, and more of it in lines below."""
    say("\n  ".join([f"error: {what}", *more]))


def command(argv: Sequence[str], prefix: str = "") -> None:
    """A command that is about to run, to be pasted; what looks like a secret is masked."""
    _write(f"+ {prefix}{shlex.join(masking.words(argv))}\n")


def _write(text: str) -> None:
    """In one piece: lines of two processes must not mix."""
    sys.stderr.write(text)
    sys.stderr.flush()


def json(document: bytes) -> None:
    """A JSON document (UTF-8) on stdout."""
    with _writing():
        sys.stdout.buffer.write(messages.neutral(document.decode()).encode())
        sys.stdout.buffer.flush()


class Unwritable(ClusterprofError):  # noqa: N818 - it says what is the matter
    """A result cannot be printed."""

    def __init__(self, error: OSError) -> None:
        super().__init__("stdout cannot be written", error.strerror or str(error))
        #: nobody reads any more (`| head`)
        self.unread = error.errno == errno.EPIPE


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # At its end Python would try once more to write what could not be written.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        raise Unwritable(error) from None


class _Shown:
    """A stream of text that loses what a terminal would obey; bytes pass as they are."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it, neutral. Raises Unwritable."""
        return self.as_it_is(messages.neutral(text))

    def as_it_is(self, text: str) -> int:
        """Write it as it is: of our own making, with our own codes. Raises Unwritable."""
        with _writing():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what is held back. Raises Unwritable."""
        with _writing():
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _Quiet(_Shown):
    """The same of the real stderr: writing never fails, and nothing waits to be written later."""

    def write(self, text: str) -> int:
        messages.write(2, text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def buffer(self) -> io.RawIOBase:
        """The same for bytes, which may fail: it holds nothing back either."""
        return io.FileIO(2, "w", closefd=False)


def styled(page: str, codes: Iterable[str]) -> None:
    """A result on stdout in which these codes, which are ours, are obeyed and no others."""
    parts = re.split(f"({'|'.join(map(re.escape, codes))})", page)
    shown = "".join(messages.neutral(part) if n % 2 == 0 else part for n, part in enumerate(parts))
    stream = sys.stdout
    (stream.as_it_is if isinstance(stream, _Shown) else stream.write)(shown)
    stream.flush()


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Our own streams in the place of Python's, for all that is printed.

    Descriptors 0 to 2 that are closed are taken first: the next file that anybody opens would be
    the stream, and get our words. They stay closed for whatever we start (O_CLOEXEC).
    """
    descriptors.fill_streams()
    before = sys.stdout, sys.stderr
    stdout = sys.stdout or cast("TextIO", open(1, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    stderr = sys.stderr or cast("TextIO", open(2, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    _any_name(stdout)
    sys.stdout = cast("TextIO", _Shown(stdout))
    real = sys.stderr is None or sys.stderr is sys.__stderr__
    sys.stderr = cast("TextIO", (_Quiet if real else _Shown)(stderr))
    try:
        yield
    finally:
        with harmless():
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _any_name(stream: object) -> None:
    """Let a stream take file names whose bytes are no text: as they are, or else as escapes."""
    if isinstance(stream, io.TextIOWrapper):
        utf8 = stream.encoding.lower().replace("-", "") == "utf8"
        stream.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


@contextlib.contextmanager
def harmless() -> Iterator[None]:
    """Whatever becomes of a result that is printed in here, it is no failure of the verb's."""
    try:
        yield
    except Unwritable as error:
        if not error.unread:
            say(str(error))
