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
from clusterprof.report import phrases
from clusterprof.report.summary import (
    Average,
    average,
    averages,
    by_cost,
    by_exposed,
    evidence_steps,
    is_measurable,
    pair_bound_ns,
    worth_showing,
)
from clusterprof.results import Finding, Results
from clusterprof.run_directory import writing

if TYPE_CHECKING:
    import jinja2
    import pyarrow as pa

    from clusterprof.report.lanes import Timeline

_MOST_RANKS = 64
_MOST_CLOCKS = 128
_MOST_CELLS = 576
_MOST_ROWS = 40
_MOST_EVIDENCE = 64
#: near the beginning of every page
_MARK = b'<meta name="generator" content="clusterprof">'


def render(results: Results, collectives: pa.Table, *, title: str) -> str:
    """The page. `collectives` is the placed table (see `clusterprof.report.lanes`).

    The same results, table and title give the same page; it ends in a newline.
    """
    from clusterprof.report import lanes

    drawn = lanes.build(results, collectives)
    script = _part("report.js")
    begins = {step["step"]: step["begin_ns"] for step in results["steps"]}
    clocks = {entry["rank"]: entry for entry in results["clock"]["ranks"]}
    floor = pair_bound_ns(results)
    return _template().render(
        title=title,
        results=results,
        style=_safe(_part("report.css")),
        script=_safe(script),
        script_hash=_fingerprint(script),
        tiles=_tiles(results),
        findings=[(finding, _drawn(finding, begins)) for finding in by_cost(results)],
        account=_account(results),
        grid=_grid(results),
        groups=results["topology"]["groups"],
        operations=by_exposed(results),
        clocks=[(entry, clocks.get(entry["rank"])) for entry in results["ranks"]],
        floor=floor,
        bound=words.bound(floor) if floor else "",
        most_rows=_MOST_ROWS,
        most_clocks=_MOST_CLOCKS,
        picture=lanes.picture(drawn) if drawn else None,
        timeline_notes=drawn.notes if drawn else [],
        data=_embedded(drawn) if drawn else None,
    )


def write(path: Path, results: Results, collectives: pa.Table, *, title: str) -> None:
    """Write the page by rename; raises `RunDirectoryError` if it cannot be written."""
    page = render(results, collectives, title=title)
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
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(words=words, phrases=phrases)
    return environment.from_string(_part("report.html.j2"))


def _shown(value: object) -> object:
    """Every text that the template puts out passes here; our own parts are marked as safe."""
    return words.plain(value) if type(value) is str else value


def _safe(text: str) -> object:
    from markupsafe import Markup

    return Markup(text)  # noqa: S704  (our own files, and JSON that _embedded has made safe)


