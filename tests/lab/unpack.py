"""Archives that tests unpack, with what every Python since 3.10.0 has.

`tarfile`'s own `extractall(filter="data")` came in the middle of a version: Debian 12's Python
3.11.2 lacks it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of plain files; a link, or a file outside of `folder`, is refused."""
    inside = folder.resolve()
    with tarfile.open(archive) as packed:
        for member in packed:
            target = (inside / member.name).resolve()
            if not target.is_relative_to(inside) or not (member.isreg() or member.isdir()):
                raise tarfile.TarError(f"{archive}: {member.name} is no plain file inside of it")
            content = packed.extractfile(member)
            if content is None:
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
            target.chmod(member.mode)
