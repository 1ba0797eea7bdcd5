"""A merged run in Python: `clusterprof.load("runs/...")`, its tables as pandas frames.

Frames are made when they are asked for, of Arrow's types; pandas is loaded then, and only here.
`SCHEMAS` has the columns of each; docs/python.md says what they mean.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa

from clusterprof import words
from clusterprof.align.lateness import SHALLOW
from clusterprof.align.match import PLACED
from clusterprof.analysis.model.accounts import ACCOUNTS
from clusterprof.columns import Ints
from clusterprof.errors import ReportError, UsageError
from clusterprof.export import merged_tables
from clusterprof.results import Results
from clusterprof.run_directory import Window
from clusterprof.tables import ACTIVITY, NAME, required

if TYPE_CHECKING:
    import pandas as pd

    from clusterprof.analysis.model.replay import Lengths
    from clusterprof.analysis.model.what_if import WhatIfs
    from clusterprof.study import Study

What = Literal["host", "gpu", "communication", "copy"]
By = Literal["rank", "host", "stage"]
_RANKS = pa.list_(pa.int32())

#: one row per finding, in the order of the report
FINDINGS = pa.schema([
    required("code", pa.string()),
    required("severity", pa.string()),
    pa.field("rank", pa.int32()),
    required("ranks", _RANKS),
    required("steps", pa.list_(pa.int64())),
    required("recurrence", pa.string()),
    required("saved_ns_per_step", pa.int64()),
    required("saved_alone_ns", pa.int64()),
    required("saved_least_ns", pa.int64()),
    required("saved_most_ns", pa.int64()),
    required("saved_uncertainty_ns", pa.int64()),
    required("share_of_step", pa.float64()),
    required("cost_ns_per_step", pa.int64()),
    required("confidence", pa.float64()),
    required("summary", pa.string()),
    required("advice", pa.string()),
    required("next", pa.string()),
])  # fmt: skip
#: one row per rank and step of the window
STEPS = pa.schema([*ACCOUNTS, required("steady", pa.bool_())])
#: one row per kernel, copy and collective of each profiled rank
_ALIGNED = [required(f"aligned_{edge}_ns", pa.int64()) for edge in ("start", "end")]
KERNELS = pa.schema([required("rank", pa.int32()), *ACTIVITY, *_ALIGNED])
#: one row per what-if
WHAT_IF = pa.schema([
    required("who", pa.string()),
    required("ranks", _RANKS),
    required("what", pa.string()),
    pa.field("times", pa.float64()),
    required("step_ns", pa.int64()),
    pa.field("without_ns", pa.int64()),
    pa.field("saved_ns", pa.int64()),
    pa.field("saved_uncertainty_ns", pa.int64()),
    pa.field("share_of_step", pa.float64()),
])  # fmt: skip

#: the frames of a run, each with its schema
SCHEMAS: dict[str, pa.Schema] = {
    "findings": FINDINGS,
    "steps": STEPS,
    "collectives": PLACED,
    "kernels": KERNELS,
    "shallow": SHALLOW,
    "what_if": WHAT_IF,
}


def load(path: str | os.PathLike[str]) -> Run:
    """Return a run that was merged: a run directory or merge's `--output`. Raises ReportError."""
    return Run(merged_tables.read(Window.at(Path(path).expanduser())))


