"""Reports that somebody made, or that change while they are read: a verb that reads them ends, in a
sentence, and takes no more memory than it is given.
"""

from __future__ import annotations

import gzip
import lzma
import os
import sqlite3
import stat
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed
from lab.hostile import repeat_pages

from clusterprof.run_directory import Window

# What each of these costs is tested at every change without a process: test_hostile_database,
# test_foreign_input, test_laid_there.
pytestmark = pytest.mark.long
Fault = Callable[..., None]

#: kilobytes
MOST = 6_000_000
#: shortens a file and writes it again, until it is ended
SHORTENS = """
import os, sys
content = open(sys.argv[1], "rb").read()
while True:
    os.truncate(sys.argv[1], len(content) // 2)
    with open(sys.argv[1], "r+b") as file:
        file.write(content)
"""


def in_sql(statement: str) -> Callable[[Path], None]:
    """An export with this done to it."""

    def spoil(export: Path) -> None:
        with closing(sqlite3.connect(export)) as database:
            database.executescript(statement)

    return spoil


def bomb(pack: Callable[[bytes], bytes], ending: str) -> Callable[[Path], None]:
    """A packed export of a few kilobytes, that is large unpacked."""

    def spoil(export: Path) -> None:
        export.unlink()
        export.with_name(export.stem + ending).write_bytes(pack(bytes(100 << 20)))

    return spoil


def pipe(export: Path) -> None:
    export.unlink()
    os.mkfifo(export)


VIEW = """ALTER TABLE StringIds RENAME TO Others;
CREATE VIEW StringIds AS SELECT * FROM Others, Others, Others, Others"""
TRIGGER = "CREATE TRIGGER t AFTER UPDATE ON StringIds BEGIN DELETE FROM StringIds; END"
COLUMN = "ALTER TABLE NVTX_EVENTS ADD COLUMN b TEXT AS (hex(zeroblob(500000000)))"
SPOILT = {
    "pages that repeat": lambda export: repeat_pages(export, "NVTX_EVENTS"),
    "a view as a table": in_sql(VIEW),
    "a trigger": in_sql(TRIGGER),
    "a column that is computed": in_sql(COLUMN),
    "a bomb of xz": bomb(lambda content: lzma.compress(content, preset=0), ".sqlite.xz"),
    "a bomb of gzip": bomb(lambda content: gzip.compress(content, 1), ".json.gz"),
    "a pipe": pipe,
}


@pytest.fixture
def reports(tmp_path: Path, recordings: Path) -> Path:
    """Three ranks' exports."""
    folder = tmp_path / "reports"
    folder.mkdir()
    for packed in sorted((recordings / "nsys-2025.3/ddp").glob("*.sqlite.xz")):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


def merged(reports: Path) -> Completed:
    """The merge of these reports, with so much memory."""
    line = command.clusterprof(["merge", reports, "--force", "--output", reports.with_name("out")])
    done = command.run(["bash", "-c", f'ulimit -v {MOST}; exec "$@"', "-", *line])
    assert "Traceback" not in done.stderr, done
    assert "a bug" not in done.stderr, done
    assert "MemoryError" not in done.stderr, done
    return done


@pytest.mark.parametrize("what", SPOILT)
def test_a_report_that_is_made_to_harm_costs_its_rank_alone(
    what: str, reports: Path, fault: Fault
) -> None:
    SPOILT[what](reports / "rank1.sqlite")
    done = merged(reports)
    fault(f"merge: a report is {what}", 0, done.returncode, 0.0, {})
    assert done.returncode == 0, done
    assert "rank1" in done.stdout + done.stderr, done


@pytest.mark.parametrize("kind", ["sqlite", "gzip"])
def test_a_report_that_is_shortened_while_it_is_read_ends_no_verb_by_a_signal(
    kind: str, reports: Path, recordings: Path, fault: Fault
) -> None:
    changing = reports / "rank1.sqlite"
    if kind == "gzip":
        for export in reports.iterdir():
            export.unlink()
        for trace in (recordings / "kineto/gloo").glob("rank*.json.gz"):
            (reports / trace.name).write_bytes(trace.read_bytes())
        changing = reports / "rank1.json.gz"
    with subprocess.Popen(["python", "-c", SHORTENS, changing], env=command.environment()) as other:
        try:
            statuses = {merged(reports).returncode for _ in range(2)}
        finally:
            other.kill()
    fault(f"merge: a report is shortened meanwhile, {kind}", 0, max(statuses), 0.0, {})
    assert statuses <= {0, 3}


def test_what_a_merge_writes_elsewhere_is_the_user_s_alone_to_write(
    reports: Path, workdir: Path, fault: Fault
) -> None:
    out, page = workdir / "out", workdir / "page.html"
    line = command.clusterprof(["merge", reports, "--output", out, "--html", page])
    done = command.run(["bash", "-c", 'umask 000; exec "$@"', "-", *line])
    fault("merge: --output and --html under umask 000", 0, done.returncode, 0.0, {})
    assert done.returncode == 0, done
    made = [page, out, *out.rglob("*")]
    assert len(made) > 5
    assert [each for each in made if stat.S_IMODE(each.stat().st_mode) & 0o022] == []


def test_damaged_tables_beside_a_whole_trace_are_said(run: Window, fault: Fault) -> None:
    line = command.clusterprof(["merge", run.path])
    assert command.run(line).returncode == 0
    table = run.rank(1) / "reduced/activity.parquet"
    os.truncate(table, table.stat().st_size // 2)
    done = command.run(line)
    fault("merge: damaged tables beside a whole trace", 0, done.returncode, 0.0, {})
    assert done.returncode == 0, done
    assert "activity.parquet" in done.stdout + done.stderr, done
    assert "read instead" in done.stdout + done.stderr, done
