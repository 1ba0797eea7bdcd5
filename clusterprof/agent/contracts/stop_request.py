"""The one order that a running job may be given: close your windows now, and save what you have.

It is a file in the run directory, `close`, with the reason in it. While a rank has its window open
its writer looks for it: a file system that hangs must not delay the training.
"""

from __future__ import annotations

import os
from typing import Optional

from . import files, paths

EVERY_S = 0.25


def give(run: str, reason: str) -> None:
    """Order all windows of the run closed; the first reason stays. Raises OSError."""
    if read(run) is None:
        files.write(os.path.join(run, paths.CLOSE), reason + "\n")


def read(run: str) -> Optional[str]:
    """The order's reason; None where none was given by us, or the run directory cannot be read.

    `run`: the run directory, or the folder of an attempt in it.
    """
    try:
        run = paths.run_of(run)
        # The listing first: NFS may remember for half a minute that a file is not there, but
        # asks the server whenever a folder is opened.
        if paths.CLOSE not in os.listdir(run):
            return None
        with files.open_ours(os.path.join(run, paths.CLOSE)) as file:
            return file.readline().decode().strip()
    except (OSError, ValueError):
        return None
