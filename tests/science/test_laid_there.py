"""A run directory in which somebody has laid pipes, links and lies.

No verb waits for them, tells what is the reader's own, or prints a line that somebody else wrote.
"""

from __future__ import annotations

import contextlib
import lzma
import os
from pathlib import Path
from typing import IO

import pytest

from clusterprof.agent.contracts import files, paths, states
from clusterprof.cli import collect, export, merge, report, runs, status
from clusterprof.errors import ClusterprofError, ReportError
from clusterprof.ingest import Source
from clusterprof.ingest.reports import read_ranks
from clusterprof.run_directory import Window

#: what is laid at once: none of it keeps the rest from being read
FILES = {
    "the manifest": [paths.MANIFEST],
    "the state": ["ranks/00001/state.json"],
    "the trace": ["ranks/00001/trace.json.gz"],
    "the steps": ["ranks/00001/steps.csv"],
    "the clocks": [paths.CLOCK_PROBE],
    "the tables": ["ranks/00001/reduced"],
    "the tables' origin": ["ranks/00001/reduced/rank.json", "ranks/00001/reduced/steps.parquet"],
    "the rest": [
        paths.PLAN, paths.CLOSE, paths.PROBED, "windows/2/order.json", "merged/results.json",
        f"merged/{paths.MERGING}", *(f"ranks/00001/{name}" for name in (
            paths.CLOCK, paths.PROBE, paths.PROBE_ADDRESS, paths.PACE, paths.PAUSES, paths.GARBAGE,
            paths.FLIGHT, paths.HANG, paths.GROUPS, paths.LOG,
        )),
    ],
}  # fmt: skip
RECORDINGS = Path(__file__).parents[1] / "data/recordings"
SECRET = "the reader's own"


def all_verbs(run: Window) -> None:
    """Whatever reads a run does so; an error in words is as good as a result."""
    for verb in (status, merge, collect, runs, report):
        where = run.path.parent if verb is runs else run.path
        with contextlib.suppress(ClusterprofError):
            verb.main(verb.__name__.rpartition(".")[2], [str(where)], None)
    with contextlib.suppress(ClusterprofError):
        out = run.path.parent / "out"
        export.main("export", [str(run.path), "--format=csv", "--force", f"-o{out}"], None)


def places(run: Window, names: list[str]) -> list[Path]:
    """Where the files are, none of which is there now; with a step log, for its pace to be read."""
    steps = run.rank(1) / paths.STEPS
    steps.write_text("step,begin_ns,end_ns\n1,10,20\n")
    found = [run.path / name for name in names]
    for place in found:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("names", FILES.values(), ids=FILES)
def test_nothing_waits_for_a_pipe(run: Window, names: list[str]) -> None:
    for place in places(run, names):
        os.mkfifo(place)
    all_verbs(run)


@pytest.mark.parametrize("names", FILES.values(), ids=FILES)
def test_no_link_is_followed_to_what_is_the_reader_s_alone(
    run: Window, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    secret = run.path.parent / "secret"
    # as the content of each kind of file would be read, its words shown
    secret.write_text(f'{{"state": "lost", "reason": "{SECRET}", "host": "{SECRET}"}}\n{SECRET}\n')
    for place in places(run, names):
        place.symlink_to(secret)
    all_verbs(run)
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    made = [each for each in run.path.parent.rglob("*") if each.is_file() and not each.is_symlink()]
    assert [each for each in made if SECRET.encode() in each.read_bytes()] == [secret]


def test_no_text_of_a_run_makes_a_line_of_its_own(
    run: Window, capsys: pytest.CaptureFixture[str]
) -> None:
    lie = "x\nforged: a line\r\nforged: another\x85forged\u2028forged"
    for rank, state in enumerate(("lost", "captured", "armed")):
        states.advance(str(run.rank(rank)), state, lie, host=lie, not_reduced=lie, report_at=lie)
    manifest = run.directory.read_manifest()
    manifest.record(launcher=lie, again=["clusterprof", lie], world_size=4, ended=None)
    hang = {"step": 3, "since_ns": 10**18, "until_ns": None, "line": lie, "no_dump": lie}
    states.advance(str(run.rank(0)), "lost", lie, hangs=hang)
    all_verbs(run)
    shown = capsys.readouterr()
    lines = (shown.out + shown.err).splitlines()
    assert any("forged" in line for line in lines)
    assert [line for line in lines if line.lstrip().startswith("forged")] == []


@pytest.mark.parametrize("name", ["trace.json.gz", "reduced/activity.parquet", "rank.sqlite"])
def test_a_report_that_is_shortened_while_it_is_read_costs_its_rank_alone(
    run: Window, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.rank(1)
    if name == "rank.sqlite":
        (packed, *_) = sorted(RECORDINGS.glob("nsys-2025.3/ddp/*.sqlite.xz"))
        (folder / name).write_bytes(lzma.decompress(packed.read_bytes()))
    reports = [folder / name] if name == "rank.sqlite" else [folder / "trace.json.gz"]
    kept = folder / "reduced" if "reduced" in name else None
    source = Source(reports[0], reduced=kept)
    assert read_ranks(source)
    if kept is not None:
        reports[0].unlink()
    opened, spoilt = files.opened, folder / name

    def shortened(path: Path, *given: bool, **more: bool) -> IO[bytes]:
        file = opened(path, *given, **more)
        if Path(path) == spoilt:
            os.truncate(path, spoilt.stat().st_size // 2)
        return file

    monkeypatch.setattr(files, "opened", shortened)
    with pytest.raises(ReportError):
        read_ranks(source)
