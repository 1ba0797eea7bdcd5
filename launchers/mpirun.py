"""MPI's mpirun: Open MPI, or one of Hydra's family (MPICH, Intel MPI, MVAPICH).

They pass our two variables to the ranks on other hosts in different ways, and several may be
installed side by side, so mpirun itself is asked which one it is.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Mapping, Sequence

from clusterprof.errors import UsageError
from clusterprof.launchers.support.command_line import (
    closed,
    find_program,
    further,
    mount_remark,
    starts_ranks_itself,
    unmounted_folders,
    whole_number,
    whose_ranks,
)
from clusterprof.launchers.support.job import Job

SUMMARY = "run a job under MPI's mpirun and profile some of its ranks"
PASSES_OPTIONS_TO = "mpirun"

#: text in the output of `mpirun --version` -> the family
_SAYS = (
    ("(Open MPI)", "openmpi"),
    ("(OpenRTE)", "openmpi"),  # Debian's, by its true name mpirun.openmpi
    ("IBM Spectrum MPI", "openmpi"),
    ("HYDRA build details", "hydra"),
    ("Intel(R) MPI Library", "hydra"),
)

_COUNTS = {
    "openmpi": ("-n", "--n", "-np", "--np", "-c"),
    "hydra": ("-n", "-np"),
    "": ("-n", "-np"),
}

#: Open MPI 4 refuses -x beside this, in whichever way it is set.
_ENVIRONMENT_LIST = "mca_base_env_list"


def job(
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
) -> Job:
    """See `clusterprof.launchers.Launcher`. Raises LaunchError where there is no mpirun."""
    kind = flavour(version(find_program("mpirun")))
    size, size_source = world(options, program, kind)
    inner = starts_ranks_itself(program)
    carrying, command, remarks = carried(kind, options, program, environ, added)
    return Job(
        launcher="mpirun",
        command=("mpirun", *carrying, *options, *command),
        world_size=None if inner else size,
        size_source="" if inner else size_source,
        identity=whose_ranks(program, "mpirun"),
        remarks=(*mount_remark(unmounted_folders((), program, added)), *remarks),
        closed=closed(program),
    )


def version(program: str) -> str:
    """The output of `mpirun --version`; "" where it fails."""
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def flavour(version_text: str) -> str:
    """`openmpi`, `hydra`, or "" for an mpirun that is neither."""
    return next((kind for sign, kind in _SAYS if sign in version_text), "")


def world(options: Sequence[str], program: Sequence[str], kind: str) -> tuple[int | None, str]:
    """How many ranks there will be and what says so; (None, "") where only mpirun knows.

    `-n 2 A : -n 4 B` is six ranks: what follows a `:` are options again, up to the program.
    """
    parts = [list(options), *further(program)]
    counts = [_count(part, _COUNTS[kind]) for part in parts]
    if any(count is None for count in counts):
        return None, ""
    return sum(n for _, n in filter(None, counts)), " : ".join(
        f"{name} {n}" for name, n in filter(None, counts)
    )


def _count(words: Sequence[str], names: Sequence[str]) -> tuple[str, int] | None:
    """The option that says how many ranks, and the number. mpirun knows no `-n4` and no `=`."""
    for place, word in enumerate(words[:-1]):
        if word in names:
            number = whole_number(words[place + 1])
            return None if number is None else (word, number)
    return None


def carried(
    kind: str,
    options: Sequence[str],
    program: Sequence[str],
    environ: Mapping[str, str],
    added: Mapping[str, str],
) -> tuple[list[str], list[str], list[str]]:
    """How our variables reach every rank: mpirun options, the program's words, remarks."""
    own = given_value(options, "PYTHONPATH")
    why = ""
    if not kind:
        why = "this mpirun is neither Open MPI nor of Hydra's family"
    elif own is not None:
        why = "the mpirun options set PYTHONPATH"
    elif kind == "openmpi" and _lists_environment(options, environ):
        why = f"Open MPI refuses -x together with {_ENVIRONMENT_LIST}"
    if not why:
        if kind == "openmpi":
            missing = [name for name in added if not _passed_on(options, name)]
            return [word for name in missing for word in ("-x", name)], list(program), []
        words = [word for name, value in added.items() for word in ("-genv", name, value)]
        return words, list(program), []
    if ":" in program:
        raise UsageError(
            f"for several programs (:) mpirun must pass clusterprof's variables on, but {why}",
            "leave that out, or start one program that branches on its rank",
        )
    values = dict(added)
    if own:
        # The injected folder stands first: what follows is what the user asked for.
        values["PYTHONPATH"] = f"{values['PYTHONPATH'].split(':', 1)[0]}:{own}"
    words = ["env", *(f"{name}={value}" for name, value in values.items())]
    return [], [*words, *program], [f"{why}: env sets clusterprof's variables"]


def given_value(options: Sequence[str], name: str) -> str | None:
    """The value that the user's own options give a variable: -x NAME=V, -genv or -env NAME V."""
    found = None
    for place, word in enumerate(options):
        after = list(options[place + 1 : place + 3])
        if word == "-x" and after and after[0].startswith(name + "="):
            found = after[0].partition("=")[2]
        elif word in ("-genv", "-env", "--genv", "--env") and after:
            if after[0].startswith(name + "="):
                found = after[0].partition("=")[2]
            elif after[0] == name and len(after) == 2:
                found = after[1]
    return found


def _passed_on(options: Sequence[str], name: str) -> bool:
    return ("-x", name) in itertools.pairwise(options)


def _lists_environment(options: Sequence[str], environ: Mapping[str, str]) -> bool:
    return _ENVIRONMENT_LIST in options or f"OMPI_MCA_{_ENVIRONMENT_LIST}" in environ
