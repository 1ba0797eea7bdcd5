"""Simulated training jobs with planted causes, and recordings with planted clocks."""

from clusterprof.simulate.clocks import middle, wall, with_clock
from clusterprof.simulate.job import Cause, Job, Truth
from clusterprof.simulate.reports import simulate

__all__ = ["Cause", "Job", "Truth", "middle", "simulate", "wall", "with_clock"]
