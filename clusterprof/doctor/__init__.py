"""Is this cluster fit to be profiled? One host's checks, and the same on every node at once."""
