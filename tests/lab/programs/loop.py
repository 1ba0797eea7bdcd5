"""The loop of `ending.py`, in a module of its own for `--step-on loop:step`."""

import time


def step() -> None:
    """One step of a training that needs no torch."""
    time.sleep(0.02)
