"""A run in ten lines for a site's operators: who, where, when, how much, and how that is known.

Half of all stragglers are nodes: whoever can look at one needs its name and its GPU's, and nothing
of the program. What the results do not have is said to be unknown, never left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from clusterprof import words
from clusterprof.report import summary
from clusterprof.report.summary import Summary
from clusterprof.results import EvidenceRow, Finding, Results

#: so many ranks' hosts and GPUs, rows of evidence, and differences of hardware are listed
_MOST = 4
_UNKNOWN = "cannot be determined"


def ticket(results: Results, folder: str) -> str:
    """Ten lines of the finding that the verdict begins with, ending in a newline.

    `folder` is how the user calls the run directory, for the command of the last line.
    """
    run = Summary(results)
    finding = run.leading
    ranks = finding["ranks"] if finding else []
    is_unknown = any(sentence["code"] == "unknown" for sentence in results["headline"])
    none = _UNKNOWN if is_unknown else "nothing"
    lines = [
        ("problem", " ".join(run.verdict_lines) or results["verdict"]),
        ("who", (summary.whom(finding) if finding else "") or none),
        ("node", _hosts(run, ranks)),
        ("GPU", _gpus(run, ranks)),
        ("when", _when(run, finding)),
        ("how much", run.figures(finding) if finding else none),
        ("hardware", _hardware(run, ranks)),
        ("evidence", _evidence(run, finding)),
        ("measured", f"{run.ranks}; clock {run.clock}" if results["ranks"] else run.all_ranks),
        (
            "command",
            (finding["next"] if finding else "") or f"clusterprof report {shlex.quote(folder)}",
        ),
    ]
    return "".join(f"{label:<9} {words.plain(text)}\n" for label, text in lines)


def _hosts(run: Summary, ranks: Sequence[int]) -> str:
    """The hosts of these ranks, each with which of them it has."""
    shallow = run.results["shallow"]
    suspects = shallow["suspects"] if shallow else []
    hosts = {entry["rank"]: entry["host"] for entry in suspects if entry["host"]} | run.hosts
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts.get(rank) or "unknown", []).append(rank)
    texts = [f"{host} ({words.ranks(members)})" for host, members in by_host.items()]
    return words.listed(texts, _MOST) if texts else _UNKNOWN


def _gpus(run: Summary, ranks: Sequence[int]) -> str:
    """The GPUs of these ranks, each with its UUID where that was read."""
    devices = {entry["rank"]: entry["device"] for entry in run.results["ranks"]}
    sampled = {row["rank"]: row for row in run.results.get("hardware", [])}
    by_gpu: dict[str, list[int]] = {}
    for rank in ranks:
        row = sampled.get(rank)
        name, uuid = (row["name"], row["uuid"]) if row else (None, None)
        name = name or devices.get(rank) or "unknown GPU"
        by_gpu.setdefault(f"{name}, UUID {uuid or 'unknown'}", []).append(rank)
    texts = [f"{gpu} ({words.ranks(members)})" for gpu, members in by_gpu.items()]
    return words.listed(texts, _MOST) if texts else _UNKNOWN


def _when(run: Summary, finding: Finding | None) -> str:
    """From when to when the steps lasted that show it, by the reference rank's clock."""
    numbers = sorted(finding["steps"]) if finding else run.evidence_steps
    if not numbers:
        return _by_looks(run, finding) if finding else _UNKNOWN
    text = f"{'step' if len(numbers) == 1 else 'steps'} {words.spans(numbers, limit=6)}"
    steps = [step for step in run.results["steps"] if step["step"] in numbers]
    if not steps:
        return text
    end_ns = steps[-1]["begin_ns"] + steps[-1]["duration_ns"]
    return f"{words.period(steps[0]['begin_ns'], end_ns)}, {text}"


def _by_looks(run: Summary, finding: Finding) -> str:
    """In which steps the looks at the running job show a finding's first rank late."""
    shallow = run.results["shallow"]
    suspects = shallow["suspects"] if shallow else []
    for late in (s for s in suspects if s["rank"] in finding["ranks"] and "looked_steps" in s):
        begin = "the start" if late["since_step"] is None else f"step {late['since_step']}"
        end = "" if late["until_step"] is None else f", until step {late['until_step']}"
        return f"since {begin}{end}"
    return _UNKNOWN


def _hardware(run: Summary, ranks: Sequence[int]) -> str:
    """How the hardware of these ranks differs from that of the others."""
    if not ranks or not run.results.get("hardware"):
        return f"{_UNKNOWN}: it was not sampled" if ranks else _UNKNOWN
    texts = [f"rank {r}: {text}" for r in ranks for text in run.differing.get(r, ())]
    return words.listed(texts, _MOST) if texts else "like that of the other ranks"


def _evidence(run: Summary, finding: Finding | None) -> str:
    """What the numbers rest on: rows of the evidence, or the steps of the window."""
    numbers = finding.get("rows", []) if finding else []
    table = run.results.get("evidence_table", [])
    if rows := [row for row in table if row["number"] in numbers]:
        return words.listed(map(_row, rows), _MOST)
    if not run.results["ranks"]:
        return run.all_ranks or _UNKNOWN
    return f"{words.counted(len(run.evidence_steps), 'step')} of the window, under the profiler"


def _row(row: EvidenceRow) -> str:
    lies = ""
    if row["least_ns"] is not None and row["most_ns"] is not None:
        lies = f" ({words.ms(row['least_ns'])} to {words.ms(row['most_ns'])})"
    steps = f" in {words.counted(row['steps'], 'step')}" if row["steps"] else ""
    profiler = "under the profiler" if row["profiler"] else "without a profiler"
    return f"{row['what']} {words.ms(row['value_ns'])}{lies} by {row['source']}{steps} {profiler}"
