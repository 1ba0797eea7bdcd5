"""Slurm batch scripts: a template's marked block, filled with the words of one command line.

The templates run as they are; a script made of one differs from it in the block alone. Words
reach the script quoted for bash, so that none of them is ever read as a command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterprof.errors import UsageError

BEGIN = "# >>> filled in by `clusterprof sbatch` >>>"
END = "# <<< filled in by `clusterprof sbatch` <<<"
SUFFIX = ".sbatch"

#: `slurm/` of the source tree, which a wheel holds inside the package.
_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "slurm", _PACKAGE.parent / "slurm")


@dataclass(frozen=True)
class Template:
    """One batch script with a block to fill."""

    name: str
    text: str

    def fill(self, values: Mapping[str, str]) -> str:
        """The script with `values` (bash text, see `array` and `quoted`) assigned in its block.

        A value whose variable the block does not assign is left out. Raises UsageError for a
        template without a block.
        """
        before, block, after = self._parts()
        lines = []
        for line in block.splitlines():
            name = line.partition("=")[0]
            lines.append(f"{name}={values[name]}" if name in values else line)
        return "\n".join([before + BEGIN, *lines, END + after])

    def _parts(self) -> tuple[str, str, str]:
        before, begin, rest = self.text.partition(BEGIN + "\n")
        block, end, after = rest.partition(END)
        if not begin or not end:
            raise UsageError(
                f"the template {self.name} has no block to fill",
                f'it needs a line "{BEGIN}"',
                f'and a line "{END}", with program=(...) between them',
            )
        return before, block, after


def templates() -> list[str]:
    """The names of the templates that come with clusterprof."""
    return sorted(path.stem for path in _folder().glob(f"*{SUFFIX}"))


def template(wanted: str) -> Template:
    """A template by its name, or a file. Raises UsageError where there is neither."""
    path = _folder() / f"{wanted}{SUFFIX}"
    if "/" in wanted or not path.is_file():
        path = Path(wanted).expanduser()
    try:
        return Template(wanted, path.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError as error:
        raise UsageError(
            f"there is no batch template {wanted}: {error.strerror}",
            f"name a file, or one of {', '.join(templates())}",
        ) from None


def _folder() -> Path:
    return next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])


def quoted(word: str) -> str:
    """`word` for bash. Control characters are written as escapes: sbatch refuses a script with
    carriage returns, and a script's line stays a line.
    """
    if not re.search(r"[\x00-\x1f\x7f]", word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + re.sub(r"[\x00-\x1f\x7f]", lambda c: f"\\{ord(c[0]):03o}", escaped) + "'"


def array(words: Sequence[str]) -> str:
    """A bash array of `words`."""
    return "(" + " ".join(map(quoted, words)) + ")"
