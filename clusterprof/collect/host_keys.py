"""A host's key, checked as OpenSSH checks it.

Neither Fabric nor paramiko does: one accepts every key, the other knows neither markers nor
patterns, and fails on one line that it cannot read. OpenSSH itself gives the files that apply to a
host (`ssh -G`), their lines for it (`ssh-keygen -F`: names, patterns, hashes, markers), and the
content of a revocation list (`ssh-keygen -Q`); what is left is to compare keys. A certificate is
never requested from a host, so `@cert-authority` lines accept nothing.
"""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterprof.collect.answers import last_printed, plain
from clusterprof.errors import HostError

#: Either answers within milliseconds; a `Match exec` of the user's may take longer.
_PATIENCE_S = 30


@dataclass
class Known:
    """The entries of the known_hosts files for one name: keys in wire format, by their type."""

    keys: dict[bytes, str] = field(default_factory=dict)
    revoked: set[bytes] = field(default_factory=set)
    #: whether a certificate of it would be accepted by OpenSSH
    authority: bool = False

    def read(self, lines: str) -> None:
        """Add the output of `ssh-keygen -F`; a line that holds no key is ignored."""
        for line in lines.splitlines():
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            key = decoded(words[1:3])
            if key is None or line.startswith("#"):
                continue
            if marker == "@revoked":
                self.revoked.add(key)
            elif marker == "@cert-authority":
                self.authority = True
            elif not marker:
                self.keys[key] = words[1]


class HostKeys:
    """The keys of one host, as a policy that paramiko calls, since it is given no keys itself."""

    def __init__(self, connection: Any, config: Path | None) -> None:
        """Look them up for a Fabric connection. Raises HostError where that cannot be done."""
        name, port = str(connection.host).lower(), int(connection.port)
        options = settings(connection, config)
        # As OpenSSH: a key without a port is accepted where there is none for that port.
        names = [name] if port == 22 else [f"[{name}]:{port}", name]
        names = [options["hostkeyalias"]] if "hostkeyalias" in options else names
        self.name = names[0]
        paths = f"{options.get('userknownhostsfile', '')} {options.get('globalknownhostsfile', '')}"
        files = [Path(path).expanduser() for path in paths.split() if path != "none"]
        self.known = []
        for host_name in names:
            entries = Known()
            for file in filter(Path.is_file, files):
                listed = run(["ssh-keygen", "-F", host_name, "-f", str(file)])
                entries.read(listed.stdout.decode(errors="replace"))
            self.known.append(entries)
        revoked = options.get("revokedhostkeys", "none")
        self.revoked = None if revoked == "none" else Path(revoked).expanduser()

    def missing_host_key(self, _client: Any, _name: str, shown: Any) -> None:
        """Accept the key that a host has shown, or raise HostError."""
        key, line = shown.asbytes(), f"{shown.get_name()} {shown.get_base64()}"
        if self.revoked is not None:
            check_revoked(self.revoked, key, line)
        for entries in self.known:
            if key in entries.revoked:
                raise HostError("its host key is marked as revoked in known_hosts")
            if key in entries.keys:
                return
            if entries.keys:
                raise HostError(
                    "its host key is not the one in known_hosts: another machine, or a new key "
                    f"(if you know why: ssh-keygen -R '{self.name}')"
                )
        if any(entries.authority for entries in self.known):
            raise HostError(
                f"its host key is not in known_hosts as {self.name}: a @cert-authority is, but "
                "certificates are not supported (add its own key: ssh-keyscan)"
            )
        raise HostError(
            f"its host key is not in known_hosts as {self.name}: connect once with ssh, and check "
            "the key"
        )

    def transport(self, sock: Any, **options: Any) -> Any:
        """A paramiko transport that prefers key types that are known, as OpenSSH does."""
        import paramiko

        transport = paramiko.Transport(sock, **options)
        types = {kind for hosts in self.known for kind in hosts.keys.values()}
        security = transport.get_security_options()
        security.key_types = sorted(
            security.key_types,
            key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-") else kind) not in types,
        )
        return transport


def settings(connection: Any, config: Path | None) -> dict[str, str]:
    """A host's options in OpenSSH's configuration, by lower-case keyword; the first value counts.

    With all of its Include and Match, which paramiko does not support. Raises HostError.
    """
    options = ["-F", str(config)] if config else []
    options += ["-p", str(connection.port), "-l", str(connection.user)]
    asked = run(["ssh", "-G", *options, "--", str(connection.original_host)])
    if asked.returncode != 0:
        raise HostError(f"ssh does not accept its configuration: {last_printed(asked.stderr)}")
    options_of: dict[str, str] = {}
    for line in asked.stdout.decode(errors="surrogateescape").splitlines():
        keyword, _, value = line.partition(" ")
        options_of.setdefault(keyword.lower(), value)
    return options_of


def check_revoked(path: Path, key: bytes, line: str) -> None:
    """RevokedHostKeys. Raises HostError, for every key where the list cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    if content.startswith(b"SSHKRL\n\0"):  # OpenSSH's own format; any other is a list of keys
        asked = run(["ssh-keygen", "-Q", "-f", str(path), "/dev/stdin"], line.encode())
        if asked.returncode not in (0, 1):
            raise _unreadable(path, last_printed(asked.stderr))
        revoked = asked.returncode == 1
    else:
        lines = [line.split() for line in content.decode(errors="replace").splitlines()]
        keys = [decoded(words[:2]) for words in lines if words and not words[0].startswith("#")]
        if None in keys:
            raise _unreadable(path, "a line of it is not a key")
        revoked = key in keys
    if revoked:
        raise HostError(f"its host key is revoked by {path}")


def _unreadable(path: Path, why: str) -> HostError:
    return HostError(f"RevokedHostKeys {path} cannot be read, so no key is accepted: {why}")


def decoded(words: Sequence[str]) -> bytes | None:
    """A key from its type and its base64 text; None where these are not a key."""
    try:
        kind, key = words[0].encode(), base64.b64decode(words[1], validate=True)
    except (IndexError, ValueError):
        return None
    return key if key.startswith(len(kind).to_bytes(4, "big") + kind) else None


def run(command: list[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a program of OpenSSH's. Raises HostError where it is missing, or does not end."""
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = " is not installed here (openssh-client)" if missing else f": {plain(str(error))}"
        raise HostError(f"host keys cannot be checked: {command[0]}{why}") from None
