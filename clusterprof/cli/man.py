"""`clusterprof man`: the manual page, made of the same parsers as every --help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from clusterprof import __version__
from clusterprof.cli import Parser, verb_parser
from clusterprof.cli.main import EXAMPLES, parser_of, summary, verbs
from clusterprof.cli.main import parser as top_parser
from clusterprof.launch.settings import SETTINGS

#: options of every verb, which stand in each --help
_OF_ALL = {"help", "color", "debug"}
_EXIT = (
    ("the job's own", "launching verbs, whatever the profile"),
    ("0, 1", "other verbs; 1 where --fail-on holds, or doctor found what is bad"),
    ("2", "the command line cannot be understood"),
    ("3, 4, 5, 6", "reports, their merge, a run directory, the profiler"),
    ("123", "--strict, and a report is missing"),
    ("125", "a fault in clusterprof"),
    ("127, 255", "the launcher, a host cannot be reached"),
    ("130", "interrupted"),
)


def parser(verb: str) -> Parser:
    """The verb's options."""
    return verb_parser(
        verb, "Print the manual page, for man(1).",
        "man > ~/.local/share/man/man1/clusterprof.1      then: man clusterprof",
    )  # fmt: skip


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print the page."""
    parser(verb).parse_args([*own, *(program or ())])
    print("\n".join(page()))
    return 0


def page() -> Iterator[str]:
    """The page's lines, in the macros of man(7)."""
    yield f'.TH CLUSTERPROF 1 "" "clusterprof {__version__}" "User Commands"'
    yield ".SH NAME"
    yield r"clusterprof \- which rank of a distributed training delays the others, and why"
    yield ".SH SYNOPSIS"
    yield r".B clusterprof"
    yield r"\fIVERB\fR [\fIOPTION\fR...]"
    yield ".SH DESCRIPTION"
    yield _text(str(top_parser().description))
    yield ".SH EXAMPLES"
    yield from _verbatim(EXAMPLES)
    yield ".SH VERBS"
    for verb in verbs():
        this = parser_of(verb)
        yield f".SS {_text(verb)}"
        yield _text(this.description or summary(verb))
        yield from _verbatim(this.examples)
        for action in this._actions:
            if action.help != argparse.SUPPRESS and action.dest not in _OF_ALL:
                names = ", ".join(rf"\fB{_text(flag)}\fR" for flag in action.option_strings)
                choices = "|".join(map(str, action.choices or ()))
                value = _text(str(action.metavar or choices or action.dest.upper()))
                words = [names, "" if action.nargs == 0 else rf"\fI{value}\fR"]
                help_text = (action.help or "").replace("%%", "%")
                yield from (".TP", " ".join(filter(None, words)), _text(help_text))
    yield ".SH ENVIRONMENT"
    for name, (variable, _) in SETTINGS.items():
        yield from (".TP", f".B {variable}", _text(f"--{name.replace('_', '-')}"))
    yield from (".TP", ".B NO_COLOR, FORCE_COLOR", "no colours, or colours also without a terminal")
    yield ".SH FILES"
    purpose = "options of launching verbs, here or in a folder above"
    yield from (".TP", ".I clusterprof.toml", purpose)
    yield from (".TP", ".I ~/.config/clusterprof/clusterprof.toml", "the same, your own")
    yield ".SH EXIT STATUS"
    for status, meaning in _EXIT:
        yield from (".TP", f".B {_text(status)}", _text(meaning))


def _verbatim(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ".PP"
        yield ".nf"
        yield from map(_text, lines)
        yield ".fi"


def _text(text: str) -> str:
    """Text that roff shows as it is: signs that it reads are escaped, and no line is a request."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    escaped = escaped.replace("~", r"\(ti").replace("`", r"\(ga").replace("^", r"\(ha")
    return rf"\&{escaped}" if escaped.startswith(".") else escaped
