"""The nsys of this node: where it is, which version, what it is told and where it may write.

The plan was written for the nsys of the launching host. A node may have another one, have it at
another place (a container has), or have none: what differs is found out by `nsys --version`,
which takes 12 ms, and flags that this one does not know are left out and said.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import stat
import subprocess
import tempfile
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .contracts import processes
from .contracts.plan import NsysPlan

#: The oldest that the tests run against: year and number.
MINIMUM = (2022, 4)

#: Where installers put nsys, below /.
PLACES = (
    "opt/nvidia/nsight-systems/*/bin/nsys",
    "opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
)
_IMPORTERS = (
    "{real}/../host-linux-x64/QdstrmImporter",
    "{here}/../host-linux-x64/QdstrmImporter",
    "/usr/lib/nsight-systems/host-linux-x64/QdstrmImporter",
)

#: Where nsys keeps what its sessions share, below the temporary folder.
_INSIDE = ("nvidia", "nsight_systems")

#: How long a question may take that has no effect.
ANSWER_S = 4.0

#: Below this nothing is captured: a program whose records find no space on the disk that they
#: are mapped from is ended by SIGBUS.
LEAST_FREE_B = 64_000_000


def here(told: NsysPlan, mode: str) -> Tuple[NsysPlan, List[str]]:
    """The plan's `nsys` as it holds on this node, and what is different here, in words.

    `mode` says how the window opens (session, cuda). Raises OSError where none is usable.
    """
    path = found(told.path)
    if path is None:
        raise OSError("%s is not on this node" % told.path)
    version = version_of(path)
    if path == told.path and version == told.version:
        return told, []
    fitted = told._replace(path=path, version=version, importer=importer(path))
    differs = []
    if version != told.version:
        differs.append("nsys is %s here, %s where it was launched" % (version, told.version))
        fitted, unknown = fit(fitted, [verb for verb in told.verbs(mode) if verb != "stop"])
        if unknown:
            differs.append("it has no %s: left out" % ", ".join(unknown))
    return fitted, differs


def found(wanted: str) -> Optional[str]:
    """The nsys at the path `wanted`, or else the one that this node has; None without one."""
    if os.path.isfile(wanted) and os.access(wanted, os.X_OK):
        return wanted
    on_path = shutil.which(os.path.basename(wanted))
    if on_path:
        return on_path
    # The newest first: installers put the version into the folder's name.
    installed = [path for place in PLACES for path in glob.glob("/" + place)]
    return max((path for path in installed if os.access(path, os.X_OK)), default=None)


def version_of(path: str) -> str:
    """2022.4.2.1. Raises OSError where it does not run, or is too old."""
    said = ask([path, "--version"])
    match = re.search(r"(\d{4})\.(\d+)(?:\.\d+)*", said)
    if match is None:
        raise OSError("%s does not run on this node: it said: %s"
                      % (path, said.strip().split("\n")[0] or "nothing"))  # fmt: skip
    if (int(match[1]), int(match[2])) < MINIMUM:
        raise OSError("%s is nsys %s on this node, which is too old" % (path, match[0]))
    return match[0]


def importer(path: str) -> Optional[str]:
    """QdstrmImporter, which Debian's nsys does not find by itself; None without one."""
    places = {"real": os.path.dirname(os.path.realpath(path)), "here": os.path.dirname(path)}
    for pattern in _IMPORTERS:
        candidate = os.path.normpath(pattern.format(**places))
        if os.access(candidate, os.X_OK):
            return candidate
    return None


def fit(nsys: NsysPlan, verbs: List[str]) -> Tuple[NsysPlan, List[str]]:
    """The verbs' arguments as this nsys knows them, and what had to be left out.

    A flag that another verb of this version has is given to that one.
    """
    helps = {verb: ask([nsys.path, verb, "--help"]) for verb in verbs}
    if not all(helps.values()):
        return nsys, []
    words: Dict[str, Any] = {verb: list(getattr(nsys, verb)) for verb in verbs}
    left_out = []
    for verb in verbs:
        for word in getattr(nsys, verb):
            name = word.split("=", 1)[0]
            if not name.startswith("--") or offers(helps[verb], name):
                continue
            words[verb].remove(word)
            other = [each for each in verbs if offers(helps[each], name)]
            if other:
                words[other[0]].append(word)
            else:
                left_out.append(name)
    trace = {}
    for kind, names in nsys.trace.items():
        known = [name for name in names.split(",") if offers(helps[verbs[0]], name)]
        left_out += ["--trace=" + name for name in names.split(",") if name not in known]
        trace[kind] = ",".join(known) or "none"
    return nsys._replace(trace=trace, **words), sorted(set(left_out))


