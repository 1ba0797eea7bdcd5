"""Command lines for NVIDIA's own tools: nsys with the clocks, ncu for a kernel of a finding."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clusterprof import words
from clusterprof.columns import Bools, Ints, coded, integers, order_by, texts
from clusterprof.export.merged_tables import Merged
from clusterprof.export.tracks import shown
from clusterprof.ingest.sources import NSYS_REPORT, stem_of
from clusterprof.results import UNBOUNDED_NS, Finding


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
        drift = int(abs(shift[1] - shift[0])) // 2
        bound = merged.clock.uncertainty(rank)
        within = "offset unknown" if bound >= UNBOUNDED_NS else words.bound(bound + drift)
        names = words.listed(shown(merged.names[rank]) for rank in sorted(ranks))
        report = source
        # its own exports cannot be shifted any more
        if not source.endswith(NSYS_REPORT.suffixes):
            report = stem_of(Path(source)) + NSYS_REPORT.suffixes[0]
        command = _command(
            "nsys", "export", "--type=sqlite", "--ts-normalize=true",
            f"--ts-shift={int(shift.sum()) // 2}", f"--output=rank{rank}-aligned.sqlite", report,
        )  # fmt: skip
        lines += [f"# {names}: {within}", command]
    return lines if len(lines) > 1 else [*lines, "# no rank has a report of nsys"]


def ncu(merged: Merged) -> list[str]:
    """For each finding that names a kernel, the ncu that profiles its longest call."""
    lines = [
        line
        for finding in merged.results["findings"]
        for row in finding["evidence"]
        if isinstance(row.get("kernel"), str) and row.get("rank") in merged.ranks
        for line in _of_kernel(merged, finding, row)
    ]
    title = "# clusterprof: Nsight Compute on the one rank, in the place of its program"
    return [title, *(lines or ["# no finding names a kernel"])]


def _of_kernel(merged: Merged, finding: Finding, row: dict[str, Any]) -> list[str]:
    """The command, with what it is of before it; or why there is none."""
    rank, function = row["rank"], words.base_name(row["kernel"])
    title = f"# {shown(merged.names[rank])}: {finding['code']}, kernel {shown(row['kernel'])}"
    if not merged.has_tables(rank):
        return [f"{title}: the rank's tables are gone, merge the run again"]
    columns = ["start_ns", "end_ns", "kind", "name", "launch_start_ns", "launch_thread"]
    calls = merged.table(rank, "activity", columns)
    names, code = coded(calls, "name")
    alike = np.array([words.base_name(str(name)) == function for name in names], np.bool_)
    calls = calls.filter(pa.array(alike[code] & (texts(calls, "kind") == "compute")))
    if not calls.num_rows:
        return [f"{title}: no kernel that ncu can profile (a copy)"]
    launch, start = integers(calls, "launch_start_ns", -1), integers(calls, "start_ns")
    order = order_by(np.where(launch >= 0, launch, start))
    launch, thread = launch[order], integers(calls, "launch_thread", -1)[order]
    took = (integers(calls, "end_ns") - start)[order]
    in_steps = _in_steps(merged, rank, finding["steps"], launch)
    if in_steps is None:
        return [f"{title}: it was launched in none of the finding's steps"]
    step, inside, per_step = in_steps
    longest = int(np.argmax(np.where(inside, took, -1)))
    if _is_range(merged, rank, step, launch[longest], int(thread[longest])):
        skipped = before = np.count_nonzero((inside & (thread == thread[longest]))[:longest])
        call = f"call {before + 1} in the NVTX range of step {step}"
        within = ["--nvtx", "--nvtx-include", f"step {step}/"]
    else:
        before = np.count_nonzero(inside[:longest])
        skipped, within = round(per_step * step) + before, []
        call = (
            f"call {before + 1} of step {step}, if every step before launches it"
            f" {per_step:.4g} times, as these do"
        )
    command = _command(
        "ncu", "--target-processes", "all", "--kernel-name", function, *within, "--launch-skip",
        str(skipped), "--launch-count", "1", "--set", "full", "--export",
        f"rank{rank}-step{step}", "PROGRAM...",
    )  # fmt: skip
    return [f"{title}: {call}", command]


def _in_steps(
    merged: Merged, rank: int, steps: Sequence[int], launch: Ints
) -> tuple[int, Bools, float] | None:
    """The first of these steps with calls: its number, its calls, and how many a step has."""
    # the host's own steps: those of the accounts are the device's
    table = merged.table(rank, "steps", ["step", "begin_ns", "end_ns"])
    limits = {row["step"]: (row["begin_ns"], row["end_ns"]) for row in table.to_pylist()}
    inside = {
        step: (launch >= limits[step][0]) & (launch < limits[step][1])
        for step in steps if step in limits
    }  # fmt: skip
    per_step = sum(np.count_nonzero(calls) for calls in inside.values()) / max(len(inside), 1)
    return next(((step, calls, per_step) for step, calls in inside.items() if calls.any()), None)


def _is_range(merged: Merged, rank: int, step: int, launch: int, thread: int) -> bool:
    """Whether the launching thread was inside an NVTX range `step N`: ncu looks at that thread."""
    calls = merged.table(rank, "host_calls", ["start_ns", "end_ns", "kind", "name", "thread"])

    calls = calls.filter(pc.equal(calls["thread"], thread))
    is_step = (texts(calls, "kind") == "range") & (texts(calls, "name") == f"step {step}")
    around = (integers(calls, "start_ns") <= launch) & (launch < integers(calls, "end_ns"))
    return bool((is_step & around).any())


def _command(*argv: str) -> str:
    return shlex.join(map(words.plain, argv))
