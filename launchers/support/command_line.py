"""Other programs: where they are, and reading their options without knowing all of them."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from clusterprof.agent.contracts.identity import STARTERS, TORCHRUN
from clusterprof.agent.contracts.identity import program as run_by_python
from clusterprof.errors import LaunchError

PYTHON = re.compile(r"python[\d.]*")


def find_program(name: str) -> str:
    """The program: on PATH, or beside our own Python (an environment that is not activated).

    Raises LaunchError where it is in neither.
    """
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise LaunchError(
            f"{name} was not found",
            "looked in PATH and beside " + sys.executable,
            "load its module, or activate the environment that has it",
        )
    return found


def last_value(options: Sequence[str], *names: str) -> str | None:
    """The value of the last of `names` in `options`, None where none is given.

    Understands `--name value`, `--name=value`, `-n value` and `-nvalue`.
    """
    found: str | None = None
    for place, option in enumerate(options):
        for name in names:
            if option == name and place + 1 < len(options):
                found = options[place + 1]
            elif name.startswith("--") and option.startswith(name + "="):
                found = option[len(name) + 1 :]
            elif _short_with_value(option, name):
                found = option[2:].removeprefix("=")
    return found


def _short_with_value(option: str, name: str) -> bool:
    return not name.startswith("--") and option.startswith(name) and len(option) > len(name)


def further(program: Sequence[str]) -> Iterator[list[str]]:
    """The words behind each `:` of a command line for several programs."""
    words = list(program)
    while ":" in words:
        words = words[words.index(":") + 1 :]
        yield words[: words.index(":")] if ":" in words else words


def whole_number(value: str | None) -> int | None:
    """`value` as a number; None where it is none (`gpu`, `1:4`, `2-4`)."""
    return int(value) if value is not None and value.isdigit() else None


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
    for place, word in enumerate(program):
        name = word.rsplit("/", 1)[-1]
        if name in STARTERS:
            return name
        if PYTHON.fullmatch(name):
            return run_by_python(list(program[place:]))
        if name.endswith((".py", ".sh")):
            break
    return ""


#: Programs that run what follows inside of a container.
CONTAINERS = ("apptainer", "singularity", "docker", "podman", "enroot", "charliecloud", "ch-run")


def unmounted_folders(
    options: Sequence[str], program: Sequence[str], added: Mapping[str, str]
) -> list[str]:
    """What a rank in a container needs and may not see: the agent's folder, the run directory.

    Empty where there is no container, or where --container-mounts shows both under their names.
    """
    first = program[0].rsplit("/", 1)[-1]
    image = any(option.partition("=")[0] == "--container-image" for option in options)
    if not image and first not in CONTAINERS:
        return []
    inject = PurePath(added["PYTHONPATH"].split(":", 1)[0])
    needed = [inject.parent, PurePath(added["CLUSTERPROF_PLAN"]).parent]
    shown = []
    for mount in (last_value(options, "--container-mounts") or "").split(","):
        host_path, _, inside = mount.partition(":")
        if host_path and inside.split(":")[0] in ("", host_path):
            shown.append(PurePath(host_path))
    return [str(place) for place in needed if not any(map(place.is_relative_to, shown))]


def mount_remark(places: Sequence[str]) -> list[str]:
    """The remark on what `unmounted_folders` found."""
    if not places:
        return []
    remark = (
        f"in the container the ranks must see {' and '.join(places)} under the same name (pyxis "
        "keeps only the last --container-mounts: add to yours) and the variables PYTHONPATH and "
        "CLUSTERPROF_PLAN; otherwise they train unprofiled"
    )
    return [remark]


def closed(program: Sequence[str]) -> str:
    """Why the agent cannot be loaded by this program's Python; "" where no word of it says so.

    PYTHONPATH and sitecustomize load it, which some of Python's own options turn off.
    """
    for place, word in enumerate(program):
        if word.startswith("PYTHONPATH="):
            return "the command sets PYTHONPATH without what loads the agent: append :$PYTHONPATH"
        if PYTHON.fullmatch(word.rsplit("/", 1)[-1]):
            flags = itertools.takewhile(_is_flag, program[place + 1 :])
            found = next((each for flag in flags for each in flag if each in "IES"), "")
            what = "sitecustomize" if found == "S" else "PYTHONPATH"
            return f"python -{found} ignores {what}, which loads the agent" if found else ""
        if word.endswith((".py", ".sh")):
            break  # what follows are its own arguments
    return ""


def _is_flag(word: str) -> bool:
    """Whether Python takes this word as letters without a value: -u, -Bs."""
    return re.fullmatch(r"-[bBdEhiIOPqsSuvVx?]+", word) is not None
