"""What a launcher is given and makes of it, and reading options of programs that are not ours."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from clusterprof.agent.contracts.identity import STARTERS, TORCHRUN, program as run_by_python
from clusterprof.errors import LaunchError


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


#: Programs that run what follows inside of a container.
CONTAINERS = ("apptainer", "singularity", "docker", "podman", "enroot", "charliecloud", "ch-run")


def find_program(name: str) -> str:
    """The program: on PATH, or beside our own Python (an environment that is not activated).

    Raises LaunchError where it is in neither.
    """
    if program := shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)):
        return program
    raise LaunchError(
        f"{name} was not found",
        "looked in PATH and beside " + sys.executable,
        "load its module, or activate the environment that has it",
    )


def last_value(options: Sequence[str], *names: str) -> str | None:
    """The value of the last of `names` in `options`, None where none is given.

    Understands `--name value`, `--name=value`, `-n value` and `-nvalue`.
    """
    value: str | None = None
    for option, following in itertools.zip_longest(options, options[1:]):
        for name in names:
            if option == name:
                value = value if following is None else following
            elif option.startswith(name + "=" if name.startswith("--") else name):
                value = option[len(name) :].removeprefix("=")
    return value


def further(program: Sequence[str]) -> Iterator[list[str]]:
    """The words behind each `:` of a command line for several programs."""
    words = list(program)
    while ":" in words:
        words = words[words.index(":") + 1 :]
        yield words[: words.index(":")] if ":" in words else words


def whole_number(value: str | None) -> int | None:
    """`value` as a number; None where it is none (`gpu`, `1:4`, `2-4`)."""
    return int(value) if value is not None and value.isdigit() else None


def file_name(word: str) -> str:
    """A program's name without its folder."""
    return word.rsplit("/", 1)[-1]


def is_python(word: str) -> bool:
    """Whether a word of a command line is a Python interpreter."""
    return re.fullmatch(r"python[\d.]*", file_name(word)) is not None


def starts_ranks_itself(program: Sequence[str]) -> bool:
    """Whether `program` is torchrun or a similar launcher: then only its workers are ranks."""
    return starter(program) in STARTERS


def whose_ranks(program: Sequence[str], launcher: str) -> str:
    """Whose variables will tell a process its rank: torchrun's alone, or `launcher`'s as well."""
    return "torchrun" if starter(program) in TORCHRUN else launcher


def starter(program: Sequence[str]) -> str:
    """What in `program` may start ranks: the first such name, or what its Python runs.

    Behind wrappers too (`env A=1 torchrun`, `conda run -n env torchrun`), but never among the
    arguments of a script: `python train.py --strategy deepspeed` is a rank.
    """
    for index, word in enumerate(program):
        if file_name(word) in STARTERS:
            return file_name(word)
        if is_python(word):
            return run_by_python(list(program[index:]))
        if word.endswith((".py", ".sh")):
            break
    return ""


def mount_remarks(line: CommandLine) -> tuple[str, ...]:
    """What a rank in a container needs and may not see: the agent's folder, the run directory.

    Empty where there is no container, or where --container-mounts shows both under their names.
    """
    image = any(option.partition("=")[0] == "--container-image" for option in line.options)
    if not image and file_name(line.program[0]) not in CONTAINERS:
        return ()
    inject = PurePath(line.added["PYTHONPATH"].split(":", 1)[0])
    needed = [inject.parent, PurePath(line.added["CLUSTERPROF_PLAN"]).parent]
    shown = []
    for mount in (last_value(line.options, "--container-mounts") or "").split(","):
        host_path, _, inside = mount.partition(":")
        if host_path and inside.split(":")[0] in ("", host_path):
            shown.append(PurePath(host_path))
    hidden = [str(place) for place in needed if not any(map(place.is_relative_to, shown))]
    remark = (
        f"in the container the ranks must see {' and '.join(hidden)} under the same name (pyxis "
        "keeps only the last --container-mounts: add to yours) and the variables PYTHONPATH and "
        "CLUSTERPROF_PLAN; otherwise they train unprofiled"
    )
    return (remark,) if hidden else ()


def closed(program: Sequence[str]) -> str:
    """Why the agent cannot be loaded by this program's Python; "" where no word of it says so.

    PYTHONPATH and sitecustomize load it, which some of Python's own options turn off.
    """
    for index, word in enumerate(program):
        if word.startswith("PYTHONPATH="):
            return "the command sets PYTHONPATH without what loads the agent: append :$PYTHONPATH"
        if is_python(word):
            # Words that Python takes as letters without a value: -u, -Bs.
            flags = itertools.takewhile(
                re.compile(r"-[bBdEhiIOPqsSuvVx?]+").fullmatch, program[index + 1 :]
            )
            letter = next((letter for flag in flags for letter in flag if letter in "IES"), "")
            variable = "sitecustomize" if letter == "S" else "PYTHONPATH"
            return f"python -{letter} ignores {variable}, which loads the agent" if letter else ""
        if word.endswith((".py", ".sh")):
            break  # what follows are its own arguments
    return ""
