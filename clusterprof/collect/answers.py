"""A host's answers: the one place where they are read, into typed values or a HostError.

A host may run any program. It may answer with anything, without end, and for other hosts; none of
that may be more than this host's own failure, and nothing of it reaches a terminal unescaped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clusterprof.agent.contracts import files, paths
from clusterprof.errors import HostError

#: The longest answer, in bytes: a listing of some 25,000 files.
ANSWER_B = 4 << 20
#: Limit of all files from one host; 64 GB, while a capture ends at 1 GB per rank by default.
FETCH_MB = "CLUSTERPROF_MAX_FETCH_MB"
#: `00008/state.json`, and of later attempts `attempt-2/00008/state.json`: written in one way only.
_PATH = re.compile(
    r"(?:attempt-([2-9]|[1-9][0-9]{1,5})/)?([0-9]{5}|[1-9][0-9]{5,8})/"
    r"((?:reduced/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,99})"
)

#: why nothing is fetched from a host
UNLISTED = "it could not list its ranks' files"


def is_word(value: Any) -> bool:
    """Whether it is a text, not empty, that moves no cursor and is no longer than Linux' paths."""
    return isinstance(value, str) and 0 < len(value) <= 4096 and value.isprintable()


#: the members of a host's description of itself, and of a file that it offers
_DESCRIPTION = {
    "host": is_word, "machine": (lambda value: value == "", is_word),
    "temporary": lambda value: is_word(value) and value.startswith("/"),
    "folder": bool, "program": bool, "nsys": bool, "other_nsys": (None, is_word),
}  # fmt: skip
_OFFERED = {
    "size": range((1 << 50) + 1),
    "sha256": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value),
}


@dataclass(frozen=True)
class Description:
    """A host's description of itself: see `clusterprof.agent.remote.host.look`."""

    host: str
    #: what distinguishes one running kernel from another; "" where unknown
    machine: str = ""
    temporary: str = ""
    #: whether these are there
    folder: bool = False
    program: bool = False
    nsys: bool = False
    #: where another nsys is
    other_nsys: str | None = None
    #: one that is free
    port: int | None = None


@dataclass(frozen=True)
class Offered:
    """A file that a host has for us."""

    attempt: int
    rank: int
    name: str
    size: int
    sha256: str

    @property
    def path(self) -> str:
        """Where it is, below our folder there and below the run directory here."""
        return f"{paths.rank_folder(paths.attempt_folder('', self.attempt), self.rank)}/{self.name}"


def plain(text: str, longest: int = 200) -> str:
    """A text from another host for one line of a terminal: nothing in it moves the cursor."""
    short = text if len(text) <= longest else text[:longest] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def last_printed(stderr: bytes) -> str:
    """The last line that a program printed, for a line of a terminal; "" for nothing."""
    return plain(stderr.decode(errors="replace").strip().rpartition("\n")[2])


def last_line(answer: bytes) -> Any:
    """The JSON in an answer's last line, since a login shell may greet before it; else None."""
    try:
        return json.loads(answer.strip().rpartition(b"\n")[2].decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def unfit(document: Mapping[str, Any], form: Mapping[str, Any], whose: str = "") -> str:
    """Which member does not have its form (`files.fits`), and what it is; "" where all have."""
    for name, member_form in form.items():
        if not files.fits(document.get(name), member_form):
            given = _shown(document[name]) if name in document else "missing"
            return f"{name}{whose} is {given}"
    return ""


def description(answer: bytes, port: int | None) -> Description | None:
    """A host's description of itself; None where the answer is none. Raises HostError.

    `port` is the one that was requested, if any: the host may offer another that is free.
    """
    document = last_line(answer)
    if not isinstance(document, dict):
        return None
    form = _DESCRIPTION if port is None else {**_DESCRIPTION, "port": range(1, 65536)}
    if wrong := unfit(document, form):
        raise HostError(f"its answer is invalid: {wrong}")
    members: dict[str, Any] = {name: document.get(name) for name in form}
    return Description(**members)


class Listing(NamedTuple):
    """The files that a host has for us, and what went wrong."""

    files: Sequence[Offered] = ()
    problems: Sequence[str] = ()

    @property
    def claims(self) -> set[tuple[int, int]]:
        """Of which attempts and ranks."""
        return {(file.attempt, file.rank) for file in self.files}


def offered(answer: bytes) -> Listing:
    """The files that a host has for us, states last, and what is wrong with the others.

    States refer to the other files, which are here by then. Raises HostError where the answer is no
    listing, or one of more than the limit, and while the host's job still runs.
    """
    document = last_line(answer)
    if document == "running":
        raise HostError("its job still runs")
    if not isinstance(document, list):
        raise HostError(UNLISTED)
    files: dict[str, Offered] = {}
    problems = []
    for entry in document:
        try:
            file = _offered(entry)
        except HostError as error:
            problems.append(error.what)
            continue
        if files.setdefault(file.path, file) != file:
            problems.append(f"it offers two files as {file.path}")
    limit_mb = os.environ.get(FETCH_MB, "64000")
    if not re.fullmatch("[0-9]{1,9}", limit_mb):
        raise HostError(f"{FETCH_MB}={plain(limit_mb, 40)} is not a number of megabytes")
    size = sum(file.size for file in files.values())
    if size > int(limit_mb) * 1_000_000:
        limit = f"at most {int(limit_mb)} MB are fetched: set {FETCH_MB} to allow more"
        raise HostError(f"it offers {size / 1e6:.0f} MB, but {limit}")
    return Listing(sorted(files.values(), key=lambda file: file.name == paths.STATE), problems)


def _offered(entry: Any) -> Offered:
    """One line of a listing. Raises HostError."""
    if not isinstance(entry, dict):
        raise HostError(f"it offers {_shown(entry)}, which is not a file")
    path = entry.get("path")
    match = _PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise HostError(f"it offers a file with an unknown name: {_shown(path)}")
    if wrong := unfit(entry, _OFFERED, f" of {path}"):
        raise HostError(f"its answer is invalid: {wrong}")
    return Offered(int(match[1] or 1), int(match[2]), match[3], entry["size"], entry["sha256"])


def _shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return plain(repr(value), 60)
