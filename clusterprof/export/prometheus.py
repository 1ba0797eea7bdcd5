"""A merged run as gauges in Prometheus' text format, for node_exporter's textfile collector.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/. Times are in seconds, as
Prometheus has them. Communicators are no label, since a large job has thousands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow.compute as pc

from clusterprof import __version__, words
from clusterprof.export.merged_tables import Merged
from clusterprof.export.tracks import shown
from clusterprof.results import UNBOUNDED_NS

#: the parts of a step, which add up to it
_PARTS = ("compute", "exposed_communication", "exposed_copy", "idle")


class Gauge(NamedTuple):
    """One metric, and a value for each set of labels."""

    name: str
    help: str
    samples: Iterable[tuple[Mapping[str, object], float]]


def text(merged: Merged) -> str:
    """The whole file of a merged run."""
    return rendered(gauges(merged), merged.run.results.path.name)


def rendered(metrics: Iterable[Gauge], run: str) -> str:
    """Gauges as a file. Every sample has the run's name as a label."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\""})
    lines = []
    for gauge in metrics:
        samples: dict[str, str] = {}
        for labels, value in gauge.samples:
            every = {"run": run, **labels}
            texts = {key: shown(label).translate(escapes) for key, label in every.items()}
            inside = ",".join(f'{key}="{text}"' for key, text in texts.items())
            number = "+Inf" if value == np.inf else f"{value:.9f}".rstrip("0").rstrip(".")
            samples.setdefault(inside, number)  # one that comes twice makes the file invalid
        if samples:
            name = f"clusterprof_{gauge.name}"
            lines += [f"# HELP {name} {gauge.help}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{inside}}} {number}" for inside, number in samples.items()]
    return "\n".join(lines) + "\n"


def gauges(merged: Merged) -> list[Gauge]:
    """All metrics of a run."""
    results, ended = merged.results, pc.max(merged.accounts["end_ns"]).as_py()
    hosts = {entry["rank"]: entry["host"] for entry in results["ranks"]}
    pace, clocks = results["pace"], results["clock"]["ranks"]

    def rank(number: int) -> dict[str, object]:
        return {"rank": number, "host": hosts[number]}

    accounts = merged.accounts.filter(merged.is_steady)
    means = accounts.group_by("rank").aggregate([(f"{part}_ns", "mean") for part in _PARTS])
    metrics = [
        Gauge("info", "Who wrote this.", [({"version": __version__}, 1)]),
        Gauge(
            "window_end_timestamp_seconds", "When the profiled window ended.",
            [] if ended is None else [({}, ended / 1e9)],
        ),
        Gauge(
            "ranks", "Ranks by whether they have a report.",
            [({"state": "profiled"}, len(hosts)), ({"state": "missing"}, len(results["missing"]))],
        ),
        Gauge(
            "step_seconds", "The mean step, without the profiler where that is known.",
            [({"without_profiler": str(pace["without_profiler"]).lower()}, pace["step_ns"] / 1e9)]
            if pace else [],
        ),
        Gauge(
            "rank_step_seconds", "A rank's mean steady-state step by part; the parts add up.",
            [
                ({**rank(row["rank"]), "part": part}, row[f"{part}_ns_mean"] / 1e9)
                for row in means.sort_by("rank").to_pylist() for part in _PARTS
            ],
        ),
        Gauge(
            "operation_seconds", "Collectives per step, mean over ranks, by what overlaps.",
            _operations(merged),
        ),
    ]  # fmt: skip
    for name, member, help_text in (
        ("saved", "saved_ns_per_step", "What its repair saves per step, net of those before it."),
        ("saved_alone", "saved_alone_ns", "What its repair alone saves per step."),
        ("saved_uncertainty", "saved_uncertainty_ns", "How far off what a repair saves may be."),
    ):
        samples = []
        for f in results["findings"]:
            ranks, ns = words.numbers(f["ranks"], 8), cast("dict[str, Any]", f)[member]
            labels = {"code": f["code"], "severity": f["severity"], "ranks": ranks}
            samples.append((labels, ns / 1e9))
        metrics.append(Gauge(f"finding_{name}_seconds", help_text, samples))
    uncertainties = [
        (rank(clock["rank"]), np.inf if clock["uncertainty_ns"] >= UNBOUNDED_NS
         else clock["uncertainty_ns"] / 1e9)
        for clock in clocks if clock["rank"] in hosts
    ]  # fmt: skip
    help_text = "How far a rank's aligned times may be wrong."
    return [*metrics, Gauge("clock_uncertainty_seconds", help_text, uncertainties)]


def _operations(merged: Merged) -> list[tuple[dict[str, object], float]]:
    total: dict[tuple[str, str], int] = defaultdict(int)
    for entry in merged.results["collectives"]["by_operation"]:
        exposed, waiting = entry["exposed_ns_per_step"], entry["exposed_wait_ns_per_step"]
        name = entry["operation"]
        total[name, "overlapped"] += entry["communication_ns_per_step"] - exposed
        total[name, "exposed_wait"] += waiting
        total[name, "exposed_transfer"] += exposed - waiting
    return [({"operation": name, "part": part}, ns / 1e9) for (name, part), ns in total.items()]
