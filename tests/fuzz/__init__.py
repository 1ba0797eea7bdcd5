"""Fuzzing of everything that clusterprof reads and somebody else may have written.

`targets` has what is read and how it is spoilt, `run` a budget of seconds; `corpus/` holds what
once broke something, and is replayed first.
"""
