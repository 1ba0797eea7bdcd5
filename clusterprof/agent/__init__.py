"""What runs inside a rank. Standard library only; torch only once the program has imported it.

In a rank this package is loaded by path under the name `_clusterprof_agent` (see
`inject/sitecustomize.py`), so that it works in a container or virtual environment in
which clusterprof is not installed. It therefore imports nothing but itself.
"""
