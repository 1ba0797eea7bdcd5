"""The command that a finding ends with: the run again, as shows more."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterprof import masking
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.results import NODES, RANKS

#: options of a run that --profiler torch refuses
_FOR_NSYS = {"--nsys", "--nsys-arg", "--trace", "--pytorch", "--cpu-sampling", "--arm"}
#: the code of a job whose kernels are launched too slowly
LAUNCH_BOUND = "host.launch_bound"


def capture(dataset: Dataset, ranks: Sequence[int], *options: str, profiler: str = "nsys") -> str:
    """The command line that profiles `ranks` again by this profiler, with `options` that show more.

    It is the run's own, whole; where that is unknown, of the launcher that its hosts suggest. nsys
    shows most, whatever captured the run, and whatever the environment names by default; a profiler
    that the run's own line names behind the ranks is the only one that can capture them. Empty
    where no rank is known.
    """
    if not ranks:
        return ""
    launcher = "srun" if len({t.info.host for t in dataset.tables}) > 1 else "torchrun"
    given = dataset.again or ("clusterprof", launcher, RANKS, "...", "--", "PROGRAM...")
    place = given.index(RANKS) if RANKS in given else len(given)
    rest = given[place + 1 :]
    if profiler == "nsys" and dataset.launches_graphs:
        options = (*options, f"--nsys-arg={NODES}")
    by = [] if "--profiler" in rest[:1] else ["--profiler", profiler, *options]
    return masking.command([*given[:place], "--ranks", ",".join(map(str, ranks)), *by, *rest])


def lighter(dataset: Dataset) -> str:
    """The profiler for ranks of which only their part of the steps is to be seen.

    It is torch.profiler in a launch-bound job, which nsys slows until it ends: unless the run's own
    line asks for what nsys alone can do.
    """
    job = what_ifs(dataset)
    bound = job is not None and any(code == LAUNCH_BOUND for code, _ in job.repaired)
    return "torch" if bound and not asks_for_nsys(dataset) else "nsys"


def asks_for_nsys(dataset: Dataset) -> bool:
    """Whether the run's own command line has options that --profiler torch refuses."""
    return bool(_FOR_NSYS & {word.partition("=")[0] for word in dataset.again})


def operators(dataset: Dataset) -> tuple[str, str]:
    """The option that shows PyTorch's operators with the nsys of the reports.

    nsys 2025.3 marks them itself; 2024.2 refuses the option, and torch can do it.
    """
    matches = [re.search(r"nsys (\d+)\.(\d+)", t.info.profiler) for t in dataset.tables]
    versions = [(int(m[1]), int(m[2])) for m in matches if m]
    by_nsys = min(versions, default=(0, 0)) >= (2025, 3)
    return "--pytorch", "autograd-nvtx" if by_nsys else "emit-nvtx"
