"""`clusterprof explain [CODE]`: what a finding means, when it is wrong, what is recommended."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from clusterprof import console
from clusterprof.cli import Parser, verb_parser
from clusterprof.errors import UsageError


def parser(verb: str) -> Parser:
    """The verb's options."""
    parser = verb_parser(
        verb, "Explain a finding by its code; without CODE, list all codes.",
        "explain straggler.host",
    )  # fmt: skip
    parser.add_argument("code", nargs="?", metavar="CODE", help="the code in the finding's line")
    return parser


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print one code's explanation, or all codes with their titles."""
    code = parser(verb).parse_args([*own, *(program or ())]).code
    from clusterprof.analysis.findings.registry import CODES, explain

    indent = ""
    if code is None:
        width = max(map(len, CODES))
        lines = [f"{name:<{width}}  {CODES[name].title}" for name in sorted(CODES)]
        indent = " " * (width + 2)
    elif code.lower() in CODES:
        lines = explain(code.lower()).splitlines()
    else:
        near = difflib.get_close_matches(code.lower(), CODES, n=3, cutoff=0.5)
        raise UsageError(
            f"there is no finding {code!r}",
            *([f"near it: {', '.join(near)}"] if near else ()),
            "list all of them: clusterprof explain",
        )
    for line in lines:
        print("\n".join(console.wrapped(line, min(100, console.width(100)), indent)))
    return 0
