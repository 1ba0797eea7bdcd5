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
from clusterprof.report.averages import Average, averages, evidence_steps, worth_showing
from clusterprof.report.precision import pair_bound_ns
from clusterprof.results import Finding, RankAccount, Results
from clusterprof.run_directory import writing

if TYPE_CHECKING:
    import jinja2
    import pyarrow as pa

    from clusterprof.report.lanes import Timeline

_MOST_RANKS = 64
_MOST_CLOCKS = 128
_MOST_CELLS = 576
_MOST_OPERATIONS = 40
_MOST_EVIDENCE = 64


def render(results: Results, collectives: pa.Table, *, title: str) -> str:
    """The page. `collectives` is the placed table (see `clusterprof.report.lanes`).

    The same results, table and title give the same page; it ends in a newline.
    """
    from clusterprof.report import lanes

    drawn = lanes.build(results, collectives)
    script = _part("report.js")
    begins = {step["step"]: step["begin_ns"] for step in results["steps"]}
    return _template().render(
        title=title,
        verdict=results["verdict"],
        version=results["clusterprof_version"],
        schema_version=results["schema_version"],
        style=_safe(_part("report.css")),
        script=_safe(script),
        script_hash=_fingerprint(script),
        tiles=_tiles(results),
        holes=[phrases.hole(hole) for hole in results["missing"]],
        holes_title=phrases.holes_title(results),
        findings=[_finding(finding, begins) for finding in phrases.by_cost(results)],
        account=_account(results),
        grid=_grid(results),
        groups=_groups(results),
        operations=_operations(results),
        clock=_clock(results),
        warnings=results["warnings"],
        picture=lanes.picture(drawn) if drawn else None,
        timeline_notes=drawn.notes if drawn else [],
        data=_embedded(drawn) if drawn else None,
    )


def write(path: Path, results: Results, collectives: pa.Table, *, title: str) -> None:
    """Write the page by rename; raises `RunDirectoryError` if it cannot be written."""
    page = render(results, collectives, title=title)
    # A run directory's name may hold bytes that are no UTF-8.
    with writing(path, "--output"):
        files.write(path, page.encode(errors="backslashreplace"))


#: near the beginning of every page
_MARK = b'<meta name="generator" content="clusterprof">'


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
    """The answer in four boxes: who, what it costs, how sure, and what was seen."""
    findings = [finding for finding in phrases.by_cost(results) if finding["severity"] != "info"]
    late = next((f for f in findings if f["code"].startswith("straggler.")), None)
    top = late or (findings[0] if findings else None)
    return [
        _tile_who(results, late),
        _tile_cost(results, top),
        _tile_sure(results, top),
        _seen(results),
    ]


def _tile_who(results: Results, late: Finding | None) -> dict[str, Any]:
    if late is not None:
        who = phrases.whom(late) or "a rank not profiled"
        return _tile("Late", who, f"{late['code']}, {phrases.recurrence(late)}", hurt=True)
    if len(results["ranks"]) < 2 or not results["collectives"]["matched"]:
        return _tile("Late", "not known", "it takes collectives of two ranks and more to tell")
    if not evidence_steps(results)[1]:
        return _tile("Late", "not known", "no step is free of the capture's own start and stop")
    return _tile("Late", "no rank", f"of the {len(results['ranks'])} seen")


def _tile_cost(results: Results, top: Finding | None) -> dict[str, Any]:
    if top is None or top["cost_ns_per_step"] <= top["uncertainty_ns"]:
        floor = pair_bound_ns(results)
        beyond = f"beyond what the clocks can tell ({words.bound(floor)})" if floor else "found"
        return _tile("Cost per step", "none", beyond)
    name = "Cost per step" if top["code"].startswith("straggler.") else "Largest cost per step"
    value, _, bound = words.with_bound(top["cost_ns_per_step"], top["uncertainty_ns"]).partition(
        " "
    )
    bound, _, _ = bound.rpartition("ms")
    rows = averages(results)
    of = f" of {words.duration(sum(r.duration_ns for r in rows) / len(rows))}" if rows else ""
    code = "" if top["code"].startswith("straggler.") else f", {top['code']}"
    more = f"{words.percent(top['share_of_step'])} of a step{of}{code}"
    return _tile(name, f"{value} ms", more, bound=bound.strip(), hurt=top["severity"] == "critical")


def _tile_sure(results: Results, top: Finding | None) -> dict[str, Any]:
    floor = pair_bound_ns(results)
    clocks = f"two ranks' times agree to {words.bound(floor)}" if floor else "one clock only"
    if top is None:
        return _tile("How sure", words.bound(floor) if floor else "-", "between two ranks' clocks")
    return _tile("How sure", words.confidence(top["confidence"]), clocks)


