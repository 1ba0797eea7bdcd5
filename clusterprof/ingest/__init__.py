"""Reports of any supported format as canonical tables (`clusterprof.tables`)."""

from __future__ import annotations

from clusterprof.ingest.assembler import combine
from clusterprof.ingest.gathered import Gathered, gather
from clusterprof.ingest.reports import read_report
from clusterprof.ingest.sources import Source, find_sources

__all__ = ["Gathered", "Source", "combine", "find_sources", "gather", "read_report"]
