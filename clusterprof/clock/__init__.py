"""One clock for all ranks, with a bound on its error that holds."""

from clusterprof.clock.align import align
from clusterprof.clock.model import SHARED_CLOCK_NS, UNBOUNDED_NS, Clock

__all__ = ["SHARED_CLOCK_NS", "UNBOUNDED_NS", "Clock", "align"]