class Run:
    """A merged run; see `clusterprof.load`."""

    def __init__(self, merged: merged_tables.Merged) -> None:
        self._merged = merged

    @property
    def path(self) -> Path:
        """The folder that it was loaded from."""
        return self._merged.run.results.path

    @property
    def results(self) -> Results:
        """All of results.json (`clusterprof.results` has its form)."""
        return self._merged.results

    @property
    def verdict(self) -> str:
        """The first line of the report."""
        return self.results["verdict"]

    @cached_property
    def findings(self) -> pd.DataFrame:
        """The findings; columns: `clusterprof.api.FINDINGS`."""
        rows: list[Any] = [*self.results["findings"]]  # what the schema lacks is left out
        return _frame(pa.Table.from_pylist(rows, schema=FINDINGS))

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Each profiled rank's account of each step; columns: `clusterprof.api.STEPS`."""
        steady = self._merged.is_steady
        return _frame(self._merged.accounts.append_column(STEPS.field("steady"), steady))

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """The matched collectives on one clock; columns: `clusterprof.api.PLACED`."""
        return _frame(self._merged.collectives)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """What ran on the profiled ranks' devices; columns: `clusterprof.api.KERNELS`.

        All of the window, some 100 bytes a row: a rank of 374,000 kernels takes 40 MB.
        """
        tables = [KERNELS.empty_table()]
        for rank in self._merged.ranks:
            if not self._merged.has_tables(rank):
                raise ReportError(
                    f"{self.path} has no tables of rank {rank}",
                    f"write them again: clusterprof merge {self.path}",
                )
            table = self._merged.table(rank, "activity", ACTIVITY.names)
            times = (table[name].to_numpy() for name in ("start_ns", "end_ns"))
            aligned = [self._merged.clock.align(rank, time) for time in times]
            ranks = pa.array(np.full(len(table), rank, np.int32))
            tables.append(pa.table([ranks, *table.columns, *aligned], schema=KERNELS))
        return _frame(pa.concat_tables(tables))

    @cached_property
    def shallow(self) -> pd.DataFrame:
        """All ranks' calls by flight recorders, if any; columns: `clusterprof.api.SHALLOW`."""
        table = self._merged.shallow
        return _frame(SHALLOW.empty_table() if table is None else table)

    def what_if(
        self,
        what: What | Collection[What] = ("host", "gpu"),
        *,
        ranks: Collection[int] | None = None,
        by: By | None = None,
        times: float | None = None,
    ) -> pd.DataFrame:
        """How long a step would be if somebody's hosts or devices were faster.

        `what`: a host's own time, its kernels (gpu), transfers (communication), copies. `ranks`: of
        these together; `by`: of each rank, of each host's ranks, of each pipeline stage's; with
        neither, of each rank, or with `times` of all together. `times` is what their time is
        multiplied by (0.5: twice as fast); without it hosts and GPUs are as fast as each rank's
        middle peer, as in findings of stragglers.

        The replay needs the reports: they are read and aligned again at the first call. Savings are
        of the same step as the report's, each by itself; columns: `clusterprof.api.WHAT_IF`.
        Raises UsageError for ranks that have no report, ReportError where there is nothing to
        replay.
        """
        kinds: list[What] = [what] if isinstance(what, str) else list(what)
        _check(kinds, times)
        by = by or (None if ranks is not None or times is not None else "rank")
        groups = _groups(self._job, self.results, ranks, by)
        rows = []
        for who, members in groups.items():
            rows += [{"who": who} | _row(self._job, members, kind, times) for kind in kinds]
        return _frame(pa.Table.from_pylist(rows, schema=WHAT_IF))

    @cached_property
    def _job(self) -> WhatIfs:
        from clusterprof.analysis.model.what_if import what_ifs

        job = what_ifs(self._study().dataset)
        if job is None:
            raise ReportError(
                f"{self.path}: there are no steady-state steps to replay",
                "profile more steps: --steps A:B",
            )
        return job

    def _study(self) -> Study:
        from clusterprof import merge_run
        from clusterprof.collect.outcomes import collect

        run = Window.at(self.path)
        if run.directory.manifest.is_file():
            run = Window.at(self.path, run.directory.read_manifest().attempt).deep()
            return merge_run.merged(
                run, collect(run, run.expected_ranks(), patience_s=0, write=False)
            )
        sources = [(Path(entry["source"]), entry["rank"]) for entry in self.results["ranks"]]
        absent = sorted({str(source) for source, _ in sources if not source.exists()})
        if absent:
            raise ReportError(
                f"the replay needs the reports, and {absent[0]} is not there",
                "load the run where they are, from the folder that merge was called in",
            )
        files = [source for source, _ in sources]
        alone = {source: rank for source, rank in sources if files.count(source) == 1}
        return merge_run.merge_reports(list(dict.fromkeys(files)), alone)

    def __repr__(self) -> str:
        return f"<clusterprof run {self.path}: {words.plain(self.verdict)}>"

    def _repr_html_(self) -> str:
        """The verdict and the findings, as a notebook shows them."""
        from clusterprof.report.summary import saved_cell

        def row(tag: str, *cells: str) -> str:
            texts = (html.escape(words.plain(cell)) for cell in cells)
            return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

        head = row("th", "severity", "finding", "ranks", "repair saves", "of the step")
        rows = ""
        for f in self.results["findings"]:
            whom, share = words.spans(f["ranks"], 8), words.percent(f["share_of_step"])
            rows += row("td", f["severity"], f["code"], whom, saved_cell(f), share)
        table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""
        verdict, path = (html.escape(words.plain(str(t))) for t in (self.verdict, self.path))
        return f"<p><b>{verdict}</b><br><small>{path}</small></p>{table}"


def _frame(table: pa.Table) -> pd.DataFrame:
    """A table as a frame of Arrow's types, names as plain strings."""
    try:
        import pandas as pd
    except ImportError:
        raise UsageError(
            "frames need pandas, which is not installed", "pip install 'clusterprof[pandas]'"
        ) from None
    plain = [f.with_type(pa.string()) if f.type == NAME else f for f in table.schema]
    return table.cast(pa.schema(plain)).to_pandas(types_mapper=pd.ArrowDtype)


