"""An exchange of datagrams between two hosts that bounds the offset of their wall clocks.

A request leaves at t1 (the asker's clock) and arrives at t2 (the answerer's); the answer leaves
at t3 and arrives at t4. Nothing arrives before it is sent: whatever the delays of the two ways,
asker minus answerer lies within [t1 - t2, t4 - t3]. Many exchanges narrow that to the fastest
request and the fastest answer. Both sides prove with every datagram that they know one secret; no
other datagram is answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import os
import socket
import struct
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from . import clocks, files
from .timing import REAL, Clock

#: how long one measurement may take, and how long it waits for a first answer
SECONDS = 0.3
FIRST_ANSWER_S = 1.5
EXCHANGES = 400
#: a datagram that is not answered for so long is sent again
ASK_AGAIN_S = 0.1
#: two clocks drift apart by no more than this while they are measured (see align/clock/bounds.py)
DRIFT_LIMIT_PPM = 150

#: bytes of a proof, and of the largest datagram
_MAC, _LARGEST = 16, 8192
_REQUEST, _ANSWER = struct.Struct("!4sI"), struct.Struct("!4sIqq")
_ASK, _REPLY, _SEEK, _FOUND = b"clp?", b"clp!", b"clp-", b"clp+"
#: Where hosts share a secret and no folder, the answerer listens on one of so many ports that
#: follow from the secret, below those that systems give away by themselves.
_MEETING_PORTS, _FIRST_PORT, _PORTS = 3, 20_000, 12_000
#: SO_TIMESTAMPNS on Linux: the kernel stamps what arrives, before any process is woken for it
_STAMPS = 35


class Exchange(NamedTuple):
    """Asker minus answerer is in [low_ns, high_ns] at `at_ns` of the answerer's wall clock."""

    at_ns: int
    low_ns: int
    high_ns: int


def exchanged(sent: int, arrived: int, left: int, came: int) -> Exchange:
    """The bound of one exchange: sent and came by the asker's clock, the others by the answerer's.

    With what the clocks may have drifted between the answer's two times.
    """
    slack = (left - arrived) * DRIFT_LIMIT_PPM // 1_000_000 + 1
    return Exchange(arrived, sent - arrived, came - left + slack)


def narrowed(exchanges: List[Exchange]) -> Exchange:
    """Return what all exchanges together leave, at the time of the best of them.

    Each counts with what the clocks may have drifted between the two. Raises ValueError where they
    contradict each other: a clock was set in between.
    """
    best = min(exchanges, key=lambda exchange: exchange.high_ns - exchange.low_ns)
    low, high = best.low_ns, best.high_ns
    for exchange in exchanges:
        slack = abs(exchange.at_ns - best.at_ns) * DRIFT_LIMIT_PPM // 1_000_000 + 1
        low = max(low, exchange.low_ns - slack)
        high = min(high, exchange.high_ns + slack)
    if low > high:
        raise ValueError("the exchanges contradict each other: a clock was set in between")
    return Exchange(best.at_ns, low, high)


def described(rank: int, exchanges: List[Exchange]) -> Dict[str, Any]:
    """A rank's bound as it stands in clock_probe.json. Raises ValueError as `narrowed` does."""
    bound = narrowed(exchanges)
    return {
        "rank": rank, "machine": clocks.machine(),
        "at_ns": bound.at_ns, "low_ns": bound.low_ns, "high_ns": bound.high_ns,
        "round_trip_ns": min(exchange.high_ns - exchange.low_ns for exchange in exchanges),
        "exchanges": len(exchanges),
    }  # fmt: skip


class Answerer(NamedTuple):
    """Where an answerer is reached, its secret, and its machine (`clocks.machine`)."""

    address: str
    port: int
    secret: bytes
    machine: str

    def endpoint(self) -> Endpoint:
        """A socket of ours on the way to it. Raises OSError where there is no way."""
        return Endpoint(route_to(self.address) or self.address, self.secret)


