"""Which processes of an nsys report are ranks, and which ranks they are.

A report holds every child of the profiled program. Started on a rank it holds that rank and its
helpers (DataLoader workers, compilers); started on what starts ranks (`nsys profile torchrun …`)
it holds all ranks of that host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.agent.contracts.identity import LAUNCHERS, Identity
from clusterprof.ingest.columns import matching
from clusterprof.ingest.nsys import activity, nvtx
from clusterprof.ingest.nsys.database import Export
from clusterprof.ingest.nsys.nccl_ranges import Communicators
from clusterprof.ingest.nsys.nvtx import Ranges
from clusterprof.ingest.step_ranges import names_steps

#: a process with less than this part of the kernels of the busiest is a helper, not a rank
_LEAST_WORK = 0.1

_INNER = frozenset(launcher.name for launcher in LAUNCHERS if launcher.inner)


def rank_processes(
    export: Export, ranges: Ranges, who: Identity | None, *, alone: bool
) -> list[int | None]:
    """Return the processes that are ranks, in the order of their GPUs, then of their ids.

    Those that use NCCL; where none does, those that keep a GPU each busy; on a CPU those that mark
    steps. `who` is what the profiled command's environment says: one that is a rank itself has no
    other ranks among its children, nor has one of which it is known (`alone`). A list of None
    where no process does anything.
    """
    work = activity.kernels_by_process(export)
    for found in (_communicating(work, ranges), _computing(work), _stepping(work, ranges)):
        if found:
            ordered = sorted(found, key=lambda process: (_device(work, process), process))
            # a rank's children come after it
            return [min(found)] if alone or _is_rank(who) else list(ordered)
    return [_busiest(export, ranges)]


def _is_rank(who: Identity | None) -> bool:
    return who is not None and who.source in _INNER and (who.world_size or 1) > 1


def _communicating(work: Sequence[activity.Work], ranges: Ranges) -> set[int]:
    calls = ranges.named(matching(ranges.names, "^nccl[A-Z]"))
    return {each.process for each in work if each.nccl} | set(ranges.process[calls].tolist())


def _computing(work: Sequence[activity.Work]) -> set[int]:
    """The busiest process of each GPU."""
    most = max((each.kernels for each in work), default=0)
    of_device: dict[int, activity.Work] = {}
    for each in sorted(work, key=lambda one: (-one.kernels, one.process)):
        of_device.setdefault(each.device, each)
    return {each.process for each in of_device.values() if each.kernels >= _LEAST_WORK * most}


def _stepping(work: Sequence[activity.Work], ranges: Ranges) -> set[int]:
    if work:
        return set()
    names = [str(name) for name in ranges.names.to_pylist()]
    return set(ranges.process[ranges.named(names_steps(names))].tolist())


def _device(work: Sequence[activity.Work], process: int) -> int:
    mine = [each for each in work if each.process == process]
    return max(mine, key=lambda each: each.kernels).device if mine else -1


def _busiest(export: Export, ranges: Ranges) -> int | None:
    """Return the process with most GPU work, else most ranges, else most OS calls."""
    process = activity.main_process(export)
    if process is not None:
        return process
    candidates = ranges.process
    if not candidates.size:
        candidates = nvtx.process_of(export.numbers("OSRT_API", ["globalTid"])["globalTid"])
    if not candidates.size:
        return None
    processes, counts = np.unique(candidates, return_counts=True)
    return int(processes[np.argmax(counts)])


def numbered(
    said: Sequence[Communicators], who: Identity | None, processes: Sequence[int | None]
) -> tuple[list[int], int | None, list[str]]:
    """Return the ranks of several processes, their world's size, and how sure that is.

    `said` are each one's communicators, which tell where they were made inside of the window.
    Where they do not, ranks are counted in the processes' order, on from those of the nodes before
    where the environment says which node it is.
    """
    sizes = {each.largest for each in said}
    world = max(sizes) if len(sizes) == 1 and max(sizes) >= len(said) else None
    known = [rank for each in said if (rank := each.world_rank(world)) is not None]
    if world is not None and len(set(known)) == len(said):
        return known, world, []
    first = who.rank * len(said) if who is not None else 0
    ranks = list(range(first, first + len(said)))
    each = ", ".join(f"process {p} as rank {r}" for p, r in zip(processes, ranks, strict=True))
    doubt = (
        "the report holds several ranks and does not say which is which: they are taken in the "
        f"order of their GPUs, else of their process ids ({each}); say it with --rank FILE=FIRST"
    )
    return ranks, world, [doubt]
