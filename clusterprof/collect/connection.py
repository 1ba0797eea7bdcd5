"""One SSH connection through Fabric: host keys checked, no prompts, no shell line built by hand.

Fabric accepts any host key; here one that OpenSSH would not accept is an error, on gateways as
well: see `host_keys`. A password or a passphrase is never asked for: what `ssh -o
BatchMode=yes HOST` cannot do, this cannot either.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.agent.contracts.timing import REAL
from clusterprof.collect.answers import ANSWER_B, plain
from clusterprof.collect.host_keys import HostKeys
from clusterprof.errors import HostError
from clusterprof.jobs import Host
from clusterprof.launchers import ssh

#: A host that answers nothing for so long is cut off, and its connection closed.
_SILENCE_S = 60
#: And what has to come of a file in so long: with a byte now and then it would never end.
_LEAST_B = 1 << 20
#: Every other request must be answered within this.
_PATIENCE_S = 2 * _SILENCE_S
#: How often a keepalive is sent.
_ASK_EVERY_S = 10

#: What receives the bytes of stdout or stderr as they arrive.
Sink = Callable[[bytes], object]


class Answer(NamedTuple):
    """How a short command on a host ended, and what it printed."""

    status: int
    stdout: bytes
    stderr: bytes


def command_line(argv: Sequence[str]) -> bytes:
    """The one place where arguments become a line for the shell that sshd always starts.

    Quoted for POSIX shells. Only our own helper's command goes this way: the user's program
    travels as JSON, which no shell reads.
    """
    return os.fsencode(shlex.join(argv))


class SshHost:
    """One host: connected on demand, each failure a HostError, for who asks to name the host."""

    def __init__(self, host: Host, config_file: Path | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.config_file = config_file
        limits = ("banner_timeout", "auth_timeout", "channel_timeout")
        self.connection: Any = ssh.fabric().Connection(
            host.address, user=host.user, port=host.port, connect_timeout=timeout_s,
            config=ssh.ssh_configuration(config_file),
            connect_kwargs=dict.fromkeys(limits, timeout_s),
        )  # fmt: skip
        if self.connection.ssh_config.get("identitiesonly") == "yes":  # Fabric does not know it
            self.connection.connect_kwargs.update(allow_agent=False, look_for_keys=False)

    def open(self) -> None:
        """Connect, if that is not done. Raises HostError with what is wrong."""
        if self.connected:
            return
        with self.explained(10 * self.timeout_s):  # timeout_s is for each part of it
            hop = self.connection
            while hop is not None and not isinstance(hop, str):
                keys = HostKeys(hop, self.config_file)
                hop.client.set_missing_host_key_policy(keys)
                hop.connect_kwargs = {**hop.connect_kwargs, "transport_factory": keys.transport}
                hop = hop.gateway
            self.connection.open()
            keep_watch(self.connection.transport)

    @property
    def connected(self) -> bool:
        """Whether there is a connection that has not ended, as far as is known."""
        return bool(self.connection.is_connected)

    def close(self) -> None:
        """End the connection; never raises."""
        with contextlib.suppress(Exception):
            self.connection.client.close()
            self.connection.close()

    @contextlib.contextmanager
    def explained(self, within_s: float = 0.0) -> Iterator[None]:
        """Turn any failure on the way to this host into a HostError.

        For most requests paramiko waits for an answer without a limit: after `within_s` seconds
        the connection is closed under it.
        """
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.close()

        within_s = max(within_s, _PATIENCE_S)
        limit = _timer(within_s, give_up)
        try:
            yield
        except HostError:
            raise
        except Exception as error:  # noqa: BLE001 - sockets, paramiko, cryptography: see `reason`
            silent = f"no answer within {within_s:g} s"
            raise HostError(silent if late.is_set() else reason(error, self.timeout_s)) from None
        finally:
            limit.cancel()

    def ask(self, argv: Sequence[str], stdin: bytes = b"", *, within_s: float = 30.0) -> Answer:
        """Run a short command to its end. Raises HostError, also of too long an answer."""
        stdout, stderr = bytearray(), bytearray()
        command = self.start(argv, _bounded(stdout), _bounded(stderr))
        command.write(stdin, last=True)
        until = REAL.now() + within_s
        while not (ended := command.wait(0.1)) and max(len(stdout), len(stderr)) <= ANSWER_B:
            if REAL.now() > until:
                break
        status = command.status() if ended else 255
        command.close()
        if max(len(stdout), len(stderr)) > ANSWER_B:
            raise HostError(f"its answer is longer than {ANSWER_B >> 20} MB")
        if not ended:
            raise HostError(f"no answer within {within_s:g} s to {argv[0]}")
        return Answer(status, bytes(stdout), bytes(stderr))

    def start(self, argv: Sequence[str], stdout: Sink, stderr: Sink) -> RemoteCommand:
        """Start a command; a thread for each sink hands on what it prints. Raises HostError."""
        self.open()
        with self.explained():
            channel = self.connection.create_session()
            channel.exec_command(command_line(argv))
        return RemoteCommand(channel, stdout, stderr)

    def read(self, path: str, left_b: int) -> Iterator[bytes]:
        """A file's content there, and at most `left_b` bytes, whatever comes. Raises HostError.

        By `cat`, whose output is read at our pace: paramiko's SFTP prefetches from a thread of its
        own, which ends with a traceback when the connection does.
        """
        mark = secrets.token_hex(16)
        self.open()
        with self.explained():
            channel = self.connection.create_session()
        with contextlib.closing(channel):
            with self.explained():
                channel.settimeout(_SILENCE_S)
                send = 'echo "$1" && exec cat <"$2"'  # behind a line that says where it begins
                channel.exec_command(command_line(["sh", "-c", send, "sh", mark, path]))
            pieces, begun = self._output(channel), b""
            while mark.encode() + b"\n" not in begun:  # a login shell may greet before it
                piece = next(pieces, b"")
                if not piece or len(begun) > ANSWER_B:
                    return
                begun += piece
            for piece in itertools.chain([begun.partition(mark.encode() + b"\n")[2]], pieces):
                yield piece[:left_b]
                left_b -= len(piece)
                if left_b <= 0:
                    return

    def _output(self, channel: Any) -> Iterator[bytes]:
        """What a command prints. Raises HostError where the connection ends or is too slow."""
        brought_b, waited_s, data = 0, 0.0, b"."
        while data:
            with self.explained():
                began = REAL.now()
                data = channel.recv(1 << 18)  # tens of kB at least, where there are so many
                brought_b, waited_s = brought_b + len(data), waited_s + REAL.now() - began
                if waited_s >= _SILENCE_S:
                    if brought_b < _LEAST_B:
                        raise HostError(f"it brings less than {_LEAST_B >> 20} MB a minute")
                    brought_b, waited_s = 0, 0.0
                if not data and channel.status_event.wait(_SILENCE_S) and channel.exit_status < 0:
                    self.close()  # paramiko may still report it as connected
                    raise EOFError
            yield data


def _bounded(answer: bytearray) -> Sink:
    """Collects an answer; of one that is too long no more than shows that it is."""
    return lambda data: answer.extend(data) if len(answer) <= ANSWER_B else None


class RemoteCommand:
    """A command that runs on a host."""

    def __init__(self, channel: Any, stdout: Sink, stderr: Sink) -> None:
        self._channel = channel
        channel.settimeout(_ASK_EVERY_S)  # for a host that reads nothing
        self._pumps = [
            threading.Thread(target=_pump, args=pair, daemon=True)
            for pair in ((channel.recv, stdout), (channel.recv_stderr, stderr))
        ]
        for pump in self._pumps:
            pump.start()

    def write(self, data: bytes, *, last: bool = False) -> bool:
        """Write bytes to its stdin; False where they are not accepted any more."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.sendall(data)
            if last:
                self._channel.shutdown_write()
            return True
        return False

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within `seconds`, or its connection has."""
        return bool(self._channel.status_event.wait(seconds))

    def status(self) -> int:
        """Its exit status; 255 (as of ssh) where the connection ended first or it is invalid."""
        until = REAL.now() + 2  # for its output: what it left running may hold that open
        for pump in self._pumps:
            pump.join(max(0.0, until - REAL.now()))
        status = int(self._channel.exit_status)
        self.close()
        return status if 0 <= status <= 255 else 255

    @property
    def lost(self) -> bool:
        """Whether the connection ended before the command did."""
        return bool(self._channel.exit_status < 0)

    def close(self) -> None:
        """Close its channel."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()


