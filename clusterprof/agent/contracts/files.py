"""The one way in which clusterprof writes a file: whole or not at all, through no link.

A file is written beside its place under a random name that did not exist before (no link is
followed), is its owner's alone until it is complete, and then takes its name by rename. Of several
writers of one path the last one stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from typing import IO, Any, Iterator, Optional, Union

#: a file's path; bytes that are no UTF-8 are surrogates, as everywhere in Python
Path = Union[str, "os.PathLike[str]"]

#: the kernel's number for a user who has none here
_UNMAPPED = 65534

#: how the name of an unfinished file ends: who lists a folder leaves it out
UNFINISHED = ".tmp"


def write(path: Path, content: Union[str, bytes], mode: Optional[int] = None) -> None:
    """Write `path`, text as UTF-8; `mode` as for `new`. Raises OSError, and leaves it as it was."""
    with new(path, mode) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def write_json(
    path: Path, value: Any, indent: Optional[int] = None, mode: Optional[int] = None
) -> None:
    """Write `value` as JSON with a line end; `mode` as for `new`. Raises OSError."""
    write(path, json.dumps(value, indent=indent) + "\n", mode)


@contextlib.contextmanager
def new(path: Path, mode: Optional[int] = None) -> Iterator[IO[bytes]]:
    """A file open for writing, which is `path` once the block has ended without an exception.

    A writer that wants a path takes the file's `name`, which is to be written in place. The
    permissions are `mode` in the end, by default what the umask leaves. Raises OSError; then, and
    with every exception of the block, `path` is as it was before.
    """
    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    # A name may have 255 bytes, and the longest is one of ours as well.
    stem = os.fsdecode(os.fsencode(name)[:128])
    beside = os.path.join(folder, ".%s.%s%s" % (stem, os.urandom(8).hex(), UNFINISHED))
    final = 0o666 & ~umask() if mode is None else mode
    with open(beside, "xb", opener=_for_its_owner) as file:
        try:
            yield file
            file.flush()
            os.fchmod(file.fileno(), final)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise


def link(source: Path, path: Path) -> None:
    """Let `path`, which may be there, be another name of the file `source`. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        return os.link(source, path, follow_symlinks=False)
    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    beside = os.path.join(folder, ".%s.%s%s" % (name, os.urandom(8).hex(), UNFINISHED))
    os.link(source, beside, follow_symlinks=False)
    try:
        os.replace(beside, path)
    except OSError:
        os.unlink(beside)
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[str]:
    """A new folder, which is `path` once the block has ended without an exception.

    It replaces what is there; of two at once one stays. Raises OSError; then, and with every
    exception of the block, `path` is as it was before.
    """
    import shutil  # no rank needs it

    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    beside = os.path.join(folder, ".%s.%s%s" % (name, os.urandom(8).hex(), UNFINISHED))
    before = beside[: -len(UNFINISHED)] + ".old" + UNFINISHED
    os.mkdir(beside)
    try:
        yield beside
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, before)
        try:
            os.rename(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(before, path)
            raise
    finally:
        for each in (beside, before):
            shutil.rmtree(each, ignore_errors=True)


def remove_left(path: Path, after_s: float = 0.0) -> None:
    """Remove what a killed process has left of a new folder `path`, beside it: what was not
    written to for `after_s` seconds.
    """
    import glob
    import shutil  # no rank needs them

    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    pattern = os.path.join(glob.escape(folder), ".%s.*%s" % (glob.escape(name), UNFINISHED))
    for left in glob.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(left).st_mtime >= after_s:
                shutil.rmtree(left, ignore_errors=True)


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def open_ours(path: Path) -> IO[bytes]:
    """Open a file that no other user wrote, for reading. Raises OSError, also for another user's.

    For what a rank obeys: whoever may write to the parent of a run directory can put another one
    in its place. Believed are our own files, root's, and those of the owner of this module, who
    decides anyhow what we do: so a rank that is root in a container believes the user whose
    clusterprof it runs. Where user ids are mapped (rootless containers), users who have no number
    there, and root on a file system that squashes it, are the unmapped user, who alone believes
    their files.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "rb", opener=_not_through_a_link))
        check_ours(os.fstat(file.fileno()), path)
        stack.pop_all()
    return file


def check_ours(found: os.stat_result, path: Path) -> None:
    """Raise PermissionError where a file is another user's: see `open_ours`."""
    owner = found.st_uid
    if owner != os.geteuid() and (owner == _UNMAPPED or owner not in (0, os.stat(__file__).st_uid)):
        raise PermissionError(errno.EPERM, "it is another user's (%d)" % owner, os.fspath(path))


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def umask() -> int:
    """This process's umask, without the moment of another one that os.umask() has for all threads.

    0o077 where the kernel does not say it (before Linux 4.7, without /proc).
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o077
