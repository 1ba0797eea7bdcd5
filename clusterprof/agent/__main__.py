"""A process of the agent's own: `python -I -S AGENT_FOLDER PART ARGUMENT...`."""

import importlib
import os
import sys
from types import ModuleType

#: part -> the module whose `main(arguments)` it is
PARTS = {
    "guard": "guard.guard",
    "trampoline": "guard.trampoline",
    "starter": "contracts.beside",
    "writer": "guard.writer",
    "prober": "remote.prober",
}

folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
package = sys.modules["_clusterprof_agent"] = ModuleType("_clusterprof_agent")
package.__path__ = [folder]
importlib.import_module("_clusterprof_agent." + PARTS[sys.argv[1]]).main(sys.argv[2:])
