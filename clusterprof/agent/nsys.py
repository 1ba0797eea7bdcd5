"""Nsight Systems: where it is, which version, what it offers, and its command lines.

What a version understands is read off its own `--help`. A node may have another nsys than the
launching host, or have it at another place: flags that it does not know are left out, and named.
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
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from .contracts import processes
from .contracts.plan import NsysPlan

#: Names an nsys for launching and reading alike.
VARIABLE = "CLUSTERPROF_NSYS"
#: How many seconds it may take to start a program.
START_VARIABLE = "CLUSTERPROF_NSYS_START_S"
#: The oldest that the tests run against: year and number.
MINIMUM = (2022, 4)
#: Where installers put nsys, below /.
PLACES = (
    "opt/nvidia/nsight-systems/*/bin/nsys",
    "opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
)
#: Where nsys keeps what its sessions share, below the temporary folder.
_INSIDE = ("nvidia", "nsight_systems")
#: How long a question that has no effect may take.
PATIENCE_S = 60.0
#: Below this nothing is captured: a program whose records find no space on the disk that they
#: are mapped from is ended by SIGBUS.
LEAST_FREE_B = 64_000_000


class Nsys:
    """One nsys that is installed here. `version` is "" where it was not asked."""

    def __init__(self, path: str, version: str = "", patience_s: float = PATIENCE_S) -> None:
        self.path = path
        self.version = version
        self.patience_s = patience_s
        self._help: Dict[str, str] = {}

    def checked(self) -> Nsys:
        """With its version, 2022.4.2.1. Raises OSError where it does not run, or is too old."""
        answer = ask([self.path, "--version"], self.patience_s)
        match = re.search(r"(\d{4})\.(\d+)(?:\.\d+)*", answer)
        if match is None:
            printed = answer.strip().split("\n")[0] or "nothing"
            raise OSError("%s does not run on this node: it printed: %s" % (self.path, printed))
        if (int(match[1]), int(match[2])) < MINIMUM:
            raise OSError("%s is nsys %s, which is too old: clusterprof needs %d.%d or newer"
                          % (self.path, match[0], *MINIMUM))  # fmt: skip
        return Nsys(self.path, match[0], self.patience_s)

    @property
    def importer(self) -> Optional[str]:
        """QdstrmImporter, which Debian's nsys does not find by itself; None without one."""
        binaries = (os.path.realpath(self.path), self.path)
        folders = [os.path.join(os.path.dirname(binary), "..") for binary in binaries]
        for folder in (*folders, "/usr/lib/nsight-systems"):
            path = os.path.normpath(os.path.join(folder, "host-linux-x64/QdstrmImporter"))
            if os.access(path, os.X_OK):
                return path
        return None

    def help(self, verb: str) -> str:
        """What `nsys VERB --help` prints; "" for a verb that it does not have."""
        if verb not in self._help:
            self._help[verb] = ask([self.path, verb, "--help"], self.patience_s)
        return self._help[verb]

    def offers(self, verb: str, name: str) -> bool:
        """Whether the verb's help names this flag (`--trace`, `--trace=cuda`) or value."""
        word = re.escape(name.split("=", 1)[0])
        return re.search(r"(?<![\w-])%s(?![\w-])" % word, self.help(verb)) is not None

    def trace(self, verb: str, names: str) -> str:
        """The list for --trace, with CUDA traced by software where this nsys has the choice.

        From 2025.6 on `cuda` is by hardware on Blackwell: of a window that closes while the
        program goes on it has lost the kernels, or ended the program (docs/nsys.md). For those
        who want it there is `cuda-hw`.
        """
        cuda = "cuda-sw" if self.offers(verb, "cuda-sw") else "cuda"
        return ",".join(cuda if name in ("cuda", "cuda-sw") else name for name in names.split(","))

    def fitted(self, plan: NsysPlan, verbs: List[str]) -> Tuple[NsysPlan, List[str]]:
        """The verbs' arguments, each by a verb that has it here, and those that no verb has."""
        words: Dict[str, Any] = {verb: list(getattr(plan, verb)) for verb in verbs}
        left_out, trace = [], {}
        for verb in verbs:
            for word in getattr(plan, verb):
                if not word.startswith("--") or self.offers(verb, word):
                    continue
                words[verb].remove(word)
                offering = next((other for other in verbs if self.offers(other, word)), None)
                if offering:
                    words[offering].append(word)
                else:
                    left_out.append(word.split("=", 1)[0])
        for kind, text in plan.trace.items():
            names = self.trace(verbs[0], text).split(",")
            unknown = [name for name in names if not self.offers(verbs[0], name)]
            left_out += map("--trace={}".format, unknown)
            trace[kind] = ",".join(name for name in names if name not in unknown) or "none"
        return plan._replace(trace=trace, **words), sorted(set(left_out))


