"""`clusterprof ssh` where a connection, a host or its disk fails: each host's outcome apart."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lab import command
from lab.command import Completed, free_port
from lab.hosts import Hosts
from lab.proxy import Proxy, proxy

from clusterprof import run_directory
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.collect import connection, over_ssh
from clusterprof.collect.connection import SshHost
from clusterprof.collect.over_ssh import RemoteHost
from clusterprof.jobs import Host, OverSsh
from clusterprof.launch import over_hosts
from clusterprof.launch.over_hosts import Running
from clusterprof.run_directory import Manifest

if TYPE_CHECKING:
    from typing_extensions import Self

Cli = Callable[..., Completed]
PLAN = Plan(run="", selection=Selection("all", "all"), window=(1, 2), profiler="torch")
pytestmark = [pytest.mark.needs_fabric, pytest.mark.needs_hosts]

#: Writes what `gather` fetches, as ranks do: 1 MB in four files of its run directory.
LEAVE = """
import json, os, sys
folder = os.path.dirname(os.environ["CLUSTERPROF_PLAN"])
rank = os.path.join(folder, "ranks", "00000")
os.makedirs(rank)
for number in range(4):
    with open(os.path.join(rank, "part%d" % number), "wb") as file:
        file.write(os.urandom(1 << 18))
with open(os.path.join(rank, "state.json"), "w") as file:
    json.dump({"state": "captured", "chosen": True}, file)
