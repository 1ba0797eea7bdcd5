"""torchrun on each of `--hosts`, over SSH: for machines without a scheduler.

Every host gets the same torchrun command except for its node rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterprof.errors import HostError, LaunchError, UsageError
from clusterprof.jobs import CommandLine, Host, Job, OverSsh, is_python, whole_number
from clusterprof.launchers import torchrun
from clusterprof.launchers.torchrun import given

SUMMARY = "run torchrun on several hosts over SSH and profile some of the ranks"
PASSES_OPTIONS_TO = "torchrun"
NEEDS = "--hosts A,B,..."
EXAMPLES = ("--hosts a,b --nproc-per-node 8 -- train.py",)

#: torchrun's own default.
PORT = 29500

_NAME = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<bracketed>[^\]\s]+)\]|(?P<address>[^:@\s\[\]]+))"
    r"(?::(?P<port>\d{1,5}))?"
)

#: What clusterprof sets for each host.
_OURS = ("--node-rank", "--node_rank", "--standalone")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `clusterprof ssh` that are neither clusterprof's in general nor torchrun's."""
    add = parser.add_argument_group("the hosts").add_argument
    add("--hosts", metavar="A,B,...", help="each [USER@]HOST[:PORT]")
    add("-F", "--ssh-config", metavar="FILE", help="an ssh configuration instead of your own")
    add("--chdir", metavar="DIR", help="the working directory on every host (default: the current "
        "one)")  # fmt: skip
    add("--python", metavar="PATH", help="the hosts' Python (default: that next to torchrun here)")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable for the program; nothing else of this environment is sent")  # fmt: skip
    add("--no-prefix", action="store_true", help="print no host names before lines of output")
    add("--connect-timeout", type=float, default=10.0, metavar="S",
        help="how long a host may take to answer (default 10 s)")  # fmt: skip


def job(line: CommandLine) -> Job:
    """See `clusterprof.launchers.Launcher`. Raises UsageError, LaunchError (no Fabric)."""
    own, theirs = _parsed(line.options)
    hosts = read_hosts(own.hosts or "")
    if given(theirs, "nnodes") is None:
        theirs = [f"--nnodes={len(hosts)}", *theirs]
    fewest = fewest_nodes(theirs, len(hosts))
    python, program = own.python or default_python(), line.program
    if is_python(program[0]) and "/" not in program[0]:
        program = [python, *program[1:]]  # the hosts' PATH need not have the one that is meant
    environment = chosen_environment(own.env, line.environ)
    inner = torchrun.job(CommandLine(theirs, program, environment, line.added))
    job = OverSsh(
        hosts=hosts,
        options=inner.command[1 : -len(program)],
        program=tuple(program),
        folder=own.chdir or str(Path.cwd()),
        python=python,
        script=script(theirs, program),
        environment=environment,
        ssh_config=Path(own.ssh_config).expanduser() if own.ssh_config else None,
        timeout_s=own.connect_timeout,
        prefix=not own.no_prefix,
        fewest=fewest,
        port=None,
    )
    port = None if given(theirs, "rdzv-endpoint") or given(theirs, "master-port") else PORT
    job = without(job, (), port)
    return replace(inner, launcher="ssh", command=job.commands[0], over_ssh=job)


