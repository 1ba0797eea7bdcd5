"""The test Slurm as pytest sees it: brought up for a session, and taken down whatever happened.

A session that was killed leaves its cluster behind. Each cluster's folder therefore names the
process that owns it, and the next session takes down those whose owner is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from lab.parts import LAB

PREFIX = "clusterprof-slurm-"
SCRIPT = LAB / "slurm.sh"
VARIABLE = "CLUSTERPROF_LAB_SLURM"


def birth(pid: int) -> str:
    """When the process started, in ticks: tells a pid from its next holder. Empty when gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def script(
    verb: str,
    state: Path,
    path: Path = SCRIPT,
    variable: str = VARIABLE,
    *further: str,
    **settings: str,
) -> subprocess.CompletedProcess[str]:
    """Run the lab's shell script at `path` on a state folder, which `variable` tells it.

    `further` words follow the verb; `settings` are environment names of the script.
    """
    # Output goes to a file, not a pipe: the daemons inherit it, and a pipe would never close.
    with tempfile.TemporaryFile("w+") as printed:
        done = subprocess.run(
            [path, verb, *further],
            env={**os.environ, **settings, variable: str(state)},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            text=True,
            timeout=400,
            check=False,
        )
        printed.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, printed.read(), "")


def remove_orphans(
    parent: Path, prefix: str = PREFIX, path: Path = SCRIPT, variable: str = VARIABLE
) -> list[Path]:
    """Take down the clusters below `parent` whose test session is gone; returns their folders."""
    orphans = []
    for folder in parent.glob(f"{prefix}*"):
        try:
            owner, born = (folder / "owner").read_text().split()
        except (OSError, ValueError):
            continue  # not ours, or about to be written
        if birth(int(owner)) != born:
            script("down", folder / "state", path, variable)
            shutil.rmtree(folder, ignore_errors=True)
            orphans.append(folder)
    return orphans


def up(**settings: str) -> Path:
    """Start a cluster in a new folder and return its state folder; `settings` are the script's.

    Raises:
        RuntimeError: the cluster did not come up; the message holds the ends of its logs.
    """
    parent = Path(tempfile.gettempdir())
    remove_orphans(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    # munged insists on a path to its socket that every user may walk along.
    folder.chmod(0o755)
    (folder / "owner").write_text(f"{os.getpid()} {birth(os.getpid())}\n")
    state = folder / "state"
    started = script("up", state, **settings)
    if started.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"the test Slurm did not start:\n{started.stdout}")
    return state


def cut(state: Path, node: str, verb: str = "cut") -> None:
    """Take a node off the network, or `mend` that, where each has a network of its own."""
    done = script(verb, state, SCRIPT, VARIABLE, node)
    assert done.returncode == 0, done.stdout


def down(state: Path) -> None:
    """Stop the cluster and remove its folder."""
    script("down", state)
    shutil.rmtree(state.parent, ignore_errors=True)
