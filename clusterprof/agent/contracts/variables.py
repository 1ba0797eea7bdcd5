"""The environment variables by which the processes of one rank find each other."""

#: Where plan.json is; without it an interpreter is none of ours.
PLAN = "CLUSTERPROF_PLAN"
#: The process that counts for this rank; its children inherit it and stay out of the way.
COUNTING = "CLUSTERPROF_COUNTING"
#: For the program under nsys: how the window opens, and where the guard listens; `none:` where
#: nsys could not start it.
PROFILED = "CLUSTERPROF_PROFILED"
WITHOUT_NSYS = "none:"
#: What makes nsys follow a process: it is not to follow those that we start beside the program.
FOLLOWED = ("LD_PRELOAD", "QUADD_", "NSYS_", "CUDA_INJECTION", "NVTX_INJECTION")
#: For the program under nsys: the descriptors that it was given, as `0,1,2`; the others are nsys'.
GIVEN = "CLUSTERPROF_GIVEN"
