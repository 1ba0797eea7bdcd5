"""Merging large traces of torch.profiler, beside another reader of them: time and memory."""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from figure import Figure, median
from process import Failed, run

#: TraceLens of AMD is on no package index: `tracelens` on PyPI is another program.
_PEER = "HolisticTraceAnalysis"
#: what it has that a merge has as well: a rank's time by kind, and communication beside compute
_ANALYSIS = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
"""


def merge(folder: Path, rounds: int) -> list[Figure]:
    """Time and peak memory of merging the traces of `folder`, over those of the peer.

    The peer is installed into an environment of its own. Where that fails the ratio is not known.
    """
    with tempfile.TemporaryDirectory(prefix="clusterprof-bench-") as name:
        work = Path(name)
        traces = _unpacked(folder, work / "traces")
        program = Path(sys.executable).parent / "clusterprof"
        peer, missing = _peer(work / "peer")
        ours, theirs = [], []
        for turn in range(rounds):
            if peer is not None:
                analysis = [peer, "-c", _ANALYSIS, work / "traces"]
                theirs.append(run(analysis, memory=True, timeout=600))
            output = work / f"merged-{turn}"
            ours.append(run([program, "merge", "-o", output, *traces], memory=True))
            results = json.loads((output / "merged" / "results.json").read_text())
            if len(results["ranks"]) != len(traces) or not results["collectives"]["matched"]:
                raise Failed(f"the merge did not take in {len(traces)} traces")
        size = sum(path.stat().st_size for path in traces) / 1e6
    seconds = [each.seconds for each in ours]
    peaks = [each.peak_bytes / 1e6 for each in ours]
    what = f"{len(traces)} traces, {size:.0f} MB: {median(seconds):.2f} s, {median(peaks):.0f} MB"
    times: list[float] | None = None
    memory: list[float] | None = None
    baseline = missing
    if theirs:
        pairs = list(zip(ours, theirs, strict=True))
        times = [mine.seconds / other.seconds for mine, other in pairs]
        memory = [mine.peak_bytes / other.peak_bytes for mine, other in pairs]
        took = median([each.seconds for each in theirs])
        held = median([each.peak_bytes / 1e6 for each in theirs])
        baseline = f"{_PEER}: {took:.2f} s, {held:.0f} MB"
    return [
        _ratio("merge of two large traces, time", 1 / 6, times, baseline, what),
        _ratio("merge of two large traces, memory", 1 / 4, memory, baseline, ""),
    ]


def _ratio(
    name: str, limit: float, ratios: list[float] | None, baseline: str, remark: str
) -> Figure:
    measured = median(ratios) if ratios else None
    floor = "imports of three processes and reading take most of it"
    return Figure(
        name, "of the peer's", limit, measured, baseline, remark, ratios or (), floor=floor
    )


def _peer(folder: Path) -> tuple[Path | None, str]:
    """The peer's Python, or why there is none."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", _PEER]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return None, f"{_PEER} could not be installed: {last}"
    return python, ""


def _unpacked(folder: Path, target: Path) -> list[Path]:
    """Plain copies of the traces: the peer reads no .xz."""
    target.mkdir()
    openers = {".xz": lzma.open, ".gz": gzip.open, ".json": open}
    traces = []
    for path in sorted(folder.iterdir()):
        if ".json" in path.suffixes[-2:]:
            plain = target / f"{path.name.partition('.json')[0]}.json"
            with openers[path.suffix](path, "rb") as packed, plain.open("wb") as whole:
                shutil.copyfileobj(packed, whole, 1 << 20)
            traces.append(plain)
    if len(traces) < 2:
        raise Failed(f"{folder} holds no two traces (.json, .json.gz, .json.xz)")
    return traces
