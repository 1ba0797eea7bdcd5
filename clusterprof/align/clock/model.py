"""What is known of each rank's clock: offset, drift, and a bound on the error of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterprof.columns import places
from clusterprof.results import ClockEntry, RankClock

#: an uncertainty from here on is narrowed by assumptions, where there are some: a straggler that
#: costs a millisecond could hide in it
COARSE_NS = 1_000_000

#: two ranks that read one clock agree to within this: five times the largest difference between the
#: reports of one host (4 µs, over 24 recordings by nsys and torch.profiler). Likely, no proof
SHARED_CLOCK_NS = 20_000


@dataclass(frozen=True)
class Clock:
    """Every rank's wall clock against the reference rank's.

    `aligned = wall - offset_ns - drift_ppm * 1e-6 * (wall - middle_ns)` is the reference
    rank's wall time; the truth lies within `uncertainty_ns` of it over the whole window.
    """

    reference_rank: int
    middle_ns: int
    method: str
    ranks: tuple[int, ...]
    offset_ns: npt.NDArray[np.int64]
    drift_ppm: npt.NDArray[np.float64]
    uncertainty_ns: npt.NDArray[np.int64]
    warnings: tuple[str, ...] = ()
    #: ranks that very likely read the reference rank's own clock: one host, and nothing in the
    #: data against an offset of zero
    same_clock: tuple[int, ...] = ()
    #: ranks whose bound rests on an assumption (see `measured`), and is no guarantee
    assumed: tuple[int, ...] = ()

    @cached_property
    def _place(self) -> dict[int, int]:
        return {rank: k for k, rank in enumerate(self.ranks)}

    def align(
        self, rank: int | npt.NDArray[np.int64], wall: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return `wall` (ns, the rank's own wall clock) on the reference rank's clock.

        `rank` is one for all of `wall`, or each one's.
        """
        if isinstance(rank, np.ndarray):
            numbers, number = places(rank)
            k: Any = np.asarray([self._place[r] for r in numbers.tolist()], dtype=np.int64)[number]
        else:
            k = self._place[rank]
        aligned = wall - self.offset_ns[k]
        if np.any(self.drift_ppm) and np.any(self.drift_ppm[k]):
            since = (wall - self.middle_ns).astype(np.float64)
            aligned = aligned - np.rint(self.drift_ppm[k] * 1e-6 * since).astype(np.int64)
        return np.asarray(aligned, dtype=np.int64)

    def uncertainty(self, rank: int) -> int:
        """Return the bound on the error of this rank's aligned times (ns)."""
        return int(self.uncertainty_ns[self._place[rank]])

    def entry(self) -> ClockEntry:
        """Return the clock as it stands in results.json."""
        ranks: list[RankClock] = [
            {
                "rank": rank,
                "offset_ns": int(self.offset_ns[k]),
                "drift_ppm": float(self.drift_ppm[k]),
                "uncertainty_ns": int(self.uncertainty_ns[k]),
            }
            for k, rank in enumerate(self.ranks)
        ]
        return {
            "reference_rank": self.reference_rank,
            "middle_ns": self.middle_ns,
            "method": self.method,
            "ranks": ranks,
            "assumed": list(self.assumed),
        }
