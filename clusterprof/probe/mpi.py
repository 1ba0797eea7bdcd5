"""The ping-pong over MPI: the fabric that the training itself uses, where there is one.

Rank 0 answers one rank after the other; those that wait for their turn sleep, since MPI's own
waiting would keep their cores, and the answering rank's, busy.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from typing import Any

from clusterprof.agent.contracts import clocks
from clusterprof.agent.contracts.exchange import Exchange, described, exchanged
from clusterprof.probe.measurement import Measurement, parsed

_TIMES = struct.Struct("=qq")
_TURN, _ASK, _ANSWER, _ROW, _END = 71, 72, 73, 74, 75
#: what MPI's own launchers, and `srun --mpi=pmix`, tell a process that is a rank of theirs
_SIGNS = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def world(environ: Mapping[str, str] | None = None) -> Any | None:
    """MPI's communicator of all ranks; None where this is no MPI job, or mpi4py is missing.

    mpi4py is not imported where no launcher speaks MPI: some MPIs abort then.
    """
    if not any(name in (os.environ if environ is None else environ) for name in _SIGNS):
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # not installed; or it finds no MPI library
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() > 1 else None


def measure(comm: Any, exchanges: int) -> Measurement | None:
    """Measure every rank's wall clock against rank 0's; the result on rank 0, None elsewhere."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank != 0:
        row: dict[str, Any] = {"rank": rank, "machine": clocks.machine()}
        try:
            row.update(described(_ask(comm, exchanges)))
        except ValueError as error:
            row["note"] = f"rank {rank}: {error}"
        comm.send(row, dest=0, tag=_ROW)
        _asleep_until(comm, _END)
        return None
    rows = [_answer(comm, peer, exchanges) for peer in range(1, size)]
    for peer in range(1, size):
        comm.Send(bytearray(1), dest=peer, tag=_END)
    machine = clocks.machine()
    bounds = [{**row, "other": 0, "other_machine": machine} for row in rows if "note" not in row]
    notes = [row["note"] for row in rows if "note" in row]
    return parsed({"method": "MPI", "bounds": bounds, "notes": notes})


def _answer(comm: Any, peer: int, exchanges: int) -> dict[str, Any]:
    """Rank 0's part: give `peer` its turn, say when its messages came, take what it found."""
    comm.Send(bytearray(1), dest=peer, tag=_TURN)
    question, times = bytearray(1), bytearray(_TIMES.size)
    for _ in range(exchanges):
        comm.Recv(question, source=peer, tag=_ASK)
        arrived = time.time_ns()
        _TIMES.pack_into(times, 0, arrived, time.time_ns())
        comm.Send(times, dest=peer, tag=_ANSWER)
    return dict(comm.recv(source=peer, tag=_ROW))


def _ask(comm: Any, exchanges: int) -> list[Exchange]:
    _asleep_until(comm, _TURN)
    question, times = bytearray(1), bytearray(_TIMES.size)
    found = []
    for _ in range(exchanges):
        sent = time.time_ns()
        comm.Send(question, dest=0, tag=_ASK)
        comm.Recv(times, source=0, tag=_ANSWER)
        came = time.time_ns()
        arrived, left = _TIMES.unpack(times)
        found.append(exchanged(sent, arrived, left, came))
    return found


def _asleep_until(comm: Any, tag: int) -> None:
    """Wait for rank 0's word without keeping a core busy."""
    while not comm.Iprobe(source=0, tag=tag):
        time.sleep(0.0005)
    comm.Recv(bytearray(1), source=0, tag=tag)
