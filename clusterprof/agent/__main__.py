"""A process of the agent's own: `python -I -S AGENT_FOLDER PART ARGUMENT...`.

The folder is loaded under the name that it has inside a rank, wherever it lies: a container and a
host that is reached over SSH have it without the rest of clusterprof.
"""

import importlib
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

NAME = "_clusterprof_agent"

#: part -> the module whose `main(arguments)` it is
PARTS = {
    "guard": "guard.guard",
    "trampoline": "guard.trampoline",
    "writer": "guard.writer",
    "prober": "remote.prober",
}


def main() -> None:
    """Run the part that the command line names."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    spec = spec_from_file_location(
        NAME, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    importlib.import_module("%s.%s" % (NAME, PARTS[sys.argv[1]])).main(sys.argv[2:])


main()
