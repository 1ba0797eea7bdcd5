"""How much faster several workers merge many reports: `python3 bench/engines.py`.

The reports of one job of 64 ranks are made of a recording of the tests of four (`enlarge.py`): all
take part in the same collectives. They are merged by one worker, two and four in turn, each merge
in a process of its own, and each has to print the same bytes. Prints a table, and draws it (SVG)
where that is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from enlarge import enlarge  # noqa: E402
from figure import median  # noqa: E402
from process import Failed, run  # noqa: E402

_RECORDING = _ROOT / "tests" / "data" / "recordings" / "nsys-2025.3" / "ddp"
_RANKS = 4
#: Reading alone, which is what is spread: the rest of a merge is one pass over all ranks.
_READ = """
import sys, time
from pathlib import Path
from clusterprof.ingest import find_sources
from clusterprof.ingest.engines import Processes
from clusterprof.ingest.gathered import _attempt
if __name__ == "__main__":
    sources = find_sources([Path(sys.argv[2])])
    began = time.perf_counter()
    found = Processes(int(sys.argv[1]), always=True).read(_attempt, sources)
    print(time.perf_counter() - began)
    assert len(found) == len(sources)
"""


@dataclass
class Row:
    """What one number of workers took; seconds of each round."""

    workers: int
    reading: list[float] = field(default_factory=list)
    merging: list[float] = field(default_factory=list)
    peak_bytes: list[float] = field(default_factory=list)


def main() -> int:
    """Make reports, merge them by each number of workers, print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--reports", type=int, default=64, help="how many, in fours (64)")
    add("--times", type=int, default=60, help="how often the recording's steps are repeated (60)")
    add("--workers", default="1,2,4", help="numbers of workers, with commas (1,2,4)")
    add("--rounds", type=int, default=3, help="how often each is measured (3)")
    add("--plot", type=Path, metavar="FILE", help="draw the speed-up into an SVG")
    add("--json", type=Path, metavar="FILE", help="write the single measurements")
    add("--folder", type=Path, help="where the reports go, and stay (a temporary one)")
    options = parser.parse_args()
    rows = [Row(int(each)) for each in options.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as name:
        folder = options.folder or Path(name) / "reports"
        if not folder.is_dir():
            print("making the reports …", file=sys.stderr)
            make(folder, options.reports, options.times)
        measure(rows, folder, Path(name), options.rounds)
        size = sum(each.stat().st_size for each in folder.glob("*.sqlite")) / 1e6
        count = len([*folder.glob("*.sqlite")])
    what = f"{count} reports, {size:.0f} MB, {os.cpu_count()} processors"
    print(f"{what}; medians of {options.rounds}\n\n{table(rows)}")
    if options.plot:
        options.plot.write_text(plot(rows, what))
    if options.json:
        facts = {"what": what, "python": sys.version.split()[0]}
        options.json.write_text(json.dumps({**facts, "rows": [vars(r) for r in rows]}) + "\n")
    return 0


def make(folder: Path, reports: int, times: int) -> None:
    """Write the reports of one job of so many ranks."""
    beside = folder.with_name(f".{folder.name}.making")
    beside.mkdir(parents=True)
    packed = [_RECORDING / f"rank{rank}.sqlite.xz" for rank in range(_RANKS)]
    made = enlarge(packed, beside, times)
    for rank in reversed(range(reports)):  # the first ones last: the others are their copies
        source, target = made[rank % _RANKS], beside / f"rank{rank}.sqlite"
        if source != target:
            shutil.copyfile(source, target)
        _of_rank(target, rank, reports)
    beside.rename(folder)


def _of_rank(report: Path, rank: int, world: int) -> None:
    """Make a report that of another rank, of a larger job."""
    with sqlite3.connect(report) as database:
        for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
            database.execute(
                "UPDATE META_DATA_CAPTURE SET value = ? WHERE value LIKE ?",
                (f'{name}="{value}"', f'{name}="%'),
            )


def measure(rows: Sequence[Row], folder: Path, work: Path, rounds: int) -> None:
    """Fill in what each number of workers takes. Raises Failed where results differ."""
    script = work / "read.py"
    script.write_text(_READ)
    # the caller's own modules stay: clusterprof's packages may lie there
    kept = os.environ.get("PYTHONPATH")
    environ = {"PYTHONPATH": f"{_ROOT}:{kept}" if kept else str(_ROOT)}
    first = ""
    for number in range(rounds):
        for row in rows:
            print(f"round {number + 1}: {row.workers} workers …", file=sys.stderr)
            done = run([sys.executable, script, str(row.workers), folder], environ, timeout=900)
            row.reading.append(float(done.stdout))
            line = [sys.executable, "-m", "clusterprof", "merge", folder, "--json"]
            line += ["--engine", "process", "--workers", str(row.workers)]
            done = run(line, environ, memory=True, timeout=900)
            row.merging.append(done.seconds)
            row.peak_bytes.append(done.peak_bytes)
            took = f"reading {row.reading[-1]:.2f} s, whole merge {row.merging[-1]:.2f} s"
            print(f"  {took}", file=sys.stderr)
            first = first or done.stdout
            if done.stdout != first:
                raise Failed(f"{row.workers} workers lead to other results")
    results = json.loads(first)
    if len(results["ranks"]) != len([*folder.glob("*.sqlite")]) or results["missing"]:
        raise Failed(f"not all reports were merged: {results['warnings']}")


def table(rows: Sequence[Row]) -> str:
    """As Markdown, with the speed-up against the first row."""
    lines = [
        "| workers | reading | speed-up | whole merge | speed-up | memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [str(row.workers)]
        for mine, first in ((row.reading, rows[0].reading), (row.merging, rows[0].merging)):
            cells += [f"{median(mine):.2f} s", f"{median(first) / median(mine):.2f}"]
        cells.append(f"{median(row.peak_bytes) / 1e6:.0f} MB")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], what: str) -> str:
    """The speed-up over the number of workers, reading and whole merge, beside the ideal."""
    most = max(row.workers for row in rows)
    left, top, width, height = 60, 40, 480, 320

    def at(workers: float, times: float) -> str:
        return f"{left + width * workers / most:.1f},{top + height * (1 - times / most):.1f}"

    def curve(name: str, colour: str, values: Sequence[float], dashed: str = "") -> list[str]:
        places = [at(row.workers, value) for row, value in zip(rows, values, strict=True)]
        x, y = places[-1].split(",")
        marks = [
            f'<circle cx="{each.split(",")[0]}" cy="{each.split(",")[1]}" r="3" fill="{colour}"/>'
            for each in places
        ]
        return [
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" {dashed}/>',
            *([] if dashed else marks),
            f'<text x="{float(x) + 8:.1f}" y="{float(y) + 4:.1f}" fill="{colour}">{name}</text>',
        ]

    def speedup(values: Sequence[list[float]]) -> list[float]:
        return [median(values[0]) / median(each) for each in values]

    box = f"0 0 {left + width + 110} {top + height + 50}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22">Speed-up of a merge: {what}</text>',
        f'<path d="M{left},{top}V{top + height}H{left + width}" fill="none" stroke="black"/>',
        f'<text x="{left + width / 2}" y="{top + height + 40}">workers</text>',
    ]
    for row in rows:
        x, y = at(row.workers, 0).split(",")
        lines.append(f'<text x="{x}" y="{float(y) + 18:.0f}">{row.workers}</text>')
        y = at(0, row.workers).split(",")[1]
        lines.append(f'<text x="{left - 30}" y="{float(y) + 4:.0f}">{row.workers}×</text>')
    lines += curve("ideal", "gray", [row.workers / rows[0].workers for row in rows],
                   'stroke-dasharray="4"')  # fmt: skip
    lines += curve("reading", "#1565c0", speedup([row.reading for row in rows]))
    lines += curve("whole merge", "#c62828", speedup([row.merging for row in rows]))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
