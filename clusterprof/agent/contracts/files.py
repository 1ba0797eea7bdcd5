"""The one way in which clusterprof writes a file: whole or not at all, through no link; and how it
reads what somebody else has left.

A file is written beside its place under a random name that did not exist before (no link is
followed), is its owner's alone until it is complete, and then takes its name by rename. Of several
writers of one path the last one stays.

JSON is read whatever it holds: a value whose size, depth and text are harmless, or a ValueError.
`fits` says whether it has the form that was expected, which `form_of` has from the NamedTuple that
`built` makes of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from typing import IO, TYPE_CHECKING, Any, Dict, Iterator, Mapping, NoReturn, Optional, Union

if TYPE_CHECKING:  # the first annotation that is compiled takes an interpreter a millisecond
    #: a file's path; bytes that are no UTF-8 are surrogates, as everywhere in Python
    Path = Union[str, os.PathLike[str]]

#: how the name of an unfinished file ends: who lists a folder leaves it out
UNFINISHED = ".tmp"
#: bytes of JSON; ten times the most that we write (a measurement of the clocks of 10,000 hosts)
MOST = 64 << 20
#: an integer beyond it is no time, size or number of ours, and would not fit into 64 bits
FARTHEST = 1 << 62


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
    flags = os.O_NOFOLLOW
    with open(beside, "xb", opener=lambda name, given: os.open(name, given | flags, 0o600)) as file:
        try:
            yield file
            file.flush()
            os.fchmod(file.fileno(), final)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or what else is there, as far as that is possible."""
    import shutil  # no rank needs it

    try:
        os.unlink(path)  # rmtree would wait for a writer of a pipe
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def remove_left(path: Path, after_s: float = 0.0) -> None:
    """Remove what a killed process has left of a new folder `path`, beside it: what was not
    written to for `after_s` seconds.
    """
    import glob  # no rank needs it

    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    pattern = os.path.join(glob.escape(folder), ".%s.*%s" % (glob.escape(name), UNFINISHED))
    for left in glob.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(left).st_mtime >= after_s:
                remove(left)


def opened(path: Path, links: bool = False, ours: bool = False) -> IO[bytes]:
    """Open a file for reading: the one way for whatever somebody else may have laid there.

    It is a regular file, and opening it waits for no one: a pipe would wait for a writer. A link is
    followed only where the user named the file, or a profiler wrote it (`links`); `ours`: no other
    user wrote it (`check_ours`). What is checked is the file that is read, not its name. Raises
    OSError.
    """
    flags = os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    try:
        file = open(path, "rb", opener=lambda name, given: os.open(name, given | flags))
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            error.strerror = "it is a link, and no file of a run is one"
        raise
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file (a pipe or a device)", file.name)
        if ours:
            check_ours(status, path)
        stack.pop_all()
    return file


def content(path: Path, most: int, links: bool = False, ours: bool = False) -> bytes:
    """What a file holds (see `opened`). Raises OSError, also for one of more than `most` bytes."""
    with opened(path, links, ours) as file:
        held = file.read(most + 1)
    if len(held) > most:
        raise OSError(errno.EFBIG, "it is larger than %d MB" % (most >> 20), os.fspath(path))
    return held


def check_ours(status: os.stat_result, path: Path) -> None:
    """Raise PermissionError where a file is another user's.

    For what a rank obeys: whoever may write to the parent of a run directory can put another one
    in its place. Believed are our own files, root's, and those of the owner of this module, who
    decides anyhow what we do: so a rank that is root in a container believes the user whose
    clusterprof it runs. Where user ids are mapped (rootless containers), users who have no number
    there, and root on a file system that squashes it, are the unmapped user, who alone believes
    their files.
    """
    owner, unmapped = status.st_uid, 65534
    if owner != os.geteuid() and (owner == unmapped or owner not in (0, os.stat(__file__).st_uid)):
        raise PermissionError(errno.EPERM, "it is another user's (%d)" % owner, os.fspath(path))


def umask() -> int:
    """This process's umask, without the moment of another one that os.umask() has for all threads.

    0o077 where the kernel does not say it (before Linux 4.7, without /proc).
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def load(path: Path, ours: bool = False, links: bool = False) -> Any:
    """The value in a JSON file; `ours` and `links` as for `opened`.

    Raises OSError, ValueError.
    """
    return parse(content(path, MOST, links, ours))


def parse(text: Union[str, bytes]) -> Any:
    """The value that `text` is. Raises ValueError, for nesting that no parser stands as well."""
    plain = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in plain or "\\uD" in plain:
        # half a character can be printed nowhere; bytes of a file name that are no UTF-8 can
        json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError("%s is no number of JSON" % constant)


def fits(value: Any, form: Any) -> bool:
    """Whether `value` has the form.

    A form is a type (an int is one of 64 bits), None, a range of ints, a function that decides, a
    tuple of forms of which one will do, `[form]` for a list of any length and `[form, form]` for
    one of two, or `{key: form}` for an object that has these keys; `"key?"` need not be there.
    """
    if isinstance(form, tuple):
        return any(fits(value, choice) for choice in form)
    if isinstance(form, list):
        if not isinstance(value, list) or len(form) not in (1, len(value)):
            return False
        return all(map(fits, value, form * len(value)))
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            fits(value[name], member) if name in value else name != key
            for key, member in form.items()
            for name in [key.rstrip("?")]
        )
    if form is None or isinstance(form, (range, type)):
        return _is_plain(value, form)
    return bool(form(value))


def _is_plain(value: Any, form: Any) -> bool:
    if form is None or form is bool or isinstance(value, bool):
        return value is None if form is None else form is type(value)
    if isinstance(form, range):
        return isinstance(value, int) and value in form
    return isinstance(value, form) and not (isinstance(value, int) and abs(value) >= FARTHEST)


def form_of(kind: Any, limits: Mapping[str, Any]) -> Any:
    """The form of the JSON of a type: a NamedTuple (a field with a default need not be there),
    Optional, List, Tuple or Dict, or a form. `limits`: by a field's name its form, over its type's.
    """
    origin = getattr(kind, "__origin__", kind)  # typing.get_origin takes three times as long
    if origin is Union:
        return form_of(kind.__args__[0], limits), None
    if origin in (list, tuple):
        return [form_of(kind.__args__[0], limits)]
    if not hasattr(kind, "_fields"):
        return origin
    return {
        name + "?" * (name in kind._field_defaults): limits.get(name) or form_of(field, limits)
        for name, field in kind.__annotations__.items()
    }


def built(kind: Any, value: Any) -> Any:
    """The value of a type from JSON of its form; what a NamedTuple has no field for is left out."""
    origin = getattr(kind, "__origin__", kind)
    if origin is Union:
        return None if value is None else built(kind.__args__[0], value)
    if origin is tuple:
        return tuple(value)
    if not hasattr(kind, "_fields"):
        return value
    fields: Dict[str, Any] = kind.__annotations__
    return kind(**{name: built(fields[name], value[name]) for name in fields if name in value})
