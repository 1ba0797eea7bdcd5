"""Which rank is this? One table of environment variables per launcher, and the one of our own.

A rank's own environment decides, never the place of a file in a list. The inner launcher wins:
torchrun's workers inherit SLURM_PROCID from the agent that started them, which is not their rank.
"""

import os
from typing import Dict, List, Mapping, MutableMapping, NamedTuple, Optional, Tuple

#: Where plan.json is; without it an interpreter is none of ours. A rank's has fields behind that,
#: for itself and its children: `/run/plan.json;counting=7`. Whoever passes on or leaves out the
#: plan does so with all of them.
PLAN = "CLUSTERPROF_PLAN"
#: The process that counts for this rank; its children inherit it and stay out of the way.
COUNTING = "counting"
#: The process that may turn out to be a rank (`rank.start.Unnumbered`); its children inherit it.
WAITING = "waiting"
#: For the program under nsys: how the window opens, and where the guard listens; `none:` where
#: nsys could not start it.
PROFILED = "profiled"
WITHOUT_NSYS = "none:"
#: What makes nsys follow a process: it is not to follow those that we start beside the program.
FOLLOWED = ("LD_PRELOAD", "QUADD_", "NSYS_", "CUDA_INJECTION", "NVTX_INJECTION")
#: For the program under nsys: the descriptors that it was given, as `0,1,2`; the others are nsys'.
GIVEN = "given"
#: Variables that we have set for one process alone, as `A+B`: its children give them back.
LENT = "lent"
#: The Unix socket of this rank's prober, a name in the kernel's own list of those without a file.
PROBE = "probe"
#: A field has no `/`: they are all in the last component of a path, and the folder is the run's.
_ESCAPED = (("%", "%25"), ("/", "%2F"), (";", "%3B"))


def plan_path(environ: Mapping[str, str]) -> str:
    """Where plan.json is."""
    folder, slash, name = environ[PLAN].rpartition("/")
    return folder + slash + name.partition(";")[0]


def fields(environ: Mapping[str, str]) -> Dict[str, str]:
    """All fields of PLAN."""
    text = environ.get(PLAN, "")
    if ";" not in text:  # nothing is said yet
        return {}
    texts = text.rpartition("/")[2].split(";")[1:]
    values = dict(text.split("=", 1) for text in texts if "=" in text)
    for name, value in values.items():
        for plain, escaped in reversed(_ESCAPED):
            value = value.replace(escaped, plain)
        values[name] = value
    return values


def profiled(environ: Mapping[str, str]) -> str:
    """The field PROFILED; "" where it is not there."""
    return fields(environ).get(PROFILED, "")


def other_profiler(environ: Mapping[str, str]) -> Optional[str]:
    """What profiles this process already, by its environment; None where nothing is seen."""
    if "NSYS_PROFILING_SESSION_ID" in environ or "QUADD_INJECTION_CONFIG" in environ:
        return "an nsys that was started around it"
    injected = environ.get("CUDA_INJECTION64_PATH")
    return "%s (CUDA_INJECTION64_PATH)" % injected if injected else None


def set_field(environ: MutableMapping[str, str], name: str, value: Optional[str]) -> None:
    """Set a field of PLAN, or take it away (None); nothing where there is no plan."""
    if PLAN not in environ:
        return
    values: Dict[str, Optional[str]] = {**fields(environ), name: value}
    whole = plan_path(environ)
    for name, value in values.items():
        if value is not None:
            for plain, escaped in _ESCAPED:
                value = value.replace(plain, escaped)
            whole += ";%s=%s" % (name, value)
    environ[PLAN] = whole


def lend(environ: MutableMapping[str, str], name: str, value: str) -> None:
    """Set a variable for this process, not for its children; what the user has set stays."""
    if name not in environ and PLAN in environ:
        environ[name] = value
        set_field(environ, LENT, "+".join(filter(None, (fields(environ).get(LENT), name))))


def give_back(environ: MutableMapping[str, str]) -> None:
    """In a child: take away what was lent to its parent."""
    names = fields(environ).get(LENT)
    if names is not None:
        set_field(environ, LENT, None)
        for name in names.split("+"):
            environ.pop(name, None)


