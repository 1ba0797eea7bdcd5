"""A container may share /dev/shm but no process ids with its node: neither ends the other's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab import command

pytestmark = [
    pytest.mark.needs_nsys,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are root's to make"),
]

#: Whatever is started in it ends with it.
NAMESPACE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
#: In a /dev/shm of its own: a session that lives on the node, another namespace that cleans up,
#: and the same once the session was killed.
SCRIPT = """
mount -t tmpfs none /dev/shm
nsys launch --trace=none --session-new=lives bash -c 'touch runs; exec sleep 600' \
    </dev/null >/dev/null 2>&1 &
until [ -e runs ]; do sleep 0.1; done
unshare --pid --fork --mount-proc python -c "$CLEAN"
echo "alive: $(ls /dev/shm | grep -c ^NSys-) $(ls /dev/shm | grep -c ^quadd-agent-)"
kill -9 -1
while pgrep -r R,S,D nsys >/dev/null; do sleep 0.1; done
unshare --pid --fork --mount-proc python -c "$CLEAN"
echo "dead: $(ls /dev/shm | grep -c ^NSys-)"
"""
CLEAN = """
import glob
from clusterprof.agent import nsys
from clusterprof.agent.contracts import processes
processes.forget_dead_sessions()
nsys.remove(glob.glob("/dev/shm/quadd-agent-*"))
"""


def test_cleaning_up_in_a_container_ends_no_session_outside_of_it(workdir: Path) -> None:
    done = command.run([*NAMESPACE, "bash", "-c", SCRIPT], env={"CLEAN": CLEAN})
    assert "alive: 1 1" in done.stdout, done
    assert "dead: 0" in done.stdout, done
