"""Reports of Nsight Systems as canonical tables."""
