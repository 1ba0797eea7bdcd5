"""As much of torch as the agent asks for, in milliseconds: a test that puts this folder first on
PYTHONPATH trains by it.

What its profiler does first, each time, is what `EVENTS` in the environment says: for `stop`, send
SIGUSR1 when the profiler is stopped.
"""

from types import SimpleNamespace

__version__ = "2.9.0"
cuda = SimpleNamespace(is_initialized=lambda: False)

from . import optim, profiler  # noqa: E402, F401