def here(plan: NsysPlan, window_by: str) -> Tuple[NsysPlan, List[str]]:
    """The plan's nsys as it is on this node, and what differs here. Raises OSError without one."""
    path = found(plan.path)
    if path is None:
        raise OSError("%s is not on this node" % plan.path)
    # of what nsys may take to start, a question may take this part
    nsys = Nsys(path, patience_s=plan.start_s * 2 / 3).checked()
    fitted = plan._replace(path=path, version=nsys.version, importer=nsys.importer)
    if nsys.version == plan.version:
        return (plan if path == plan.path else fitted), []
    differs = ["nsys is %s here, %s where it was launched" % (nsys.version, plan.version)]
    verbs = [verb for verb in plan.verbs(window_by) if verb != "stop"]
    unknown: List[str] = []
    if all(map(nsys.help, verbs)):
        fitted, unknown = nsys.fitted(fitted, verbs)
    if unknown:
        differs.append("it has no %s: left out" % ", ".join(unknown))
    return fitted, differs


def found(wanted: str) -> Optional[str]:
    """The nsys at the path `wanted`, or else the one that this node has; None without one."""
    path = shutil.which(wanted) or shutil.which(os.path.basename(wanted))
    return path or next(in_places(), None)


def in_places() -> Iterator[str]:
    """Those where installers put them, newest first: the version is in the folder's name."""
    paths = [path for place in PLACES for path in glob.glob("/" + place)]
    return iter(sorted((path for path in paths if os.access(path, os.X_OK)), reverse=True))


def ask(command: List[str], patience_s: float) -> str:
    """Run a question that has no effect; its stdout and stderr, "" where it does not answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=patience_s,
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
        ours = ((), "clusterprof-%d-%s" % (os.getuid(), lock), os.getuid())
        for inside, name, owner in ((_INSIDE, lock, None), ours):
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

    What stands there already is neither changed nor followed: another user's link would make a
    file of ours that all may write wherever it points to. Raises OSError where something else is
    there, or a lock that is not `owner`'s.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    opened = [os.open(node, os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for folder in inside:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o777, dir_fd=opened[-1])
            opened.append(os.open(folder, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        parent, flags = opened[-1], flags | os.O_RDWR | os.O_NONBLOCK
        try:
            opened.append(os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=parent))
        except FileExistsError:
            opened.append(os.open(name, flags, dir_fd=parent))
        status = os.fstat(opened[-1])
    finally:
        for descriptor in opened:
            os.close(descriptor)
    if not stat.S_ISREG(status.st_mode) or owner not in (None, status.st_uid):
        raise OSError("%s in %s is not a lock of nsys" % (name, node))


def free_bytes(folder: str) -> int:
    """What an ordinary user may still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def temporary_files(pid: int) -> List[str]:
    """What nsys makes outside of its TMPDIR and leaves there, by the environment it gives `pid`."""
    entries: List[str] = []
    with contextlib.suppress(OSError), open("/proc/%d/environ" % pid, "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")
    values = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    configs = map(values.get, ("QUADD_INJECTION_CONFIG", "QUADD_OS_RUNTIME_CONFIG"))
    files = [config for config in configs if config and config.startswith("/tmp/injection_config_")]
    daemon = values.get("QUADD_AGENT_PID", "")
    if daemon.isdigit():
        files.append("/dev/shm/quadd-agent-instance-" + daemon)
    return [*files, "/dev/shm/sem.nsys_sem_%d" % pid]


def remove(files: List[str]) -> None:
    """Remove what `temporary_files` named, where it is ours and still there."""
    for path in files:
        with contextlib.suppress(OSError):
            (processes.remove_unused if path.startswith("/dev/shm/") else os.unlink)(path)
