"""What terminal, Markdown and page say of finished results that a reader's check would refute.

Read as a person reads them, numbers in their text: a time of a step is no longer than the step, a
share is that of the step beside it, parts add up to their whole, and the picture shows the rank
that the sentence names.
"""

from __future__ import annotations

import base64
import html as markup
import json
import re
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from clusterprof.report import html, text
from clusterprof.report.summary import ACCOUNT_COLUMNS, Summary
from clusterprof.results import Results

#: one line, so that no sentence is broken
_WIDTH = 100_000
_NUMBER = r"(\d+(?:\.\d+)?)"
_OF_EACH = re.compile(rf"{_NUMBER} ms of each {_NUMBER} ms step \((?:{_NUMBER}%)?")
_PER_STEP = re.compile(rf"{_NUMBER} ms (?:alone )?per step")
#: what a repair saves, and the share of the step that it is
_SAVED = re.compile(
    rf"repair saves (?:0 to \S+ ms \(best guess )?{_NUMBER}[ )][^,]*?per step[^%]*?, {_NUMBER}% of "
    rf"(?:the step|{_NUMBER} ms steps)"
)
_STEP = re.compile(
    rf"(?:(?:steps of|steps take) {_NUMBER} ms|\bof (?:each )?{_NUMBER} ms (?:steps?|per step)\b)"
)
_PATH = re.compile(rf"of {_NUMBER} ms per step.*% on rank")
_PART = re.compile(rf"(\w+) {_NUMBER} ms \({_NUMBER}%\)")
_INTERVAL = re.compile(rf"repair saves {_NUMBER} (?:\({_NUMBER} to|±{_NUMBER} ms)")
_CONFIDENT = re.compile(r"confidence \d")
_AFTER = re.compile(r"repair saves \d.*? once \S+ (?:is|other causes are) repaired")
_EMBEDDED = re.compile(r'<script type="application/json" id="heatmap-data">(.*?)</script>')
_UNSEEN = re.compile(r"<(script|style|title)\b.*?</\1>", re.DOTALL)
_BLOCK = re.compile(r"</(?:p|li|h\d|dd|dt|td|th|tr|div|summary)>")
#: a name of steps that tells why their length is another one
_OTHER_STEPS = re.compile(
    r"steps? \d|without the profiler|in the window|outside|long run|replay|was late|median steps"
)
#: a rank is darkest where it has so many times as much as the next, and so much of a step
_DARKEST, _LEAST_FRAC = 1.5, 0.05


def disagreements(results: Results, collectives: pa.Table) -> list[str]:
    """Return a sentence for each number or name on a face that another one refutes."""
    page = html.render(results, collectives, title="job")
    faces = {
        "terminal": text.render(results, width=_WIDTH),
        "markdown": re.sub(r"\\(?=\W)", "", text.markdown(results)),
        "page": visible(page),
    }
    checks: tuple[Callable[[Results, str], Iterator[str]], ...] = (
        _too_long, _shares, _lengths_of_step, _critical_path, _open_ended, _after_others,
    )  # fmt: skip
    found = [f"{name}: {each}" for name, face in faces.items() for check in checks
             for each in check(results, face)]  # fmt: skip
    found += [f"breakdown: {each}" for each in _breakdown(results)]
    return found + [f"page: {each}" for each in _picture(results, page)]


def visible(page: str) -> str:
    """The text of a page that is seen, a line for each block of it."""
    lines = _BLOCK.sub("\n", _UNSEEN.sub("", page))
    return markup.unescape(re.sub(r"<[^>]*>", "", lines))


def _is(stated: str, true: float, more: float = 0.0) -> bool:
    """Whether a number is another one, each of whose parts is written in three digits."""
    last = 10.0 ** -len(stated.partition(".")[2])
    return abs(float(stated) - true) <= 0.51 * last + 0.011 * abs(true) + more


def _steps_ns(results: Results) -> list[float]:
    """The lengths of a step of which savings and tables are."""
    pace = results["pace"]
    return [pace["step_ns"], pace["window_step_ns"]] if pace else []


def _too_long(results: Results, face: str) -> Iterator[str]:
    """Times of a step that are longer than it is."""
    for much, step, _ in _OF_EACH.findall(face):
        if float(much) > float(step):
            yield f"{much} ms of a step of {step} ms"
    most = max(_steps_ns(results), default=float("inf")) / 1e6
    for line in face.splitlines():
        for much in _PER_STEP.findall(line):
            if not _is(much, most) and float(much) > most and not _OTHER_STEPS.search(line):
                yield f"{much} ms per step of {most:.4g} ms: {line.strip()}"


def _shares(results: Results, face: str) -> Iterator[str]:
    """Shares of a step that are not the time beside them over the step that is shown."""
    for much, step, share in _OF_EACH.findall(face):
        if share and not _is(share, 100 * float(much) / float(step)):
            yield f"{much} ms of {step} ms is not {share}%"
    usual_ns = Summary(results).usual_ns
    for line in face.splitlines() if usual_ns else ():
        for much, share, step in _SAVED.findall(line):
            of_ms = float(step) if step else (usual_ns or 0) / 1e6
            if not _is(share, 100 * float(much) / of_ms):
                yield f"{much} ms of {of_ms:.4g} ms is not {share}%: {line.strip()}"