def _fingerprint(script: str) -> str:
    """What the page's policy allows to run: this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(drawn: Timeline) -> object:
    """JSON that no HTML parser can take for markup, whatever names it holds."""
    import orjson

    from clusterprof.report import lanes

    text = orjson.dumps(lanes.embedded(drawn)).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _safe(text)


def _tiles(results: Results) -> list[dict[str, Any]]:
    """The answer in four boxes: the straggler, what it costs, confidence and coverage."""
    findings = [finding for finding in by_cost(results) if finding["severity"] != "info"]
    straggler = next((f for f in findings if f["code"].startswith("straggler.")), None)
    top = straggler or (findings[0] if findings else None)
    floor = pair_bound_ns(results)
    clocks = f"two ranks' times agree to {words.bound(floor)}" if floor else "one clock only"
    confidence = words.confidence(top["confidence"]) if top else ""
    return [
        _tile_straggler(results, straggler),
        _tile_cost(results, top),
        _tile("Confidence", confidence, clocks)
        if top
        else _tile("Confidence", words.bound(floor) if floor else "-", "between two ranks' clocks"),
        _tile_coverage(results),
    ]


def _tile_straggler(results: Results, straggler: Finding | None) -> dict[str, Any]:
    if straggler is not None:
        who = phrases.whom(straggler) or "an unprofiled rank"
        more = f"{straggler['code']}, {phrases.recurrence(straggler)}"
        return _tile("Straggler", who, more, hurt=True)
    if len(results["ranks"]) < 2 or not results["collectives"]["matched"]:
        why = "needs collectives of at least two profiled ranks"
    elif not evidence_steps(results)[1]:
        why = "no step is free of the profiler's own start and stop"
    else:
        return _tile("Straggler", "none", f"of {len(results['ranks'])} profiled ranks")
    return _tile("Straggler", "cannot be determined", why)


def _tile_cost(results: Results, top: Finding | None) -> dict[str, Any]:
    if top is None or not is_measurable(top):
        floor = pair_bound_ns(results)
        beyond = f"beyond the clocks' uncertainty ({words.bound(floor)})" if floor else "found"
        return _tile("Cost per step", "none", beyond)
    is_straggler = top["code"].startswith("straggler.")
    cost = words.with_bound(top["cost_ns_per_step"], top["uncertainty_ns"])
    value, _, bound = cost.removesuffix("ms").partition(" ")
    rows = averages(results)
    of = f" of {words.duration(sum(r.duration_ns for r in rows) / len(rows))}" if rows else ""
    code = "" if is_straggler else f", {top['code']}"
    return _tile(
        "Cost per step" if is_straggler else "Largest cost per step",
        f"{value} ms",
        f"{words.percent(top['share_of_step'])} of a step{of}{code}",
        bound=bound.strip(),
        hurt=top["severity"] == "critical",
    )


def _tile_coverage(results: Results) -> dict[str, Any]:
    steps, steady = evidence_steps(results)
    profiled, missing = len(results["ranks"]), len(results["missing"])
    more = words.counted(len(steps), "steady-state step" if steady else "step")
    if steps:
        more += f" ({words.spans(steps, limit=4)})" + ("" if steady else ", none in steady state")
    value = f"{profiled} of {profiled + missing} reports" if missing else ""
    return _tile("Coverage", value or words.counted(profiled, "rank"), more, hurt=bool(missing))


def _tile(
    name: str, value: str, more: str, *, bound: str = "", hurt: bool = False
) -> dict[str, Any]:
    return {"name": name, "value": value, "more": more, "bound": bound, "hurt": hurt}


def _drawn(finding: Finding, begins: Mapping[int, int]) -> dict[str, Any]:
    """A finding's bar (its share of a step, and from where to where that may lie, in %)."""
    share = finding["share_of_step"] * 100 if is_measurable(finding) else 0.0
    half = share * finding["uncertainty_ns"] / finding["cost_ns_per_step"] if share else 0.0
    # an uncertainty below 0.2% of a step is narrower than the mark for it
    whisker = (_round(max(share - half, 0)), _round(min(share + half, 100))) if half > 0.2 else None
    return {
        "share": _round(min(share, 100)) if share else None,
        "whisker": whisker,
        "evidence": _evidence(finding["evidence"], begins),
    }


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
    """Each rank's mean step, of so many ranks as the page can carry."""
    every = averages(results)
    if not every:
        return None
    rows = worth_showing(results, every, _MOST_RANKS)
    longest = max(row.duration_ns for row in every)
    steps, steady = evidence_steps(results)
    floor = pair_bound_ns(results)
    stragglers = _stragglers(results)
    return {
        "steps": words.counted(len(steps), "steady-state step" if steady else "step"),
        "which": words.spans(steps, 6),
        "steady": steady,
        "rows": [
            {
                "rank": row.rank,
                "named": row.rank in stragglers,
                "step": words.milliseconds(row.duration_ns, words.column_decimals(row.duration_ns)),
                "cells": _cells(row, floor),
                "bar": _bar(row, longest),
            }
            for row in rows
        ],
        "left_out": len(every) - len(rows),
    }


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
    decimals = words.column_decimals(row.duration_ns)
    cells = []
    for tone, _, ns in _parts(row):
        below = tone == "wait" and 0 < ns <= floor
        share = max(ns / row.duration_ns, 0) if row.duration_ns else 0.0
        cells.append(
            {
                "tone": tone,
                # compute is what one hopes for: the shade is for what costs
                "share": 0 if tone == "compute" or below else _round(share),
                "ms": f"<{words.bound(floor)[1:]}" if below else words.milliseconds(ns, decimals),
                "percent": "" if below else words.percent(share),
            }
        )
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


def _grid(results: Results) -> dict[str, Any]:
    """The account of each rank and step, of so many steps as the page can carry."""
    present = {account["rank"] for step in results["steps"] for account in step["ranks"]}
    rows = worth_showing(results, averages(results), _MOST_RANKS)
    ranks = [row.rank for row in rows if row.rank in present]
    most = max(4, _MOST_CELLS // max(len(ranks), 1))
    steps = results["steps"][: min(most, 48)]
    longest = max(
        (a["duration_ns"] for step in steps if step["settled"] for a in step["ranks"]),
        default=max((a["duration_ns"] for step in steps for a in step["ranks"]), default=1),
    )
    bars = {
        (step["step"], a["rank"]): _bar(average(a["rank"], [a]), longest)
        | {"steady": step["settled"], "ms": words.milliseconds(a["duration_ns"])}
        for step in steps
        for a in step["ranks"]
        if a["rank"] in ranks
    }
    caption = f"ms per step; a full bar is {words.duration(longest)}, the longest steady-state step"
    if len(steps) < len(results["steps"]):
        caption += f"; the first {len(steps)} of {len(results['steps'])} steps"
    stragglers = _stragglers(results)
    return {
        "caption": caption,
        "steps": [{"number": step["step"], "steady": step["settled"]} for step in steps],
        "rows": [
            {
                "rank": rank,
                "named": rank in stragglers,
                "cells": [bars.get((step["step"], rank)) for step in steps],
            }
            for rank in ranks
        ],
    }


def _stragglers(results: Results) -> set[int]:
    """Ranks that are named as stragglers, alone or together."""
    return {
        rank
        for finding in results["findings"]
        if finding["code"] in ("straggler.host", "straggler.gpu") and finding["severity"] != "info"
        for rank in finding["ranks"]
    }


def _round(value: float) -> float:
    return round(float(value), 2)
