"""Run torchrun on each host over SSH and fetch the reports.

All hosts are checked before anything is started, since a training would wait for missing nodes.
After that the hosts' outcomes are independent.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from clusterprof import agent, words
from clusterprof.agent.contracts import paths
from clusterprof.agent.contracts.plan import Meeting, Plan
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.collect import answers, over_ssh
from clusterprof.collect.answers import Description
from clusterprof.collect.connection import RemoteCommand, Sink, SshHost
from clusterprof.collect.over_ssh import RemoteHost
from clusterprof.console import command as show_command, say
from clusterprof.errors import HostError
from clusterprof.jobs import Host, OverSsh
from clusterprof.launch.job_processes import handled
from clusterprof.launch.planning import LaunchPlan
from clusterprof.launch.run_job import begin, conclude
from clusterprof.launchers import ssh as launcher

#: So long after it is asked to kill its job a host has done so.
KILLED_S = 15.0
_TO_STOP = ("INT", "TERM", "HUP")
_HANDED_ON = (*_TO_STOP, "USR1", "USR2")


def run(plan: LaunchPlan) -> int:
    """Run the job on its hosts; returns the highest of their statuses."""
    assert plan.job.over_ssh is not None
    remotes = look_at(plan.job.over_ssh, plan.capture.path)
    try:
        hosts, job = usable(remotes, plan, plan.job.over_ssh)
        plan_job = replace(plan.job, over_ssh=job, command=job.commands[0])
        return run_on(hosts, job, replace(plan, job=plan_job))
    finally:
        for host in remotes:
            host.ssh.close()


def usable(
    remotes: Sequence[RemoteHost], plan: LaunchPlan, job: OverSsh
) -> tuple[list[RemoteHost], OverSsh]:
    """The hosts that can do the job, and the job on them. Raises HostError for too few."""
    hosts = [remote for remote in remotes if not remote.reason]
    bad = [remote for remote in remotes if remote.reason]
    if len(hosts) < job.fewest:
        fewer = "; --nnodes MIN:MAX continues with fewer" if job.fewest == len(job.hosts) else ""
        raise HostError(
            f"{len(bad)} of {len(job.hosts)} hosts cannot be used, nothing was started",
            *(f"{host.name}: {host.reason}" for host in bad),
            f"fix that or leave the host out of --hosts{fewer}",
        )
    left_out = [f"{host.name} is left out: {host.reason}" for host in bad]
    for line in (*left_out, *remarks(hosts, plan.capture.path)):
        say(line)
    port = hosts[0].description.port
    if job.port is not None and port != job.port:
        say(f"port {job.port} is in use on {hosts[0].name}: rendezvous at port {port}")
    job = launcher.without(job, [host.host for host in bad], port)
    for host, ranks in zip(hosts, launcher.ranks(job, plan.job.world_size), strict=True):
        host.ranks = ranks
    return hosts, job


def remarks(hosts: Sequence[RemoteHost], nsys: str | None) -> Iterator[str]:
    """What the user should know of the hosts before the job runs on them."""
    names_on: dict[str, list[str]] = {}
    for host in hosts:
        names_on.setdefault(host.description.machine, []).append(host.name)
        if nsys and not host.description.nsys:
            other_nsys = host.description.other_nsys
            then = f"use {other_nsys}" if other_nsys else "train without nsys (or --profiler torch)"
            yield f"{host.name} has no {nsys}: its ranks {then}"
    for machine, names in names_on.items():
        if machine and len(names) > 1:
            yield f"{words.listed(names)} are one machine: it runs a torchrun for each"


def look_at(job: OverSsh, nsys: str | None) -> list[RemoteHost]:
    """Connect to all hosts at once and check whether each can run its part. Changes nothing there.

    The `reason` of one that cannot says what is wrong; it is not connected any more.
    """
    with ThreadPoolExecutor(max_workers=min(64, len(job.hosts))) as pool:
        return [*pool.map(lambda host: _look(host, job, nsys), job.hosts)]


def _look(host: Host, job: OverSsh, nsys: str | None) -> RemoteHost:
    ssh = SshHost(host, job.ssh_config, job.timeout_s)
    remote = RemoteHost(host, ssh, job.python, Description(host.name))
    request = {"folder": job.folder, "program": job.script, "nsys": nsys, "port": job.port}
    try:
        answer = remote.ask("look", json.dumps(request), within_s=job.timeout_s)
        description = answers.description(answer.stdout, job.port) if answer.status == 0 else None
        if description is None:
            printed = answers.last_printed(answer.stderr) or "nothing"
            how = f"(it printed: {printed}): --python PATH"
            remote.reason = f"{job.python} does not run there {how}"
        elif not description.folder:
            remote.reason = f"it has no folder {job.folder}: --chdir DIR"
        elif not description.program:
            remote.reason = f"it has no {job.script} in {job.folder}"
        else:
            remote.description = description
    except HostError as error:
        remote.reason = error.what
    if remote.reason:
        ssh.close()
    return remote


def run_on(hosts: list[RemoteHost], job: OverSsh, plan: LaunchPlan) -> int:
    """Run the job on its hosts, fetch the reports, merge."""
    run, manifest = begin(plan)
    running = Running(hosts)
    numbers = [getattr(signal, f"SIG{name}") for name in _HANDED_ON]
    with handled(numbers, running.note):
        try:
            deliver_to_all(hosts, job, plan)
            manifest.record(**members(hosts, job))
            for host, command in zip(hosts, job.commands, strict=True):
                show_command(command, f"{host.name}: ")
            with printing(job) as output:
                status = running.run(job, output)
        finally:
            # Also if the run directory could not be written: nothing of ours remains on a host.
            over_ssh.gather(run, hosts, running.asked_to_end)
        over_ssh.name_missing(run, hosts, plan.expected)
        for host in hosts:
            if host.reason:
                say(f"{host.name}: {host.reason}")
            elif host.status:
                say(f"{host.name}: torchrun ended with status {host.status}")
        manifest.content.update(members(hosts, job))
    return conclude(plan, run, manifest, status, patience_s=0)


def deliver_to_all(hosts: Sequence[RemoteHost], job: OverSsh, plan: LaunchPlan) -> None:
    """Copy the agent and the plan to all hosts. Raises HostError for the first that fails.

    The plan says how the hosts' probers find each other without a common folder; it is kept on the
    hosts only.
    """
    names = [launcher.hostname(host.host.address, job.ssh_config) for host in hosts]
    for_agent = plan.for_agent._replace(meeting=Meeting(secrets.token_hex(32), tuple(names)))
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        list(pool.map(lambda host: deliver(host, for_agent), hosts))


#: makes our folder, for its owner only, of a zip archive on stdin
_UNPACK = (
    "import io, os, sys, zipfile; os.umask(0o77); os.mkdir(sys.argv[1]); "
    "zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read())).extractall(sys.argv[1])"
)


def deliver(remote: RemoteHost, plan: Plan) -> None:
    """Make our folder there, for its owner only, with the agent and the plan. Raises HostError."""
    remote.folder = f"{remote.description.temporary}/clusterprof-{secrets.token_hex(8)}"
    home, archive = Path(agent.__path__[0]), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted(home.rglob("*.py")):
            packed.writestr(f"agent/{path.relative_to(home)}", path.read_bytes())
        document = plan._replace(run=remote.folder).to_json()
        packed.writestr(paths.PLAN, json.dumps(document, indent=1))
    command = [remote.python, "-I", "-S", "-c", _UNPACK, remote.folder]
    try:
        answer = remote.ssh.ask(command, archive.getvalue(), within_s=120)
    except HostError as error:
        raise HostError(f"{remote.name}: {error.what}") from None
    if not remote.ssh.connected:
        raise HostError(f"{remote.name}: the connection was lost")
    if answer.status != 0:
        why = answers.last_printed(answer.stderr) or f"status {answer.status}"
        raise HostError(
            f"{remote.name}: {remote.folder} cannot be written ({why}): is no space left there? "
            "the login's TMPDIR on that host says where it is"
        )


def members(hosts: Sequence[RemoteHost], job: OverSsh) -> dict[str, Any]:
    """What run.json says of the hosts: enough to fetch later what could not be fetched now."""
    config = str(job.ssh_config) if job.ssh_config else None
    return {
        "ssh": {"config": config, "python": job.python, "timeout_s": job.timeout_s},
        "hosts": [host.as_json() for host in hosts],
    }


#: Where a host's stdout and stderr go, by its name.
Output = Callable[[str], tuple[Sink, Sink]]


class Running:
    """A job that runs on its hosts."""

    def __init__(self, hosts: Sequence[RemoteHost], clock: Clock = REAL) -> None:
        self.hosts = hosts
        self._clock = clock
        #: signals to forward, by name: a signal handler may only append
        self.signals: list[str] = []
        self._stops = 0
        self._patience = float("inf")

    def run(self, job: OverSsh, output: Output) -> int:
        """Start every host's command and wait for all; returns the highest status."""
        for host, argv in zip(self.hosts, job.commands, strict=True):
            if self.asked_to_end():
                host.status, host.reason = 143, "clusterprof was asked to end before it began"
            else:
                start(host, job, argv, output)
        while running := [
            (host, host.command) for host in self.hosts if host.command and host.status is None
        ]:
            self.forward_signals([command for _, command in running])
            for host, command in running:
                self.wait_for(host, command)
        return max(host.status or 0 for host in self.hosts)

    def wait_for(self, host: RemoteHost, command: RemoteCommand) -> None:
        """Wait a moment for a host's command, and note how it ended."""
        if self._clock.now() > self._patience:
            command.close()
            host.status, host.reason = 255, "it did not end when asked to"
        elif command.wait(0.5 / len(self.hosts)):
            lost, host.status = command.lost, command.status()
            if lost and host.ssh.connected:
                host.reason = "our helper there was killed"
            elif lost:
                host.reason = "the connection was lost while the job ran"

    def note(self, number: int, _frame: object) -> None:
        """Handle a signal, which `run` forwards."""
        self.signals.append(signal.Signals(number).name.removeprefix("SIG"))

    def forward_signals(self, commands: Sequence[RemoteCommand]) -> None:
        """Forward signals to the hosts; the second one that ends the job kills it."""
        while self.signals:
            name = self.signals.pop(0)
            self._stops += name in _TO_STOP
            if name in _TO_STOP and self._stops > 1:
                name = "KILL"
                self._patience = min(self._patience, self._clock.now() + KILLED_S)
            for command in commands:
                command.write(f"{name}\n".encode())

    def asked_to_end(self) -> bool:
        """Whether a signal to end has come that was not forwarded, since no job runs."""
        return any(name in _TO_STOP for name in self.signals)