def _seen(results: Results) -> dict[str, Any]:
    steps, settled = evidence_steps(results)
    seen = len(results["ranks"])
    value = (
        f"{seen} of {seen + len(results['missing'])} reports"
        if results["missing"]
        else (words.counted(seen, "rank"))
    )
    kind = "settled step" if settled else "unsettled step"
    return _tile(
        "Seen",
        value,
        f"{words.counted(len(steps), kind)}"
        + (f": {words.numbers(steps, limit=4)}" if steps else ""),
        hurt=bool(results["missing"]),
    )


def _tile(
    name: str, value: str, more: str, *, bound: str = "", hurt: bool = False
) -> dict[str, Any]:
    return {"name": name, "value": value, "more": more, "bound": bound, "hurt": hurt}


def _finding(finding: Finding, begins: Mapping[int, int]) -> dict[str, Any]:
    seen = finding["cost_ns_per_step"] > finding["uncertainty_ns"]
    share = finding["share_of_step"] * 100 if seen else 0.0
    facts = [f"{words.percent(finding['share_of_step'])} of a step"] if share else []
    facts += [phrases.recurrence(finding), f"confidence {words.confidence(finding['confidence'])}"]
    cost = phrases.cost(finding)
    return {
        "severity": finding["severity"],
        "code": finding["code"],
        "whom": phrases.whom(finding),
        "cost": cost.removesuffix(" per step"),
        "per_step": cost.endswith(" per step"),
        "share": _round(min(share, 100)) if share else None,
        "share_text": words.percent(finding["share_of_step"]),
        "whisker": _whisker(finding, share),
        "facts": ", ".join(facts),
        "summary": finding["summary"],
        "advice": finding["advice"],
        "next": finding["next"],
        "evidence": _evidence(finding["evidence"], begins),
    }


def _whisker(finding: Finding, share: float) -> tuple[float, float] | None:
    """From where to where the share may lie, in % of a step; nothing where that is a hair."""
    if not share:
        return None
    half = share * finding["uncertainty_ns"] / finding["cost_ns_per_step"]
    return (_round(max(share - half, 0)), _round(min(share + half, 100))) if half > 0.2 else None


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


_PARTS = (
    ("c", "compute", "compute"),
    ("w", "wait", "exposed wait"),
    ("t", "transfer", "exposed transfer"),
    ("m", "copies", "exposed copies"),
)


def _account(results: Results) -> dict[str, Any] | None:
    every = averages(results)
    if not every:
        return None
    rows = worth_showing(results, every, _MOST_RANKS)
    longest = max(row.duration_ns for row in every)
    steps, settled = evidence_steps(results)
    if settled:
        lead = (
            f"Means over {words.counted(len(steps), 'settled step')} ({words.numbers(steps, 6)}). "
        )
    else:
        lead = "No step is free of the capture's own start and stop; means over all. "
    lead += "Exposed is what no compute hides; the parts add up to the step."
    floor = pair_bound_ns(results)
    late = _late(results)
    return {
        "lead": lead,
        "bound": words.bound(floor) if floor else "",
        "rows": [_account_row(row, longest, floor, named=row.rank in late) for row in rows],
        "left_out": _left_out(len(every) - len(rows), "rank"),
    }


def _account_row(row: Average, longest: float, floor: int, *, named: bool) -> dict[str, Any]:
    values = [
        ("compute", row.compute_ns),
        ("wait", row.exposed_wait_ns),
        ("transfer", row.exposed_transfer_ns),
        ("copies", row.exposed_copy_ns),
        ("idle", row.idle_ns),
    ]
    decimals = words.column_decimals(row.duration_ns)
    cells = []
    for tone, ns in values:
        below = tone == "wait" and 0 < ns <= floor
        share = max(ns / row.duration_ns, 0) if row.duration_ns else 0.0
        cells.append(
            {
                "tone": "soft" if tone == "idle" else tone,
                # Compute is what one hopes for: the shade is for what costs.
                "share": 0 if tone == "compute" or below else _round(share),
                "ms": f"<{words.bound(floor)[1:]}" if below else words.milliseconds(ns, decimals),
                "percent": "" if below else words.percent(share),
            }
        )
    parts, total = _stack([ns for _, ns in values[:4]], row.duration_ns, longest)
    return {
        "rank": row.rank,
        "named": named,
        "step": words.milliseconds(row.duration_ns, decimals),
        "cells": cells,
        "parts": parts,
        "total": total,
        "label": _label([ns for _, ns in values], row.duration_ns),
    }


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
    accounts = {(step["step"], a["rank"]): a for step in steps for a in step["ranks"]}
    late = _late(results)
    caption = f"ms per step; a full bar is {words.duration(longest)}, the longest settled step"
    if len(steps) < len(results["steps"]):
        caption += f"; the first {len(steps)} of {len(results['steps'])} steps"
    return {
        "caption": caption,
        "steps": [{"number": step["step"], "settled": step["settled"]} for step in steps],
        "rows": [
            {
                "rank": rank,
                "named": rank in late,
                "cells": [
                    _cell(accounts[step["step"], rank], longest, settled=step["settled"])
                    if (step["step"], rank) in accounts
                    else None
                    for step in steps
                ],
            }
            for rank in ranks
        ],
    }


