"""The report as one HTML file: findings first, then what they rest on.

The page loads nothing from anywhere and its policy forbids to; all that comes out of
reports is escaped by the template or, in the timeline's data, kept out of the parser's
sight. Without scripts the timeline and the heatmap are missing, which they draw; the
tables are not.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources, util
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pyarrow as pa
from jinja2 import bccache

from clusterprof import __version__, words
from clusterprof.agent.contracts import files
from clusterprof.arguments import beginning
from clusterprof.report import collective_charts, heatmap, lanes, panels, step_chart, summary
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job
from clusterprof.results import UNBOUNDED_NS, Finding, Results
from clusterprof.run_directory import writing

_MOST_EVIDENCE = 64
#: of more findings of one code than fit on a screen, the first is a card and the others its table
_MOST_CARDS = 3
_STYLES = ("report.css", "timeline.css", "overview.css")
#: the page's one script, in this order: what the others share first, what shows the state last
_SCRIPTS = (
    "core.js", "downloads.js", "tables.js", "heatmap.js", "whatif.js", "timeline_data.js",
    "timeline_draw.js", "timeline.js", "arrive.js",
)  # fmt: skip
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
    run, job = Summary(results), job or Job()
    timeline = lanes.build(run, collectives, spans)
    what_if = panels.what_if(run)
    data = {
        "timeline-data": timeline.data if timeline else None,
        "heatmap-data": heatmap.embedded(run, collectives, job),
        "what-if-data": what_if and what_if["script"],
        "results-data": panels.packed_results(results),
    }
    data = {name: content for name, content in data.items() if content is not None}
    script = "".join(map(asset, _SCRIPTS))
    clocks = {entry["rank"]: entry for entry in results["clock"]["ranks"]}
    # those whose clocks are known least come first
    ranks = [*results["ranks"]]
    if len(ranks) > 2 * panels.ENDS:
        ranks.sort(key=lambda entry: -run.uncertainties.get(entry["rank"], UNBOUNDED_NS))
    template = environment().get_template("report.html.j2")
    return template.render(
        title=title,
        run=run,
        results=results,
        style="".join(map(asset, _STYLES)),
        script=script,
        # what the page's policy allows to run: this script and no other
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        tiles=panels.tiles(run),
        moment=_moment(run.leading, run, timeline) if run.leading in run.cards else "",
        what_if=what_if,
        findings=_cards(run, timeline),
        account=panels.account(run),
        path=panels.critical_path(results),
        groups=panels.ends(results["topology"]["groups"], panels.ENDS, 0),
        operations=panels.ends(results["collectives"]["by_operation"], panels.ENDS, 0),
        late=panels.ends(run.suspects, 2 * panels.ENDS, 0),
        clocks=panels.ends([(entry, clocks.get(entry["rank"])) for entry in ranks]),
        explained=explained or {},
        bound=summary.bound(run.pair_bound_ns) if run.pair_bound_ns else "",
        timeline=timeline,
        kinds=timeline.kinds if timeline else set(),
        # what the scripts read, by the id of its element
        data=data,
        heatmap="heatmap-data" in data,
        run_steps=step_chart.chart(results, job),
        **collective_charts.charts(run, collectives),
        provenance=panels.provenance(run, job),
    )


def write(path: Path, page: str, option: str = "--output") -> None:
    """Write a page by rename; raises `RunDirectoryError`, which names `option`, if that fails."""
    # a run directory's name may hold bytes that are no UTF-8
    with writing(path, option):
        files.write(path, page.encode(errors="backslashreplace"))


def is_ours(path: Path) -> bool:
    """Whether a file is a page that `write` wrote."""
    return _MARK in beginning(path)


class Card(NamedTuple):
    """A finding with its place among all, what is drawn of it, and those in its table."""

    number: int
    finding: Finding
    drawn: dict[str, Any]
    others: list[Card]


def _cards(run: Summary, timeline: lanes.Timeline | None) -> list[Card]:
    """All findings in their order; of many of one code the first holds the others.

    Drawn are a finding's share of a step, and from where to where that may lie (%).
    """
    by_code: dict[str, list[Card]] = {}
    for number, finding in enumerate(run.cards, 1):
        share, saved = finding["share_of_step"] * 100, finding["saved_ns_per_step"]
        ends = finding["saved_least_ns"], finding["saved_most_ns"]
        low, high = (round(min(share * end / saved, 100.0), 2) if share else 0.0 for end in ends)
        drawn = {
            "share": round(min(share, 100.0), 2) if share else None,
            # what is narrower than 0.4% of a step is narrower than the mark for it
            "whisker": (low, high) if high - low > 0.4 else None,
            "saving": _saving(finding),
            "evidence": _evidence(finding, run.begins),
            "moment": _moment(finding, run, timeline),
        }
        by_code.setdefault(finding["code"], []).append(Card(number, finding, drawn, []))
    for cards in by_code.values():
        if len(cards) > _MOST_CARDS:
            cards[0].others.extend(cards[1:])
            del cards[1:]
    return sorted(chain.from_iterable(by_code.values()), key=lambda card: card.number)


def _moment(finding: Finding, run: Summary, timeline: lanes.Timeline | None) -> str:
    """The address in the timeline of a finding's first evidence, else of its step and rank."""
    if link := next(filter(None, _links(finding, run.begins)), ""):
        return link
    if timeline is None:
        return ""
    shown = [step.number for step in timeline.steps if step.number is not None]
    steps = [step for step in (timeline.steps[timeline.typical].number, *shown)
             if step in finding["steps"]]  # fmt: skip
    ranks = [rank for rank in finding["ranks"] if rank in timeline.ranks]
    return f"#timeline&step={steps[0]}&rank={ranks[0]}" if steps and ranks else ""


