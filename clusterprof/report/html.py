"""The report as one HTML file: findings first, then what they rest on.

The page loads nothing from anywhere and its policy forbids to; all that comes out of
reports is escaped by the template or, in the timeline's data, kept out of the parser's
sight. Without scripts only the timeline's interaction is missing.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof.agent.contracts import files, words
from clusterprof.report import overview, summary
from clusterprof.report.summary import Average
from clusterprof.report.whole_job import Job
from clusterprof.results import Finding, Results
from clusterprof.run_directory import writing

if TYPE_CHECKING:
    import jinja2
    import pyarrow as pa

_MOST_RANKS = 64
_MOST_STEPS = 48
_MOST_CLOCKS = 128
_MOST_CELLS = 576
_MOST_ROWS = 40
_MOST_EVIDENCE = 64
#: the page's one script, in this order: what the others share first, what shows the state last
_STYLES = ("report.css", "overview.css")
_SCRIPTS = ("core.js", "heatmap.js", "timeline.js", "arrive.js")
#: near the beginning of every page
_MARK = b'<meta name="generator" content="clusterprof">'


def render(results: Results, collectives: pa.Table, *, title: str, job: Job | None = None) -> str:
    """The page. `collectives` is the placed table (see `clusterprof.report.lanes`).

    `job` is what is known besides, of a run of clusterprof. The same arguments give the same page;
    it ends in a newline.
    """
    from clusterprof.report import heatmap, lanes

    drawn = lanes.build(results, collectives)
    heat = heatmap.embedded(results, collectives, job or Job())
    data = {"timeline-data": lanes.embedded(drawn) if drawn else None, "heatmap-data": heat}
    data = {name: each for name, each in data.items() if each is not None}
    script = "".join(map(_part, _SCRIPTS))
    begins = {step["step"]: step["begin_ns"] for step in results["steps"]}
    clocks = {entry["rank"]: entry for entry in results["clock"]["ranks"]}
    floor = summary.pair_bound_ns(results)
    return _template().render(
        title=title,
        results=results,
        style="".join(map(_part, _STYLES)),
        script=script,
        # what the page's policy allows to run: this script and no other
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        verdict=summary.sentences(results["verdict"]),
        tiles=overview.tiles(results),
        leading=summary.leading(results),
        findings=[(finding, _drawn(finding, begins)) for finding in summary.by_saving(results)],
        account=_account(results),
        path=_path(results),
        groups=results["topology"]["groups"],
        operations=summary.by_exposed(results),
        clocks=[(entry, clocks.get(entry["rank"])) for entry in results["ranks"]],
        floor=floor,
        bound=summary.bound(floor) if floor else "",
        most_rows=_MOST_ROWS,
        most_clocks=_MOST_CLOCKS,
        picture=lanes.picture(drawn) if drawn else None,
        timeline_notes=drawn.notes if drawn else [],
        # what the scripts read, by the id of its element
        data=data,
        heatmap="heatmap-data" in data,
    )


def write(
    path: Path, results: Results, collectives: pa.Table, *, title: str, job: Job | None = None
) -> None:
    """Write the page by rename; raises `RunDirectoryError` if it cannot be written."""
    page = render(results, collectives, title=title, job=job)
    # a run directory's name may hold bytes that are no UTF-8
    with writing(path, "--output"):
        files.write(path, page.encode(errors="backslashreplace"))


def is_ours(path: Path) -> bool:
    """Whether a file is a page that `write` wrote."""
    try:
        with path.open("rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and _MARK in file.read(4096)
    except OSError:
        return False


def _part(name: str) -> str:
    return resources.files("clusterprof.report").joinpath("page").joinpath(name).read_text("utf-8")


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(words=words, summary=summary)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(_part("report.html.j2"))


def _shown(value: object) -> object:
    """Every text that the template puts out passes here, but for what it marks as safe."""
    return words.plain(value) if type(value) is str else value


def _drawn(finding: Finding, begins: Mapping[int, int]) -> dict[str, Any]:
    """A finding's bar (its share of a step, and from where to where that may lie, in %)."""
    share = finding["share_of_step"] * 100
    half = share * finding["saved_uncertainty_ns"] / finding["saved_ns_per_step"] if share else 0.0
    # an uncertainty below 0.2% of a step is narrower than the mark for it
    whisker = (_round(max(share - half, 0)), _round(min(share + half, 100))) if half > 0.2 else None
    return {
        "share": _round(min(share, 100)) if share else None,
        "whisker": whisker,
        "saving": _saving(finding),
        "evidence": _evidence(finding["evidence"], begins),
    }


def _saving(finding: Finding) -> list[dict[str, Any]]:
    """The step with and without a finding's cause, in the window and in the long run."""
    entry = finding["saving"]
    if entry is None:
        return []
    names = {"window": "the window", "long_run": "its steps again and again"}
    out = []
    for view, name in names.items():
        step, without = entry[view]["step_ns"], entry[view]["without_ns"]  # type: ignore[literal-required]
        stated = " (stated)" if view == entry["stated"] else ""
        cells = [f"{words.milliseconds(ns, 2)} ms" for ns in (step, without, step - without)]
        out.append({"name": name + stated, "cells": cells})
    return out


