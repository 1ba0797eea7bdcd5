"""One SSH connection through Fabric: host keys checked, nothing asked, no shell built by hand.

Fabric accepts any host key and reads no known_hosts; here an unknown or a changed key is an
error, on gateways as well. A password or a passphrase is never asked for: what `ssh -o
BatchMode=yes HOST` cannot do, this cannot either.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof import ssh_config
from clusterprof.errors import HostError
from clusterprof.plan import Host

_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

#: A host that answers nothing at all for so long is cut off, and its connection given up.
_SILENCE_S = 60
#: It is asked so often.
_ASK_EVERY_S = 10

#: To whom bytes that arrive on stdout and on stderr are handed.
Sink = Callable[[bytes], object]


class Answer(NamedTuple):
    """What a short command on a host left."""

    status: int
    stdout: bytes
    stderr: bytes


def command_line(argv: Sequence[str]) -> bytes:
    """The one place where words become a line for a remote shell, which sshd always puts between.

    Quoted for POSIX shells. Only our own helper's command goes this way: the user's program
    travels as JSON, which no shell ever sees.
    """
    return os.fsencode(shlex.join(argv))


class SshHost:
    """One host: connected on demand, each failure a HostError that names it."""

    def __init__(self, host: Host, config_file: Path | None, timeout_s: float) -> None:
        self.name = host.name
        self.timeout_s = timeout_s
        self._sftp: Any = None
        self.connection: Any = ssh_config.fabric().Connection(
            host.address,
            user=host.user,
            port=host.port,
            config=ssh_config.load(config_file),
            connect_timeout=timeout_s,
            connect_kwargs={
                "banner_timeout": timeout_s,
                "auth_timeout": timeout_s,
                "channel_timeout": timeout_s,
            },
        )
        if self.connection.ssh_config.get("identitiesonly") == "yes":  # Fabric does not know it
            self.connection.connect_kwargs.update(allow_agent=False, look_for_keys=False)

    # -- the connection ---------------------------------------------------------------------

    def open(self) -> None:
        """Connect, if that is not done. Raises HostError with what is wrong in words."""
        if self.connected:
            return
        with self.explained():
            each = self.connection
            while each is not None and not isinstance(each, str):
                check_keys(each)
                each = each.gateway
            self.connection.open()
            keep_watch(self.connection.transport)

    @property
    def connected(self) -> bool:
        """Whether there is a connection, and nothing is known of its end."""
        return bool(self.connection.is_connected)

    def close(self) -> None:
        """End the connection; never raises."""
        with contextlib.suppress(Exception):
            self.connection.client.close()
            self.connection.close()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn whatever goes wrong on the way to this host into a HostError."""
        try:
            yield
        except HostError:
            raise
        except Exception as error:  # noqa: BLE001 - sockets, paramiko, cryptography: see `reason`
            raise HostError(f"{self.name}: {reason(error, self.timeout_s)}") from None

    # -- commands ---------------------------------------------------------------------------

    def ask(self, argv: Sequence[str], stdin: bytes = b"", *, within_s: float = 30.0) -> Answer:
        """Run a short command to its end. Raises HostError."""
        out, err = bytearray(), bytearray()
        command = self.start(argv, out.extend, err.extend)
        command.write(stdin)
        command.end_of_input()
        if not command.wait(within_s):
            command.close()
            raise HostError(f"{self.name}: no answer within {within_s:g} s to {argv[0]}")
        return Answer(command.status(), bytes(out), bytes(err))

    def start(self, argv: Sequence[str], stdout: Sink, stderr: Sink) -> RemoteCommand:
        """Start a command; what it prints goes to the two sinks, each from a thread of its own.

        Raises HostError.
        """
        self.open()
        with self.explained():
            channel = self.connection.create_session()
            channel.exec_command(command_line(argv))
        return RemoteCommand(channel, stdout, stderr)

    def sftp(self) -> Any:
        """Paramiko's SFTP client. Raises HostError where sshd offers none."""
        self.open()
        if self._sftp is not None and not self._sftp.get_channel().closed:
            return self._sftp
        try:
            # Fabric's own would be the first one for ever, its connection lost or not.
            self._sftp = self.connection.client.open_sftp()
        except Exception as error:  # noqa: BLE001 - as above
            raise HostError(f"{self.name}: its sshd offers no SFTP ({first_line(error)})") from None
        return self._sftp


