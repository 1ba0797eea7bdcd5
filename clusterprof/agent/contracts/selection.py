"""Is this rank one of the chosen? Decided inside the rank, where its place is known."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional

from .identity import Identity


def chosen(selection: Mapping[str, Any], identity: Identity) -> bool:
    """Whether `selection` (see `clusterprof.arguments.Selection`) takes in the rank `identity`.

    `one-per-node` takes local rank 0 of every node. `stages` takes the first rank of every
    pipeline stage; with the pipeline as the slowest dimension (Megatron's order) a stage is
    `world size / pp` consecutive ranks.
    """
    kind = selection["kind"]
    if kind == "all":
        return True
    if kind == "one-per-node":
        return identity.local_rank == 0
    if kind == "stages":
        return identity.rank in stage_ranks(selection, identity.world_size)
    return identity.rank in selection["ranks"]


def stage_ranks(selection: Mapping[str, Any], world_size: Optional[int]) -> List[int]:
    """The first rank of each pipeline stage, rank 0 among them; [0] if the sizes do not fit."""
    stages = selection["pp"]
    size = selection.get("world_size") or world_size
    if not size or size % stages:
        return [0]
    return list(range(0, size, size // stages))
