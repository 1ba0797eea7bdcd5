"""`clusterprof VERB ...`: split the command line, run the verb, print errors as messages."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, cast

from clusterprof import __version__, console, launchers
from clusterprof.cli import Parser, nearest
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.priority import without_pandas

#: heading of --help -> verb, as its module is called -> one line. Launchers are verbs of the
#: first group: `cli.launch`
GROUPS = {
    "run a job": {
        "sbatch": "submit a batch job that profiles some of its ranks, and a job that merges",
        "look": "look at all ranks of a job while it runs, and say which are late; profile none",
    },
    "look at a run": {
        "status": "show how far each rank of a run is, while the job runs",
        "attach": "look at a job that was not started under clusterprof, as far as torch lets one",
        "capture": "capture further steps of a job that runs, on any of its ranks",
        "collect": "finish an interrupted run: collect its reports, merge, print the verdict",
        "merge": "merge reports of several ranks; print which rank delays the others, and why",
        "report": "print the verdict of a merged run",
        "view": "open the page of a merged run, or serve it on the loopback with its ssh command",
        "explain": "explain a finding: its meaning, when it is wrong, what is recommended",
        "runs": "list your runs with what they found, or remove old ones",
    },
    "share and compare": {
        "export": "write a merged run for Perfetto and other tools",
        "compare": "compare two runs: step time, its parts, findings, each with the noise",
        "verify": "after a repair: check the stated saving against what a new run measures",
        "baseline": "keep runs under a name, to compare with",
        "scrub": "copy an nsys export without environment variables, to share it",
        "mcp": "answer an assistant's questions about runs (a server that speaks MCP)",
    },
    "set up": {
        "doctor": "check that profiling can work, on every node of the allocation",
        "clock": "measure the clocks of the nodes against each other, inside a launcher",
        "completion": "print a script that completes this command line in a shell",
    },
}
VERBS = {verb: text for group in GROUPS.values() for verb, text in group.items()}

EXAMPLES = (
    "clusterprof torchrun --nproc-per-node 4 -- train.py",
    "clusterprof srun -N2 --ntasks-per-node=8 --gpus-per-node=8 -- python train.py",
    "clusterprof srun --ranks 0,8,16 --steps 20:30 -N2 ... -- python train.py",
    "clusterprof merge DIR              reports that were recorded without clusterprof",
    "clusterprof help VERB              the options of a verb",
)


def grouped() -> dict[str, list[str]]:
    """All verbs by the headings of --help; the launchers come first."""
    first, *others = GROUPS
    launching = [*(name for name in launchers.names() if name not in VERBS), *GROUPS[first]]
    return {first: launching, **{title: [*GROUPS[title]] for title in others}}


def verbs() -> list[str]:
    """All verbs, in the order of --help."""
    return [name for names in grouped().values() for name in names]


def parser() -> Parser:
    """The parser of the verbs; each verb's own options are added when it is chosen."""
    top = Parser(
        prog="clusterprof",
        usage="clusterprof VERB ...",
        description="Profile a few ranks of a distributed training. Names the ranks that delay "
        "the others and the cause, and the communication that is not overlapped with compute.",
        examples=EXAMPLES,
    )
    top.add_argument("-h", "--help", action="help", help="show this help")
    top.add_argument("-V", "--version", action="version", version=f"clusterprof {__version__}",
        help="show the version")  # fmt: skip
    for title, names in grouped().items():
        group = top.add_argument_group(title)
        for name in names:
            group.add_argument(name, nargs="?", help=summary(name))
    return top


def summary(verb: str) -> str:
    """A verb in one line."""
    return VERBS.get(verb) or launchers.summary(verb)


def parser_of(verb: str) -> Parser:
    """The parser of a verb, with all options that its help shows."""
    return cast("Parser", verb_module(verb).parser(verb))


def verb_module(verb: str) -> ModuleType:
    """The module that runs `verb`."""
    return importlib.import_module(f"clusterprof.cli.{verb if verb in VERBS else 'launch'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status (see "exit codes" in the README)."""
    if argv is None:  # in a process of its own
        without_pandas()
    with console.streams():
        return run(list(sys.argv[1:] if argv is None else argv))


def run(words: Sequence[str]) -> int:
    """Run one verb, and turn an error into a message and a status."""
    if words[:1] == ["help"]:
        words = [*(word for word in words[1:2] if word != "help"), "--help"]
    if not words:
        parser().print_help()
        return 2
    verb, (own, program) = words[0], split(words[1:])
    if debug := "--debug" in own:  # our own modules' log: where one rank's reader failed
        import logging

        log = logging.getLogger("clusterprof")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.DEBUG)
    try:
        if verb not in verbs():
            check_verb(verb)
        if verb not in (*launchers.names(), "sbatch", "look"):
            # Where a container's umask lets all users write what we make, let its owner alone. The
            # umask of the user's own programs, which those verbs start, is its own affair.
            umask = os.umask(0o022)
            os.umask(umask if umask & stat.S_IWOTH else umask | 0o022)
        status = int(verb_module(verb).main(verb, own, program))
        sys.stdout.flush()
    except KeyboardInterrupt:
        console.say("interrupted")
        return 130
    except Exception as error:  # noqa: BLE001 - each becomes a message and a status
        if isinstance(error, console.Unwritable) and error.unread:
            return 0  # `clusterprof merge ... | head`: no error of ours
        if debug:
            import traceback

            traceback.print_exc()
        if not isinstance(error, ClusterprofError):
            error = ClusterprofError(
                f"{type(error).__name__}: {error}",
                "this is a bug in clusterprof",
                "add --debug to see where it happened, and please report it",
            )
        console.error(error.what, *error.details)
        return error.exit_code
    return status


def check_verb(word: str) -> NoReturn:
    """Print the help or the version where that is the first word; else raise UsageError."""
    top = parser()
    if word.startswith("-"):
        top.parse_args([word])
    near = nearest(word, ["help", *verbs()])
    raise UsageError(
        f"there is no verb {word}",
        f"did you mean clusterprof {near}?" if near else f"those there are: {', '.join(verbs())}",
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What stands before the first `--` and what after it; None where there is no `--`."""
    if "--" not in words:
        return list(words), None
    dashes = list(words).index("--")
    return list(words[:dashes]), list(words[dashes + 1 :])