class RemoteCommand:
    """A command that runs on a host."""

    def __init__(self, channel: Any, stdout: Sink, stderr: Sink) -> None:
        self._channel = channel
        self._pumps = [
            threading.Thread(target=_pump, args=pair, daemon=True)
            for pair in ((channel.recv, stdout), (channel.recv_stderr, stderr))
        ]
        for pump in self._pumps:
            pump.start()

    def write(self, data: bytes) -> bool:
        """Hand bytes to its stdin; False where nobody takes them any more."""
        try:
            self._channel.sendall(data)
        except (OSError, EOFError):
            return False
        return True

    def end_of_input(self) -> None:
        """Close its stdin."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`, or its connection has."""
        return bool(self._channel.status_event.wait(seconds))

    def drain(self, seconds: float) -> None:
        """Wait for the rest of its output; something that it left running may hold it open."""
        for pump in self._pumps:
            pump.join(seconds)

    def status(self) -> int:
        """Its exit status; 255 where the connection ended first, as ssh has it."""
        self.drain(2)
        status = int(self._channel.recv_exit_status())
        self.close()
        return status if status >= 0 else 255

    @property
    def lost(self) -> bool:
        """Whether the connection ended before the command did."""
        return bool(self._channel.exit_status < 0)

    def close(self) -> None:
        """Give it up."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()


def _pump(receive: Callable[[int], bytes], sink: Sink) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := receive(1 << 16):
            sink(data)


def check_keys(connection: Any) -> None:
    """Accept only host keys that the user's known_hosts hold (Fabric would accept any)."""
    import paramiko

    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
    told = connection.ssh_config
    own = told.get("userknownhostsfile", "").split() or _KNOWN_HOSTS
    system = told.get("globalknownhostsfile", "").split() or _SYSTEM_KNOWN_HOSTS
    for name in (*own, *system):
        path = Path(name).expanduser()
        if path.is_file():
            connection.client.load_system_host_keys(str(path))


def keep_watch(transport: Any) -> None:
    """Notice a host that is cut off within a minute, and not when TCP gives up after fifteen.

    TCP knows a dead network, but not a machine that hangs with its kernel alive, nor a gateway
    that takes bytes and hands none on: as OpenSSH's ServerAliveInterval does, sshd is asked.
    """
    threading.Thread(target=_watch, args=(transport,), daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):  # through a gateway it is no socket
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


def _watch(transport: Any) -> None:
    """Ask again and again; end the connection when there is no answer."""
    while transport.is_active():
        answered = threading.Event()
        threading.Thread(target=_ask_for_life, args=(transport, answered), daemon=True).start()
        if not answered.wait(_SILENCE_S):
            transport.close()
            return
        time.sleep(_ASK_EVERY_S)


def _ask_for_life(transport: Any, answered: threading.Event) -> None:
    # A refusal is an answer; so is the connection's own end, which others will notice.
    with contextlib.suppress(Exception):
        transport.global_request("keepalive@openssh.com")
    answered.set()


def reason(error: Exception, timeout_s: float) -> str:
    """What a failed connection means, and what to do about it, in one line."""
    import paramiko
    from paramiko.ssh_exception import NoValidConnectionsError

    said = first_line(error)
    if isinstance(error, paramiko.BadHostKeyException):
        return (
            "its host key is not the one in known_hosts: another machine, or a new key "
            "(if you know why: ssh-keygen -R)"
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return "the private key is locked: ssh-add it (a passphrase is never asked for)"
    if isinstance(error, paramiko.AuthenticationException):
        return "it accepts none of our keys (a password is never asked for)"
    if isinstance(error, NoValidConnectionsError):
        said = "; ".join(sorted({first_line(each) for each in error.errors.values()}))
        return f"it cannot be reached: {said}"
    if isinstance(error, socket.gaierror):
        return f"its name is not known: {error.strerror}"
    # paramiko's words for a server that took the connection and then said nothing
    silent = "banner" in said or said == "No existing session"
    if isinstance(error, TimeoutError) or "timed out" in said.lower() or silent:
        return f"no answer within {timeout_s:g} s"
    if "not found in known_hosts" in said:
        return "its host key is not in known_hosts: connect once with ssh, and look at the key"
    if isinstance(error, EOFError):
        return "it closed the connection"
    return f"it cannot be reached: {said}"


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().split("\n")[0]
    return text or type(error).__name__
