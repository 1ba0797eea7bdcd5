"""`clusterprof explain [CODE]`: what a finding means, when it is wrong, what is recommended."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from clusterprof.cli import verb_parser
from clusterprof.errors import UsageError


def main(verb: str, own: Sequence[str], program: Sequence[str] | None) -> int:
    """Print one code's explanation, or all codes with their titles."""
    parser = verb_parser(
        verb, "Explain a finding by its code; without CODE, list all codes.",
        "explain straggler.host",
    )  # fmt: skip
    parser.add_argument("code", nargs="?", metavar="CODE", help="the code in the finding's line")
    code = parser.parse_args([*own, *(program or ())]).code
    from clusterprof.analysis.findings.registry import CODES, explain

    if code is None:
        width = max(map(len, CODES))
        print("\n".join(f"{each:<{width}}  {CODES[each].title}" for each in sorted(CODES)))
    elif code in CODES:
        print(explain(code))
    else:
        near = difflib.get_close_matches(code, CODES, n=3, cutoff=0.5)
        raise UsageError(
            f"there is no finding {code!r}",
            *([f"near it: {', '.join(near)}"] if near else ()),
            "list all of them: clusterprof explain",
        )
    return 0