def _lengths_of_step(results: Results, face: str) -> Iterator[str]:
    """Steps as long as none that savings or tables are of, without a word which ones they are."""
    for line in face.splitlines():
        for step in map("".join, _STEP.findall(line)):
            known = any(_is(step, ns / 1e6) for ns in _steps_ns(results))
            if not known and results["pace"] and not _OTHER_STEPS.search(line):
                yield f"a step of {step} ms: {line.strip()}"


def _critical_path(results: Results, face: str) -> Iterator[str]:
    """Parts of the critical path that are more than it, or not the share beside them."""
    for line in face.splitlines():
        if whole := _PATH.search(line):
            parts = _PART.findall(line)
            if sum(float(much) for _, much, _ in parts) > 1.01 * float(whole[1]):
                yield f"more than all of it: {line.strip()}"
            for what, much, share in parts:
                if not _is(share, 100 * float(much) / float(whole[1])):
                    yield f"{what} is not {share}%: {line.strip()}"


def _open_ended(results: Results, face: str) -> Iterator[str]:
    """Savings that may be nothing, beside a confidence."""
    for line in filter(_CONFIDENT.search, face.splitlines()):
        intervals = _INTERVAL.findall(line)
        ends = [float(least or float(value) - float(bound)) for value, least, bound in intervals]
        if "repair saves at most" in line or min(ends, default=1) <= 0:
            yield f"sure of what may be nothing: {line.strip()}"


def _after_others(results: Results, face: str) -> Iterator[str]:
    """Savings once others are repaired, without what the repair saves alone."""
    for line in face.splitlines():
        if _AFTER.search(line) and "alone" not in line:
            yield f"only after others: {line.strip()}"


def _breakdown(results: Results) -> Iterator[str]:
    """Rows of the breakdown whose parts are not the step, or not the share beside them."""
    for row in Summary(results).account_rows:
        cells = dict(zip(ACCOUNT_COLUMNS, (cell.split() for cell in row), strict=True))
        step = float(cells["step"][0])
        parts = sum(float(cells[name][0]) for name in ("compute", "exposed", "copies", "idle"))
        digit = 10.0 ** -len(cells["step"][0].partition(".")[2])
        if abs(parts - step) > 2.6 * digit:
            yield f"rank {row[0]}: parts of {parts:.2f} ms in a step of {step} ms"
        for name, (much, *share) in cells.items():
            is_share = share and share[0].endswith("%") and not share[0].startswith("<")
            if is_share and not _is(share[0][:-1], 100 * float(much) / step, 100 * digit / step):
                yield f"rank {row[0]}: {name} {much} ms is not {share[0]}"


def _picture(results: Results, page: str) -> Iterator[str]:
    """Times of a step that are longer than it, in the measure that the page opens on; and its
    darkest rank where it is not the first finding's, nor a sentence says why.
    """
    data = json.loads(_EMBEDDED.search(page)[1])  # type: ignore[index]
    measure, ranks = data["measures"][data["first"]], data["ranks"]
    codes = np.frombuffer(base64.b64decode(measure["values"]), "<u2").reshape(len(ranks), -1)
    cells_ns = np.where(codes == 65_535, 0, codes) * measure["unit_ns"]
    # steps that the profiler disturbed are pale, and begin at another time on each rank
    lasted_ns = {step["step"]: step["duration_ns"] for step in results["steps"] if step["settled"]}
    for number, most_ns in zip(measure["steps"], cells_ns.max(axis=0), strict=True):
        if most_ns > 1.01 * lasted_ns.get(number, np.inf):
            yield f"{measure['name']} of {most_ns / 1e6:.4g} ms in step {number}"
    steady = np.isin(measure["steps"], [*lasted_ns])
    if steady.any() and len(ranks) > 1 and " stands out: " not in visible(page):
        means_ns = dict(zip(ranks, cells_ns[:, steady].mean(axis=1).tolist(), strict=True))
        yield from _other_than_named(results, means_ns, measure["name"])


def _other_than_named(results: Results, means_ns: dict[int, float], name: str) -> Iterator[str]:
    """A rank that is much darker than all others, and not the first finding's, nor any's."""
    run, (rank, following) = Summary(results), sorted(means_ns, key=lambda k: -means_ns[k])[:2]
    next_ns, top = means_ns[following], run.leading
    if means_ns[rank] < max(_DARKEST * next_ns, next_ns + _LEAST_FRAC * (run.usual_ns or 0)):
        return
    if not run.is_named(rank):
        yield f"{name} is most of rank {rank}, which no sentence names"
    elif top and len(top["ranks"]) == 1 and rank not in top["ranks"]:
        yield f"{name} is most of rank {rank}, and {top['ranks']} is the finding's"
