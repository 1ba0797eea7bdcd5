"""Other users of the same machine, for tests that run as root: two who are no one special."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

ALICE, MALLORY = 61_001, 61_002


def as_user(uid: int, what: Callable[[], object]) -> None:
    """Do `what` in a child process of that user; an exception of it fails the test."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            what()
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the parent fails
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, f"user {uid} could not"