def start(host: RemoteHost, job: OverSsh, argv: Sequence[str], output: Output) -> None:
    """Start one host's command. Where that fails, this host is lost and no other."""
    request = {"argv": [*argv], "folder": job.folder, "environment": {**job.environment}}
    helper_there = f"{host.folder}/agent/remote/host.py"
    command = [host.python, "-I", "-S", helper_there, "run", host.folder]
    try:
        host.command = host.ssh.start(command, *output(host.name))
    except HostError as error:
        host.status, host.reason = 255, error.what
        return
    if not host.command.write(json.dumps(request).encode() + b"\n") and not host.command.wait(1):
        host.command.close()
        host.status, host.reason = 255, "it does not accept its command"


@contextlib.contextmanager
def printing(job: OverSsh) -> Iterator[Callable[[str], tuple[Prefixed, Prefixed]]]:
    """For each host, where its stdout and stderr go."""
    lock = threading.Lock()
    with contextlib.ExitStack() as at_the_end:

        def output(name: str) -> tuple[Prefixed, Prefixed]:
            prefix = f"{name}: " if job.prefix else ""
            stdout = Prefixed(sys.stdout.buffer, prefix, lock)
            stderr = Prefixed(sys.stderr.buffer, prefix, lock)
            for stream in (stdout, stderr):
                at_the_end.callback(stream.finish)
            return stdout, stderr

        yield output