class Endpoint:
    """A UDP socket on one address, whose datagrams carry a proof of the secret."""

    def __init__(self, address: str, secret: bytes, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        self.secret = secret
        #: the file that says how to reach it, as long as it is open
        self.announced_in = ""
        try:
            self.socket.bind((address, port))
            self.socket.setblocking(False)
            self.stamps = self._kernel_stamps()
        except OSError:
            self.socket.close()
            raise

    def fileno(self) -> int:
        """For select."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket, and remove its announcement."""
        self.socket.close()
        if self.announced_in:
            with contextlib.suppress(OSError):
                os.unlink(self.announced_in)

    def _kernel_stamps(self) -> bool:
        """Whether the kernel's stamps and time.time_ns() are one clock, tried on ourselves.

        They are not where a library shifts the clock of this process only.
        """
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, _STAMPS, 1)
            before = time.time_ns()
            self.socket.sendto(b"self", self.socket.getsockname())
            if self.wait(0.2):
                stamp = _stamp(self.socket.recvmsg(64, 64)[1])
                return stamp is not None and before <= stamp <= time.time_ns()
        return False

    def send(self, body: bytes, to: Any) -> None:
        """One datagram with its proof; one that cannot be sent is lost, as any may be."""
        with contextlib.suppress(OSError):
            self.socket.sendto(body + self._proof(body), to)

    def receive(self) -> Optional[Tuple[bytes, Any, int]]:
        """A datagram with a proof, its sender and when it came (wall, ns); None for any other."""
        try:
            data, ancillary, _, sender = self.socket.recvmsg(_LARGEST, 64)
        except OSError:
            return None
        now = time.time_ns()
        body, proof = data[:-_MAC], data[-_MAC:]
        if not body or not hmac.compare_digest(proof, self._proof(body)):
            return None
        stamp = _stamp(ancillary) if self.stamps else None
        # A stamp later than now: the clock was set back in between.
        return body, sender, now if stamp is None or stamp > now else stamp

    def _proof(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self.secret, digest_size=_MAC).digest()

    def wait(self, seconds: float, clock: Clock = REAL) -> bool:
        """Whether something came within so long."""
        return bool(clock.wait([self.socket], seconds))


def received(
    endpoints: List[Endpoint], seconds: float, clock: Clock
) -> Iterator[Tuple[bytes, Any, int]]:
    """All datagrams with a proof that come within so long."""
    until = clock.now() + seconds
    while True:
        ready = clock.wait(endpoints, until - clock.now())
        yield from filter(None, [endpoint.receive() for endpoint in ready])
        if not ready or clock.now() > until:
            return