def _parsed(options: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those of torchrun. Raises UsageError."""
    parser = argparse.ArgumentParser(
        prog="clusterprof ssh", allow_abbrev=False, add_help=False, exit_on_error=False
    )
    add_options(parser)
    try:
        own, theirs = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise UsageError(str(error), "its options: clusterprof ssh --help") from None
    for option in theirs:
        if option.partition("=")[0] in _OURS:
            raise UsageError(
                f"{option} cannot be given: clusterprof sets it on each host",
                "leave it out, see --dry-run",
            )
    return own, theirs


def meeting(job: OverSsh, rank: int) -> list[str]:
    """The options by which one host's torchrun finds the others."""
    fixed = not is_range(job.options)
    ours = [f"--node-rank={rank}"] if fixed else []
    if given(job.options, "rdzv-endpoint"):
        return ours
    names = ("rdzv-backend", "master-addr", "master-port")
    backend, address, port = (given(job.options, name) for name in names)
    first = address or hostname(job.hosts[0].address, job.ssh_config)
    if fixed and backend in (None, "static"):
        ours += [] if address else [f"--master-addr={first}"]
        return ours if port else [*ours, f"--master-port={job.port}"]
    ours += [] if backend else ["--rdzv-backend=c10d"]
    shown = f"[{first}]" if ":" in first else first
    return [*ours, f"--rdzv-endpoint={shown}:{port or job.port}"]


def ranks(job: OverSsh, world_size: int | None) -> list[frozenset[int] | None]:
    """Each host's ranks; None where only torchrun will know.

    They lie in the order of `--hosts` where each launcher has its node rank: a rendezvous other
    than the static one gives them as it likes.
    """
    backend = given(job.options, "rdzv-backend") or job.environment.get("PET_RDZV_BACKEND")
    if not world_size or is_range(job.options) or backend not in (None, "static"):
        return [None] * len(job.hosts)
    per_host = world_size // len(job.hosts)
    return [frozenset(range(first, first + per_host)) for first in range(0, world_size, per_host)]


def without(job: OverSsh, lost: Collection[Host], port: int | None) -> OverSsh:
    """The same job on the hosts that are left, its launchers meeting at `port`.

    A fixed number of nodes meets at the first host, each with its node rank, so that ranks follow
    the order of `--hosts`. With a range (`--nnodes 2:4`) torchrun's own rendezvous decides, by the
    order of arrival.
    """
    left = tuple(host for host in job.hosts if host not in lost)
    job = replace(job, hosts=left, port=port)
    start = (job.python, "-m", "torch.distributed.run")
    # torchrun waits half a minute for more hosts than there are; of two values it takes the last.
    last = [f"--nnodes={job.fewest}:{len(left)}"] if is_range(job.options) else []
    commands = (
        (*start, *meeting(job, rank), *job.options, *last, *job.program)
        for rank in range(len(left))
    )
    return replace(job, commands=tuple(commands))


def read_hosts(text: str) -> tuple[Host, ...]:
    """`--hosts`. Raises UsageError."""
    if not text:
        raise UsageError(
            "there are no hosts",
            "write: clusterprof ssh --hosts a,b --nproc-per-node 8 -- train.py",
        )
    hosts = tuple(map(read_host, text.split(",")))
    if len({host.name for host in hosts}) < len(hosts):
        raise UsageError(f"--hosts {text} names a host twice", "each host runs one torchrun")
    return hosts


def read_host(text: str) -> Host:
    """One of `--hosts`. Raises UsageError."""
    text, shown = text.strip(), repr(text)
    match = _NAME.fullmatch(text)
    # ssh takes a name with a leading dash for an option; so might what a ProxyCommand starts.
    if match is None or text.startswith("-") or (match["address"] or "").startswith("-"):
        raise UsageError(
            f"--hosts: {shown} is not a host", "expected [USER@]HOST[:PORT], separated by commas"
        )
    port = whole_number(match["port"])
    if port is not None and not 0 < port < 65536:
        raise UsageError(f"--hosts: {shown} has no port between 1 and 65535")
    return Host(text, match["bracketed"] or match["address"], match["user"], port)


def fewest_nodes(options: Sequence[str], hosts: int) -> int:
    """The least number of hosts that will do. Raises UsageError where --nnodes does not fit."""
    nodes = given(options, "nnodes") or ""
    low_text, _, high_text = nodes.partition(":")
    low, high = whole_number(low_text), whole_number(high_text or low_text)
    if low is None or high is None or not 1 <= low <= high:
        raise UsageError(f"--nnodes {nodes} is neither a number nor a range", "write 4, or 2:4")
    if not low <= hosts <= high:
        raise UsageError(
            f"--nnodes {nodes} does not fit {hosts} hosts", "each host of --hosts is one node"
        )
    return low


def is_range(options: Sequence[str]) -> bool:
    """Whether `--nnodes` is MIN:MAX."""
    return ":" in (given(options, "nnodes") or "")


def script(options: Sequence[str], program: Sequence[str]) -> str | None:
    """The Python file that the program is; None where its words do not show it."""
    if "-m" in options or "--module" in options:
        return None
    words = program[1:] if is_python(program[0]) else program
    return words[0] if words and words[0].endswith(".py") else None


def chosen_environment(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by `--env NAME` (its value here) and `--env NAME=VALUE`. Raises UsageError."""
    chosen = {}
    for text in given:
        name, given_value, value = text.partition("=")
        if not name or "\0" in text:
            raise UsageError(f"--env {text!r} names no variable", "write --env NAME or NAME=VALUE")
        if not given_value and name not in environ:
            raise UsageError(f"--env {name}: it is not set here", f"write --env {name}=VALUE")
        chosen[name] = value if given_value else environ[name]
    return chosen


def default_python() -> str:
    """The Python next to the torchrun that would run here; else our own."""
    own = Path(sys.executable)
    torchrun_path = shutil.which("torchrun") or shutil.which("torchrun", path=str(own.parent))
    beside = str(Path(torchrun_path or own).parent / "python")
    return beside if torchrun_path and os.access(beside, os.X_OK) else sys.executable


def fabric() -> Any:
    """The module fabric. Raises LaunchError where it is not installed."""
    try:
        import fabric as found
    except ImportError as error:
        raise LaunchError(
            "clusterprof ssh needs Fabric, which is not installed here",
            f"python said: {error}",
            "pip install clusterprof[ssh]",
        ) from None
    # Errors are printed by us; paramiko would print its tracebacks as well.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    return found


def ssh_configuration(path: Path | None) -> Any:
    """Fabric's configuration, with the user's ssh configuration, or with `path` instead.

    Raises LaunchError (no Fabric), HostError (the file cannot be read).
    """
    configuration = fabric().Config(runtime_ssh_path=None if path is None else str(path), lazy=True)
    try:
        configuration.load_ssh_config()
    except Exception as error:  # noqa: BLE001 - paramiko raises what it likes on a file it cannot parse
        raise HostError(
            f"the ssh configuration {path or '~/.ssh/config'} cannot be read",
            str(error).split("\n")[0] or type(error).__name__,
        ) from None
    return configuration


def hostname(name: str, path: Path | None) -> str:
    """The address that the ssh configuration has for `name`. Raises LaunchError, HostError."""
    return str(ssh_configuration(path).base_ssh_config.lookup(name).get("hostname", name))
