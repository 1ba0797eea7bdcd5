"""A job over SSH: look at every host first, run it on all, bring home what each rank left.

Each host's outcome stands apart: one that is lost is a hole with its reason, the others go on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterprof.agent import files, states
from clusterprof.agent import host as far_side
from clusterprof.collect.connection import Answer, RemoteCommand, SshHost
from clusterprof.errors import HostError
from clusterprof.plan import Host, OverSsh
from clusterprof.rundir import RunDirectory

_AGENT = Path(far_side.__file__).resolve().parent

#: A rank may be finishing its report a little after its launcher has ended.
PATIENCE_S = 3.0

#: Isolated and without site packages: our helper must start whatever is installed there.
HELPER = ("-I", "-S", "-")

#: What no SFTP server says of its own disk (it says «Failure»), and ours does.
_OUR_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

_TO_STOP = ("TERM", "INT", "HUP")

_PATH = re.compile(r"(attempt-(\d+)/)?(\d{5,})/([A-Za-z0-9_][A-Za-z0-9._-]*)")


def helper() -> bytes:
    """The program that `python -I -S -` reads from stdin on a host."""
    return Path(far_side.__file__).read_bytes()


@dataclass
class RemoteHost:
    """One host of a run, and what became of it."""

    host: Host
    ssh: SshHost
    #: what it said of itself: see `clusterprof.agent.host.look`
    found: dict[str, Any]
    #: our temporary folder there, once it is made
    folder: str = ""
    command: RemoteCommand | None = None
    status: int | None = None
    #: what was lost with it; "" where nothing was
    reason: str = ""

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.host.name

    def ask(self, verb: str, *words: str, python: str, within_s: float = 30) -> Answer:
        """Have our helper, which travels along, do `verb` there. Raises HostError."""
        return self.ssh.ask([python, *HELPER, verb, *words], helper(), within_s=within_s)


# -- before anything is started ------------------------------------------------------------------


def look_at(there: OverSsh, nsys: str | None) -> tuple[list[RemoteHost], dict[Host, str]]:
    """Reach all hosts at once and see whether each could run its part.

    Returns those that can, in order, and what is wrong with the others. Nothing is changed there.
    """
    with ThreadPoolExecutor(max_workers=min(64, len(there.hosts))) as pool:
        seen = list(pool.map(lambda host: _look(host, there, nsys), there.hosts))
    good = [each for each in seen if isinstance(each, RemoteHost)]
    bad = {
        host: each
        for host, each in zip(there.hosts, seen, strict=True)
        if not isinstance(each, RemoteHost)
    }
    return good, bad


def _look(host: Host, there: OverSsh, nsys: str | None) -> RemoteHost | str:
    """A host that can do its part, or what is wrong with it."""
    ssh = SshHost(host, there.ssh_config, there.timeout_s)
    request = {
        "folder": there.folder, "program": there.script, "nsys": nsys, "port": there.port,
    }  # fmt: skip
    try:
        ssh.open()
        answer = ssh.ask(
            [there.python, *HELPER, "look", json.dumps(request)],
            helper(),
            within_s=there.timeout_s,
        )
        found = _json(answer.stdout)
        if answer.status != 0 or not isinstance(found, dict):
            said = (answer.stderr.decode(errors="replace").strip() or "nothing").split("\n")[-1]
            ssh.close()
            return f"{there.python} does not run there (it said: {said}): --python PATH"
        ssh.sftp()
    except HostError as error:
        ssh.close()
        return error.what.removeprefix(f"{host.name}: ")
    missing = [
        what
        for what, is_there in (
            (f"it has no folder {there.folder}: --chdir DIR", found["folder"]),
            (f"it has no {there.script} in {there.folder}", found["program"]),
        )
        if not is_there
    ]
    if missing:
        ssh.close()
        return missing[0]
    return RemoteHost(host, ssh, found)


def same_machine(hosts: Sequence[RemoteHost]) -> list[list[str]]:
    """The names of hosts that are one and the same, by what they say of themselves."""
    names: dict[str, list[str]] = {}
    for each in hosts:
        if each.found["machine"]:
            names.setdefault(each.found["machine"], []).append(each.name)
    return [same for same in names.values() if len(same) > 1]


def _json(text: bytes) -> Any:
    """What a helper answered: its last line, since a login shell may greet before it."""
    lines = text.decode("utf-8", "replace").strip().split("\n")
    try:
        return json.loads(lines[-1])
    except ValueError:
        return None


# -- running -------------------------------------------------------------------------------------


def deliver(each: RemoteHost, plan: Mapping[str, Any]) -> None:
    """Make our folder there, for its owner only, with the agent and the plan. Raises HostError."""
    folder = f"{each.found['temporary']}/clusterprof-{secrets.token_hex(8)}"
    sftp = each.ssh.sftp()
    with each.ssh.explained(), writable(each, folder):
        sftp.mkdir(folder, 0o700)
        each.folder = folder
        for name in ("agent", "agent/inject"):
            sftp.mkdir(f"{each.folder}/{name}", 0o700)
        for path in sorted(_AGENT.rglob("*.py")):
            with sftp.open(f"{each.folder}/agent/{path.relative_to(_AGENT)}", "wb") as file:
                file.set_pipelined(True)
                file.write(path.read_bytes())
        with sftp.open(f"{each.folder}/plan.json", "wb") as file:
            file.write(json.dumps({**plan, "run": each.folder}, indent=1).encode())


@contextlib.contextmanager
def writable(each: RemoteHost, folder: str) -> Iterator[None]:
    """SFTP says of a full disk no more than «Failure»: say what was being done there."""
    try:
        yield
    except OSError as error:
        if not each.ssh.connected:
            raise
        raise HostError(
            f"{each.name}: {folder} cannot be written ({error}): is no space left there? "
            "the login's TMPDIR on that host says where it is"
        ) from None


#: Where a host's stdout and stderr go.
Output = Callable[[str], tuple[Callable[[bytes], object], Callable[[bytes], object]]]


class Running:
    """A job that runs on its hosts."""

    def __init__(self, hosts: Sequence[RemoteHost]) -> None:
        self.hosts = hosts
        #: signals to hand on, by name: a signal handler may only append
        self.orders: list[str] = []
        self._stops = 0

    def run(self, there: OverSsh, output: Output) -> int:
        """Start every host's command and wait for all; returns the highest status."""
        for each, argv in zip(self.hosts, there.commands, strict=True):
            if any(order in _TO_STOP for order in self.orders):
                each.status, each.reason = 143, "told to end before it began"
            else:
                start(each, there, argv, output)
        while any(each.status is None for each in self.hosts):
            self.obey()
            for each in self.hosts:
                if each.status is None:
                    look_after(each, 0.5 / len(self.hosts))
        return max(each.status or 0 for each in self.hosts)

    def obey(self) -> None:
        """Hand signals on; the second order to end is the last."""
        while self.orders:
            name = self.orders.pop(0)
            if name in _TO_STOP:
                self._stops += 1
                name = name if self._stops == 1 else "KILL"
            for each in self.hosts:
                if each.command is not None and each.status is None:
                    each.command.write(f"{name}\n".encode())

    def told_to_stop_again(self) -> bool:
        """Whether an order to end came after the job had ended: while its reports were fetched."""
        return any(order in _TO_STOP for order in self.orders)


