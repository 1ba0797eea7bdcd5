"""Measuring the clocks of a job's nodes against each other, before or beside a training."""
