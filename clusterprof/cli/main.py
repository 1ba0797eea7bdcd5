"""`clusterprof VERB ...`: split the command line, run the verb, print errors as messages."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from clusterprof import __version__, console, launchers
from clusterprof.errors import ClusterprofError

#: verb, as its module is called -> one line for --help. Each launcher is a verb too: `cli.launch`
VERBS = {
    "sbatch": "submit a batch job that profiles some of its ranks, and a job that merges",
    "doctor": "check that profiling can work, on every node of the allocation",
    "status": "show how far each rank of a run is, while the job runs",
    "capture": "capture further steps of a job that runs, on any of its ranks",
    "collect": "finish an interrupted run: collect its reports, merge, print the verdict",
    "merge": "merge reports of several ranks; print which rank delays the others, and why",
    "report": "print the verdict of a merged run",
    "export": "write a merged run for Perfetto and other tools",
    "compare": "compare two runs: step time, its parts, findings, each with the noise",
    "baseline": "keep runs under a name, to compare with",
    "explain": "explain a finding: its meaning, when it is wrong, what is recommended",
    "clock": "measure the clocks of the nodes against each other, inside a launcher",
    "scrub": "copy an nsys export without environment variables, to share it",
}

_EPILOG = """\
examples:
  clusterprof torchrun --nproc-per-node 4 -- train.py
  clusterprof srun --ranks 0,8,16 -N2 --ntasks-per-node=8 --gpus-per-node=8 -- python train.py
  clusterprof merge REPORT...        for reports that were recorded without clusterprof

clusterprof VERB --help shows the options of a verb.
"""


def verbs() -> list[str]:
    """All verbs: the launchers, then what else there is to do."""
    return [*(name for name in launchers.names() if name not in VERBS), *VERBS]


def parser() -> argparse.ArgumentParser:
    """The parser of the verbs; each verb's own options are added when it is chosen."""
    top = argparse.ArgumentParser(
        prog="clusterprof",
        description="Profile a few ranks of a distributed training. Names the ranks that delay "
        "the others and the cause, and the communication that is not overlapped with compute.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"clusterprof {__version__}")
    group = top.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name in verbs():
        line = VERBS.get(name) or launchers.summary(name)
        group.add_parser(name, help=line, add_help=False)
    return top


def verb_module(verb: str) -> ModuleType:
    """The module that runs `verb`."""
    return importlib.import_module(f"clusterprof.cli.{verb if verb in VERBS else 'launch'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status (see "exit codes" in the README)."""
    with console.streams():
        return run(list(sys.argv[1:] if argv is None else argv))


def run(words: Sequence[str]) -> int:
    """Run one verb, and turn an error into a message and a status."""
    if not words or words[0] not in verbs():
        parser().parse_args(words)
        parser().print_help()
        return 2
    verb, rest = words[0], words[1:]
    own, program = split(rest)
    debug = "--debug" in own
    if debug:  # what our own modules log reaches stderr: where one rank's reader failed
        log = logging.getLogger("clusterprof")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.DEBUG)
    try:
        status = int(verb_module(verb).main(verb, own, program))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - each becomes a message and a status
        if isinstance(error, console.Unwritable) and error.unread:
            return 0  # `clusterprof merge ... | head`: no error of ours
        if debug:
            traceback.print_exc()
        if isinstance(error, ClusterprofError):
            console.error(error)
            return error.exit_code
        console.error(
            f"{type(error).__name__}: {error}",
            "this is a bug in clusterprof",
            "add --debug to see where it happened, and please report it",
        )
        return ClusterprofError.exit_code
    return status


def split(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What stands before the first `--` and what after it; None where there is no `--`."""
    if "--" not in words:
        return list(words), None
    place = list(words).index("--")
    return list(words[:place]), list(words[place + 1 :])