"""


#: Runs until the file `hung` is beside it.
UNTIL_HUNG = """
import os, time
print("runs", flush=True)
while not os.path.exists(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hung")):
    time.sleep(0.05)
print("done")
"""


def through(hosts: Hosts, way: Proxy, host: str = "h1") -> Path:
    """A configuration in which `host` is behind the proxy, with the same key."""
    port = hosts.port(host)
    known = hosts.state / "known_hosts"
    lines = [
        line.replace(f"]:{port} ", f"]:{way.port} ") for line in known.read_text().splitlines()
    ]
    beside = hosts.state / f"known_{way.port}"
    beside.write_text("\n".join(lines) + "\n")
    return hosts.changed(
        f"config_{way.port}", (f"Port {port}\n", f"Port {way.port}\n"), (str(known), str(beside))
    )


@pytest.fixture
def way(ssh_hosts: Hosts) -> Iterator[Proxy]:
    """The way to h1."""
    with proxy(ssh_hosts.port("h1")) as made:
        yield made


class Job:
    """A command on h1 behind a proxy, and on h2, started and looked after as by the verb."""

    def __init__(
        self, config: Path, names: list[str], program: list[str], timeout_s: float = 20
    ) -> None:
        all_hosts = tuple(Host(name, name) for name in names)
        python = command.environment()["PATH"].split(":")[0] + "/python"
        self.there = OverSsh(
            hosts=all_hosts, options=(), program=tuple(program), folder="/", python=python,
            script=None, environment={}, ssh_config=config, timeout_s=timeout_s, prefix=True,
            fewest=len(names), port=None, commands=tuple((python, *program) for _ in names),
        )  # fmt: skip
        self.hosts = over_hosts.look_at(self.there, None)
        assert not any(each.reason for each in self.hosts)
        for each in self.hosts:
            over_hosts.deliver(each, PLAN)
        self.printed = bytearray()

    def run(self) -> int:
        sinks = (self.printed.extend, self.printed.extend)
        return Running(self.hosts).run(self.there, lambda name: sinks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.hosts:
            each.ssh.close()


def remove_left(each: RemoteHost, hosts: Hosts, python: str) -> None:
    """Take our folder away over the whole way, once the helper there has ended its job."""
    ssh = SshHost(Host("h1", "h1"), hosts.config, 20)
    again = RemoteHost(each.host, ssh, python, each.description, each.folder)
    with contextlib.closing(ssh):
        answer = again.ask("list", each.folder, "0", within_s=60)
        assert json.loads(answer.stdout.splitlines()[-1]) == []
        again.ask("remove", each.folder)


def test_a_host_that_hangs_is_given_up_and_the_others_go_on(
    ssh_hosts: Hosts, way: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection, "_SILENCE_S", 8)
    monkeypatch.setattr(connection, "_ASK_EVERY_S", 0.2)
    (tmp_path / "wait.py").write_text(UNTIL_HUNG)
    program = [str(tmp_path / "wait.py")]
    with Job(through(ssh_hosts, way), ["h1", "h2"], program, timeout_s=10) as job:

        def hang() -> None:
            while job.printed.count(b"runs") < 2:
                time.sleep(0.05)
            way.flows.clear()
            (tmp_path / "hung").touch()

        threading.Thread(target=hang, daemon=True).start()
        assert job.run() == 255
        first, second = job.hosts
        assert (first.status, second.status) == (255, 0)
        assert first.reason
        assert first.command is not None
        assert first.command.lost
        assert second.reason == ""
        run = run_directory.create(tmp_path / "run")
        over_ssh.gather(run, job.hosts)
        assert " 10 s" in first.reason
        assert f"h1:{first.folder} " in first.reason
        assert f"clusterprof collect {run.path}" in first.reason
        assert second.folder == "", "h2's files are here"
        way.flows.set()
        way.cut()
        remove_left(first, ssh_hosts, job.there.python)


def test_a_connection_lost_while_reports_are_fetched_is_made_again_and_goes_on(
    ssh_hosts: Hosts, way: Proxy, tmp_path: Path
) -> None:
    with Job(through(ssh_hosts, way), ["h1"], ["-c", LEAVE]) as job:
        assert job.run() == 0, job.printed
        run = run_directory.create(tmp_path / "run")
        (each,) = job.hosts
        way.remaining = 600_000  # in the third file
        over_ssh.gather(run, job.hosts)
        assert (each.reason, each.folder) == ("", "")
        assert way.connections == 2
        sizes = {path.name: path.stat().st_size for path in run.rank(0).iterdir()}
        assert sizes.pop("state.json") > 0
        assert sizes == {f"part{number}": 1 << 18 for number in range(4)}


def test_a_connection_lost_for_good_leaves_the_rest_there_and_says_where(
    ssh_hosts: Hosts, way: Proxy, tmp_path: Path
) -> None:
    config = through(ssh_hosts, way)
    with Job(config, ["h1"], ["-c", LEAVE]) as job:
        assert job.run() == 0, job.printed
        run = run_directory.create(tmp_path / "run")
        (each,) = job.hosts
        way.remaining, way.for_good = 600_000, True
        over_ssh.gather(run, job.hosts)
        assert f"h1:{each.folder} " in each.reason
        assert f"clusterprof collect {run.path}" in each.reason
        here = sorted(path.name for path in run.rank(0).iterdir())
        assert here == ["part0", "part1"], "whole files only"
    manifest: dict[str, Any] = {
        "ssh": {"config": str(ssh_hosts.config), "python": job.there.python, "timeout_s": 20},
        "hosts": [
            {"name": "h1", "address": "h1", "user": None, "port": None, "hostname": "h1",
             "left": each.folder}
        ],
    }  # fmt: skip
    over_ssh.gather_left(
        run, Manifest(run.directory.manifest, manifest), ssh_hosts.config, job.there.python
    )
    assert manifest["hosts"][0]["left"] == ""
    assert len(list(run.rank(0).iterdir())) == 5


@pytest.fixture
def full(ssh_hosts: Hosts) -> Iterator[None]:
    """h2's temporary folder, as h2 sees it, is on a disk with 32 kB."""
    inside = ["nsenter", "-t", (ssh_hosts.state / "h2.pid").read_text().strip(), "-m"]
    folder = ssh_hosts.state / "scratch"
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", folder], check=True)
    yield
    subprocess.run([*inside, "umount", "-l", folder], check=True)


def test_a_host_without_space_or_python_or_named_twice_is_said_and_nothing_stays(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts, full: None
) -> None:
    (workdir / "train.py").touch()
    # What other tests' hosts were left with, by design.
    before = {each for host in ("h1", "h2") for each in folders(ssh_hosts, host)}
    line = ["ssh", "-F", ssh_hosts.config, "--hosts", "h1,h2,root@h1", "--profiler=torch"]
    rest = ["--run-dir=run", "--nproc-per-node", "1", "--", "train.py"]
    done = run_clusterprof([*line, *rest])
    assert done.returncode == 255, done
    (full_disk,) = re.findall("h2: .*TMPDIR.*", done.stderr)
    assert f"{ssh_hosts.state}/scratch/clusterprof-" in full_disk, done
    assert "No space left on device" in full_disk, done
    printed = [set(each.split()) for each in done.stderr.splitlines()]
    assert any({"h1", "root@h1"} <= words for words in printed), done
    done = run_clusterprof([*line, "--force", "--python=/no/such/python", *rest])
    assert done.returncode == 255, done
    assert done.stderr.count(": /no/such/python ") == 3, done
    for host in ("h1", "h2"):
        assert folders(ssh_hosts, host) <= before


def folders(hosts: Hosts, host: str) -> set[Path]:
    """The folders of ours on a host; the lock by which ranks start nsys in turn stays there."""
    return {each for each in hosts.local(host).glob("clusterprof-*") if each.is_dir()}


def test_hosts_are_reached_through_another_and_by_an_address_of_ipv6(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts, light_python: Path
) -> None:
    (workdir / "tell.py").write_text("import os; print(os.uname().nodename, os.environ['RANK'])\n")
    log = ssh_hosts.state / "h2.log"
    before = log.read_text().count("Accepted publickey")
    with proxy(ssh_hosts.port("h3"), "::1") as way:
        key = (ssh_hosts.state / "h3.key.pub").read_text().split(" ")[:2]
        with (ssh_hosts.state / "known_hosts").open("a") as known:
            known.write(f"[::1]:{way.port} {' '.join(key)}\n")
        config = ssh_hosts.changed("config_jump", ("Host h1\n", "Host h1\n  ProxyJump h2\n"))
        everywhere = config.read_text().partition("Host h3\n")[2].replace(
            f"  HostName 127.0.0.1\n  Port {ssh_hosts.port('h3')}\n", ""
        )  # fmt: skip
        config.write_text(f"{config.read_text()}Host *\n{everywhere}")
        done = run_clusterprof(
            ["ssh", "-F", config, f"--master-port={free_port()}",
             "--hosts", f"h1,[::1]:{way.port}", "--python", light_python, "--profiler=torch",
             "--run-dir=run", "--nproc-per-node", "1", "--master-addr=127.0.0.1", "--", "tell.py"]
        )  # fmt: skip
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[::1]:{way.port}: h3 1", "h1: h1 0"]
    assert log.read_text().count("Accepted publickey") > before, "the way to h1 leads through h2"
