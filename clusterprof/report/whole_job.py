"""What is known of a whole job beside its results: all ranks, all steps, and how it was started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from clusterprof.columns import Ints

_STEP = ("step", "begin_ns", "end_ns")


@dataclass(frozen=True)
class Job:
    """A run of clusterprof, as its run directory tells. Of other reports all of it is unknown."""

    #: each call of all ranks by their flight recorders (`align.lateness.SHALLOW`)
    shallow: pa.Table | None = None
    #: the step log of each rank, profiled or not: the steps near the window (`tables.STEPS`)
    steps: Mapping[int, pa.Table] = field(default_factory=dict)
    #: the other steps of each rank in blocks: first_step, count, median_ns, q1_ns, q3_ns, …
    paces: Mapping[int, Mapping[str, Ints]] = field(default_factory=dict)
    #: which attempt of the job these are of
    attempt: int = 1
    #: the first step of the window, and the first one after it
    window: tuple[int, int] | None = None
    #: the hosts of those ranks whose host is known
    hosts: Mapping[int, str] = field(default_factory=dict)
    #: the versions of torch that ranks trained with
    torch: tuple[str, ...] = ()
    #: the command line (secrets masked), its launcher, and when the job began and ended (ISO 8601)
    command: str = ""
    launcher: str = ""
    began: str = ""
    ended: str = ""

    @property
    def logged(self) -> tuple[Ints, Ints, Ints]:
        """The rank, the number and the length (ns) of each step in the step logs."""
        steps = [
            np.stack([np.full(log.num_rows, rank), *(log[name].to_numpy() for name in _STEP)])
            for rank, log in sorted(self.steps.items())
        ]
        rank, step, begin, end = np.concatenate([np.zeros((4, 0), np.int64), *steps], axis=1)
        return rank, step, end - begin
