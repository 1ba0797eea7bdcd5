"""Running a job with profiled ranks: planned, started, watched, ended."""
