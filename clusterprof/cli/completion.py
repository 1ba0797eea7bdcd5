"""`clusterprof completion SHELL`: completion of verbs, options and values, which shtab writes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from clusterprof import __version__, launchers
from clusterprof.cli import Parser, verb_parser
from clusterprof.cli.main import parser as top_parser, parser_of, summary, verbs

SHELLS = ("bash", "fish", "tcsh", "zsh")
#: what takes the name of a file
_FILES = {"FILE", "DIR", "PATH", "NAME|FILE", "EXPORT", "TARGET", "RUN", "PROGRAM"}


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb, "Print a script that completes verbs, options and their values in a shell.",
        "completion bash > ~/.local/share/bash-completion/completions/clusterprof",
        "completion zsh > ~/.zfunc/_clusterprof               with fpath+=~/.zfunc in .zshrc",
        "completion fish > ~/.config/fish/completions/clusterprof.fish",
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print the script."""
    import shtab

    from clusterprof.analysis.findings.registry import CODES

    arguments = parser(verb).parse_args([*own, *(program or ())])
    whole = every_verb()
    for action in arguments_of(whole):
        if action.metavar == "CODE":
            action.choices = sorted(CODES)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined] # this is how shtab asks
        if action.metavar:
            # shtab writes it as it is between the colons of zsh's _arguments
            action.metavar = str(action.metavar).replace(":", "-")
        # a shell shows one line: the first clause
        action.help = re.split(r"[;:(]|\. ", action.help or "")[0].strip()
    print(shtab.complete(whole, arguments.shell))
    return 0


def every_verb() -> argparse.ArgumentParser:
    """One parser of the whole command line, as shtab and argparse-manpage read it.

    Each verb is a command of its own; what stands behind `--` is its argument PROGRAM.
    """
    top = argparse.ArgumentParser("clusterprof", description=top_parser().description)
    top.add_argument("-V", "--version", action="version", version=__version__,
        help="show the version")  # fmt: skip
    commands = top.add_subparsers(
        title="verbs", metavar="VERB", parser_class=argparse.ArgumentParser
    )
    for name in verbs():
        verb = parser_of(name)
        command = commands.add_parser(
            name, help=summary(name), usage=verb.usage, parents=[verb], add_help=False
        )
        if name in (*launchers.names(), "sbatch", "look"):
            command.add_argument("program", metavar="PROGRAM", nargs=argparse.REMAINDER,
                help="the training, behind --")  # fmt: skip
    help_of = commands.add_parser("help", help="the options of a verb")
    help_of.add_argument("verb", nargs="?", choices=verbs(), help="the verb")
    return top


def arguments_of(whole: argparse.ArgumentParser) -> list[argparse.Action]:
    """What the help of a parser shows, and that of its commands."""
    shown = [action for action in whole._actions if action.help != argparse.SUPPRESS]
    commands = [
        command for action in shown if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]  # fmt: skip
    return [*shown, *(action for command in commands for action in arguments_of(command))]
