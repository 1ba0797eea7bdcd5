"""A process on each node of the job that measures the hosts' clocks: around the window, and with
`--watch` at each look.

It stands beside the node's first rank and beside the reference rank, the lowest profiled one (rank
0 where none is), and ends with its rank, which announces the ends of its window by a datagram to a
Unix socket without a file: that obeys its own user only and never answers. The reference rank's
prober answers on UDP, on the job's own network and only to those that know a secret; one prober of
every other machine asks it for a third of a second, at both ends of the window and at each look of
`--watch`. At a look all of these note what their own clocks say, too: one that was set shows.
Address and secret stand in a file of the run directory that only its owner can read. Hosts that
share no folder (`clusterprof ssh`) get a secret, and each other's names, with the plan.

Arguments: FD RUN RANK REFERENCE OWNER WATCHED, the last 1 with `--watch`, else 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import struct
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..contracts import clocks, exchange, files, paths, plan as plans, states
from ..contracts.exchange import Answerer
from ..contracts.identity import plan_path
from ..contracts.timing import REAL, Clock

#: The reference rank's prober answers for so long after its own window closed.
GRACE_S = 30.0
#: ... and for so long after its rank has ended, or after the last datagram that came since.
QUIET_S = 1.0
#: So often it is asked at each end of the window: its machine may stall for longer than one
#: measurement waits, and no process waits for this one.
TRIES = 3
#: Of so many looks, the latest, what was measured is kept: as many as a look may go back.
MOST_LOOKS = 64


class Prober:
    """One rank's prober, from its start to the end of its rank."""

    def __init__(
        self, pipe: socket.socket, run: str, rank: int, against: int, owner: int,
        clock: Clock = REAL, watched: bool = False,
    ) -> None:  # fmt: skip
        """`watched`: the rank announces looks as well, until it ends."""
        self.run = run
        self.watched = watched
        self.clock = clock
        self.rank = rank
        self.against = against
        self.owner = owner
        self.pipe = pipe
        self.pipe.setblocking(False)
        self.meeting = meeting(os.environ)
        #: the file in which the reference rank's prober writes how it is reached
        self.address_file = os.path.join(paths.rank_folder(run, against), paths.PROBE_ADDRESS)
        self.bounds: List[Dict[str, Any]] = []
        #: what this host's clocks said at each look
        self.readings: List[Dict[str, Any]] = []
        self.is_saved = True
        self.notes: List[str] = []

    def answer(self) -> None:
        """Answer all others until our rank has ended, or some time after its window has closed."""
        if self.meeting is not None:
            endpoint = exchange.listen_for_seekers(*self.meeting)
        else:
            states.make(os.path.dirname(self.address_file))
            endpoint = exchange.announce(self.address_file, exchange.own_address(os.environ))
        until = math.inf
        sources: List[Any] = [endpoint, self.pipe, self.owner]
        with contextlib.closing(endpoint):
            while self.clock.now() < until:
                pause = None if until == math.inf else until - self.clock.now()
                ready = self.clock.wait(sources, pause)
                if endpoint in ready:
                    exchange.answer(endpoint)
                    if self.owner not in sources:
                        until = self.clock.now() + QUIET_S
                event = self.event() if self.pipe in ready else ""
                if event == clocks.LOOK:
                    self.read_clock()
                    self.save()
                if event == "close" and not self.watched:
                    until = self.clock.now() + GRACE_S
                if self.owner in ready:
                    sources.remove(self.owner)
                    until = self.clock.now() + QUIET_S

    def event(self) -> str:
        """What our rank announced; "" for a datagram of another user."""
        ucred = struct.Struct("@iII")  # who sent a datagram, as the kernel knows it
        try:
            data, sender, _, _ = self.pipe.recvmsg(64, socket.CMSG_SPACE(ucred.size))
        except OSError:
            return ""
        users = [
            ucred.unpack(credentials)[1]
            for _, kind, credentials in sender
            if kind == socket.SCM_CREDENTIALS and len(credentials) == ucred.size
        ]
        return data.decode("ascii", "replace") if users == [os.getuid()] else ""

    def ask(self) -> None:
        """Measure when the window opens and once more when it has closed; then we are done.

        With `--watch` at each look as well, until our rank has ended. Done at once where another
        prober measures this machine, or there is nothing to measure.
        """
        answerer, ended = None, False
        sources: List[Any] = [self.pipe, self.owner]
        while not ended:
            ready = self.clock.wait(sources)
            event = self.event() if self.pipe in ready else ""
            if answerer is None and self.is_first(event):
                answerer = self.find()
                if answerer is not None and not self.claims(answerer):
                    break
            self.follow(event, answerer)
            ended = self.owner in ready or self.is_last(event, answerer)
        self.save()

    def is_first(self, event: str) -> bool:
        """Whether measuring may begin with this event: with `--watch` it may with any."""
        return event == "open" or (event != "" and self.watched)

    def is_last(self, event: str, answerer: Optional[Answerer]) -> bool:
        """Whether nothing is measured after this event: with `--watch` another look may come."""
        if self.watched:
            return False
        return event == "close" or (event == "open" and answerer is None)

    def follow(self, event: str, answerer: Optional[Answerer]) -> None:
        """Measure at this event where there is an answerer; at a look note our clocks as well.

        What is new is written at once, but not as the window opens.
        """
        if event and answerer is not None:
            self.measure(event, answerer)
        if event == clocks.LOOK:
            self.read_clock()
        if event != "open":
            self.save()

    def read_clock(self) -> None:
        """Note what this host's clocks say at a look."""
        self.readings.append(clocks.reading(clocks.LOOK))
        forget(self.readings, "event")
        self.is_saved = False

    def save(self) -> None:
        """Write what is new, beside the rank's other files; where that fails, with the next."""
        if self.is_saved:
            return
        folder = paths.rank_folder(self.run, self.rank)
        lists = {"bounds": self.bounds, "notes": self.notes, "readings": self.readings}
        with contextlib.suppress(OSError):
            states.make(folder)  # the rank's writer may not have come to it
            files.write_json(os.path.join(folder, paths.PROBE), {"schema_version": 1, **lists})
            self.is_saved = True

    def measure(self, event: str, answerer: Answerer) -> None:
        """One measurement against the reference rank's prober."""
        exchanges: List[exchange.Exchange] = []
        with contextlib.suppress(OSError):  # no way to it
            with contextlib.closing(answerer.endpoint()) as endpoint:
                tries = (exchange.measure(endpoint, answerer, self.clock) for _ in range(TRIES))
                exchanges = next(filter(None, tries), [])
        if not exchanges:
            self.note("rank %d's host did not answer at %s (UDP %s:%d)"
                      % (self.against, moment(event), answerer.address, answerer.port))  # fmt: skip
            return
        try:
            bound = exchange.described(self.rank, exchanges)
            bound.update(when=event, other=self.against, other_machine=answerer.machine)
            self.bounds.append(bound)
            forget(self.bounds, "when")
            self.is_saved = False
        except ValueError as error:
            self.note("at %s: %s" % (moment(event), error))

    def note(self, what: str) -> None:
        """Note what could not be measured, once."""
        if what not in self.notes:
            self.notes.append(what)
            self.is_saved = False

    def find(self) -> Optional[Answerer]:
        """The reference rank's prober; None where there is none (its rank never began)."""
        where = ""
        if self.meeting is None:
            self.clock.until(self.announced, exchange.FIRST_ANSWER_S, 0.1)
            answerer = self.announced()
        else:
            answerer = exchange.seek(*self.meeting, exchange.FIRST_ANSWER_S, self.clock)
            ports = ", ".join(map(str, exchange.meeting_ports(self.meeting[0])))
            where = " on %s (UDP ports %s)" % (", ".join(self.meeting[1]), ports)
        if answerer is None:
            self.note("rank %d's prober was not found%s" % (self.against, where))
        return answerer

    def announced(self) -> Optional[Answerer]:
        """As the reference rank's prober has written; None where it has not, or not yet."""
        with contextlib.suppress(OSError, ValueError):
            return exchange.announced(self.address_file, ours=True)
        return None

    def claims(self, answerer: Answerer) -> bool:
        """Whether it is ours to measure: of each machine the first that comes, of its own none."""
        machine = clocks.machine()
        if not machine or machine == answerer.machine:
            return False
        about = (answerer.secret.hex() + machine).encode()
        name = hashlib.blake2b(about, digest_size=8).hexdigest()
        folder = os.path.join(self.run, paths.PROBED)
        with contextlib.suppress(OSError):
            if os.path.isdir(self.run):
                os.makedirs(folder, exist_ok=True)
            os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        return False


