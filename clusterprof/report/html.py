"""The report as one HTML file: findings first, then what they rest on.

The page loads nothing from anywhere and its policy forbids to; all that comes out of
reports is escaped by the template or, in the timeline's data, kept out of the parser's
sight. Without scripts only the timeline's interaction is missing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterprof import words
from clusterprof.agent.contracts import files
from clusterprof.report import breakdown, overview, summary
from clusterprof.report.whole_job import Job
from clusterprof.results import UNBOUNDED_NS, Finding, Results
from clusterprof.run_directory import writing

if TYPE_CHECKING:
    import pyarrow as pa

    from clusterprof.report import lanes

_MOST_EVIDENCE = 64
#: of more findings of one code than fit on a screen, the first is a card and the others its table
_MOST_CARDS = 3
#: the page's one script, in this order: what the others share first, what shows the state last
_STYLES = ("report.css", "timeline.css", "overview.css")
_SCRIPTS = (
    "core.js",
    "downloads.js",
    "tables.js",
    "heatmap.js",
    "whatif.js",
    "timeline.js",
    "arrive.js",
)
#: near the beginning of every page
_MARK = b'<meta name="generator" content="clusterprof">'


def render(
    results: Results,
    collectives: pa.Table,
    spans: pa.Table | None = None,
    *,
    title: str,
    job: Job | None = None,
    explained: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """The page. `collectives` is the placed table, `spans` what hosts and devices did.

    Both are as in `merged/` (see `clusterprof.report.lanes`); without `spans` the timeline has
    collectives alone. `job` is what is known besides, of a run of clusterprof, `explained`
    what the findings' codes mean (`explained` of the registry). The same arguments give the same
    page; it ends in a newline.
    """
    from clusterprof.report import (
        collective_charts,
        heatmap,
        lanes,
        provenance,
        step_chart,
        templates,
    )

    drawn = lanes.build(results, collectives, spans)
    panel = overview.what_if(results)
    heat = heatmap.embedded(results, collectives, job or Job())
    data = {
        "timeline-data": lanes.embedded(drawn, results) if drawn else None,
        "heatmap-data": heat,
        "what-if-data": overview.ticked(panel),
        "results-data": provenance.embedded(results),
    }
    data = {name: each for name, each in data.items() if each is not None}
    script = "".join(map(templates.part, _SCRIPTS))
    begins = {step["step"]: step["begin_ns"] for step in results["steps"]}
    cards = [(each, _drawn(each, begins, drawn)) for each in summary.cards(results)]
    leading = summary.leading(results)
    clocks = {entry["rank"]: entry for entry in results["clock"]["ranks"]}
    # those whose clocks are known least come first
    ranks = sorted(results["ranks"], key=lambda each: each["rank"])
    if len(ranks) > 2 * breakdown.ENDS:
        unsure = summary.rank_uncertainties(results)
        ranks.sort(key=lambda each: -unsure.get(each["rank"], UNBOUNDED_NS))
    floor = summary.pair_bound_ns(results)
    return (
        templates.environment()
        .get_template("report.html.j2")
        .render(
            title=title,
            results=results,
            style="".join(map(templates.part, _STYLES)),
            script=script,
            # what the page's policy allows to run: this script and no other
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            verdict=summary.verdict_lines(results),
            tiles=overview.tiles(results),
            leading=leading,
            moment=next((shown["moment"] for each, shown in cards if each is leading), ""),
            what_if=panel,
            findings=_folded(cards),
            account=breakdown.account(results),
            path=breakdown.path(results),
            groups=breakdown.ends(results["topology"]["groups"], breakdown.ENDS, 0),
            operations=breakdown.ends(summary.by_exposed(results), breakdown.ENDS, 0),
            late=breakdown.ends(summary.suspects(results), 2 * breakdown.ENDS, 0),
            clocks=breakdown.ends([(each, clocks.get(each["rank"])) for each in ranks]),
            explained=explained or {},
            floor=floor,
            bound=summary.bound(floor) if floor else "",
            picture=lanes.picture(drawn) if drawn else None,
            hatch=lanes.hatch,
            kinds={kind for kind, _ in drawn.spans.names} if drawn else set(),
            timeline_notes=drawn.notes if drawn else [],
            # what the scripts read, by the id of its element
            data=data,
            heatmap="heatmap-data" in data,
            run_steps=step_chart.chart(results, job or Job()),
            **collective_charts.charts(results, collectives),
            provenance=provenance.facts(results, job or Job()),
        )
    )


def write(path: Path, page: str) -> None:
    """Write what `render` gave by rename; raises `RunDirectoryError` if it cannot be written."""
    # a run directory's name may hold bytes that are no UTF-8
    with writing(path, "--output"):
        files.write(path, page.encode(errors="backslashreplace"))


def is_ours(path: Path) -> bool:
    """Whether a file is a page that `write` wrote."""
    try:
        with files.opened(path, links=True) as file:
            return _MARK in file.read(4096)
    except OSError:
        return False


class Card(NamedTuple):
    """A finding with its place among all, what is drawn of it, and those in its table."""

    number: int
    finding: Finding
    drawn: dict[str, Any]
    others: list[tuple[int, Finding, dict[str, Any]]]


def _folded(cards: Sequence[tuple[Finding, dict[str, Any]]]) -> list[Card]:
    """All findings in their order; of many of one code the first holds the others."""
    by_code: dict[str, list[tuple[int, Finding, dict[str, Any]]]] = {}
    for number, (finding, drawn) in enumerate(cards, 1):
        by_code.setdefault(finding["code"], []).append((number, finding, drawn))
    out = []
    for alike in by_code.values():
        many = len(alike) > _MOST_CARDS
        out += [Card(*each, []) for each in alike[: 1 if many else None]]
        if many:
            out[-1] = out[-1]._replace(others=alike[1:])
    return sorted(out)


def _drawn(
    finding: Finding, begins: Mapping[int, int], timeline: lanes.Timeline | None
) -> dict[str, Any]:
    """A finding's bar (its share of a step, and from where to where that may lie, in %)."""
    share = finding["share_of_step"] * 100
    half = share * finding["saved_uncertainty_ns"] / finding["saved_ns_per_step"] if share else 0.0
    # an uncertainty below 0.2% of a step is narrower than the mark for it
    whisker = (_round(max(share - half, 0)), _round(min(share + half, 100))) if half > 0.2 else None
    return {
        "share": _round(min(share, 100)) if share else None,
        "whisker": whisker,
        "saving": _saving(finding),
        "evidence": _evidence(finding, begins),
        "moment": next(filter(None, _moments(finding, begins)), _step(finding, timeline)),
    }


