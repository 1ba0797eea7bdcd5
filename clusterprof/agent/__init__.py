"""What runs inside a rank. Standard library only; torch only once the program has imported it.

`inject/sitecustomize.py` and `__main__.py` name this folder `_clusterprof_agent`, wherever it lies:
containers, virtual environments and hosts that are reached over SSH have it without the rest of
clusterprof. It therefore imports nothing but itself, and nothing stands in this file.
"""