def _stamp(ancillary: List[Any]) -> Optional[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _STAMPS and len(data) >= 16:
            seconds, rest = struct.unpack("@qq", data[:16])
            return int(seconds * 1_000_000_000 + rest)
    return None


def announce(path: str, address: str) -> Endpoint:
    """An endpoint on `address`, announced in the file `path` that only its owner can read.

    Raises OSError.
    """
    endpoint = Endpoint(address, os.urandom(32))
    try:
        host, port = endpoint.socket.getsockname()[:2]
        fields = {"address": host, "port": port, "secret": endpoint.secret.hex()}
        files.write_json(path, {**fields, "machine": clocks.machine()}, mode=0o600)
    except OSError:
        endpoint.close()
        raise
    endpoint.announced_in = path
    return endpoint


def announced(path: str, ours: bool) -> Answerer:
    """The answerer that a file announces; `ours` as for `files.load`.

    Raises OSError, ValueError.
    """
    fields = files.load(path, ours)
    form = {"address": str, "port": range(1, 65536), "secret": str, "machine": str}
    if not files.fits(fields, form):
        raise ValueError("%s announces no answerer" % path)
    address, port, secret, machine = map(fields.get, form)
    return Answerer(address, port, bytes.fromhex(secret), machine)


def answer(endpoint: Endpoint) -> Optional[Tuple[bytes, Any]]:
    """Take one datagram and answer it; returns one that asks for something else, and its sender."""
    came = endpoint.receive()
    if came is None:
        return None
    body, sender, arrived = came
    if body[:4] == _ASK and len(body) == _REQUEST.size:
        number = _REQUEST.unpack(body)[1]
        endpoint.send(_ANSWER.pack(_REPLY, number, arrived, time.time_ns()), sender)
    elif body[:4] == _SEEK:
        endpoint.send(_FOUND + body[4:12] + clocks.machine().encode(), sender)
    else:
        return body, sender
    return None


def meeting_ports(secret: bytes) -> List[int]:
    """The ports where those look for an answerer that know its secret and not its port."""
    names = [b"port %d" % k for k in range(_MEETING_PORTS)]
    digests = [hashlib.blake2b(name, key=secret, digest_size=4).digest() for name in names]
    return [_FIRST_PORT + int.from_bytes(digest, "big") % _PORTS for digest in digests]


def listen_for_seekers(secret: bytes, hosts: List[str]) -> Endpoint:
    """An endpoint on the first meeting port that is free, towards `hosts`. Raises OSError."""
    address = _address_towards(hosts)
    *ports, last = meeting_ports(secret)
    for port in ports:
        with contextlib.suppress(OSError):
            return Endpoint(address, secret, port)
    return Endpoint(address, secret, last)


def seek(
    secret: bytes, hosts: List[str], seconds: float, clock: Clock = REAL
) -> Optional[Answerer]:
    """The answerer on one of `hosts`; None where none answers within `seconds`."""
    routes = [(host, route_to(host)) for host in hosts]
    ways = [(host, Endpoint(address, secret)) for host, address in routes if address is not None]
    endpoints = [endpoint for _, endpoint in ways]
    mark, deadline = os.urandom(8), clock.now() + seconds
    try:
        while ways and clock.now() < deadline:
            for (host, endpoint), port in itertools.product(ways, meeting_ports(secret)):
                endpoint.send(_SEEK + mark, (host, port))
            for body, sender, _ in received(endpoints, ASK_AGAIN_S, clock):
                if body[:12] == _FOUND + mark:
                    machine = body[12:].decode("utf-8", "replace")
                    return Answerer(sender[0], sender[1], secret, machine)
    finally:
        for endpoint in endpoints:
            endpoint.close()
    return None


def measure(endpoint: Endpoint, to: Answerer, clock: Clock = REAL) -> List[Exchange]:
    """Exchange datagrams with an answerer for `SECONDS`; [] if none comes in `FIRST_ANSWER_S`."""
    exchanges: List[Exchange] = []
    number = int.from_bytes(os.urandom(3), "big")
    deadline = clock.now() + FIRST_ANSWER_S
    while len(exchanges) < EXCHANGES and clock.now() <= deadline:
        number += 1
        sent = time.time_ns()
        endpoint.send(_REQUEST.pack(_ASK, number), to[:2])
        for body, _, came in received([endpoint], ASK_AGAIN_S, clock):
            if body[:4] != _REPLY or len(body) != _ANSWER.size:
                continue
            _, replied_to, arrived, left = _ANSWER.unpack(body)
            if replied_to == number:  # no answer that came too late
                if not exchanges:
                    deadline = clock.now() + SECONDS
                exchanges.append(exchanged(sent, arrived, left, came))
                break
    return exchanges


def own_address(environ: Any) -> str:
    """This host's address towards the job's master, or Slurm's launching node."""
    named = [environ.get("MASTER_ADDR"), environ.get("SLURM_LAUNCH_NODE_IPADDR")]
    return _address_towards([*filter(None, named), socket.gethostname()])


def _address_towards(hosts: List[str]) -> str:
    """The address from which the first of `hosts` that is another machine is reached."""
    ways = [way for way in map(route_to, hosts) if way is not None]
    others = [way for way in ways if not way.startswith("127.") and way != "::1"]
    return [*others, *ways, "127.0.0.1"][0]


def route_to(host: str) -> Optional[str]:
    """The local address from which `host` is reached; None where there is no way."""
    with contextlib.suppress(OSError):
        *kind, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*kind) as probe:
            probe.connect(target)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    return None
