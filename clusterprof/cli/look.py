"""`clusterprof look OPTIONS -- LAUNCHER ...`: look at all ranks of a job, and profile none."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from typing import Any

from clusterprof import jobs, launchers
from clusterprof.cli import Parser, launch, verb_parser
from clusterprof.errors import UsageError

#: the options of the launching verbs that a look has as well
OPTIONS = (
    "steps", "step_on", "watch", "metrics", "hang_after", "stacks", "clock_probe", "run_dir",
    "force", "dry_run", "no_merge", "strict", "fail_on", "gpu_hour",
)  # fmt: skip
#: no rank is profiled, whatever the environment or a file of settings says
FIXED: dict[str, Any] = {
    "profiler": "none", "ranks": "auto", "arm": None, "nsys": None, "trace": None, "nsys_arg": [],
    "pytorch": None, "cpu_sampling": False, "window_by": "auto", "looks_alone": True,
}  # fmt: skip
HELP = {
    "steps": "the steps of the first look: A to B-1 (default 10:15)",
    "watch": "look at all ranks so often: 90s, 10m, 1h; off: once, at the first look (default 10m)",
}
#: how often all ranks are looked at where nothing says it
EVERY = "10m"
_USAGE = "clusterprof look [OPTION...] -- PROGRAM..."
_EXAMPLE = "write: clusterprof look -- srun -N2 --ntasks-per-node=8 python train.py"


def parser(verb: str) -> Parser:
    """The verb's options: some of those of the launching verbs."""
    parser = verb_parser(
        verb, "Look at all ranks of a job again and again while it runs, and say which are late. "
        "No rank is profiled. PROGRAM is the command that starts the job, as it is: srun, "
        "torchrun, mpirun, or anything else that starts Python.",
        "look -- srun -N64 --ntasks-per-node=8 python train.py",
        "look --watch 1m -- torchrun --nproc-per-node 8 train.py",
        "look -- accelerate launch --num_processes 4 train.py",
        usage=_USAGE, short_help=False,
    )  # fmt: skip
    to_capture = (
        "a look captures no rank: clusterprof capture RUN --ranks late does, in the same run"
    )
    parser.gone = dict.fromkeys(("--ranks", "--profiler", "--arm"), to_capture)
    group = parser.add_argument_group("the look")
    for action in launch.launching_parser(verb, "", "")._actions:
        if action.dest in OPTIONS:
            action.help = HELP.get(action.dest, action.help)
            group._add_action(action)
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Run the job, look at all its ranks; returns the job's own status."""
    own = ["--help" if word == "-h" else word for word in own]
    own_parser = parser(verb)
    _, left = own_parser.parse_known_args(own)
    if left and left[0] in launchers.names():
        job = shlex.join([*left, *(["--", *program] if program else [])])
        raise UsageError(f"{left[0]} stands behind --", f"write: clusterprof look -- {job}")
    if left:
        raise own_parser.unknown(left[0])
    if not program:
        raise UsageError("there is no -- before the command that starts the job", _EXAMPLE)
    launcher, options, command = split(program)
    # hosts over SSH share no folder: their recorders are looked at once the job has ended
    usual = {"watch": "off" if launcher == "ssh" else EVERY}
    return launch.start(launcher, [*own, *options], command, FIXED, usual)


def split(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The launcher of a command line, its options, and the program that it starts.

    What no launcher of ours starts is a program as it is, which `run` starts. The program stands
    behind --, or begins with the first word that can be one: Python, a script, or what starts
    ranks. Raises UsageError where there is none.
    """
    launcher, rest = words[0], list(words[1:])
    if launcher not in launchers.names():
        return "run", [], list(words)
    options = list(itertools.takewhile(lambda word: word != "--", rest))
    program = rest[len(options) + 1 :]
    if len(options) == len(rest):
        begin = _program_at(launcher, rest)
        if begin is None:
            raise UsageError(
                f"what {launcher} starts cannot be told from its options",
                f"write -- before it: clusterprof look -- {launcher} [OPTION...] -- PROGRAM...",
            )
        options, program = rest[:begin], rest[begin:]
    if not program:
        raise UsageError(f"{launcher} has no program to start", _EXAMPLE)
    return launcher, options, program


def _program_at(launcher: str, words: Sequence[str]) -> int | None:
    """The place of the first word that may be a program, and is no value of the launcher's options
    that we know (`ssh --python PATH`).
    """
    known = Parser()
    getattr(launchers.load(launcher), "add_options", lambda _: None)(known)
    takes_value = {
        name for action in known._actions if action.nargs is None for name in action.option_strings
    }
    pairs = enumerate(itertools.pairwise(["", *words]))
    return next(
        (n for n, (before, word) in pairs if before not in takes_value and _may_be_program(word)),
        None,
    )


def _may_be_program(word: str) -> bool:
    is_script = word.endswith((".py", ".sh")) and "=" not in word
    return jobs.is_python(word) or is_script or jobs.starts_ranks_itself([word])
