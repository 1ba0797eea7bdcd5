"""What a launcher is given, and what it makes of it: the types that every launcher uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CommandLine:
    """`clusterprof LAUNCHER options... -- program...`, without clusterprof's own options."""

    #: the launcher's own, verbatim
    options: Sequence[str]
    program: Sequence[str]
    environ: Mapping[str, str]
    #: the environment that must reach every rank
    added: Mapping[str, str]


@dataclass(frozen=True)
class Host:
    """A host as `--hosts` names it: `user@address:port`."""

    name: str
    address: str
    user: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class OverSsh:
    """How `clusterprof ssh` reaches its hosts, and what it runs there."""

    hosts: tuple[Host, ...]
    #: torchrun's own options, and what it runs
    options: tuple[str, ...]
    program: tuple[str, ...]
    #: the working directory, on every host
    folder: str
    #: the hosts' Python
    python: str
    #: a file of the program, below `folder`, that every host must have; None where it names none
    script: str | None
    #: `--env`: added on every host; the values are never written nor shown
    environment: Mapping[str, str]
    ssh_config: Path | None
    timeout_s: float
    prefix: bool
    #: as few hosts as can do the job (`--nnodes MIN:MAX`)
    fewest: int
    #: where the launchers meet on the first host; None where the user says it
    port: int | None
    #: what that makes: one command a host, in their order
    commands: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Job:
    """What a launcher makes of a command line: what to run, and what is known of its ranks."""

    launcher: str
    command: tuple[str, ...]
    #: None where only the ranks will know
    world_size: int | None
    #: what says so: `-n4`, `--nproc-per-node=4`; "" where nothing does
    size_source: str
    #: whose variables tell a process its rank: `srun`, `torchrun`
    identity: str
    remarks: tuple[str, ...] = ()
    #: why the agent cannot be loaded by the program's Python, by its words (set for all launchers)
    closed: str = ""
    #: the command itself puts our two variables into every rank; the launcher must not have them
    carries: bool = False
    #: only of a job that is started over SSH
    over_ssh: OverSsh | None = None
