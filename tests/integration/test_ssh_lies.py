"""Hosts that answer `clusterprof ssh` with whatever they like, beside one that does not.

The real sshd is in between; h2's Python is a script that answers what a test wants it to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest
from lab import lies
from lab.command import Completed, free_port
from lab.hosts import Hosts
from lab.tiers import long_but

from clusterprof import run_directory
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.collect import connection, over_ssh
from clusterprof.collect.connection import SshHost
from clusterprof.errors import HostError
from clusterprof.jobs import Host, OverSsh
from clusterprof.launch import over_hosts
from clusterprof.launch.over_hosts import Running

Cli = Callable[..., Completed]
PLAN = Plan(run="", selection=Selection("all", "all"), window=(1, 2), profiler="torch")
pytestmark = [pytest.mark.needs_fabric, pytest.mark.needs_hosts]

#: Answers `look` and `list` with the file of that name beside it, where there is one, and with
#: one of `run` hears nothing; in place of torchrun, which takes seconds to start, is a shell.
PYTHON = """#!/bin/sh
case "$4" in
look|list) [ ! -e "$0-$4" ] || {{ cat "$0-$4"; exit 0; }} ;;
run) [ ! -e "$0-run" ] || {{ trap '' INT TERM HUP; exec cat >/dev/null; }} ;;
esac
[ "$2" != torch.distributed.run ] || exec sh -c 'for last; do :; done; eval "$last"' sh "$@"
exec {python} "$@"
"""

#: A rank that leaves one file and ends with a status of its own.
LEAVE = """
cd "$(dirname "$CLUSTERPROF_PLAN")"
mkdir -p ranks/00000 ranks/00001
case $(hostname) in h1) rank=0 ;; *) rank=1 ;; esac
echo '{"state": "captured", "chosen": true}' >ranks/0000$rank/state.json
echo log >ranks/0000$rank/log
ln -s /etc/passwd ranks/0000$rank/link
exit 7
"""

#: A rank that no interrupt ends, from when it says so.
DEAF = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


class Liar:
    """h2, as a test wants it."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.script = PYTHON.format(python=shlex.quote(sys.executable))
        #: that exists on every host, each with its own
        self.python = hosts.state / "scratch" / "python"
        for name in ("h1", "h2"):
            path = hosts.local(name) / "python"
            path.write_text(self.script)
            path.chmod(0o755)

    def answers(self, verb: str, answer: bytes | None) -> None:
        path = self.hosts.local("h2") / f"python-{verb}"
        path.unlink(missing_ok=True)
        if answer is not None:
            path.write_bytes(answer)


@pytest.fixture
def liar(ssh_hosts: Hosts) -> Iterator[Liar]:
    made = Liar(ssh_hosts)
    yield made
    for path in ssh_hosts.state.glob("local/h?/python*"):
        path.unlink()


def job(liar: Liar) -> OverSsh:
    return OverSsh(
        hosts=(Host("h1", "h1"), Host("h2", "h2")), options=(), program=(), folder="/",
        python=str(liar.python), script=None, environment={}, ssh_config=liar.hosts.config,
        timeout_s=20, prefix=True, fewest=1, port=None,
    )  # fmt: skip


def test_whatever_a_host_says_of_its_files_is_its_own_failure(liar: Liar, tmp_path: Path) -> None:
    there = job(liar)
    first, second = over_hosts.look_at(there, None)
    assert first.reason == second.reason == ""
    for each in (first, second):
        over_hosts.deliver(each, PLAN)
    folders = first.folder, second.folder
    entry = {"path": "00001/log", "size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    odd = dict(lies.ANSWERS) | {
        "rank 0 of h1": json.dumps([{**entry, "path": "00000/log"}]).encode(),
        "a file that is not there": json.dumps([entry]).encode(),
        "more than fits": json.dumps([{**entry, "size": 1 << 49}]).encode(),
        "a way out": json.dumps([{**entry, "path": "00001/../../run.json"}]).encode(),
    }  # fmt: skip
    del odd["lists in a list"]
    assert len(odd) >= 24
    rank = Path(liar.hosts.local("h1"), Path(folders[0]).name, "ranks/00000")
    rank.mkdir(parents=True)
    (rank / "log").write_text("of h1\n")
    for number, (name, answer) in enumerate(odd.items()):
        liar.answers("list", answer)
        run = run_directory.create(tmp_path / str(number))
        # h1 brings its own beside one of the lies, and is not asked again: each takes a while.
        hosts = [first, second] if name == "rank 0 of h1" else [second]
        for each, folder, given in zip((first, second), folders, ({0}, {1}), strict=True):
            each.folder, each.reason, each.ranks = folder, "", frozenset(given)
        over_ssh.gather(run, hosts)
        assert second.folder == folders[1], name
        assert f"h2:{second.folder} " in second.reason, name
        assert second.reason.isprintable(), name
        assert len(second.reason) < 600, name
        left = [str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()]
        assert left == (["ranks/00000/log"] if first in hosts else []), name
        if first in hosts:
            assert (first.reason, first.folder) == ("", "")
            assert (run.rank(0) / "log").read_text() == "of h1\n"
    for each, folder in zip((first, second), folders, strict=True):
        liar.answers("list", None)
        each.ask("remove", folder)
        each.ssh.close()


