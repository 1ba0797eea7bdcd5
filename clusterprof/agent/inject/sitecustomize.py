"""Found first in every interpreter of a job: start the agent, hand on to the user's own.

This file must never fail, and must cost an interpreter that is no rank next to nothing.
"""

import gc
import os
import sys


def _start_agent() -> None:
    if "CLUSTERPROF_PLAN" not in os.environ:
        return
    collects = gc.isenabled()
    try:
        gc.disable()  # nearly all that is made stays
        from types import ModuleType

        package = sys.modules["_clusterprof_agent"] = ModuleType("_clusterprof_agent")
        package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
        from _clusterprof_agent.rank import start

        start.main()
        if not gc.get_freeze_count():  # old at once: no collection of the young ones looks at it
            gc.freeze()
            gc.unfreeze()
    except Exception as error:  # the training goes on, whatever is wrong with us
        try:
            from _clusterprof_agent.contracts.messages import complain

            reason = error if isinstance(error, (OSError, ValueError)) else repr(error)
            complain("this process runs without profiling: %s" % (reason,))
        except Exception:
            pass
    finally:
        if collects:
            gc.enable()


def _hand_on() -> None:
    """Import the sitecustomize that this one stands in front of, if there is one."""
    our_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != our_folder]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


_start_agent()
_hand_on()
