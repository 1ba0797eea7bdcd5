"""Which ranks belong together: communicators, stages, peers."""