def offers(help_text: str, name: str) -> bool:
    """Whether a help text names this flag or value."""
    return re.search(r"(?<![\w-])%s(?![\w-])" % re.escape(name), help_text) is not None


def ask(command: List[str]) -> str:
    """Run a question that has no effect; its stdout and stderr, "" where it does not answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=ANSWER_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def temporary(longest: int) -> str:
    """A node-local folder whose name is at most so long: a socket's may have 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= longest else "/tmp"


def scratch(private: str, version: str) -> str:
    """A TMPDIR for one session's nsys alone, below the rank's private folder.

    So nothing of another version's is found there (which leaves reports empty), all of it can be
    measured, and removed. Measured: 2023.4 and 2024.2 keep their list of sessions there as well;
    2022.4 has the list in /dev/shm and its lock in TMPDIR, and loses reports where the lock is
    not the same for all: it is a link to the one that every other nsys on this node takes.
    """
    folder, lock = os.path.join(private, "nsys"), "SessionManager-%s.lock" % version
    node = tempfile.gettempdir()
    umask = os.umask(0)
    try:
        # With another mode than 0777, which nsys gives them itself, the program records nothing.
        os.makedirs(os.path.join(folder, *_INSIDE))
        # Where another user has made that one so that we cannot, ours are at least together.
        for inside, name, owner in (
            (_INSIDE, lock, None), ((), "clusterprof-%d-%s" % (os.getuid(), lock), os.getuid())
        ):  # fmt: skip
            with contextlib.suppress(OSError):
                # A link to nothing has nsys try for ever.
                make_lock(node, inside, name, owner)
                os.symlink(os.path.join(node, *inside, name), os.path.join(folder, *_INSIDE, lock))
                break
    finally:
        os.umask(umask)
    return folder


def make_lock(node: str, inside: Sequence[str], name: str, owner: Optional[int]) -> None:
    """See to it that the empty file `name` is there, below `node`, that all may write.

    What stands there already is neither changed nor followed: everybody may write to these
    folders, and another user's link would make a file of ours that all may write wherever it
    points to. Raises OSError where something else is there, or a lock that is not `owner`'s.
    """
    here = os.open(node, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in inside:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o777, dir_fd=here)
            above = here
            here = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            os.close(above)
        how = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            lock = os.open(name, how | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=here)
        except FileExistsError:
            lock = os.open(name, how, dir_fd=here)
        try:
            there = os.fstat(lock)
        finally:
            os.close(lock)
    finally:
        os.close(here)
    if not stat.S_ISREG(there.st_mode) or owner not in (None, there.st_uid):
        raise OSError("%s in %s is not a lock of nsys" % (name, node))


def free_bytes(folder: str) -> int:
    """What an ordinary user may still write there."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def litter(pid: int) -> List[str]:
    """The files that nsys makes outside of its TMPDIR for the program `pid` and leaves there.

    By the environment that nsys gives the program, read before the program has it.
    """
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            environ = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        return []
    values = {os.fsdecode(name): os.fsdecode(value) for name, _, value in environ}
    files = [
        values[name]
        for name in ("QUADD_INJECTION_CONFIG", "QUADD_OS_RUNTIME_CONFIG")
        if values.get(name, "").startswith("/tmp/injection_config_")
    ]
    daemon = values.get("QUADD_AGENT_PID", "")
    if daemon.isdigit():
        files.append("/dev/shm/quadd-agent-instance-" + daemon)
    files.append("/dev/shm/sem.nsys_sem_%d" % pid)
    return files


def remove(files: List[str]) -> None:
    """Remove what `litter` named, where it is ours and still there."""
    for path in files:
        if path.startswith("/dev/shm/"):
            processes.remove_unused(path)
            continue
        with contextlib.suppress(OSError):
            os.unlink(path)
