"""The command line: one module per verb, each loading what it needs when it runs."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from clusterprof import console
from clusterprof.errors import UsageError

#: From here on a word that can be nothing else is said to be near one: `htlm` is at 0.75 of `html`.
_PERHAPS = 0.6

#: argparse's message for a value that is none of those there are
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """What all verbs have: a summary and examples before the options, errors as those of ours."""

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self.examples = examples
        #: the options of all verbs, which the help has last
        self.common: argparse._ArgumentGroup | None = None
        #: options that there were, and what there is instead
        self.gone: Mapping[str, str] = {}
        #: what is being parsed
        self._words: list[str] = []

    def format_help(self) -> str:
        """The summary, examples, the usage, then the options, all within the terminal's width."""
        width = console.width(80)
        before = self.description, self.usage
        self.description, self.usage = None, argparse.SUPPRESS
        self._action_groups.sort(key=lambda group: group is self.common)
        options = super().format_help()
        self.description, self.usage = before
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        parts = [formatter.format_help().rstrip("\n")]
        if self.examples:
            parts.append("\n".join(["examples:", *_examples(self.examples, width)]))
        usage = self.format_usage().rstrip()
        lines = usage.splitlines() if self.usage else [" ".join(usage.split())]
        wrapped = (console.wrapped(line, width, " " * 9, _BRACKETS) for line in lines)
        return "\n\n".join([*parts, "\n".join(itertools.chain(*wrapped)), options])

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, with what may have been meant."""
        near = None
        if message.startswith("the following arguments are required"):
            # an option that is misspelt is found out before what is missing besides
            for word in self._words:
                is_option = word.partition("=")[0] in self._option_string_actions
                if word.startswith("--") and not is_option and self.meant(word):
                    raise self.unknown(word)
        if wrong := _CHOICE.search(message):
            near = nearest(wrong[1], [choice.strip(" '") for choice in wrong[2].split(",")])
        raise UsageError(message, self._hint(near))

    def _hint(self, near: str | None) -> str:
        return f"did you mean {near}?" if near else f"see {self.prog} --help"

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises UsageError also for what is left over, with what it may have meant."""
        self._words = list(args or ())
        arguments, left = self.parse_known_args(args, namespace)
        if left:
            raise self.unknown(left[0])
        return arguments

    def unknown(self, word: str) -> UsageError:
        """The error for a word that is not an option."""
        kind = "option" if word.startswith("-") else "argument"
        hint = self.gone.get(word.partition("=")[0]) or self._hint(self.meant(word))
        return UsageError(f"{self.prog} has no {kind} {word}", hint)

    def check_passed_on(self, words: Sequence[str], theirs: Parser | None = None) -> None:
        """Raise UsageError for a word that would go to a launcher and is nearly an option of ours,
        or was one; `theirs` has the options of the launcher's own module.
        """
        launcher_options = theirs._option_string_actions if theirs else ()
        for word, value in itertools.zip_longest(words, words[1:], fillvalue=""):
            name, _, given = word.partition("=")
            # Slurm has --profile as well, with other values.
            slurm = name == "--profile" and (given or value) not in ("auto", "nsys", "torch")
            # Shorter ones are near to many (Slurm's `--tmp`).
            maybe = name.startswith("--") and len(name) >= len("--rank") and not slurm
            # `--rank` is at 0.92 of `--ranks`, Slurm's `--time-min` at 0.87 of `--time-margin`.
            ours = name in self.gone or (maybe and self.meant(name, 0.88))
            if ours and name not in launcher_options:
                raise self.unknown(word)

    def meant(self, word: str, least_likeness: float = _PERHAPS) -> str | None:
        """The option that a word that is none is near to; None for none."""
        return nearest(word.partition("=")[0], self._option_string_actions, least_likeness)


def _examples(examples: Sequence[str], width: int) -> Iterator[str]:
    """Command lines, as a shell goes on with them, and their remarks beside them or below."""
    fits = max(map(len, examples)) <= width - 2
    for example in examples:
        if fits:
            yield f"  {example}"
            continue
        command, _, remark = example.partition("   ")
        first, *others = console.wrapped(command, width - 8, whole=_QUOTED)
        yield " \\\n      ".join([f"  {first}", *others])
        if remark:
            yield from console.wrapped(f"      {remark.strip()}", width, " " * 6)


_QUOTED, _BRACKETS = re.compile(r"'[^']*'"), re.compile(r"\[[^][]*\]")


def nearest(word: str, words: Iterable[str], least_likeness: float = _PERHAPS) -> str | None:
    """The one of `words` that a misspelt word is near to; None where none is."""
    import difflib

    return next(iter(difflib.get_close_matches(word, [*words], n=1, cutoff=least_likeness)), None)


class _Colour(argparse.Action):
    """`--color`: what is printed from now on."""

    def __call__(self, _parser: object, _found: object, value: Any, _flag: object = None) -> None:
        console.colour = value


def verb_parser(
    verb: str, description: str, *examples: str, usage: str | None = None, run: str = "",
    short_help: bool = True,
) -> Parser:  # fmt: skip
    """A verb's parser with what all verbs have; `examples` are command lines without `clusterprof`.

    `run`: the help of its argument RUN; `short_help`: whether argparse handles -h.
    """
    parser = Parser(
        prog=f"clusterprof {verb}", usage=usage, description=description,
        examples=[f"clusterprof {example}" for example in examples],
    )  # fmt: skip
    if run:
        from clusterprof.arguments import path

        parser.add_argument("run", metavar="RUN", type=path, help=run)
    common = parser.common = parser.add_argument_group("all verbs")
    names = ["-h", "--help"] if short_help else ["--help"]
    common.add_argument(*names, action="help", help="show this help")
    common.add_argument("--color", action=_Colour, choices=("auto", "always", "never"),
        help="colours on stdout (default auto: on a terminal; NO_COLOR and FORCE_COLOR say "
        "otherwise)")  # fmt: skip
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser
