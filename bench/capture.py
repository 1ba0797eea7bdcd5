"""What a capture costs a training: the stalls at its start and stop, and the steps inside it.

    python3 bench/capture.py --nsys PATH --nproc-per-node 4

runs one small training for each way to open and close a window (plain `nsys profile` with
cudaProfilerApi, nsys sessions, clusterprof itself, torch.profiler; with OS runtime tracing and
without, …) and prints one table. Needs a Python with torch; clusterprof is the checkout's.

A stall is read off the steps alone, the same for all ways: from one step's end to the next, an
interval longer than 1.5 times the median of its part (before, inside, after the window) counts
with what it exceeds that. What lies before the middle of the window is the start's, the rest the
stop's. So what the machine itself does is in it too: the row without a profiler shows how much.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PROGRAM = _HERE / "programs" / "window.py"
_FRAMEWORKS = _HERE / "programs" / "frameworks.py"
#: `--program`: what is trained; all but the first open no window by themselves
PROGRAMS = ("window", "small", "nanogpt", "trainer")

#: the window; before it the slow first steps, and an early capture where one is made
FIRST, END = 140, 160
WARMED_UP = 8
EARLY_ENDS = 30
#: how long the training goes on after the window: longer than nsys writes beside it
AFTER_S = 6.0
MOST_AFTER = 600
LONG = 1.5
#: what a step may be longer after the window than before it
GONE = 0.02


@dataclass(frozen=True)
class Way:
    """One way to capture a window."""

    name: str
    #: what `clusterprof torchrun` is told; None where clusterprof has no part in it
    clusterprof: tuple[str, ...] | None = None
    #: nsys' own words, before the program, {rank} and {output} to be filled in
    under: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    needs_gpu: bool = False
    needs_nsys: bool = True
    environ: tuple[tuple[str, str], ...] = ()


def ways(gpu: bool) -> list[Way]:
    """All of them, the most telling first."""
    few, many = ("cuda,nvtx", "cuda,nvtx,osrt") if gpu else ("nvtx", "nvtx,osrt")

    def plain(name: str, trace: str, *flags: str, program: tuple[str, ...] = ()) -> Way:
        words = ("profile", f"--trace={trace}", "--sample=none", "--cpuctxsw=none",
                 "--capture-range=cudaProfilerApi", "--output={output}",
                 "--force-overwrite=true", *flags)  # fmt: skip
        if not any(flag.startswith("--capture-range-end") for flag in flags):
            words += ("--capture-range-end=stop",)
        return Way(name, None, words, ("--open-by=cuda", *program), needs_gpu=True)

    def session(name: str, *program: str) -> Way:
        words = ("launch", "--session-new=bench-{rank}", f"--trace={few}")
        return Way(name, None, words, ("--open-by=session", *program))

    def ours(
        name: str, *flags: str, needs_gpu: bool = False, needs_nsys: bool = True, **environ: str
    ) -> Way:
        return Way(name, flags, needs_gpu=needs_gpu, needs_nsys=needs_nsys,
                   environ=tuple(environ.items()))  # fmt: skip

    return [
        Way("no profiler", needs_nsys=False),
        plain("nsys profile, cudaProfilerApi, osrt", many),
        plain("nsys profile, cudaProfilerApi", few),
        ours("clusterprof (session)", "--profiler=nsys", f"--trace={few}"),
        plain("nsys profile, cudaProfilerApi, no flush", few, "--flush-on-cudaprofilerstop=false"),
        ours("clusterprof (session), osrt", "--profiler=nsys", f"--trace={many}"),
        ours("clusterprof --window-by cuda", "--profiler=nsys", "--window-by=cuda",
             f"--trace={few}", needs_gpu=True),
        session("session, an empty capture early", "--early"),
        ours("torch.profiler", "--profiler=torch", needs_nsys=False),
        ours("torch.profiler, TEARDOWN_CUPTI=0", "--profiler=torch", needs_nsys=False,
             TEARDOWN_CUPTI="0"),
        replace(session("session, cuptiFinalize", "--finalize"), needs_gpu=True),
        plain("cudaProfilerApi, an empty capture early", few, "--capture-range-end=repeat:2",
              program=("--early",)),
        session("session, waiting for its stop", "--wait"),
        session("session, a barrier after its start", "--barrier"),
        session("session"),
    ]  # fmt: skip


@dataclass
class Row:
    """What one way cost, in seconds; a value for each rank of each round."""

    name: str
    early: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    #: the job from start to end, without the steps after the window as they are without a profiler
    whole: list[float] = field(default_factory=list)
    reports: int = 0
    report_bytes: int = 0
    #: why there is nothing
    problem: str = ""


class CannotMeasureError(Exception):
    """There is nothing to measure here, or a run did not end well."""


def main() -> int:
    """Measure what there is time for, print the table."""
    arguments = parser().parse_args()
    try:
        gpus, nsys, version = look(arguments)
    except CannotMeasureError as error:
        print(f"bench/capture.py: error: {error}", file=sys.stderr)
        return 2
    chosen = only(ways(gpus > 0), arguments.only)
    if arguments.program in PROGRAMS[2:]:  # these open no window by themselves
        chosen = [way for way in chosen if not (way.under or way.program)]
    rows = {way.name: Row(way.name) for way in chosen}
    deadline = time.monotonic() + arguments.seconds
    bench = Bench(arguments.nproc_per_node, nsys, arguments.captured, arguments.program)
    try:
        for number in range(arguments.rounds):
            for way in chosen:
                measure_or_explain(bench, way, rows[way.name], gpus, deadline, number)
    except KeyboardInterrupt:
        print("interrupted: what there is", file=sys.stderr)
    heading = about(bench, version)
    print(f"\n{heading}\n\n{table(list(rows.values()))}")
    if arguments.output:
        facts = {"about": heading, "rows": [asdict(row) for row in rows.values()]}
        arguments.output.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if any(row.reports for row in rows.values()) else 1


def only(all_ways: list[Way], words: Sequence[str] | None) -> list[Way]:
    """Those that the words choose, and the one without a profiler; a whole name chooses one."""
    if not words:
        return all_ways
    names = {way.name for way in all_ways}
    return [
        way for way in all_ways if any(
            way.name == word if word in names else word in way.name
            for word in (*words, "no profiler"))
    ]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    this = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    this.add_argument("--nsys", metavar="PATH", help="the nsys to measure (default: on PATH)")
    this.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="ranks (2)")
    this.add_argument("--captured", default="all", metavar="R", help="which: all (default) or 0,1")
    this.add_argument("--program", choices=PROGRAMS, default=PROGRAMS[0],
                      help="the training: window, bound by its GPU; small, by its launches; the "
                      "loop of nanoGPT's train.py; Hugging Face's Trainer (window)")  # fmt: skip
    this.add_argument("--rounds", type=int, default=1, metavar="N", help="each way so often (1)")
    this.add_argument("--seconds", type=float, default=330, metavar="S",
                      help="begin no further run after so long (330)")  # fmt: skip
    this.add_argument(
        "--only", action="append", metavar="WORDS", help="ways whose name is this, or has it"
    )
    this.add_argument("--output", type=Path, metavar="FILE", help="all values, as JSON")
    return this


def look(arguments: argparse.Namespace) -> tuple[int, str | None, str]:
    """How many GPUs, which nsys and its version. Raises CannotMeasureError."""
    if importlib.util.find_spec("torch") is None:
        raise CannotMeasureError(f"{sys.executable} has no torch: run it with the Python that has")
    counted = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if counted.returncode != 0:
        raise CannotMeasureError(f"torch cannot be imported: {last_line(counted.stderr)}")
    gpus = int(counted.stdout)
    if arguments.nproc_per_node < 1:
        raise CannotMeasureError(f"--nproc-per-node {arguments.nproc_per_node}: one rank or more")
    if 0 < gpus < arguments.nproc_per_node:
        raise CannotMeasureError(f"--nproc-per-node {arguments.nproc_per_node}: {gpus} GPUs here")
    nsys = shutil.which(arguments.nsys or "nsys")
    if nsys is None:
        if arguments.nsys:
            raise CannotMeasureError(f"--nsys {arguments.nsys} is no program that can be run")
        return gpus, None, "no nsys"
    version = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=False)
    if version.returncode != 0:
        raise CannotMeasureError(
            f"{nsys} does not run: {last_line(version.stderr + version.stdout)}"
        )
    return gpus, str(Path(nsys).absolute()), "nsys " + version.stdout.split()[-1].split("-")[0]


def measure_or_explain(
    bench: Bench, way: Way, row: Row, gpus: int, deadline: float, number: int
) -> None:
    """One run of one way; whatever goes wrong is the row's, and the next goes on."""
    if way.needs_gpu and not gpus:
        row.problem = "needs a GPU"
    elif way.needs_nsys and bench.nsys is None:
        row.problem = "there is no nsys (--nsys PATH)"
    elif row.problem or (number and not row.start):
        return
    elif time.monotonic() > deadline:
        row.problem = row.problem or ("" if row.start else "no time left (--seconds, --only)")
    else:
        print(f"measuring {way.name} …", file=sys.stderr, flush=True)
        try:
            bench.measure(way, row)
        except CannotMeasureError as error:
            row.problem = str(error)
            print(f"  {error}", file=sys.stderr, flush=True)


class Bench:
    """Runs the program in each way."""

    def __init__(self, ranks: int, nsys: str | None, captured: str, program: str) -> None:
        self.ranks = ranks
        self.nsys = nsys
        self.captured = captured
        self.program = program
        #: steps after the window, known once the step without a profiler is
        self.after = 40
        self.facts: dict[str, str] = {}
        self.step_s = 0.0

    def measure(self, way: Way, row: Row) -> None:
        """One training; its values go to `row`. Raises CannotMeasureError."""
        with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as name:
            folder = Path(name)
            begin = time.monotonic()
            try:
                self.run(self.command(way, folder), folder, way)
            finally:
                self.end_sessions(way)
            whole = time.monotonic() - begin
            logs = self.logs(folder)
            for log in logs:
                self.add(row, log["ends"])
            reports = found_reports(folder)
            if way.needs_nsys and not reports:
                raise CannotMeasureError(f"no report was written: {last_output(folder)}")
            if row.name == "no profiler" and not self.step_s:
                self.step_s = statistics.median(row.before)
            # The first run is shorter than the others by some steps.
            row.whole.append(whole - self.after * self.step_s)
            row.reports += len(reports)
            row.report_bytes += sum(path.stat().st_size for path in reports)
        self.facts = {key: str(logs[0][key]) for key in ("device", "torch", "nccl")
                      if key in logs[0]}  # fmt: skip
        if row.name == "no profiler":
            self.after = max(40, min(MOST_AFTER, math.ceil(AFTER_S / self.step_s)))

    def command(self, way: Way, folder: Path) -> list[str]:
        """torchrun, alone or through clusterprof, and the program."""
        launcher = ["--standalone", f"--nproc-per-node={self.ranks}"]
        common = [f"--folder={folder}", f"--steps={END + self.after}"]
        if self.program in PROGRAMS[2:]:
            program = [str(_FRAMEWORKS), self.program, *common]
        else:
            program = [str(_PROGRAM), *common, f"--window={FIRST}:{END}", *way.program]
            program.append(f"--captured={self.captured}")
            if self.program == "small":
                program.append("--small")
            if self.nsys:
                program.append(f"--nsys={self.nsys}")
        if way.under:
            words = [word.replace("{output}", f"{folder}/report-{{rank}}") for word in way.under]
            program.append("--under=" + json.dumps([self.nsys, *words]))
        if way.clusterprof is None:
            return [str(torchrun(folder)), *launcher, *program]
        nsys = [f"--nsys={self.nsys}"] if way.needs_nsys else []
        return [
            sys.executable, "-m", "clusterprof", "torchrun", f"--ranks={self.captured}",
            f"--steps={FIRST}:{END}", "--no-merge", f"--run-dir={folder / 'run'}",
            *way.clusterprof, *nsys, *launcher, "--", *program,
        ]  # fmt: skip

    def run(self, command: Sequence[str], folder: Path, way: Way) -> None:
        """Run it to its end. Raises CannotMeasureError."""
        before = os.environ.get("PYTHONPATH")
        checkout = str(_HERE.parent)
        environ = {
            **os.environ,
            "PYTHONPATH": f"{checkout}:{before}" if before else checkout,
            "PATH": f"{torchrun(folder).parent}:{os.environ.get('PATH', os.defpath)}",
            "OMP_NUM_THREADS": "1",
            **dict(way.environ),
        }
        with (folder / "output").open("wb") as out:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(150)
            except subprocess.TimeoutExpired:
                raise CannotMeasureError(f"it hung: {last_output(folder)}") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if status != 0:
            raise CannotMeasureError(f"it ended with {status}: {last_output(folder)}")

    def logs(self, folder: Path) -> list[dict[str, list[int]]]:
        """What each rank wrote."""
        logs = []
        for rank in range(self.ranks):
            path = folder / f"{rank}.json"
            if not path.exists():
                raise CannotMeasureError(f"rank {rank} wrote nothing: {last_output(folder)}")
            logs.append(json.loads(path.read_text()))
        return logs

    def add(self, row: Row, ends: Sequence[int]) -> None:
        """One rank's steps, as the module's docstring tells."""
        intervals = [(b - a) / 1e9 for a, b in itertools.pairwise(ends)]
        # intervals[i] ends with step i + 1; the switches lie before the steps FIRST and END
        steps = dict(enumerate(intervals, start=1))
        before = base(steps, EARLY_ENDS, FIRST - 1)
        inside = base(steps, FIRST + 3, END - 1)
        after = base(steps, END + (self.after + 1) // 2, END + self.after)
        row.before.append(before)
        row.inside.append(inside)
        row.after.append(after)
        middle = (FIRST + END) // 2
        row.early.append(excess(steps, WARMED_UP, EARLY_ENDS, before))
        row.start.append(
            excess(steps, EARLY_ENDS, FIRST, before) + excess(steps, FIRST, middle, inside)
        )
        row.stop.append(
            excess(steps, middle, END - 1, inside) + excess(steps, END - 1, END + self.after, after)
        )

    def end_sessions(self, way: Way) -> None:
        """Leave none of our own nsys sessions behind."""
        if "launch" not in way.under or self.nsys is None:
            return
        for rank in range(self.ranks):
            subprocess.run(
                [self.nsys, "shutdown", f"--session=bench-{rank}", "--kill=none"],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
            )  # fmt: skip


def base(steps: dict[int, float], begin: int, end: int) -> float:
    """The median length of the steps [begin, end), in seconds."""
    return statistics.median(steps[step] for step in range(begin, end) if step in steps)


def excess(steps: dict[int, float], begin: int, end: int, usual: float) -> float:
    """By how much the long ones of the steps [begin, end) exceed the usual length, in seconds."""
    lengths = (steps[step] for step in range(begin, end) if step in steps)
    return sum(length - usual for length in lengths if length > LONG * usual)


def torchrun(folder: Path) -> Path:
    """A torchrun of this Python's torch, wherever (and whether) it has installed one."""
    path = folder / "bin" / "torchrun"
    if not path.exists():
        path.parent.mkdir()
        path.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n'
        )
        path.chmod(0o755)
    return path


def found_reports(folder: Path) -> list[Path]:
    """Every report, of nsys or torch.profiler. An early empty one is not counted."""
    kinds = ("report-*.nsys-rep", "run/ranks/*/report.nsys-rep", "run/ranks/*/trace.json.gz")
    found = [path for kind in kinds for path in folder.glob(kind)]
    return found or list(folder.glob("report-*.qdstrm"))


def last_output(folder: Path) -> str:
    """The last line that a run printed; more of it goes to stderr."""
    text = (folder / "output").read_text(errors="replace")
    print(*(f"  | {line}" for line in text.splitlines()[-8:]), sep="\n", file=sys.stderr)
    return last_line(text)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it version nothing"


def about(bench: Bench, version: str) -> str:
    """One line on what was measured where."""
    facts = bench.facts
    parts = [
        bench.program,
        f"{bench.ranks} ranks on {facts.get('device', 'unknown')}",
        f"{bench.captured} captured",
        version,
        f"torch {facts.get('torch', '?')}",
        *([f"NCCL {facts['nccl']}"] if "nccl" in facts else ["gloo"]),
        f"Python {platform.python_version()}",
        f"steps of {bench.step_s * 1e3:.1f} ms without a profiler, {END - FIRST} in the window",
    ]
    return ", ".join(parts)


