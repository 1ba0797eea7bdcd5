"""Run torchrun on each host over SSH and fetch the reports.

All hosts are checked before anything is started, since a training would wait for missing nodes.
After that the hosts' outcomes are independent.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, BinaryIO

from clusterprof import words
from clusterprof.agent.contracts.plan import Meeting
from clusterprof.collect import over_ssh
from clusterprof.collect.over_ssh import RemoteHost, Running
from clusterprof.console import command as show_command
from clusterprof.console import say
from clusterprof.errors import HostError
from clusterprof.launch.planning import LaunchPlan
from clusterprof.launch.run_job import begin, conclude
from clusterprof.launchers import ssh as launcher
from clusterprof.launchers.support.job import OverSsh

_HANDED_ON = ("INT", "TERM", "HUP", "USR1", "USR2")


def run(plan: LaunchPlan) -> int:
    """Run the job on its hosts; returns the highest of their statuses."""
    assert plan.job.over_ssh is not None
    hosts, there = usable_hosts(plan, plan.job.over_ssh)
    try:
        job = replace(plan.job, over_ssh=there, command=there.commands[0])
        return run_on(hosts, there, replace(plan, job=job))
    finally:
        for host in hosts:
            host.ssh.close()


def usable_hosts(plan: LaunchPlan, there: OverSsh) -> tuple[list[RemoteHost], OverSsh]:
    """The hosts that can do the job, and the job on them. Raises HostError for too few."""
    nsys = plan.capture.nsys.path if plan.capture.nsys else None
    hosts, bad = over_ssh.look_at(there, nsys)
    if len(hosts) < there.fewest:
        for usable in hosts:
            usable.ssh.close()
        fixed = there.fewest == len(there.hosts)
        raise HostError(
            f"{len(bad)} of {len(there.hosts)} hosts cannot be used, nothing was started",
            *(f"{host.name}: {why}" for host, why in bad.items()),
            "fix that or leave the host out of --hosts"
            + ("; --nnodes MIN:MAX continues with fewer" if fixed else ""),
        )
    for host, why in bad.items():
        say(f"{host.name} is left out: {why}")
    for usable in hosts:
        if nsys and not usable.description.nsys:
            other_nsys = usable.description.other_nsys
            then = f"use {other_nsys}" if other_nsys else "train without nsys (or --profiler torch)"
            say(f"{usable.name} has no {nsys}: its ranks {then}")
    names_on: dict[str, list[str]] = {}
    for usable in hosts:
        names_on.setdefault(usable.description.machine, []).append(usable.name)
    for machine, names in names_on.items():
        if machine and len(names) > 1:
            say(f"{words.listed(names)} are one machine: it runs a torchrun for each")
    port = hosts[0].description.port
    if there.port is not None and port != there.port:
        say(f"port {there.port} is in use on {hosts[0].name}: rendezvous at port {port}")
    there = launcher.without(there, list(bad), port)
    for usable, ranks in zip(hosts, launcher.ranks(there, plan.job.world_size), strict=True):
        usable.ranks = ranks
    return hosts, there


def run_on(hosts: list[RemoteHost], there: OverSsh, plan: LaunchPlan) -> int:
    """Run the job on its hosts, fetch the reports, merge."""
    run, manifest = begin(plan)
    running = Running(hosts)
    with signals(running):
        try:
            deliver(hosts, there, plan)
            manifest.record(**members(hosts, there))
            for host, command in zip(hosts, there.commands, strict=True):
                show_command(command, f"{host.name}: ")
            with printing(there) as output:
                status = running.run(there, output)
        finally:
            # Also if the run directory could not be written: nothing of ours remains on a host.
            over_ssh.gather(run, hosts, running.asked_to_end)
        over_ssh.name_missing(run, hosts, plan.expected)
        for host in hosts:
            if host.reason:
                say(f"{host.name}: {host.reason}")
            elif host.status:
                say(f"{host.name}: torchrun ended with status {host.status}")
        manifest.content.update(members(hosts, there))
    return conclude(plan, run, manifest, status, patience_s=0)


def deliver(hosts: Sequence[RemoteHost], there: OverSsh, plan: LaunchPlan) -> None:
    """Copy the agent and the plan to all hosts. Raises HostError for the first that fails.

    The plan says how the hosts' probers find each other without a common folder; it is kept on the
    hosts only.
    """
    names = [launcher.hostname(each.host.address, there.ssh_config) for each in hosts]
    for_agent = plan.for_agent._replace(meeting=Meeting(secrets.token_hex(32), tuple(names)))

    def deliver_to(host: RemoteHost) -> None:
        try:
            over_ssh.deliver(host, for_agent)
        except HostError as error:
            raise HostError(f"{host.name}: {error.what}") from None

    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        list(pool.map(deliver_to, hosts))


def members(hosts: Sequence[RemoteHost], there: OverSsh) -> dict[str, Any]:
    """What run.json says of the hosts: enough to fetch later what could not be fetched now."""
    config = str(there.ssh_config) if there.ssh_config else None
    return {
        "ssh": {"config": config, "python": there.python, "timeout_s": there.timeout_s},
        "hosts": [each.as_json() for each in hosts],
    }


@contextlib.contextmanager
def signals(running: Running) -> Iterator[None]:
    """Forward our signals to the hosts; a second signal to end kills the job there."""

    def note(number: int, _frame: object) -> None:
        running.signals.append(signal.Signals(number).name.removeprefix("SIG"))

    numbers = [getattr(signal, f"SIG{name}") for name in _HANDED_ON]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def printing(there: OverSsh) -> Iterator[Callable[[str], tuple[Prefixed, Prefixed]]]:
    """For each host, where its stdout and stderr go."""
    lock = threading.Lock()
    with contextlib.ExitStack() as at_the_end:

        def output(name: str) -> tuple[Prefixed, Prefixed]:
            prefix = f"{name}: " if there.prefix else ""
            stdout = Prefixed(sys.stdout.buffer, prefix, lock)
            stderr = Prefixed(sys.stderr.buffer, prefix, lock)
            at_the_end.callback(stdout.finish)
            at_the_end.callback(stderr.finish)
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
