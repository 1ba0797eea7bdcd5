"""DeepSpeed, of which PyPI has the source only, in a folder of its own.

In the environment itself transformers and accelerate would find it and behave otherwise. Its
processes compile an operation at their first start. Run as a program this installs and compiles it
(`make long`); where that cannot be done it says so and exits 0: the tests name what they leave
out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = Path(__file__).with_suffix(".txt")
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "deepspeed"
#: a copy of what is installed there, written when all of it is
READY = FOLDER / "ready"
COMPILE = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as it; it().load(False)"


def why_not() -> str | None:
    """None where DeepSpeed is there, else the reason in words."""
    try:
        same = READY.read_bytes() == PACKAGES.read_bytes()
    except OSError:
        return f"no {FOLDER.parent.name}/{FOLDER.name}"
    return None if same else f"{FOLDER.parent.name}/{FOLDER.name} is of other versions"


def environment() -> dict[str, str]:
    """What a program needs in its environment to use it on processors."""
    return {
        "DS_ACCELERATOR": "cpu",
        "PATH": os.pathsep.join([str(FOLDER / "bin"), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(FOLDER),
        "TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"),
    }


def install() -> str | None:
    """Install and compile it; None, or why that failed."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    commands = (
        ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps",
         "--require-hashes", "--no-build-isolation", "--target", FOLDER, "--requirement", PACKAGES],
        ["-c", COMPILE],
    )  # fmt: skip
    try:
        for command in commands:
            subprocess.run(
                [sys.executable, *command],
                env={**os.environ, **environment(), "DS_BUILD_OPS": "0"},
                cwd=FOLDER.parents[1], timeout=600, check=True, capture_output=True, text=True,
            )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return error.stderr.strip()[-2000:] or f"exit status {error.returncode}"
    READY.write_bytes(PACKAGES.read_bytes())
    return None


def main() -> None:
    if not why_not():
        return
    if os.environ.get("CLUSTERPROF_TESTS_INSTALL") == "no":
        reason: str | None = "CLUSTERPROF_TESTS_INSTALL=no"
    else:
        reason = install()
    if reason:
        print(f"parts: missing: DeepSpeed: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