def moment(event: str) -> str:
    """When that was, in words."""
    return "a look" if event == clocks.LOOK else "the window's %s" % event


def forget(entries: List[Dict[str, Any]], when: str) -> None:
    """Leave out what is of the oldest look, where there are too many; `when`: the event's key."""
    looks = [entry for entry in entries if entry[when] == clocks.LOOK]
    if len(looks) > MOST_LOOKS:
        entries.remove(looks[0])


def meeting(environ: Mapping[str, str]) -> Optional[Tuple[bytes, List[str]]]:
    """Secret and hosts of a job whose hosts share no folder, by the plan; None where they do."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        given = plans.read(plan_path(environ)).meeting
        if given is not None:
            hosts = dict.fromkeys([environ.get("MASTER_ADDR", ""), *given.hosts])
            return bytes.fromhex(given.secret), [host for host in hosts if host]
    return None


def main(argv: List[str]) -> None:
    """Beside the rank, and until it ends: arguments as above."""
    number, rank, against, owner = (int(argv[place]) for place in (0, 2, 3, 4))
    pipe = socket.socket(fileno=number)
    pipe.set_inheritable(False)
    prober = Prober(pipe, argv[1], rank, against, os.pidfd_open(owner), watched=argv[5] == "1")
    with contextlib.suppress(OSError):  # the clocks stay unmeasured: no process waits for us
        (prober.answer if rank == against else prober.ask)()