class Mute(paramiko.ServerInterface):
    """An sshd that lets everybody in, and then does what no real one does."""

    def __init__(self, status: int | None) -> None:
        #: what a command ends with; None: whether it was started is not even said
        self.status = status
        self.over = threading.Event()

    def check_auth_publickey(self, username: str, key: Any) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        if self.status is None:
            self.over.wait(20)
            return False
        status = self.status
        threading.Timer(0.2, lambda: (channel.send_exit_status(status), channel.close())).start()
        return True


@contextlib.contextmanager
def fake_sshd(hosts: Hosts, folder: Path, server: Mute) -> Iterator[SshHost]:
    """A connection to it."""
    key = paramiko.Ed25519Key.from_private_key_file(str(hosts.state / "h1.key"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        served: list[Any] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                made = paramiko.Transport(listener.accept()[0])
                served.append(made)
                made.add_server_key(key)
                made.start_server(server=server)

        threading.Thread(target=serve, daemon=True).start()
        (folder / "known").write_text(f"[127.0.0.1]:{port} ssh-ed25519 {key.get_base64()}\n")
        (folder / "config").write_text(
            f"Host mute\n HostName 127.0.0.1\n Port {port}\n IdentityFile {hosts.state}/id\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {folder}/known\n"
        )
        ssh = SshHost(Host("mute", "mute"), folder / "config", 20)
        try:
            ssh.open()
            yield ssh
        finally:
            server.over.set()
            ssh.close()
            for each in served:
                each.close()


def test_an_sshd_that_never_answers_is_given_up(
    ssh_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PATIENCE_S", 2)
    with (
        fake_sshd(ssh_hosts, tmp_path, Mute(None)) as ssh,
        pytest.raises(HostError, match=r"^no answer within 2 s$"),
    ):
        ssh.ask(["true"])


@pytest.mark.parametrize(("sent", "taken"), [(7, 7), (256, 255), ((1 << 32) - 1, 255)])
def test_a_status_that_no_process_can_have_is_not_taken_for_success(
    ssh_hosts: Hosts, tmp_path: Path, sent: int, taken: int
) -> None:
    with fake_sshd(ssh_hosts, tmp_path, Mute(sent)) as ssh:
        assert ssh.ask(["true"]).status == taken


def test_a_host_that_does_not_end_its_job_is_given_up_at_the_second_signal(liar: Liar) -> None:
    (liar.hosts.local("h2") / "python-run").write_text("")
    there = replace(job(liar), commands=((str(liar.python), "-c", DEAF),) * 2)
    hosts = over_hosts.look_at(there, None)
    assert not any(each.reason for each in hosts)
    for each in hosts:
        over_hosts.deliver(each, PLAN)
    running = Running(hosts)
    printed = bytearray()

    def interrupt() -> None:
        while b"deaf" not in printed:
            time.sleep(0.05)
        running.signals.extend(["INT", "INT"])

    threading.Thread(target=interrupt, daemon=True).start()
    assert running.run(there, lambda name: (printed.extend, printed.extend)) == 255
    first, second = hosts
    assert (first.status, first.reason) == (137, ""), printed
    assert second.status == 255
    assert second.reason
    for each in hosts:
        each.ask("remove", each.folder)
        each.ssh.close()


@pytest.mark.parametrize(
    "answer", long_but(["lists nested 200,000 deep"], ["five megabytes of lines"])
)
def test_the_status_of_the_job_comes_through_and_the_other_hosts_ranks(
    run_clusterprof: Cli, workdir: Path, liar: Liar, answer: str, fault: Callable[..., None]
) -> None:
    liar.answers("list", lies.ANSWERS[answer])
    done = run_clusterprof(
        ["ssh", "-F", liar.hosts.config, f"--master-port={free_port()}",
         "--hosts", "h1,h2", "--profiler=torch", "--run-dir=run",
         "--python", liar.python, "--ranks=all", "--nproc-per-node=1", "--no-merge", "--no-python",
         "--", LEAVE]
    )  # fmt: skip
    fault(f"ssh: a host answers {answer}", 7, done.returncode, 0.0, {})
    assert done.returncode == 7, done
    assert "h2: " in done.stderr
    assert "h2:/" in done.stderr
    assert "Traceback" not in done.stderr
    here = sorted(str(path.relative_to("run/ranks")) for path in Path("run/ranks").glob("*/*"))
    assert [name for name in here if name.startswith("00000")] == [
        "00000/log", "00000/state.json",
    ], "and no link"  # fmt: skip
    assert json.loads(Path("run/ranks/00001/state.json").read_text())["state"] == "lost"


def test_a_host_that_lies_of_itself_is_left_out_and_the_others_train(
    run_clusterprof: Cli, workdir: Path, liar: Liar, fault: Callable[..., None]
) -> None:
    liar.answers("look", b'{"host": "\\u001b[2Jh1", "machine": "", "temporary": "/tmp"}')
    done = run_clusterprof(
        ["ssh", "-F", liar.hosts.config, f"--master-port={free_port()}",
         "--hosts", "h1,h2", "--profiler=torch", "--run-dir=run",
         "--python", liar.python, "--ranks=all", "--nnodes=1:2", "--no-merge", "--no-python",
         "--", LEAVE]
    )  # fmt: skip
    fault("ssh: a host lies of itself", 7, done.returncode, 0.0, {})
    assert done.returncode == 7, done
    assert "host is '\\x1b[2Jh1'" in done.stderr