# As a NamedTuple compiles annotations that are texts, and the first compile() in an interpreter
# takes 2 ms, there is no `from __future__ import annotations` in this module, nor in its like.
class Launcher(NamedTuple):
    """The variables in which one launcher tells a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    #: what must be there besides for the variables to mean what they say
    requires: Tuple[str, ...] = ()
    #: it starts ranks inside of another launcher's tasks, whose variables they inherit
    inner: bool = False
    #: how many ranks there are on this node; "" where it does not say
    local_size: str = ""
    #: the node's number, where the rank is that on its node: known of the first node only
    node: str = ""


class Identity(NamedTuple):
    """A process's place in its job, and which launcher said so."""

    rank: int
    world_size: Optional[int]
    local_rank: Optional[int]
    source: str


LIGHTNING = "lightning"

#: One row is all that a new launcher's ranks need to be known, live and in a report. Inner
#: launchers first. RANK alone is also set by hand in many scripts, so it comes last.
LAUNCHERS: Tuple[Launcher, ...] = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("TORCHELASTIC_RUN_ID",), inner=True,
             local_size="LOCAL_WORLD_SIZE"),
    Launcher("deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("CROSS_RANK", "LOCAL_SIZE"),
             inner=True, local_size="LOCAL_SIZE"),
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_STEP_ID",)),
    # MPICH, Intel MPI and their kin.
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    Launcher("environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("WORLD_SIZE",)),
    # Its rank 0 starts the others of its node as its children.
    Launcher(LIGHTNING, "LOCAL_RANK", "WORLD_SIZE", "LOCAL_RANK", ("WORLD_SIZE",),
             node="NODE_RANK"),
)  # fmt: skip

#: The source of a program that was started as it stands: any launcher's variables, or, where there
#: are none, the only rank.
ALONE = "run"
#: The source where torch's process group has said which rank it is.
GROUP = "process group"

#: What starts the ranks as children of its own: scripts by their file's name, and modules.
#: `accelerate launch` is torchrun in its own process, or starts one program and says nothing.
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
STARTERS = (
    *TORCHRUN,
    "accelerate", "accelerate-launch", "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch",
)  # fmt: skip
#: Scripts in Python that only prepare an environment for the program behind them.
WRAPPERS = ("conda", "poetry", "pipenv", "pdm", "hatch")


def is_starter(line: List[str]) -> bool:
    """Whether an interpreter with this command line starts ranks and is none itself."""
    return program(line) in STARTERS + WRAPPERS


def program(line: List[str]) -> str:
    """The file name of the script, or the module, that `python ...` runs; "" for neither."""
    words = iter(line[1:])
    for word in words:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif not word.startswith("-"):
            return os.path.basename(word)
        elif not word.startswith(("--", "-W", "-X")):
            flags, is_module, module = word[1:].partition("m")
            if is_module:
                return module or next(words, "")
            if "c" in flags or not flags:
                return ""
    return ""


def _number(environ: Mapping[str, str], name: str) -> Optional[int]:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return None


def identify(environ: Mapping[str, str], source: Optional[str] = None) -> Optional[Identity]:
    """Return the place that `environ` gives a process, or None where it gives none.

    `source` restricts the answer to one launcher's variables, and those of inner launchers (a
    script may end in torchrun): of `srun torchrun ...` the source is torchrun, and the srun task,
    which has a SLURM_PROCID, is no rank.
    """
    for launcher in LAUNCHERS:
        if source not in (None, ALONE, launcher.name) and not launcher.inner:
            continue
        rank = _number(environ, launcher.rank)
        if launcher.node and _number(environ, launcher.node) != 0:
            continue
        if rank is not None and environ.keys() >= set(launcher.requires):
            world_size = _number(environ, launcher.world_size)
            return Identity(rank, world_size, _number(environ, launcher.local_rank), launcher.name)
    return Identity(0, 1, 0, ALONE) if source == ALONE else None


def of_group(rank: int, world_size: int, environ: Mapping[str, str]) -> Identity:
    """The place of a process that has this one in its process group."""
    return Identity(rank, world_size, _number(environ, "LOCAL_RANK"), GROUP)


def nodes(me: Identity, environ: Mapping[str, str]) -> int:
    """How many nodes the job's ranks are on, as far as the launcher says; 0 where it does not."""
    slurm = _number(environ, "SLURM_STEP_NUM_NODES") if environ.get("SLURM_STEP_ID") else None
    # how many ranks this process's launcher has started on this node
    sizes = [_number(environ, row.local_size) for row in LAUNCHERS if row.name == me.source]
    on_node = max((size for size in sizes if size is not None), default=0)
    return max(slurm or 0, -(-(me.world_size or 0) // on_node) if on_node > 0 else 0)