def _check(kinds: Sequence[What], times: float | None) -> None:
    """Raises UsageError."""
    if strange := [kind for kind in kinds if kind not in get_args(What)]:
        raise UsageError(f"what_if({strange[0]!r}): expected one of {', '.join(get_args(What))}")
    alone = [kind for kind in kinds if kind not in ("host", "gpu")]
    if times is None and alone:
        raise UsageError(
            f"what_if({alone[0]!r}): transfers and copies have no peers", "say how fast: times=0.5"
        )
    if times is not None and not (math.isfinite(times) and 0 <= times <= 100):
        raise UsageError(f"what_if(times={times}): expected 0 to 100")


def _groups(
    job: WhatIfs, results: Results, ranks: Collection[int] | None, by: By | None
) -> dict[str, list[int]]:
    """The ranks that change together, by what they are called. Raises UsageError."""
    if by not in (None, *get_args(By)):
        raise UsageError(f"what_if(by={by!r}): expected one of {', '.join(get_args(By))}")
    chosen = _chosen(job.dataset.ranks, ranks)
    if by is None:
        whole = len(chosen) == len(job.dataset.ranks) > 1
        return {"all ranks" if whole else words.ranks(chosen): chosen}
    if by == "rank":
        return {f"rank {rank}": [rank] for rank in chosen}
    # ranks of no known host or stage are together
    names: dict[int, Any] = dict.fromkeys(chosen, "" if by == "host" else 0)
    if by == "host":
        names |= {entry["rank"]: entry["host"] for entry in results["ranks"]}
    else:
        for stage in results["topology"]["stages"]:
            names |= dict.fromkeys(stage["ranks"], stage["stage"])
    members: dict[Any, list[int]] = {}
    for rank in chosen:
        members.setdefault(names[rank], []).append(rank)
    return {f"{by} {name}": group for name, group in sorted(members.items())}


def _chosen(profiled: Sequence[int], ranks: Collection[int] | None) -> list[int]:
    """The ranks that are asked for, all by default. Raises UsageError."""
    chosen = sorted(profiled if ranks is None else set(ranks))
    absent = sorted(set(chosen) - set(profiled))
    if absent or not chosen:
        problem = f"rank {absent[0]} has no report" if absent else "ranks is empty"
        raise UsageError(f"what_if: {problem}", f"with a report: {words.ranks(profiled)}")
    return chosen


def _row(job: WhatIfs, ranks: list[int], what: What, times: float | None) -> dict[str, Any]:
    """One what-if. Without peers nothing is known."""
    row = {"ranks": ranks, "what": what, "times": times, "step_ns": round(job.step_ns)}
    lengths = _changed(job, ranks, what, times)
    if lengths is None:
        return row
    saved = job.saved(lengths, ranks=tuple(ranks))
    least_ns, most_ns, _ = job.interval(saved, tuple(ranks))
    return row | {
        "without_ns": round(job.step_ns - saved.ns),
        "saved_ns": round(saved.ns),
        "saved_uncertainty_ns": round(max(saved.ns - least_ns, most_ns - saved.ns)),
        "share_of_step": saved.ns / job.step_ns if job.step_ns else 0.0,
    }


def _changed(job: WhatIfs, ranks: Sequence[int], what: What, times: float | None) -> Lengths | None:
    """The job's lengths with that change; None where no rank has a peer outside of `ranks`."""
    from dataclasses import replace

    from clusterprof.analysis.model.timeline import COLLECTIVE, COMPUTE

    places = [job.dataset.place[rank] for rank in ranks]
    if times is None:
        if not any(len(np.setdiff1d(job.peers.others(k), places)) for k in places):
            return None
        return job.like_peers(job.base, places, "host" if what == "host" else "gpu")
    base, graph = job.base, job.job
    if what == "host":
        of_ranks = np.isin(graph.host_rank, places)
        return replace(base, own=np.where(of_ranks, _scaled(base.own, times), base.own))
    is_kernel, is_collective = graph.kind == COMPUTE, graph.kind == COLLECTIVE
    chosen = {
        "gpu": is_kernel, "communication": is_collective, "copy": ~(is_kernel | is_collective)
    }[what] & np.isin(graph.rank, places)  # fmt: skip
    return replace(base, run=np.where(chosen, _scaled(base.run, times), base.run))


def _scaled(ns: Ints, times: float) -> Ints:
    return np.round(ns * times).astype(np.int64)