def _cell(account: RankAccount, longest: float, *, settled: bool) -> dict[str, Any]:
    wait = account["exposed_wait_ns"]
    values = [
        account["compute_ns"],
        wait,
        account["exposed_communication_ns"] - wait,
        account["exposed_copy_ns"],
    ]
    parts, total = _stack(values, account["duration_ns"], longest)
    return {
        "settled": settled,
        "parts": parts,
        "total": total,
        "ms": words.milliseconds(account["duration_ns"]),
        "label": _label([*values, account["idle_ns"]], account["duration_ns"]),
    }


def _stack(
    values: Sequence[float], duration: float, longest: float
) -> tuple[list[tuple[str, float, float]], float]:
    """(tone, left, width) of a stacked bar in % and its length; the rest of it is idle."""
    total = min(duration / longest, 1) * 100 if longest else 0
    left, parts = 0.0, []
    for (tone, _, _), value in zip(_PARTS, values, strict=True):
        width = value / duration * total if duration else 0
        if width > 0:
            parts.append((tone, _round(left), _round(width)))
        left += width
    return parts, _round(total)


def _label(values: Sequence[float], duration: float) -> str:
    names = [*(name for _, _, name in _PARTS), "idle"]
    shares = [
        f"{name} {words.percent(value / duration)}"
        for name, value in zip(names, values, strict=True)
        if duration and value
    ]
    return f"{words.milliseconds(duration)} ms: " + ", ".join(shares)


def _groups(results: Results) -> dict[str, Any]:
    entries = results["topology"]["groups"]
    return {
        "rows": [
            {
                "kind": entry["kind"],
                "ranks": phrases.members(entry),
                "communicator": words.communicator(entry["communicator"]),
                "communicator_whole": entry["communicator"],
                "calls": f"{entry['calls_per_step']:g}",
                "confidence": words.confidence(entry["confidence"]),
                "why": entry["why"],
            }
            for entry in entries[:_MOST_OPERATIONS]
        ],
        "left_out": _left_out(len(entries) - _MOST_OPERATIONS, "group"),
    }


def _operations(results: Results) -> dict[str, Any]:
    counts = results["collectives"]
    entries = sorted(counts["by_operation"], key=lambda entry: -entry["exposed_ns"])
    floor = pair_bound_ns(results)
    return {
        "counts": phrases.collectives(results),
        "bound": words.bound(floor) if floor else "",
        "rows": [
            {
                "operation": entry["operation"],
                "communicator": words.communicator(entry["communicator"]),
                "communicator_whole": entry["communicator"],
                "ranks": words.numbers(entry["ranks"], limit=4),
                "cells": phrases.operation_cells(entry, floor),
            }
            for entry in entries[:_MOST_OPERATIONS]
        ],
        "left_out": _left_out(len(entries) - _MOST_OPERATIONS, "operation"),
    }


def _clock(results: Results) -> dict[str, Any]:
    clocks = {entry["rank"]: entry for entry in results["clock"]["ranks"]}
    reference = results["clock"]["reference_rank"]
    rows = []
    for entry in results["ranks"][:_MOST_CLOCKS]:
        clock = clocks.get(entry["rank"])
        rows.append(
            {
                "rank": entry["rank"],
                "host": entry["host"] or "-",
                "device": entry["device"] or "-",
                "profiler": entry["profiler"],
                "source": entry["source"],
                "offset": "reference" if entry["rank"] == reference else phrases.offset(clock),
                "uncertainty": words.bound(clock["uncertainty_ns"]) if clock else "-",
                "drift": f"{clock['drift_ppm']:.3f}" if clock else "-",
            }
        )
    lead = (
        f"The clock is {phrases.clock(results)}. An uncertainty is a bound over the whole window."
    )
    if results["capture"] is not None:
        lead += f" What the capture cost: {phrases.capture(results['capture'])}."
    left_out = _left_out(len(results["ranks"]) - _MOST_CLOCKS, "rank")
    return {"lead": lead, "rows": rows, "left_out": left_out}


def _late(results: Results) -> set[int]:
    """Ranks that are called late, alone or together."""
    return {
        rank
        for finding in results["findings"]
        if finding["code"] in ("straggler.host", "straggler.gpu") and finding["severity"] != "info"
        for rank in finding["ranks"]
    }


def _left_out(count: int, noun: str) -> str:
    return f"{words.counted(count, f'more {noun}')} in results.json." if count > 0 else ""


def _round(value: float) -> float:
    return round(float(value), 2)
