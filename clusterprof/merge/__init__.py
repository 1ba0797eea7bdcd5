"""Collectives across ranks: matching calls, and placing them on one clock."""

from clusterprof.merge.matched import MATCHED, PLACED
from clusterprof.merge.matching import match, tolerance
from clusterprof.merge.numbering import numbered
from clusterprof.merge.placing import place

__all__ = ["MATCHED", "PLACED", "match", "numbered", "place", "tolerance"]
