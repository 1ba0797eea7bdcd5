"""What docs/findings.md says of the codes of findings: what each means, and what to do."""

from __future__ import annotations

from clusterprof.analysis.findings.registry import CODES

#: in `docs/findings.md`, before what `reference` returns
WRITTEN = "<!-- from here on written by `make readme`: CODES in clusterprof/analysis/findings -->"


def reference() -> str:
    """All codes as Markdown: what docs/findings.md has of them."""
    text = f"{WRITTEN}\n\n## Codes\n\n`clusterprof explain CODE` prints the same in a terminal.\n"
    for one in CODES.values():
        text += (
            f"\n### {one.code}\n\n**{one.title}.** {one.meaning}\n\n"
            f"- When it is wrong: {one.when_wrong}\n- Recommendation: {one.recommendation}\n"
        )
    return text