def start(each: RemoteHost, there: OverSsh, argv: Sequence[str], output: Output) -> None:
    """Start one host's command. Where that fails it is lost, and the others are not."""
    request = {
        "argv": list(argv), "folder": there.folder, "environment": dict(there.environment)
    }  # fmt: skip
    try:
        each.command = each.ssh.start(
            [there.python, "-I", "-S", f"{each.folder}/agent/host.py", "run", each.folder],
            *output(each.name),
        )
        each.command.write(json.dumps(request).encode() + b"\n")
    except HostError as error:
        each.status, each.reason = 255, error.what.removeprefix(f"{each.name}: ")


def look_after(each: RemoteHost, seconds: float) -> None:
    """Note how one host's command ended, if it has."""
    assert each.command is not None
    if not each.command.wait(seconds):
        return
    lost = each.command.lost
    each.status = each.command.status()
    if lost:
        still = each.ssh.connected
        each.reason = (
            "our helper there was killed" if still else "the connection was lost while the job ran"
        )


# -- bringing home -------------------------------------------------------------------------------


def gather(
    run: RunDirectory,
    hosts: Iterable[RemoteHost],
    python: str,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Bring every host's rank folders into `run` and take our folder there away.

    One host after another: paramiko's SFTP stalls when several transfer at once. A host whose
    files cannot all be brought keeps them, and its `reason` says where they are.
    """
    for each in hosts:
        if not each.folder:
            continue
        problem = _gather_again(run, each, python, stop)
        if not problem:
            each.folder = ""
            continue
        before = f"{each.reason}; " if each.reason else ""
        each.reason = (
            f"{before}{problem}; what its ranks left stays in {each.name}:{each.folder} "
            f"(clusterprof collect {run.path})"
        )


def gather_left(run: RunDirectory, manifest: dict[str, Any]) -> list[RemoteHost]:
    """Bring what an interrupted run left on its hosts; run.json's `hosts` say what and where.

    Returns the hosts that were asked; `manifest` says afterwards what is still left.
    """
    told = manifest["ssh"]
    config = Path(told["config"]) if told["config"] else None
    asked = []
    for entry in manifest["hosts"]:
        if not entry["left"]:
            continue
        host = Host(entry["name"], entry["address"], entry["user"], entry["port"])
        ssh = SshHost(host, config, told["timeout_s"])
        each = RemoteHost(host, ssh, {"host": entry["hostname"]}, entry["left"])
        gather(run, [each], told["python"])
        ssh.close()
        entry.update(left=each.folder, reason=each.reason)
        asked.append(each)
    return asked


def _gather_again(
    run: RunDirectory, each: RemoteHost, python: str, stop: Callable[[], bool]
) -> str:
    """`_gather_one`, and once more over a new connection if the first was lost meanwhile."""
    was_there = each.ssh.connected
    problem = _gather_once(run, each, python, stop)
    if problem and was_there and not each.ssh.connected and not stop():
        problem = _gather_once(run, each, python, stop)
    return problem


def _gather_once(run: RunDirectory, each: RemoteHost, python: str, stop: Callable[[], bool]) -> str:
    try:
        return _gather_one(run, each, python, stop)
    except HostError as error:
        cause = error.__context__
        if isinstance(cause, OSError) and cause.errno in _OUR_DISK:
            return f"{run.path} cannot be written: {cause.strerror}"
        return error.what.removeprefix(f"{each.name}: ")
    except OSError as error:
        return f"{run.path} cannot be written: {error.strerror or error}"


def _gather_one(run: RunDirectory, each: RemoteHost, python: str, stop: Callable[[], bool]) -> str:
    """Bring one host's files; returns what went wrong, "" where nothing did. Raises HostError."""
    answer = each.ask("list", each.folder, str(PATIENCE_S), python=python, within_s=600)
    listed = _json(answer.stdout)
    if listed == "running":
        return "its job still runs there"
    if answer.status != 0 or not isinstance(listed, list):
        return "it could not say what its ranks left"
    problems = []
    sftp = each.ssh.sftp()
    # States last: what they speak of is here by then.
    for entry in sorted(listed, key=lambda entry: str(entry["path"]).endswith("state.json")):
        match = _PATH.fullmatch(str(entry["path"]))
        if match is None:
            problems.append(f"it offers a file of an unknown name: {entry['path']!r}")
            continue
        if stop():
            return "told to end while the reports were fetched"
        problem = _fetch(run, each, sftp, match, entry)
        if problem:
            problems.append(problem)
    if not problems:
        each.ask("remove", each.folder, python=python)
    return "; ".join(problems[:3])


def _fetch(
    run: RunDirectory, each: RemoteHost, sftp: Any, match: re.Match[str], entry: Mapping[str, Any]
) -> str:
    """One file, by rename and only if its checksum is right; returns what went wrong."""
    attempt, _, rank, name = match.groups(default="")
    folder = replace(run, attempt=int(match[2] or 1)).rank(int(rank))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    told = (entry["size"], entry["sha256"])
    if target.is_file() and far_side.checksum(str(target)) == told:
        return ""  # it came before the connection was lost
    try:
        with files.new(target) as file:
            with each.ssh.explained():
                sftp.getfo(f"{each.folder}/{attempt}ranks/{rank}/{name}", file)
            file.flush()
            _check(file.name, told)
    except ValueError:
        return f"{entry['path']} did not arrive whole"
    return ""


def _check(path: str, told: tuple[int, str]) -> None:
    """Raise ValueError where the file is not the one of that size and checksum."""
    if far_side.checksum(path) != told:
        raise ValueError(path)


def name_holes(run: RunDirectory, holes: Mapping[int, tuple[str, str]]) -> None:
    """Say in a rank's state why its host (`rank -> (host, reason)`) gave no report of it."""
    for rank, (host, reason) in holes.items():
        folder = run.rank(rank)
        if states.read(str(folder)).get("state") in ("collected", "lost", "counted"):
            continue
        if any((folder / name).is_file() for name in ("report.nsys-rep", "trace.json.gz")):
            continue
        states.advance(str(folder), "lost", reason, host=host, chosen=True, rank=rank)
