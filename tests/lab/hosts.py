"""The hosts behind SSH as pytest sees them: brought up for a session, taken down whatever happened.

A session that was killed leaves its hosts behind; like a cluster's, their folder names its owner,
and the next session takes them down.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab import cluster
from lab.parts import LAB

PREFIX = "clusterprof-hosts-"
SCRIPT = LAB / "hosts.sh"
VARIABLE = "CLUSTERPROF_LAB_HOSTS"


@dataclass(frozen=True)
class Hosts:
    """Three hosts, h1 to h3."""

    state: Path

    @property
    def config(self) -> Path:
        """An ssh configuration that knows them."""
        return self.state / "config"

    def local(self, host: str) -> Path:
        """The temporary folder that only this host has."""
        return self.state / "local" / host

    def changed(self, name: str, *edits: tuple[str, str]) -> Path:
        """The configuration with some lines replaced, as another file beside it."""
        text = self.config.read_text()
        for before, after in edits:
            assert before in text
            text = text.replace(before, after)
        path = self.state / name
        path.write_text(text)
        return path

    def port(self, host: str) -> int:
        """Where a host's sshd listens, on the loopback."""
        block = self.config.read_text().partition(f"Host {host}\n")[2]
        return int(block.partition("Port ")[2].split()[0])


def remove_orphans(parent: Path) -> list[Path]:
    """Take down the hosts below `parent` whose test session is gone; returns their folders."""
    return cluster.remove_orphans(parent, PREFIX, SCRIPT, VARIABLE)


def up() -> Hosts:
    """Start three hosts in a new folder.

    Raises:
        RuntimeError: they did not come up; the message holds the ends of their logs.
    """
    parent = Path(tempfile.gettempdir())
    remove_orphans(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    (folder / "owner").write_text(f"{os.getpid()} {cluster.birth(os.getpid())}\n")
    state = folder / "state"
    started = cluster.script("up", state, SCRIPT, VARIABLE)
    if started.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"the hosts did not start:\n{started.stdout}")
    return Hosts(state)


def down(state: Path) -> None:
    """Stop the hosts and all that runs on them, and remove their folder."""
    cluster.script("down", state, SCRIPT, VARIABLE)
    shutil.rmtree(state.parent, ignore_errors=True)
