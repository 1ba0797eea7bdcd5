"""All modules of clusterprof, as `clusterprof.cli.main` has them loaded: for `warm.py`."""

import importlib
import pkgutil

import clusterprof
from clusterprof.priority import without_pandas

without_pandas()
for module in pkgutil.walk_packages(clusterprof.__path__, "clusterprof."):
    if not module.name.endswith((".__main__", ".sitecustomize")):
        importlib.import_module(module.name)
