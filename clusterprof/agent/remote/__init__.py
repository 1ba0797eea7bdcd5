"""What runs on a host for the ssh launcher and the clock probes."""
