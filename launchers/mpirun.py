"""MPI's mpirun: Open MPI, or one of Hydra's family (MPICH, Intel MPI, MVAPICH).

They pass our two variables to the ranks on other hosts in different ways, and several may be
installed side by side, so mpirun itself is asked which one it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from clusterprof import jobs
from clusterprof.agent.nsys import ask
from clusterprof.errors import UsageError
from clusterprof.jobs import CommandLine, Job

SUMMARY = "run a job under MPI's mpirun and profile some of its ranks"
PASSES_OPTIONS_TO = "mpirun"
EXAMPLES = (
    "-np 16 --ranks 0,8 -- python train.py",
    "--dry-run -np 16 -- python train.py",
)

#: text in the output of `mpirun --version` -> the family
_SAYS = (
    ("(Open MPI)", "openmpi"),
    ("(OpenRTE)", "openmpi"),  # Debian's, by its true name mpirun.openmpi
    ("IBM Spectrum MPI", "openmpi"),
    ("HYDRA build details", "hydra"),
    ("Intel(R) MPI Library", "hydra"),
)

_COUNTS = {"openmpi": ("-n", "--n", "-np", "--np", "-c"), "hydra": ("-n", "-np"), "": ("-n", "-np")}

#: Open MPI 4 refuses -x beside this, in whichever way it is set.
_ENVIRONMENT_LIST = "mca_base_env_list"


def job(line: CommandLine) -> Job:
    """See `clusterprof.launchers.Launcher`. Raises LaunchError where there is no mpirun."""
    answer = version(jobs.find_program("mpirun"))
    kind = next((kind for sign, kind in _SAYS if sign in answer), "")
    carrying, command, remarks = carried(kind, line)
    return Job(
        "mpirun",
        ("mpirun", *carrying, *line.options, *command),
        *world(line.options, line.program, kind),
        identity=jobs.whose_ranks(line.program, "mpirun"),
        remarks=(*jobs.mount_remarks(line), *remarks),
    )


def version(program: str) -> str:
    """The output of `mpirun --version`; "" where it fails."""
    return ask([program, "--version"], 20)


def world(options: Sequence[str], program: Sequence[str], kind: str) -> tuple[int | None, str]:
    """How many ranks there will be and what says so; (None, "") where only mpirun knows.

    `-n 2 A : -n 4 B` is six ranks: what follows a `:` are options again, up to the program.
    mpirun knows no `-n4` and no `=`.
    """
    if jobs.starts_ranks_itself(program):
        return None, ""
    size, sources = 0, []
    for words in (list(options), *jobs.further(program)):
        given = (pair for pair in itertools.pairwise(words) if pair[0] in _COUNTS[kind])
        name, value = next(given, ("", ""))
        if (count := jobs.whole_number(value)) is None:
            return None, ""
        size += count
        sources.append(f"{name} {count}")
    return size, " : ".join(sources)


def carried(kind: str, line: CommandLine) -> tuple[list[str], list[str], list[str]]:
    """How our variables reach every rank: mpirun options, the program's words, remarks."""
    why = withheld(kind, line)
    if not why:
        passed = [name for word, name in itertools.pairwise(line.options) if word == "-x"]
        added = line.added
        passing = {
            "openmpi": [word for name in added if name not in passed for word in ("-x", name)],
            "hydra": [word for name, value in added.items() for word in ("-genv", name, value)],
        }
        return passing[kind], list(line.program), []
    if ":" in line.program:
        raise UsageError(
            f"for several programs (:) mpirun must pass clusterprof's variables on, but {why}",
            "leave that out, or start one program that branches on its rank",
        )
    values = dict(line.added)
    if own := given_value(line.options, "PYTHONPATH"):
        # The injected folder stands first: what follows is what the user asked for.
        values["PYTHONPATH"] = f"{values['PYTHONPATH'].split(':', 1)[0]}:{own}"
    words = ["env", *(f"{name}={value}" for name, value in values.items())]
    return [], [*words, *line.program], [f"{why}: env sets clusterprof's variables"]


def withheld(kind: str, line: CommandLine) -> str:
    """Why mpirun itself cannot pass our variables on; "" where it can."""
    if not kind:
        return "this mpirun is neither Open MPI nor of Hydra's family"
    if given_value(line.options, "PYTHONPATH") is not None:
        return "the mpirun options set PYTHONPATH"
    listed = _ENVIRONMENT_LIST in line.options or f"OMPI_MCA_{_ENVIRONMENT_LIST}" in line.environ
    if kind == "openmpi" and listed:
        return f"Open MPI refuses -x together with {_ENVIRONMENT_LIST}"
    return ""


def given_value(options: Sequence[str], name: str) -> str | None:
    """The value that the user's own options give a variable: -x NAME=V, -genv or -env NAME V."""
    value = None
    for index, word in enumerate(options):
        first, *second = options[index + 1 : index + 3] or [""]
        if word in ("-x", "-genv", "-env", "--genv", "--env") and first.startswith(name + "="):
            value = first.partition("=")[2]
        elif word in ("-genv", "-env", "--genv", "--env") and first == name and second:
            value = second[0]
    return value
