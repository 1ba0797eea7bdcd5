"""One term a thing: what messages, docs, comments and names must not say, and what says it."""

from __future__ import annotations

import functools
import io
import re
import tokenize
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
    found["bench"] = sorted([*(ROOT / "bench").rglob("*.py"), *(ROOT / "scripts").glob("*")])
    found["tests"] = sorted(p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))
    return found


def _texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Each line, text of a file, and whether that is a name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":  # names of code, also published ones
        text = re.sub(r"`[^`\n]+`", "", text)
    if path.suffix != ".py":
        yield from ((at, line, False) for at, line in enumerate(text.splitlines(), 1))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], " ".join(token.string.split()), False
        elif token.type == tokenize.NAME:
            yield token.start[0], token.string, True


@functools.cache
def _wrong(text: str) -> list[str]:
    """What a text says in other words, and what says it; most names stand in many places."""
    found = ((re.search(pattern, text, re.IGNORECASE), PHRASES[pattern]) for pattern in PHRASES)
    return [f"{match[0]}: {instead}" for match, instead in found if match]


def offences(path: Path) -> list[str]:
    """What a file says in other words than the glossary's."""
    found = []
    for line, text, is_name in _texts(path):
        text = re.sub(rf"\"({'|'.join(KEYS)})\"", "", text)
        if text.strip("\"'") in KEYS or (is_name and path.name == "results.py" and text in KEYS):
            continue
        if is_name:
            name = text.strip("_").lower()
            if name in NAMES:
                found.append(f"{path.relative_to(ROOT)}:{line} {text}: {NAMES[name]}")
            text = text.replace("_", " ")
        found += [f"{path.relative_to(ROOT)}:{line} {wrong}" for wrong in _wrong(text)]
    return found


@pytest.mark.parametrize("part", sorted(_places()))
def test_what_is_written_is_in_the_glossary_s_words(part: str) -> None:
    assert [each for path in _places()[part] for each in offences(path)] == []


if __name__ == "__main__":
    import sys

    for part in sys.argv[1:] or _places():
        lines = [each for path in _places()[part] for each in offences(path)]
        print(f"{part}: {len(lines)}", *lines, sep="\n")
