"""A ping-pong between rank 0 and every other rank, which bounds the offsets of their wall clocks.

Over UDP. Rank 0 listens on the address by which the job itself would reach it, and answers only
those who prove that they know a secret. It leaves address and secret in a file that only its owner
can read, in a folder that all nodes see: whoever can read that file is the same user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterprof import words
from clusterprof.agent.contracts import clocks, exchange
from clusterprof.agent.contracts.exchange import Answerer, Endpoint
from clusterprof.agent.contracts.identity import Identity
from clusterprof.agent.contracts.timing import REAL, Clock
from clusterprof.errors import ClusterprofError
from clusterprof.probe.measurement import Measurement, parsed

#: a rank's bound on its way to rank 0, and back that it has come
_DELIVER, _RECEIVED = b"clp>", b"clp<"
_PATIENCE_S = 2.0
#: so often a rank looks for rank 0's file, which may appear late on other nodes
_LOOK_EVERY_S = 0.05


def over_udp(
    me: Identity, meet: Path, environ: Mapping[str, str], timeout_s: float, clock: Clock = REAL
) -> Measurement | None:
    """Measure every rank's wall clock against rank 0's; the result on rank 0, None elsewhere.

    `meet` is a folder that all nodes see. Raises ClusterprofError where rank 0 cannot listen
    there, or where a rank does not find or reach it within `timeout_s`.
    """
    # What distinguishes this measurement from another of the same user in the same folder.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
    given = [re.sub(r"\W", "_", environ[name]) for name in names if environ.get(name)]
    path = meet / f".clusterprof-clock-{'.'.join(given) or 'here'}"
    if me.rank == 0:
        return _answer(path, me.world_size or 1, environ, timeout_s, clock)
    _ask(me, path, timeout_s, clock)
    return None


def _answer(
    path: Path, size: int, environ: Mapping[str, str], timeout_s: float, clock: Clock
) -> Measurement:
    """All ranks' bounds against rank 0's own clock."""
    address = exchange.own_address(environ)
    try:
        endpoint = exchange.announce(str(path), address)
    except OSError as error:
        raise ClusterprofError(
            f"rank 0 cannot listen on {address}, or cannot announce it in {path}",
            error.strerror or str(error),
            "name a folder that all nodes see and you may write: --meet DIR",
        ) from None
    rows: dict[int, dict[str, Any]] = {}
    deadline = clock.now() + timeout_s
    with contextlib.closing(endpoint):
        while len(rows) < size - 1 and endpoint.wait(deadline - clock.now(), clock):
            if delivered := _taken(endpoint):
                row = json.loads(delivered)
                rows[int(row["rank"])] = row
        # A rank whose last confirmation was lost asks again: it has a moment for it.
        until = clock.now() + 0.3
        while endpoint.wait(until - clock.now(), clock):
            _taken(endpoint)
    against = {"other": 0, "other_machine": clocks.machine()}
    in_order = [rows[rank] for rank in sorted(rows)]
    notes = [str(row["note"]) for row in in_order if "note" in row]
    if silent := set(range(1, size)) - set(rows):
        notes.append(f"no answer from {words.ranks(silent)} within {timeout_s:g} s")
    bounds = [{**row, **against} for row in in_order if "note" not in row]
    return parsed({"method": "UDP", "bounds": bounds, "notes": notes})


def _taken(endpoint: Endpoint) -> bytes:
    """Take one datagram and answer it; what a rank has delivered by it, b"" for nothing."""
    body, sender = exchange.answer(endpoint) or (b"", None)
    if not body.startswith(_DELIVER):
        return b""
    endpoint.send(_RECEIVED + body[4:12], sender)
    return body[12:]


def _ask(me: Identity, path: Path, timeout_s: float, clock: Clock) -> None:
    deadline = clock.now() + timeout_s
    tried: Answerer | None = None
    while clock.now() < deadline:
        with contextlib.suppress(OSError, ValueError):
            # One that does not answer was left by a killed measurement, or is late: look again.
            tried = exchange.announced(str(path), ours=False)
            if _measured(me, tried, clock):
                return
        clock.sleep(_LOOK_EVERY_S)
    where = f"{tried.address} UDP port {tried.port}" if tried else str(path)
    raise ClusterprofError(
        f"rank {me.rank} did not reach rank 0 within {timeout_s:g} s",
        f"looked for: {where}",
        "do the nodes see that folder (--meet DIR), and may they speak UDP to each other?",
    )


def _measured(me: Identity, answerer: Answerer, clock: Clock) -> bool:
    """Measure, and deliver the bound to rank 0, or a note where the exchanges leave none; whether
    it has confirmed that. Raises OSError.
    """
    with contextlib.closing(answerer.endpoint()) as endpoint:
        exchanges = exchange.measure(endpoint, answerer, clock)
        if not exchanges:
            return False
        try:
            row = exchange.described(me.rank, exchanges)
        except ValueError as error:
            row = {"rank": me.rank, "note": f"rank {me.rank}: {error}"}
        mark, deadline = os.urandom(8), clock.now() + _PATIENCE_S
        while clock.now() < deadline:
            endpoint.send(_DELIVER + mark + json.dumps(row).encode(), answerer[:2])
            answers = exchange.received([endpoint], exchange.ASK_AGAIN_S, clock)
            if any(body == _RECEIVED + mark for body, _, _ in answers):
                return True
        return False
