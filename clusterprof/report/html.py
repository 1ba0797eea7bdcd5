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
from clusterprof.masking import to_fill_in
from clusterprof.report import collective_charts, lanes, panels, summary
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job, heatmap, step_chart
from clusterprof.results import UNBOUNDED_NS, Finding, Results
from clusterprof.run_directory import writing

_MOST_EVIDENCE = 64
#: the page's one script, in this order: what the others share first, what shows the state last
_SCRIPTS = (
    "core.js", "downloads.js", "tables.js", "heatmap.js", "whatif.js", "timeline_data.js",
    "timeline_draw.js", "timeline.js", "arrive.js",
)  # fmt: skip


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
    combined, what_if = results["combined"], None
    if combined and len(combined["findings"]) > 1:
        # for fewer the first boxes say what one saves
        remaining_ns = combined["remaining_ns"]
        what_if = {"remaining_ns": remaining_ns, "texts": [*map(words.ms, remaining_ns)]}
    data = {
        "timeline-data": timeline and timeline.data,
        "heatmap-data": heatmap(run, collectives, job),
        "what-if-data": what_if,
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
        style="".join(map(asset, ("report.css", "timeline.css", "overview.css"))),
        script=script,
        # what the page's policy allows to run: this script and no other
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        tiles=panels.tiles(run),
        moment=_moment(run.leading, run, timeline) if run.leading in run.cards else "",
        findings=_cards(run, timeline),
        account=panels.account(run),
        several_hosts=len({entry["host"] for entry in ranks}) > 1,
        clocks=[(entry, clocks.get(entry["rank"])) for entry in ranks],
        ends=panels.ENDS,
        explained=explained or {},
        bound=summary.bound(run.pair_bound_ns) if run.pair_bound_ns else "",
        timeline=timeline,
        # what the scripts read, by the id of its element
        data=data,
        pauses=panels.pauses(run),
        run_steps=step_chart(results, job),
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
    return b'<meta name="generator" content="clusterprof">' in beginning(path)


class Card(NamedTuple):
    """A finding with its place among all, what is drawn of it, and those in its table."""

    number: int
    finding: Finding
    drawn: dict[str, Any]
    others: list[Card]


def _cards(run: Summary, timeline: lanes.Timeline | None) -> list[Card]:
    """All findings in order, many of one code in the first's card; shares of a step in %."""
    by_code: dict[str, list[Card]] = {}
    for number, finding in enumerate(run.cards, 1):
        share, saved = finding["share_of_step"] * 100, finding["saved_ns_per_step"]
        ends = finding["saved_least_ns"], finding["saved_most_ns"]
        low, high = (round(min(share * end / saved, 100.0), 2) if share else 0.0 for end in ends)
        drawn = {
            "share": round(min(share, 100.0), 2) if share else None,
            # what is narrower than 0.4% of a step is narrower than the mark for it
            "whisker": (low, high) if high - low > 0.4 else None,
            "evidence": _evidence(finding, run.begins),
            "moment": _moment(finding, run, timeline),
        }
        by_code.setdefault(finding["code"], []).append(Card(number, finding, drawn, []))
    for cards in by_code.values():
        # more do not fit on a screen
        if len(cards) > 3:
            cards[0].others.extend(cards[1:])
            del cards[1:]
    return sorted(chain.from_iterable(by_code.values()), key=lambda card: card.number)


def _moment(finding: Finding, run: Summary, timeline: lanes.Timeline | None) -> str:
    """The address in the timeline of a finding's first evidence, else of its step and rank."""
    if link := next(filter(None, _links(finding, run.begins)), ""):
        return link
    if timeline is None:
        return ""
    typical = timeline.steps[timeline.typical]
    shown = [step.number for step in (typical, *timeline.steps)]
    steps = [step for step in shown if step in finding["steps"]]
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


def _evidence(finding: Finding, begins: Mapping[int, int]) -> list[dict[str, Any]]:
    """Neighbours of the same keys as tables, their `what` in front, with links to their moments."""
    tables: list[dict[str, Any]] = []
    evidence = finding["evidence"]
    readable = [_readable(line, begins) for line in evidence[:_MOST_EVIDENCE]]
    linked = zip(readable, _links(finding, begins), strict=False)
    for keys, rows in groupby(linked, key=lambda row: tuple(row[0])):
        lines, links = zip(*rows, strict=True)
        texts = [column for column, key in enumerate(keys)
                 if any(isinstance(line[key], str) for line in lines)]  # fmt: skip
        tables.append({
            "names": [words.quantity(key, None)[0] for key in keys],
            "words": texts,
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
            if (begin := begins.get(line.get("step", -1))) is not None:
                shown["into_the_step_ns"] = value - begin
        elif key == "communicator" and isinstance(value, str):
            shown[key] = words.communicator(value)
        elif isinstance(value, Mapping):
            shown |= {f"{key}_{inner}": content for inner, content in value.items()}
        elif key != "what":
            shown[key] = value
    return shown


def asset(name: str) -> str:
    """Return the text of a file of the page."""
    return (resources.files("clusterprof.report") / "page" / name).read_text("utf-8")


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return what all templates are read in: every text that comes in is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        # every text that a template puts out passes here, but for what it marks as safe
        finalize=lambda value: words.plain(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        bytecode_cache=_BesideTheTemplates(),
    )
    templates.globals.update(words=words, summary=summary, to_fill_in=to_fill_in)
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return templates


class _BesideTheTemplates(bccache.BytecodeCache):
    """Byte code where Python keeps its own: compiling takes longer than drawing a small page."""

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
