"""README.md as a package index shows it: a hook of hatchling.

An index has no file beside the README, so its relative links and pictures lead to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: the target of a link or picture that leads to a file of the repository
_RELATIVE = re.compile(r"(?P<picture>!?)(?P<label>\[[^\]]*\]\()(?P<target>(?!#|\w+:)[^)\s]+)")


class AbsoluteLinks(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what pyproject.toml calls dynamic."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, source: str) -> str:
    """Markdown with all relative links made absolute, by the repository's address at GitHub."""

    def address(link: re.Match[str]) -> str:
        view = "raw" if link["picture"] else "blob"
        return f"{link['picture']}{link['label']}{source}/{view}/main/{link['target']}"

    return _RELATIVE.sub(address, text)
