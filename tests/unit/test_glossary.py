"""One term a thing: what messages, docs, comments and names must not say, and what says it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: in text of any kind: what must not be said -> what to say
PHRASES = {
    r"h[eo]lds? (\w+ ){0,2}up\b": "delays the other ranks",
    r"\blate ones?\b|\baccus\w*|\bblam(e|es|ed|ing)\b": "straggler",
    r"\bsettled\b": "steady-state",
    r"\bchosen ranks?\b|\bcaptured ranks?\b": "profiled rank",
    r"\bnobody\b": "no rank, no user: name who",
    r"\bholes?\b": "missing report",
    r"\bthat no compute hides\b|\bnot hidden\b": "exposed, not overlapped with compute",
    r"\bsets? the pace\b|\bstarv(e|es|ed|ing)\b": "host-bound, launch-bound",
    r"\bnothing to do\b": "idle",
    r"\bhost launches late\b": "kernels are launched late on its host",
    r"\bis known on it to\b": "uncertainty (±)",
    r"\bstood still\b|\bstands? still\b|\bstanding still\b": "stalled",
    r"\btore\b|\btears? .{0,20}apart\b": "desynchronised",
    r"\bnothing (else )?stands out\b": "no findings, no other issue",
    r"\bnext to last\b": "second-to-last",
    r"\brooms?\b|\bhouse\b|\bthe science\b": "package, module, architecture, analysis",
    r"\bbeside that\b": "also",
    r"\bsign of life\b|\bheard\b": "last update, no update",
    r"\bhow sure\b": "confidence",
    r"\bthe capture itself\b": "profiler overhead",
}
#: as the whole name of a function, class, variable, parameter or module
NAMES = {
    "accused": "straggler", "away": "host_gaps", "behind": "carried_lag", "blame": "straggler_cost",
    "heard": "what it holds", "homecoming": "report_transfer", "keeper": "orphan rescue",
    "litter": "temporary_files", "orders": "stop_request", "outside": "profiler_bias",
    "said": "what it holds", "scene": "dataset", "seen": "what it holds", "settled": "steady",
    "shared": "common_causes", "slowed": "profiler_overhead", "stood": "wait_caused",
    "sure": "what it holds", "together": "joint_stragglers", "told": "what it holds",
}  # fmt: skip

#: published keys of schema 1, which stay until there is a second: not words of ours to choose
KEYS = {"settled"}


@functools.cache
def _places() -> dict[str, list[Path]]:
    """Part of the project -> its files."""
    package = ROOT / "clusterprof"
    found = {
        folder.name: sorted(
            p for p in folder.rglob("*") if p.suffix in {".py", ".js", ".j2", ".css"}
        )
        for folder in sorted(package.iterdir())
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__"
    }
    found["launchers"] = sorted((ROOT / "launchers").glob("*.py"))
    found["top"] = [*sorted(package.glob("*.py")), ROOT / "pyproject.toml", ROOT / "Makefile"]
    found["docs"] = sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    )
    found["docs"] = [p for p in found["docs"] if p.name != "CHANGELOG.md"]
    found["slurm"] = sorted((ROOT / "slurm").glob("*.sbatch"))
    found["bench"] = sorted([*(ROOT / "bench").rglob("*.py"), *(ROOT / "scripts").glob("*.*")])
    found["tests"] = sorted(p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))
    return found


#: a comment, a text or a word of a program; `tokenize` takes ten times as long for the same
_TOKEN = re.compile(
    r"""\#[^\n]* | (?P<word>\w+(?!["'\w])) | [bfru]{0,2}(?:"{3}(?:\\.|[^\\])*?"{3}
    |'{3}(?:\\.|[^\\])*?'{3} | "(?:\\.|[^\\"])*" | '(?:\\.|[^\\'])*')""",
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
_PHRASE = re.compile("|".join(PHRASES), re.IGNORECASE)


def _texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Each line, text of a file, and whether that is a name."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":  # names of code, also published ones
        content = re.sub(r"`[^`\n]+`", "", content)
    if path.suffix != ".py":
        yield from ((number, line, False) for number, line in enumerate(content.splitlines(), 1))
        return
    number, end = 1, 0
    for token in _TOKEN.finditer(content):
        number += content.count("\n", end, token.start())
        end = token.start()
        yield number, " ".join(token[0].split()), token.lastgroup == "word"


@functools.cache
def _wrong(text: str, is_name: bool) -> list[str]:
    """What a text says in other words, and what says it; most names stand in many places."""
    wrong = []
    if is_name and (name := text.strip("_").lower()) in NAMES:
        wrong.append(f"{text}: {NAMES[name]}")
    text = text.replace("_", " ") if is_name else re.sub(rf"\"({'|'.join(KEYS)})\"", "", text)
    if _PHRASE.search(text):
        matches = ((re.search(said, text, re.IGNORECASE), PHRASES[said]) for said in PHRASES)
        wrong += [f"{match[0]}: {instead}" for match, instead in matches if match]
    return wrong


def offences(path: Path) -> list[str]:
    """What a file says in other words than the glossary's."""
    offending = []
    for line, text, is_name in _texts(path):
        wrong = _wrong(text, is_name)
        if wrong and text.strip("\"'") not in KEYS:
            offending += [f"{path.relative_to(ROOT)}:{line} {phrase}" for phrase in wrong]
    return offending


@pytest.mark.parametrize("part", sorted(_places()))
def test_what_is_written_is_in_the_glossary_s_words(part: str) -> None:
    assert [each for path in _places()[part] for each in offences(path)] == []


if __name__ == "__main__":
    import sys

    for part in sys.argv[1:] or _places():
        lines = [each for path in _places()[part] for each in offences(path)]
        print(f"{part}: {len(lines)}", *lines, sep="\n")
