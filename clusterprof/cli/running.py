"""Running the launcher itself, in the foreground, as if we were not there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from clusterprof.errors import LaunchError


def run_job(command: Sequence[str], added: Any) -> int:
    """Run the launcher, handing signals on; returns its status, 128 + n for signal n.

    Ctrl-C reaches the launcher by itself (it is in our process group): we only wait for it.
    """
    job: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def hand_on(number: int, _frame: object) -> None:
        if job is None:
            pending.append(number)
        elif number != signal.SIGINT:
            job.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        job = subprocess.Popen(command, env={**os.environ, **added})
        for number in pending:
            job.send_signal(number)
        status = job.wait()
    except OSError as error:
        raise LaunchError(f"{command[0]} could not be started", str(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
