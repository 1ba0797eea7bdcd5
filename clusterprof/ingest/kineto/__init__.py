"""Traces of torch.profiler (Kineto) as canonical tables."""