def _links(finding: Finding, begins: Mapping[int, int]) -> list[str]:
    """The address of each evidence line's rank, step and moment in the timeline, or nothing."""
    links = []
    for line in finding["evidence"]:
        rank, step, time = line.get("rank", finding["rank"]), line.get("step"), line.get("time_ns")
        link = ""
        if isinstance(rank, int) and isinstance(step, int) and step in begins:
            link = f"#timeline&step={step}&rank={rank}"
            if isinstance(time, int):
                link += f"&at={(time - begins[step]) / 1e6:.4f}"
        links.append(link)
    return links


def _saving(finding: Finding) -> list[dict[str, Any]]:
    """The step with and without a finding's cause, in the window and in the long run."""
    saving, rows = finding["saving"], []
    if saving is None:
        return []
    for view, name in (("window", "the window"), ("long_run", "its steps again and again")):
        step, without = saving[view]["step_ns"], saving[view]["without_ns"]  # type: ignore[literal-required]
        stated = " (stated)" if view == saving["stated"] else ""
        cells = [f"{words.milliseconds(ns, 2)} ms" for ns in (step, without, step - without)]
        rows.append({"name": name + stated, "cells": cells})
    if looks := saving.get("looks"):
        name = f"{words.percent(looks['share'])} of the lateness in {looks['steps']} steps (stated)"
        step, saved_ns = saving["window"]["step_ns"], finding["saved_ns_per_step"]
        cells = [f"{words.milliseconds(ns, 2)} ms" for ns in (step, step - saved_ns, saved_ns)]
        rows.append({"name": name, "cells": cells})
    return rows


def _evidence(finding: Finding, begins: Mapping[int, int]) -> list[dict[str, Any]]:
    """Neighbours with the same keys become one table, its sentence (`what`) in front.

    `links` has each row's moment in the timeline, empty where it names none.
    """
    tables: list[dict[str, Any]] = []
    evidence = finding["evidence"]
    readable = [_readable(line, begins) for line in evidence[:_MOST_EVIDENCE]]
    linked = zip(readable, _links(finding, begins), strict=False)
    for keys, rows in groupby(linked, key=lambda row: tuple(row[0])):
        lines, links = zip(*rows, strict=True)
        tables.append({
            "names": [words.quantity(key, None)[0] for key in keys],
            "words": [column for column, key in enumerate(keys)
                      if any(isinstance(line[key], str) for line in lines)],
            "rows": [[words.quantity(key, line[key])[1] for key in keys] for line in lines],
            "links": links if any(links) else (),
        })  # fmt: skip
    if len(evidence) > _MOST_EVIDENCE:
        rest = f"{len(evidence) - _MOST_EVIDENCE} more lines are in results.json"
        tables.append({"names": [rest], "words": [0], "rows": [], "links": ()})
    return tables


def _readable(line: Mapping[str, Any], begins: Mapping[int, int]) -> dict[str, Any]:
    """Moments as times since their step began, ids short, and what lies within as its parts."""
    shown: dict[str, Any] = {"what": line["what"]} if "what" in line else {}
    for key, value in line.items():
        if key == "time_ns" and isinstance(value, int):
            begin = begins.get(line.get("step", -1))
            if begin is not None:
                shown["into_the_step_ns"] = value - begin
        elif key == "communicator" and isinstance(value, str):
            shown[key] = words.communicator(value)
        elif isinstance(value, Mapping):
            shown |= {f"{key}_{inner}": content for inner, content in value.items()}
        elif key != "what":
            shown[key] = value
    return shown


# -- templates


def asset(name: str) -> str:
    """Return the text of a file of the page."""
    return (resources.files("clusterprof.report") / "page" / name).read_text("utf-8")


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return what all templates are read in: every text that comes in is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        bytecode_cache=_BesideTheTemplates(),
    )
    templates.globals.update(words=words, summary=summary)
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return templates


def _shown(value: object) -> object:
    """Every text that a template puts out passes here, but for what it marks as safe."""
    return words.plain(value) if type(value) is str else value


class _BesideTheTemplates(bccache.BytecodeCache):
    """Byte code in `page/__pycache__`, or where else Python is told to keep it.

    Compiling the templates takes longer than drawing a small page. Where the folder cannot be
    written they are compiled each time.
    """

    def get_cache_key(self, name: str, _filename: str | None = None) -> str:
        folder = resources.files("clusterprof.report") / "page"
        return util.cache_from_source(str(folder / name))

    def get_source_checksum(self, source: str) -> str:
        made_by = f"{__version__} {jinja2.__version__} {Path(__file__).stat().st_mtime_ns}"
        return hashlib.sha256(f"{made_by}\n{source}".encode()).hexdigest()

    def load_bytecode(self, bucket: bccache.Bucket) -> None:
        try:
            with Path(bucket.key).open("rb") as file:
                bucket.load_bytecode(file)
        except Exception:  # noqa: BLE001 - an unpickler raises anything
            bucket.reset()

    def dump_bytecode(self, bucket: bccache.Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        with contextlib.suppress(OSError):
            Path(bucket.key).parent.mkdir(parents=True, exist_ok=True)
            files.write(bucket.key, bucket.bytecode_to_string())
