"""Simulated training jobs with planted causes: reports whose truth is known."""

from clusterprof.simulate.job import Cause, Job, Truth
from clusterprof.simulate.reports import simulate

__all__ = ["Cause", "Job", "Truth", "simulate"]
