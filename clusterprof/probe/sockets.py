"""The ping-pong over UDP, where there is no MPI.

Rank 0 listens on the address that the job itself would reach it by, and answers only those who
prove that they know a secret. It leaves address and secret in a file that only its owner can
read, in a folder that all nodes see: whoever can read that file is the same user.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterprof.agent.contracts import clocks, documents, exchange, files
from clusterprof.agent.contracts.identity import Identity
from clusterprof.errors import ClusterprofError
from clusterprof.probe.measurement import Measurement, parsed

#: so long may the file of the address take to be seen by other nodes
_LOOK_EVERY_S = 0.05


def measure(
    me: Identity, meet: Path, environ: Mapping[str, str], timeout_s: float
) -> Measurement | None:
    """Measure every rank's wall clock against rank 0's; the result on rank 0, None elsewhere.

    `meet` is a folder that all nodes see. Raises ClusterprofError where rank 0 cannot listen
    there, or where a rank does not find or reach it within `timeout_s`.
    """
    path = meet / f".clusterprof-clock-{_job(environ)}"
    if me.rank == 0:
        return _listen(path, me.world_size or 1, environ, timeout_s)
    _ask(me, path, timeout_s)
    return None


def _job(environ: Mapping[str, str]) -> str:
    """What tells this measurement from another one of the same user in the same folder."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
    words = [environ[name] for name in names if environ.get(name)]
    kept = ("".join(c if c.isalnum() else "_" for c in word) for word in words)
    return ".".join(kept) or "here"


def _listen(path: Path, size: int, environ: Mapping[str, str], timeout_s: float) -> Measurement:
    secret = secrets.token_bytes(32)
    machine = clocks.machine()
    rows: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    with _listening(path, secret, exchange.own_address(environ), machine) as endpoint:
        while len(rows) < size - 1 and endpoint.wait(deadline - time.monotonic()):
            told = exchange.answer(endpoint)
            if told is not None:
                row = json.loads(told)
                rows[int(row["rank"])] = {**row, "other": 0, "other_machine": machine}
        # A rank whose last confirmation was lost asks again: it has a moment for it.
        until = time.monotonic() + 0.3
        while endpoint.wait(until - time.monotonic()):
            exchange.answer(endpoint)
    silent = sorted(set(range(1, size)) - set(rows))
    notes = [str(row["note"]) for row in rows.values() if "note" in row]
    if silent:
        notes.append(f"nothing came from rank {', '.join(map(str, silent))} in {timeout_s:g} s")
    bounds = [row for _, row in sorted(rows.items()) if "note" not in row]
    return parsed({"method": "UDP", "bounds": bounds, "notes": notes})


@contextlib.contextmanager
def _listening(
    path: Path, secret: bytes, address: str, machine: str
) -> Iterator[exchange.Endpoint]:
    """An endpoint whose address stands in the file `path`, for as long as it is listened to."""
    try:
        endpoint = exchange.Endpoint(address, secret)
        told = {
            "address": address, "port": endpoint.port, "secret": secret.hex(), "machine": machine,
        }  # fmt: skip
        files.write_json(path, told, mode=0o600)
    except OSError as error:
        raise ClusterprofError(
            f"rank 0 cannot listen on {address}, or cannot say so in {path}",
            error.strerror or str(error),
            "name a folder that all nodes see and you may write: --meet DIR",
        ) from None
    try:
        yield endpoint
    finally:
        endpoint.close()
        path.unlink(missing_ok=True)


def _ask(me: Identity, path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    tried = None
    while time.monotonic() < deadline:
        told = _read(path)
        # What does not answer was left behind by a killed measurement: look again.
        if told is not None and told != tried and _measured(me, told):
            return
        tried = told
        time.sleep(_LOOK_EVERY_S)
    where = f"{tried['address']} UDP port {tried['port']}" if tried else str(path)
    raise ClusterprofError(
        f"rank {me.rank} did not reach rank 0 within {timeout_s:g} s",
        f"looked for: {where}",
        "do the nodes see that folder (--meet DIR), and may they speak UDP to each other?",
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        told = documents.load(str(path))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and "secret" in told else None


def _measured(me: Identity, told: Mapping[str, Any]) -> bool:
    """Measure and hand the result to rank 0; False where nobody answers."""
    target = (told["address"], told["port"])
    here = exchange.route_to(target[0])
    if here is None:
        return False
    endpoint = exchange.Endpoint(here, bytes.fromhex(told["secret"]))
    with contextlib.closing(endpoint):
        found = exchange.measure(endpoint, target)
        if not found:
            return False
        row: dict[str, Any] = {"rank": me.rank, "machine": clocks.machine()}
        try:
            row.update(exchange.described(found))
        except ValueError as error:
            row["note"] = f"rank {me.rank}: {error}"
        return exchange.tell(endpoint, target, json.dumps(row).encode())
