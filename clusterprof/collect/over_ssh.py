"""The hosts of a job over SSH, and fetching each rank's files from them.

Each host's outcome is its own: the reports of a lost host are missing with a reason.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.agent.contracts import files, paths, states
from clusterprof.agent.contracts.states import State
from clusterprof.agent.remote import host as far_side
from clusterprof.collect import answers
from clusterprof.collect.answers import Description, Listing, Offered
from clusterprof.collect.connection import Answer, RemoteCommand, SshHost
from clusterprof.errors import HostError, RunDirectoryError
from clusterprof.jobs import Host
from clusterprof.run_directory import Manifest, Window
from clusterprof.words import ranks as named_ranks

#: A rank may be finishing its report a little after its launcher has ended.
PATIENCE_S = 3.0


@dataclass
class RemoteHost:
    """One host of a run, and its outcome."""

    host: Host
    ssh: SshHost
    #: its Python
    python: str
    #: its description of itself
    description: Description
    #: our temporary folder there, once it is made
    folder: str = ""
    #: those that its launcher starts; None where only that knows
    ranks: frozenset[int] | None = None
    #: of whose files a fetch was begun, as (attempt, rank); attempts are counted from 1, one for
    #: each time that the launcher has started the ranks
    brought: set[tuple[int, int]] = field(default_factory=set)
    command: RemoteCommand | None = None
    status: int | None = None
    #: why something of it is missing; "" where nothing is
    reason: str = ""

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.host.name

    def as_json(self) -> dict[str, Any]:
        """Its entry in run.json: enough to fetch later what could not be fetched now."""
        return {
            "name": self.name, "address": self.host.address, "user": self.host.user,
            "port": self.host.port, "hostname": self.description.host,
            "status": self.status, "reason": self.reason,
            # where its ranks' files still are, "" once they are here; its ranks, null where only
            # they know; and the ranks of whose files a fetch was begun
            "left": self.folder,
            "ranks": None if self.ranks is None else sorted(self.ranks),
            "brought": sorted(self.brought),
        }  # fmt: skip

    def ask(self, verb: str, *words: str, within_s: float = 30) -> Answer:
        """Have our helper, which is sent with the request, do `verb`. Raises HostError."""
        program = Path(far_side.__file__).read_bytes()
        # Isolated and without site packages: it starts whatever is installed there.
        command = [self.python, "-I", "-S", "-", verb, *words]
        return self.ssh.ask(command, program, within_s=within_s)


def gather(
    run: Window, hosts: Sequence[RemoteHost], stop: Callable[[], bool] = lambda: False
) -> None:
    """Fetch every host's rank folders into `run` and remove our folder there.

    All hosts list their files first, since a rank that two of them offer is fetched from neither;
    then one after another is fetched. A host whose files cannot all be fetched keeps them, and its
    `reason` says where they are. No file is fetched once `stop()`.
    """
    asked = [host for host in hosts if host.folder]
    transfer = _Transfer(run, stop)
    with ThreadPoolExecutor(max_workers=32) as pool:
        listings = list(pool.map(lambda host: transfer.retried(host, transfer.listed), asked))
    claims = Counter(claim for host in hosts for claim in host.brought)
    claims.update(claim for listing in listings for claim in listing.claims)
    for host, listing in zip(asked, listings, strict=True):
        problems = listing.problems
        if not problems or listing.files:
            wanted = _accepted(host, listing, claims)
            fetched = transfer.retried(host, functools.partial(transfer.fetched, wanted=wanted))
            problems = [*fetched.problems, *wanted.problems]
        if not problems:
            host.folder = ""
            continue
        then = f"{host.name}:{host.folder} (fetch them with: clusterprof collect {run.path})"
        reasons = [*filter(None, [host.reason]), *problems[:3]]
        host.reason = "; ".join([*reasons, f"its ranks' files are still in {then}"])


def gather_left(
    run: Window, manifest: Manifest, config: Path | None, python: str
) -> list[RemoteHost]:
    """Fetch what an interrupted run left on its hosts, by `hosts` of its run.json.

    Returns the hosts that had files; `manifest` says afterwards what is still left. `config` and
    `python` are the user's, never run.json's: both are or name programs that are executed.
    Raises RunDirectoryError where `manifest` names no hosts as ours do.
    """
    hosts = []
    for entry in manifest.hosts:
        if wrong := answers.unfit(entry, _LEFT):
            raise RunDirectoryError(
                f"{run.directory.manifest} is damaged: its hosts are invalid ({wrong})",
                f"copy the hosts' files below {run.path} yourself, then: clusterprof merge "
                f"{run.path}",
            )
        host = Host(entry["name"], entry["address"], entry.get("user"), entry.get("port"))
        ssh = SshHost(host, config, min(float(manifest.ssh["timeout_s"]), 3600.0))
        remote = RemoteHost(host, ssh, python, Description(entry["hostname"]), entry["left"])
        remote.ranks = None if entry.get("ranks") is None else frozenset(entry["ranks"])
        remote.brought = {(attempt, rank) for attempt, rank in entry.get("brought") or ()}
        hosts.append(remote)
    asked = [remote for remote in hosts if remote.folder]
    gather(run, hosts)
    for remote, entry in zip(hosts, manifest.hosts, strict=True):
        remote.ssh.close()
        entry.update(left=remote.folder, brought=sorted(remote.brought))
        if remote in asked:
            entry["reason"] = remote.reason
    return asked


def _is_name(value: Any) -> bool:
    """Whether it is a text that neither ssh nor a ProxyCommand takes for an option."""
    return isinstance(value, str) and value.isprintable() and not value.startswith("-")


#: a host of run.json, as `RemoteHost.as_json` writes it
_LEFT = {
    "name": _is_name, "address": _is_name, "user": (None, _is_name), "port": (None, int),
    "hostname": _is_name,
    # our folder on a host: no other is listed or removed
    "left": lambda left: left == ""
    or (_is_name(left) and re.fullmatch(r"/.*/clusterprof-[0-9a-f]{16}", left)),
    "ranks": (None, [int]), "brought": (None, [[int, int]]),
}  # fmt: skip


def _accepted(host: RemoteHost, listing: Listing, claims: Mapping[tuple[int, int], int]) -> Listing:
    """The files that are fetched from this host, and why the others are not."""
    if host.ranks is None:
        why = "another host offers as well"
        refused = {c for c in listing.claims if claims[c] > 1 + (c in host.brought)}
    else:
        why = "do not run on it"
        refused = {c for c in listing.claims if host.ranks and c[1] not in host.ranks}
    problems = [*listing.problems]
    if refused:
        ranks = named_ranks({rank for _, rank in refused})
        problems.append(f"it offers files of {ranks}, which {why}")
    good = [file for file in listing.files if (file.attempt, file.rank) not in refused]
    return Listing(good, problems)


class _Transfer(NamedTuple):
    """How files come from the hosts into the run directory."""

    run: Window
    stop: Callable[[], bool]

    def retried(self, host: RemoteHost, act: Callable[[RemoteHost], Listing]) -> Listing:
        """What `act` gives, or what went wrong; once more where its connection was lost."""
        done = Listing()
        for _ in range(2):
            was_there = host.ssh.connected
            try:
                done = act(host)
            except HostError as error:
                done = Listing(problems=[error.what])
            except OSError as error:
                why = error.strerror or error
                done = Listing(problems=[f"{self.run.path} cannot be written: {why}"])
            if not done.problems or not was_there or host.ssh.connected or self.stop():
                break
        return done

    def listed(self, host: RemoteHost) -> Listing:
        """The files that this host has for us. Raises HostError."""
        answer = host.ask("list", host.folder, str(PATIENCE_S), within_s=600)
        if answer.status != 0:
            raise HostError(answers.UNLISTED)
        return answers.offered(answer.stdout)

    def fetched(self, host: RemoteHost, wanted: Listing) -> Listing:
        """Fetch these files, and remove the folder there if these are all. Raises HostError."""
        problems = []
        for file in wanted.files:
            if self.stop():
                raise HostError("clusterprof was asked to end while the reports were fetched")
            if not self.fetch(host, file):
                problems.append(f"{file.path} arrived incomplete")
        if not wanted.problems and not problems:
            host.ask("remove", host.folder)
        return Listing(problems=problems)

    def fetch(self, host: RemoteHost, offered: Offered) -> bool:
        """Fetch one file into its rank's folder here; whether it is there with the size and the
        checksum that were offered. If not, what was there before stays.

        `offered.path` is below our folder there, `offered.name` below the rank's here. Raises
        HostError, OSError.
        """
        folder = replace(self.run, attempt=offered.attempt).rank(offered.rank)
        folder.mkdir(parents=True, exist_ok=True)
        target, wanted = folder / offered.name, (offered.size, offered.sha256)
        target.parent.mkdir(exist_ok=True)  # of reduced tables
        host.brought.add((offered.attempt, offered.rank))
        if target.is_file() and far_side.checksum(str(target)) == wanted:
            return True  # it came before the connection was lost
        digest = hashlib.sha256()
        with contextlib.suppress(ValueError), files.new(target) as file:
            for piece in host.ssh.read(f"{host.folder}/{offered.path}", offered.size):
                file.write(piece)
                digest.update(piece)
            if (file.tell(), digest.hexdigest()) != wanted:
                raise ValueError(offered)  # nothing is left of it
            return True
        return False


def name_missing(run: Window, hosts: Sequence[RemoteHost], expected: Sequence[int] | None) -> None:
    """Note in the states of a lost host's ranks why they have no report: of those that are
    `expected`, or, where only the ranks know these, of the first of each host.
    """
    for host in hosts:
        ranks = sorted(host.ranks or ()) if host.reason else []
        for rank in ranks[:1] if expected is None else {*ranks}.intersection(expected):
            folder = run.rank(rank)
            state = State.of(states.read(str(folder)))
            is_over = state is not None and state.ended and state is not State.CAPTURED
            # of a rank of which only its report's tables were fetched there is this file
            tables = f"{paths.REDUCED}/{paths.REDUCED_RANK}"
            reports = (folder / name for name in (paths.REPORT, paths.TRACE, tables))
            if not is_over and not any(map(Path.is_file, reports)):
                states.advance(
                    str(folder), State.LOST, host.reason, host=host.name, chosen=True, rank=rank
                )