def table(rows: Sequence[Row]) -> str:
    """As Markdown. Ranges are over ranks and rounds."""
    plain = next((row for row in rows if row.name == "no profiler"), Row(""))
    head = ("", "stall at start", "at stop", "step before", "inside", "after", "after/before",
            "against no profiler", "job longer by", "reports")  # fmt: skip
    lines = [head, *(tuple(cells(row, plain)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def cells(row: Row, plain: Row) -> Iterator[str]:
    yield row.name
    if not row.start:
        yield from [""] * 8
        yield shortened(row.problem or "not measured")
        return
    early = f" + {span(row.early)} early" if "early" in row.name else ""
    yield f"{span(row.start)} s{early}"
    yield f"{span(row.stop)} s"
    before, inside, after = map(statistics.median, (row.before, row.inside, row.after))
    yield from (f"{part * 1e3:.2f} ms" for part in (before, inside, after))
    stays = row.name != "no profiler" and after > (1 + GONE) * before
    yield f"{after / before - 1:+.1%}" + (" (stays)" if stays else "")
    yield "" if row.name == "no profiler" else against(row, plain)
    longer = 0.0
    if plain.whole and row.whole:
        longer = statistics.median(row.whole) - statistics.median(plain.whole)
    yield "" if row.name == "no profiler" else f"{longer:+.1f} s"
    size = f", {row.report_bytes / row.reports / 1e6:.1f} MB each" if row.reports else ""
    yield shortened(row.problem) or f"{row.reports}{size}"


def against(row: Row, plain: Row) -> str:
    """Steps before, inside and after the window, by those of the same steps without a profiler.

    The last of them is what a capture leaves behind, whatever the program itself does meanwhile.
    """
    if not plain.after:
        return "not measured"
    parts = ((row.before, plain.before), (row.inside, plain.inside), (row.after, plain.after))
    return ", ".join(f"{statistics.median(a) / statistics.median(b) - 1:+.1%}" for a, b in parts)


def shortened(text: str) -> str:
    """For a cell of the table; all of it is on stderr."""
    return text if len(text) <= 60 else text[:59] + "…"


def span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    sys.exit(main())
