"""Simulated training jobs with planted causes, and recordings with planted clocks."""

from simulate.clocks import middle, wall, with_clock
from simulate.job import Cause, Job, Truth
from simulate.reports import simulate

__all__ = ["Cause", "Job", "Truth", "middle", "simulate", "wall", "with_clock"]
