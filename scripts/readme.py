"""Fill the outputs in README.md with what the commands beside them really print.

    python scripts/readme.py            rewrite README.md, docs/report.png and the pages below
    python scripts/readme.py --check    end with 1 if README.md says anything else
    python scripts/readme.py --findings write docs/findings.md and docs/python.md only

A block is a fenced one after a comment `<!-- output of: COMMAND -->`, or `<!-- first 9 lines of:
COMMAND -->`; the command runs in the repository's root. The commands read recordings, so what they
print is the same every time.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "report.png"
PYTHON = ROOT / "docs" / "python.md"
FINDINGS = ROOT / "docs" / "findings.md"
RECORDING = "tests/data/recordings/nsys-2025.3/ddp-host-straggler"

_BLOCK = re.compile(
    r"(<!-- (?:output|first (?P<lines>\d+) lines) of: (?P<command>.+?) -->\n```[a-z]*\n)"
    r"(?P<output>.*?)(```\n)",
    re.DOTALL,
)


def run(command: str) -> str:
    """What the command prints on stdout; `clusterprof` is the one beside this Python."""
    words = shlex.split(command)
    if words[0] == "clusterprof":
        words[:1] = [sys.executable, "-m", "clusterprof"]
    environment = {**os.environ, "COLUMNS": "96", "NO_COLOR": "1"}
    for name in [name for name in environment if name.startswith("CLUSTERPROF_")]:
        del environment[name]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: status {done.returncode}\n{done.stderr}")
    return done.stdout


def filled(text: str) -> str:
    """README's text with every output block as its command prints it now."""
    return _BLOCK.sub(_fill, text)


def _fill(found: re.Match[str]) -> str:
    lines = run(found["command"]).splitlines(keepends=True)
    wanted = int(found["lines"]) if found["lines"] else len(lines)
    return found[1] + "".join(lines[:wanted]) + found[5]


def take_picture() -> None:
    """docs/report.png: the page of the recording, as headless Chromium shows it: verdict and
    timeline, without the sections between them.
    """
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        run(f"clusterprof merge {RECORDING} --html {page}")
        between = "#overview, #findings, #account, #run"
        page.write_text(page.read_text() + f"<style>{between} {{ display: none }}</style>")
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", f"--user-data-dir={folder}/profile", "--window-size=1280,1000",
             f"--screenshot={PICTURE}", page.as_uri()],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip


def write_findings() -> None:
    """docs/findings.md: every finding code, from the registry, below what is hand-written."""
    import finding_codes

    by_hand = FINDINGS.read_text(encoding="utf-8").partition(finding_codes.WRITTEN)[0]
    FINDINGS.write_text(by_hand + finding_codes.reference(), encoding="utf-8")


def write_python() -> None:
    """docs/python.md: the columns of all frames, below what is hand-written."""
    import frame_columns

    by_hand = PYTHON.read_text(encoding="utf-8").partition(frame_columns.WRITTEN)[0]
    PYTHON.write_text(by_hand + frame_columns.reference(), encoding="utf-8")


def main() -> int:
    """Rewrite, or check with --check."""
    if "--findings" in sys.argv[1:]:
        write_findings()
        write_python()
        return 0
    text = README.read_text()
    now = filled(text)
    if "--check" in sys.argv[1:]:
        return 0 if now == text else 1
    README.write_text(now)
    write_findings()
    write_python()
    take_picture()
    return 0


if __name__ == "__main__":
    sys.exit(main())