def _evidence(
    evidence: Sequence[Mapping[str, Any]], begins: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Neighbours with the same keys become one table, its sentence (`what`) in front."""
    tables = []
    shown = [_readable(line, begins) for line in evidence[:_MOST_EVIDENCE]]
    for keys, rows in groupby(shown, key=tuple):
        lines = list(rows)
        cells = [[words.quantity(key, line[key])[1] for key in keys] for line in lines]
        textual = [at for at, key in enumerate(keys) if any(isinstance(r[key], str) for r in lines)]
        names = [words.quantity(key, None)[0] for key in keys]
        tables.append({"names": names, "words": textual, "rows": cells})
    if len(evidence) > _MOST_EVIDENCE:
        more = f"{len(evidence) - _MOST_EVIDENCE} more lines are in results.json"
        tables.append({"names": [more], "words": [0], "rows": []})
    return tables


def _readable(line: Mapping[str, Any], begins: Mapping[int, int]) -> dict[str, Any]:
    """Moments as times since their step began, ids short, and what lies within as its parts."""
    out: dict[str, Any] = {"what": line["what"]} if "what" in line else {}
    for key, value in line.items():
        if key == "time_ns" and isinstance(value, int):
            begin = begins.get(line.get("step", -1))
            if begin is not None:
                out["into_the_step_ns"] = value - begin
        elif key == "communicator" and isinstance(value, str):
            out[key] = words.communicator(value)
        elif isinstance(value, Mapping):
            out |= {f"{key}_{inner}": part for inner, part in value.items()}
        elif key != "what":
            out[key] = value
    return out


def _account(results: Results) -> dict[str, Any] | None:
    """Each rank's mean step and steps, of so many ranks and steps as the page can carry."""
    every = summary.averages(results)
    if not every:
        return None
    rows = summary.worth_showing(results, every, _MOST_RANKS)
    longest = max(row.duration_ns for row in every)
    evidence, steady = summary.evidence_steps(results)
    floor = summary.pair_bound_ns(results)
    stragglers = summary.stragglers(results)
    steps = results["steps"][: min(max(4, _MOST_CELLS // len(rows)), _MOST_STEPS)]
    accounts = [(step, account) for step in steps for account in step["ranks"]]
    settled = [account["duration_ns"] for step, account in accounts if step["settled"]]
    widest = max(settled or (account["duration_ns"] for _, account in accounts), default=1)
    cells = {
        (step["step"], account["rank"]): _bar(summary.average(account["rank"], [account]), widest)
        | {"steady": step["settled"], "ms": words.milliseconds(account["duration_ns"])}
        for step, account in accounts
    }
    caption = f"ms per step; a full bar is {words.duration(widest)}, the longest steady-state step"
    if len(steps) < len(results["steps"]):
        caption += f"; the first {len(steps)} of {len(results['steps'])} steps"
    return {
        "which": words.spans(evidence, 6),
        "count": words.counted(len(evidence), "steady-state step"),
        "steady": steady,
        "rows": [
            {
                "rank": row.rank,
                "named": row.rank in stragglers,
                "step": words.milliseconds(row.duration_ns, words.column_decimals(row.duration_ns)),
                "cells": _cells(row, floor),
                "bar": _bar(row, longest),
                "steps": [cells.get((step["step"], row.rank)) for step in steps],
            }
            for row in rows
        ],
        "left_out": len(every) - len(rows),
        "caption": caption,
        "steps": [{"number": step["step"], "steady": step["settled"]} for step in steps],
    }


def _path(results: Results) -> list[list[str]]:
    """The critical path by what binds it: on it, its share, the mean per rank, GPU time lost."""
    path = results["critical_path"]
    if path is None or not path["step_ns"]:
        return []
    return [
        [
            part["what"],
            words.milliseconds(part["path_ns"], 2),
            words.percent(part["path_ns"] / path["step_ns"]),
            words.milliseconds(part["mean_ns"], 2) if part["what"] != "idle" else "-",
            words.milliseconds(part["imbalance_gpu_ns"], 2) if part["imbalance_gpu_ns"] else "-",
        ]
        for part in path["parts"]
    ]


def _parts(row: Average) -> list[tuple[str, str, float]]:
    """(tone, name, ns) of the parts of a step; the last one is what the others leave."""
    return [
        ("compute", "compute", row.compute_ns),
        ("wait", "exposed wait", row.exposed_wait_ns),
        ("transfer", "exposed transfer", row.exposed_transfer_ns),
        ("copies", "exposed copies", row.exposed_copy_ns),
        ("soft", "idle", row.idle_ns),
    ]


def _cells(row: Average, floor: int) -> list[dict[str, Any]]:
    cells = []
    for tone, _, ns in _parts(row):
        ms, percent = summary.part_cells(row, ns, floor if tone == "wait" else 0)
        # compute is what one hopes for: the shade is for what costs
        shaded = percent and tone != "compute" and row.duration_ns
        share = _round(max(ns / row.duration_ns, 0)) if shaded else 0
        cells.append({"tone": tone, "share": share, "ms": ms, "percent": percent})
    return cells


def _bar(row: Average, longest: float) -> dict[str, Any]:
    """A stacked bar: (tone, left, width) of each part but idle, in % of the longest step."""
    total = min(row.duration_ns / longest, 1) * 100 if longest else 0
    every = [(t, name, ns / row.duration_ns) for t, name, ns in _parts(row) if row.duration_ns]
    left, parts = 0.0, []
    for tone, _, share in every[:-1]:
        width = share * total
        if width > 0:
            # the style sheet knows these tones by their first letters, copies by m
            parts.append(("m" if tone == "copies" else tone[0], _round(left), _round(width)))
        left += width
    shares = ", ".join(f"{name} {words.percent(share)}" for _, name, share in every if share)
    label = f"{words.ms(row.duration_ns)}: {shares}"
    return {"parts": parts, "total": _round(total), "label": label}


def _round(value: float) -> float:
    return round(float(value), 2)