def _pump(receive: Callable[[int], bytes], sink: Sink) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            try:
                data = receive(1 << 16)
            except TimeoutError:  # no output for a while
                continue
            if not data:
                return
            sink(data)


def keep_watch(transport: Any) -> None:
    """Notice a host that is cut off within a minute; TCP alone takes fifteen.

    TCP notices a dead network, but not a machine that hangs with its kernel alive, nor a gateway
    that takes bytes and forwards none: sshd is asked, as by OpenSSH's ServerAliveInterval.
    """

    def watch() -> None:
        while transport.is_active():
            limit = _timer(_SILENCE_S, transport.close)
            # A refusal is an answer; the connection's own end is noticed elsewhere.
            with contextlib.suppress(Exception):
                transport.global_request("keepalive@openssh.com")
            limit.cancel()
            REAL.sleep(_ASK_EVERY_S)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):  # through a gateway it is not a socket
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


def _timer(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


def reason(error: Exception, timeout_s: float) -> str:
    """What a failed connection means, and what to do about it, in one line."""
    import paramiko
    from paramiko.ssh_exception import NoValidConnectionsError

    text = first_line(error)
    meanings: dict[type[Exception], str] = {
        paramiko.PasswordRequiredException:
            "the private key is locked: ssh-add it (a passphrase is never asked for)",
        paramiko.AuthenticationException:
            "it accepts none of your keys (a password is never asked for)",
        socket.gaierror: f"its name cannot be resolved: {getattr(error, 'strerror', '')}",
        EOFError: "it closed the connection",
        TimeoutError: f"no answer within {timeout_s:g} s",
    }  # fmt: skip
    for kind, meaning in meanings.items():
        if isinstance(error, kind):
            return meaning
    if isinstance(error, NoValidConnectionsError):
        text = "; ".join(sorted({first_line(failure) for failure in error.errors.values()}))
    # a banner, or no session: a server that accepted the connection and then sent nothing
    elif "timed out" in text.lower() or "banner" in text or text == "No existing session":
        return meanings[TimeoutError]
    return f"it cannot be reached: {text}"


def first_line(error: BaseException) -> str:
    """An exception in one line; its text may come from the other side."""
    return plain(str(error).strip().split("\n")[0]) or type(error).__name__
