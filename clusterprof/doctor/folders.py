"""The folders that a capture writes to: the node's own temporary one, shared memory, the runs'."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from clusterprof.agent.contracts.words import size
from clusterprof.agent.nsys import free_bytes
from clusterprof.doctor.table import BAD, OK, WARN, Check

#: File systems that other hosts serve: nsys' data would cross the network while it is captured.
_REMOTE = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p", "pvfs2", "wekafs",
    "afs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "orangefs",
}  # fmt: skip
#: Where nsys and the program, and NCCL, talk to each other.
SHARED_MEMORY = "/dev/shm"  # noqa: S108
#: Windows of five steps took some hundred MB of temporary data.
ENOUGH_B = 2e9
TOO_LITTLE_B = 2e8
SHARED_MEMORY_B = 64e6

#: How long a file of another node may take to appear: clients of NFS look every few seconds.
VISIBLE_S = 4.0
TOKEN = "token"  # noqa: S105 - a file's name

#: the check of the folder that all nodes must see, and what to do where they do not
RUNS = "run directories"
SHARE = "choose a folder that all nodes share with --run-dir"


def temporary_folder() -> Check:
    """Where nsys keeps what it captures until the report is made."""
    name, folder = "temporary folder", tempfile.gettempdir()
    advice = "set TMPDIR to a folder on the node's own disk, the same for all ranks of a node"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="clusterprof-doctor-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Check(name, BAD, f"{folder}: no file can be made and locked: {error}", advice)
    space, kind = free_bytes(folder), file_system(folder)
    level, then = OK, ""
    if space < TOO_LITTLE_B:
        level, then = BAD, f"free space there, or {advice}"
    elif kind in _REMOTE:
        level, then = WARN, advice
    elif space < ENOUGH_B:
        level, then = WARN, f"enough for a short window only; {advice}"
    return Check(name, level, f"{folder}, {kind}, {size(space)} free", then, space)


def shared_memory() -> Check:
    """nsys and the program talk through /dev/shm."""
    try:
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="clusterprof-doctor-"):
            space = free_bytes(SHARED_MEMORY)
    except OSError as error:
        return Check(SHARED_MEMORY, BAD, f"cannot be written: {error}",
                     "nsys needs it: in a container --ipc=host or a larger --shm-size")  # fmt: skip
    few = space < SHARED_MEMORY_B
    advice = "nsys and NCCL need it: free some" if few else ""
    return Check(SHARED_MEMORY, WARN if few else OK, f"{size(space)} free", advice, space)


def run_folder(parent: Path) -> Check:
    """Whether run directories can be made below `parent`, as this host sees it."""
    try:
        Path(tempfile.mkdtemp(prefix=".clusterprof-doctor-", dir=parent)).rmdir()
    except OSError as error:
        return Check(RUNS, BAD, f"{parent} cannot be written: {error.strerror}",
                     "choose another with --run-dir")  # fmt: skip
    space, kind = free_bytes(str(parent)), file_system(str(parent))
    few = space < TOO_LITTLE_B
    advice = "free space there, or choose another with --run-dir" if few else ""
    found = f"{parent}, {kind}, {size(space)} free"
    return Check(RUNS, WARN if few else OK, found, advice, space)


def probed_folder(probe: Path, host: str) -> Check:
    """Whether this node sees a file that another one has just written, and can write beside it."""
    deadline = time.monotonic() + VISIBLE_S
    while not (probe / TOKEN).exists():
        if time.monotonic() > deadline:
            return Check(RUNS, BAD, f"{probe.parent} is another folder on this node", SHARE)
        time.sleep(0.1)
    try:
        (probe / host).touch()
    except OSError as error:
        return Check(RUNS, BAD, f"{probe.parent} cannot be written: {error.strerror}", SHARE)
    return run_folder(probe.parent)


def existing(folder: Path) -> Path:
    """`folder`, or the nearest above it that is there."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def file_system(folder: str) -> str:
    """The type of the file system that holds `folder`: xfs, tmpfs, nfs4."""
    device = Path(folder).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return "unknown file system"