#: A longer line is passed on in pieces of this length.
PIECE_B = 1 << 16


class Prefixed:
    """Passes what one host prints to one of our streams, each line behind `prefix`.

    Lines of different hosts never mix, and no host can print a line that begins with another's
    name. A carriage return ends a line too (progress bars). With no `prefix` bytes pass unchanged.
    """

    def __init__(self, stream: BinaryIO, prefix: str, lock: threading.Lock) -> None:
        self._stream = stream
        self._prefix = prefix.encode()
        self._lock = lock
        #: of the last line, which has no end yet
        self._rest = b""
        self._returned = False

    def __call__(self, data: bytes) -> None:
        """Take bytes, and pass on what is a whole line by now."""
        if not self._prefix:
            self._pass(data)
            return
        if self._returned and data.startswith(b"\n"):  # the other half of a \r\n
            self._pass(b"\n")
            data = data[1:]
        lines = (self._rest + data).splitlines(keepends=True)
        unended = bool(lines) and not lines[-1].endswith((b"\n", b"\r"))
        self._rest = lines.pop() if unended else b""
        self._returned = not unended and bool(lines) and lines[-1].endswith(b"\r")
        while len(self._rest) >= PIECE_B:
            lines.append(self._rest[:PIECE_B] + b"\n")
            self._rest = self._rest[PIECE_B:]
        if lines:
            self._pass(b"".join(self._prefix + line for line in lines))

    def finish(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest:
            self._pass(self._prefix + self._rest + b"\n")
            self._rest = b""

    def _pass(self, data: bytes) -> None:
        # The reader may be gone (`| head`): the job continues.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write(data)
            self._stream.flush()
