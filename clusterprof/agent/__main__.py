"""A process of the agent's own: `python -I -S AGENT_FOLDER PART ARGUMENT...`."""

import os
import sys
from types import ModuleType

folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
package = sys.modules["_clusterprof_agent"] = ModuleType("_clusterprof_agent")
package.__path__ = [folder]

from _clusterprof_agent.contracts import beside  # noqa: E402

beside.run_part(sys.argv[1], sys.argv[2:])