def _step(finding: Finding, timeline: lanes.Timeline | None) -> str:
    """The address of a step and a rank that a finding names and the timeline has, or nothing."""
    if timeline is None:
        return ""
    typical = timeline.steps[timeline.typical].number
    there = [each.number for each in timeline.steps if each.number is not None]
    steps = [each for each in (typical, *there) if each in finding["steps"]]
    ranks = [rank for rank in finding["ranks"] if rank in timeline.ranks]
    return f"#timeline&step={steps[0]}&rank={ranks[0]}" if steps and ranks else ""


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


def _evidence(finding: Finding, begins: Mapping[int, int]) -> list[dict[str, Any]]:
    """Neighbours with the same keys become one table, its sentence (`what`) in front.

    `links` has each row's moment in the timeline, empty where it names none.
    """
    tables = []
    evidence = finding["evidence"]
    shown = [_readable(line, begins) for line in evidence[:_MOST_EVIDENCE]]
    linked = zip(shown, _moments(finding, begins), strict=False)
    for keys, rows in groupby(linked, key=lambda each: tuple(each[0])):
        lines, links = zip(*rows, strict=True)
        cells = [[words.quantity(key, line[key])[1] for key in keys] for line in lines]
        textual = [at for at, key in enumerate(keys) if any(isinstance(r[key], str) for r in lines)]
        names = [words.quantity(key, None)[0] for key in keys]
        tables.append(
            {"names": names, "words": textual, "rows": cells, "links": links if any(links) else ()}
        )
    if len(evidence) > _MOST_EVIDENCE:
        more = f"{len(evidence) - _MOST_EVIDENCE} more lines are in results.json"
        tables.append({"names": [more], "words": [0], "rows": [], "links": ()})
    return tables


def _moments(finding: Finding, begins: Mapping[int, int]) -> list[str]:
    """The address of each evidence line's rank, step and moment in the timeline, or nothing."""
    out = []
    for line in finding["evidence"]:
        rank, step = line.get("rank", finding["rank"]), line.get("step")
        link = ""
        if isinstance(rank, int) and isinstance(step, int) and step in begins:
            link = f"#timeline&step={step}&rank={rank}"
            time = line.get("time_ns")
            if isinstance(time, int):
                link += f"&at={(time - begins[step]) / 1e6:.4f}"
        out.append(link)
    return out


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


def _round(value: float) -> float:
    return round(float(value), 2)
