"""Dumps of PyTorch's flight recorder: what every rank called, and when."""
