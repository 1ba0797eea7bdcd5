"""Command lines for NVIDIA's own tools: nsys with the clocks, ncu for a kernel of a finding."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.columns import Bools, Ints, coded, integers, order_by, texts
from clusterprof.export.merged_tables import Merged
from clusterprof.export.tracks import shown
from clusterprof.results import UNBOUNDED_NS, Finding

#: what nsys exports; its own exports cannot be shifted any more
_REPORTS = (".nsys-rep", ".qdrep")


def nsys(merged: Merged) -> list[str]:
    """For each report of nsys the export that puts it on the reference rank's clock.

    `--ts-shift` is a constant (ns, added): what the clock's drift makes of it over the window is
    said beside it.
    """
    lines = ["# clusterprof: nsys 2023.4 or newer; --ts-shift is in ns, and added to every time"]
    of_report: dict[str, list[int]] = {}
    for entry in merged.results["ranks"]:
        if entry["profiler"].startswith("nsys"):
            of_report.setdefault(entry["source"], []).append(entry["rank"])
    for source, ranks in of_report.items():
        rank = min(ranks)
        rows = merged.accounts.filter(pc.equal(merged.accounts["rank"], rank))
        if not rows.num_rows:
            lines.append(f"# {shown(merged.names[rank])}: nothing to align it by")
            continue
        ends = np.array([pc.min(rows["begin_ns"]).as_py(), pc.max(rows["end_ns"]).as_py()])
        shift = merged.clock.align(rank, ends) - ends
        middle = int(shift.sum()) // 2
        drift = int(abs(shift[1] - shift[0])) // 2
        bound = merged.clock.uncertainty(rank)
        within = "offset unknown" if bound >= UNBOUNDED_NS else words.bound(bound + drift)
        names = words.listed(shown(merged.names[rank]) for rank in sorted(ranks))
        lines.append(f"# {names}: {within}")
        report = source
        if not source.endswith(_REPORTS):
            report = re.sub(r"(\.sqlite)?(\.xz)?$", ".nsys-rep", PurePath(source).name, count=1)
        target = f"rank{rank}-aligned.sqlite"
        lines.append(
            _command("nsys", "export", "--type=sqlite", "--ts-normalize=true",
                     f"--ts-shift={middle}", f"--output={target}", report)
        )  # fmt: skip
    if len(lines) == 1:
        lines.append("# no rank has a report of nsys")
    return lines


def ncu(merged: Merged) -> list[str]:
    """For each finding that names a kernel, the ncu that profiles its longest call."""
    lines = ["# clusterprof: Nsight Compute on the one rank, in the place of its program"]
    for finding in merged.results["findings"]:
        for row in finding["evidence"]:
            if isinstance(row.get("kernel"), str) and row.get("rank") in merged.ranks:
                lines += _of_kernel(merged, finding, row)
    if len(lines) == 1:
        lines.append("# no finding names a kernel")
    return lines


def _of_kernel(merged: Merged, finding: Finding, row: dict[str, Any]) -> Iterator[str]:
    rank, kernel = row["rank"], row["kernel"]
    name = shown(merged.names[rank])
    title = f"# {name}: {finding['code']}, kernel {shown(kernel)}"
    columns = ["start_ns", "end_ns", "kind", "name", "launch_start_ns", "launch_thread"]
    table = merged.table(rank, "activity", columns)
    if table is None:
        yield f"{title}: the rank's tables are gone, merge the run again"
        return
    names, code = coded(table, "name")
    function = words.base_name(kernel)
    alike = np.array([words.base_name(str(name)) == function for name in names], np.bool_)
    kinds, kind = coded(table, "kind")
    calls = np.flatnonzero(alike[code] & (kinds[kind] == "compute"))
    if not len(calls):
        yield f"{title}: no kernel that ncu can profile (a copy)"
        return
    launch = integers(table, "launch_start_ns", -1)[calls]
    order = order_by(np.where(launch >= 0, launch, integers(table, "start_ns")[calls]))
    calls, launch = calls[order], launch[order]
    thread = integers(table, "launch_thread", -1)[calls]
    took = (integers(table, "end_ns") - integers(table, "start_ns"))[calls]
    in_steps = _in_steps(merged, rank, finding["steps"], launch)
    if in_steps is None:
        yield f"{title}: it was launched in none of the finding's steps"
        return
    step, inside, per_step = in_steps
    longest = int(np.argmax(np.where(inside, took, -1)))
    options = ["--target-processes", "all", "--kernel-name", function]
    if _is_range(merged, rank, step, launch[longest], int(thread[longest])):
        before = np.count_nonzero((inside & (thread == thread[longest]))[:longest])
        options += ["--nvtx", "--nvtx-include", f"step {step}/", "--launch-skip", str(before)]
        yield f"{title}: call {before + 1} in the NVTX range of step {step}"
    else:
        before = np.count_nonzero(inside[:longest])
        options += ["--launch-skip", str(round(per_step * step) + before)]
        yield (
            f"{title}: call {before + 1} of step {step}, if every step before launches it"
            f" {per_step:.4g} times, as these do"
        )
    yield _command(
        "ncu", *options, "--launch-count", "1", "--set", "full", "--export",
        f"rank{rank}-step{step}", "PROGRAM...",
    )  # fmt: skip


def _in_steps(
    merged: Merged, rank: int, steps: Sequence[int], launch: Ints
) -> tuple[int, Bools, float] | None:
    """The first of these steps with calls: its number, its calls, and how many a step has."""
    # the host's own steps: those of the accounts are the device's
    table = merged.table(rank, "steps", ["step", "begin_ns", "end_ns"])
    rows = [] if table is None else table.to_pylist()
    limits = {row["step"]: (row["begin_ns"], row["end_ns"]) for row in rows}
    inside = {
        step: (launch >= limits[step][0]) & (launch < limits[step][1])
        for step in steps if step in limits
    }  # fmt: skip
    with_calls = [step for step, which in inside.items() if which.any()]
    if not with_calls:
        return None
    mean = float(np.mean([which.sum() for which in inside.values()]))
    return with_calls[0], inside[with_calls[0]], mean


def _is_range(merged: Merged, rank: int, step: int, launch: int, thread: int) -> bool:
    """Whether the launching thread was inside an NVTX range `step N`: ncu looks at that thread."""
    calls = merged.table(rank, "host_calls", ["start_ns", "end_ns", "kind", "name", "thread"])
    if calls is None:
        return False
    calls = calls.filter(pc.equal(calls["thread"], thread))
    is_step = (texts(calls, "kind") == "range") & (texts(calls, "name") == f"step {step}")
    around = (integers(calls, "start_ns") <= launch) & (launch < integers(calls, "end_ns"))
    return bool((is_step & around).any())


def _command(*argv: str) -> str:
    return shlex.join(map(words.plain, argv))
