"""One clock for all ranks, with a bound on its error that holds."""

from clusterprof.align.clock.alignment import SHARED_CLOCK_NS, Clock, align
from clusterprof.results import UNBOUNDED_NS

__all__ = ["SHARED_CLOCK_NS", "UNBOUNDED_NS", "Clock", "align"]
