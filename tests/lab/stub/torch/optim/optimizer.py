"""An optimizer, and the hooks after its steps."""

import os
import time

hooks = {}


class Handle:
    """What takes a hook out."""

    def remove(self):
        """Take it out."""
        hooks.pop(self, None)


def register_optimizer_step_post_hook(hook):
    """As torch's."""
    handle = Handle()
    hooks[handle] = hook
    return handle


class SGD:
    """Twenty milliseconds a step, or `STEP_S`."""

    def __init__(self, *_, **__):
        """Of no parameters."""

    def step(self):
        """One step."""
        time.sleep(float(os.environ.get("STEP_S", "0.02")))
        for hook in tuple(hooks.values()):
            hook(self, (), {})
