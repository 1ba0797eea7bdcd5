"""`clusterprof VERB ...`: split the command line, find the verb, turn errors into words."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from clusterprof import __version__, console
from clusterprof.errors import ClusterprofError

#: verb -> (module, one line for --help)
VERBS = {
    "srun": ("launch.run_job", "run a job under Slurm's srun and capture chosen ranks"),
    "torchrun": ("launch.run_job", "run a job under torchrun and capture chosen ranks"),
    "mpirun": ("launch.run_job", "run a job under MPI's mpirun and capture chosen ranks"),
    "ssh": (
        "launch.over_hosts",
        "run torchrun on each of --hosts over SSH and capture chosen ranks",
    ),
    "run": ("launch.run_job", "run a program as it stands: accelerate, deepspeed, a script"),
    "sbatch": ("cli.sbatch", "submit a batch job with chosen ranks captured, and one that merges"),
    "doctor": ("cli.doctor", "check that a capture can work, on every node of the allocation"),
    "status": ("cli.status", "how far each rank of a run is, while it runs"),
    "collect": ("cli.collect", "finish an interrupted run: settle its ranks, merge, report"),
    "merge": ("cli.merge", "merge reports of several ranks and say who is late and why"),
    "scrub": ("cli.scrub", "copy an nsys export without the environment it was taken in"),
    "clock": ("cli.clock", "measure the nodes' clocks against each other, inside a launcher"),
    "report": ("cli.report", "print the verdict of a merged run again, or write its page"),
}

_EPILOG = """\
the whole of it:
  clusterprof torchrun --ranks 0,2 --nproc-per-node 4 -- train.py
  clusterprof srun --ranks 0,8,16 -N2 --ntasks-per-node=8 --gpus-per-node=8 -- python train.py
  clusterprof merge REPORT...        reports that clusterprof did not launch

clusterprof VERB --help tells a verb's options.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verbs; each verb's own options are added when it is chosen."""
    top = argparse.ArgumentParser(
        prog="clusterprof",
        description="Which rank holds up the others, why, and which communication is not hidden.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"clusterprof {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, (_, line) in VERBS.items():
        verbs.add_parser(name, help=line, add_help=False)
    return top


def verb_module(verb: str) -> ModuleType:
    """The module that runs `verb`."""
    return importlib.import_module(f"clusterprof.{VERBS[verb][0]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status (see "exit codes" in the README)."""
    with console.streams():
        return run(list(sys.argv[1:] if argv is None else argv))


def run(words: Sequence[str]) -> int:
    """Run one verb, and turn what goes wrong into words and a status."""
    if not words or words[0] not in VERBS:
        parser().parse_args(words)
        parser().print_help()
        return 2
    verb, rest = words[0], words[1:]
    own, program = split(rest)
    if "--debug" in own:
        _show_debug()
    try:
        status = int(verb_module(verb).main(verb, own, program))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - each becomes words and a status
        if isinstance(error, console.Unwritable) and error.unread:
            return 0  # `clusterprof merge ... | head`: no error of ours
        if "--debug" in own:
            traceback.print_exc()
        if isinstance(error, ClusterprofError):
            console.error(error)
            return error.exit_code
        console.error(
            f"{type(error).__name__}: {error}",
            "this is a fault of clusterprof",
            "add --debug to see where, and please report it",
        )
        return ClusterprofError.exit_code
    return status


def _show_debug() -> None:
    """Let what our own modules say for --debug reach stderr: where one rank's reader failed."""
    log = logging.getLogger("clusterprof")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.DEBUG)


def split(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What stands before the first `--` and what after it; None where there is no `--`."""
    if "--" not in words:
        return list(words), None
    place = list(words).index("--")
    return list(words[:place]), list(words[place + 1 :])
