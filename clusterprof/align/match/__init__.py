"""Collectives across ranks: matching calls: which call of one rank is which of another."""

from clusterprof.align.match.calls import MATCHED, PLACED
from clusterprof.align.match.matching import contradicted, match, tolerance
from clusterprof.align.match.numbering import numbered

__all__ = ["MATCHED", "PLACED", "contradicted", "match", "numbered", "tolerance"]
