"""Whoever reads the reports, and whatever happens to a reading process: the same results."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from lab import merging_many, reading
from lab.command import Completed, clusterprof as command_line
from lab.parts import LAB

from clusterprof.ingest import Gathered, engines, gather, gathered
from clusterprof.ingest.engines import Processes, Read
from clusterprof.ingest.sources import Source
from clusterprof.launch import tasks
from clusterprof.report import results_json
from clusterprof.study import study
from clusterprof.tables import SCHEMAS

Run = Callable[..., Completed]
Bytes = dict[str, bytes]
#: seconds without a report after which tasks of MPI are lost
LOST_S = "20"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, recordings: Path) -> Path:
    """Four ranks' reports, and one that is none."""
    folder = tmp_path_factory.mktemp("reports")
    for each in (recordings / "nsys-2025.3" / "ddp-host-straggler").glob("rank*"):
        shutil.copy(each, folder)
    (folder / "rank9.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def here(reports: Path) -> Gathered:
    return gather([reports])


#: Recordings of which cases are made, by seeds. By these the last but one has two whole reports,
#: and the last a whole one, one that is none and one of which the tables alone are left.
CASES = (
    "nsys-2025.3/ddp-host-straggler", "nsys-2025.3/ddp-intermittent", "kineto/pipeline",
    "nsys-2024.2/pipeline", "kineto/gloo",
)  # fmt: skip
FIRST_SEED = 134


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, recordings: Path) -> list[Path]:
    """Folders of reports of which some are gone, broken, cut short, or tables alone."""
    folder = tmp_path_factory.mktemp("cases")
    for seed, name in enumerate(CASES, FIRST_SEED):
        merging_many.make(recordings / name, folder / f"case{seed}", seed)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Path]], Bytes]:
    """What one process writes of these cases, each merged once."""
    alone: dict[Path, Bytes] = {}

    def merge(case: Path) -> Bytes:
        out = tmp_path_factory.mktemp("one") / "out"
        merging_many.merge([case], out, Processes(1))
        written = merging_many.written(out)
        names = {name.partition("/")[2] for name in written}
        assert {"merged/results.json", "report.html"} <= names
        assert any(name.endswith("activity.parquet") for name in names)
        assert "error" not in names
        return written

    def merged(cases: Sequence[Path]) -> Bytes:
        alone.update((case, merge(case)) for case in cases if case not in alone)
        return dict(item for case in cases for item in alone[case].items())

    return merged


#: how many processes or tasks of MPI read, and how many of the cases
ENGINES = [(2, 2), *(pytest.param(n, len(CASES), marks=pytest.mark.long) for n in range(1, 6))]


@pytest.mark.parametrize(("workers", "count"), ENGINES)
def test_any_number_of_processes_and_threads_writes_the_same_bytes(
    cases: list[Path],
    in_one_process: Callable[[Sequence[Path]], Bytes],
    tmp_path: Path,
    workers: int,
    count: int,
) -> None:
    for engine in (Processes(workers, always=True), Processes(workers)):
        merging_many.merge(cases[-count:], tmp_path / "out", engine)
        assert merging_many.written(tmp_path / "out") == in_one_process(cases[-count:])


@pytest.mark.long
@pytest.mark.needs_openmpi
@pytest.mark.parametrize(("workers", "count"), ENGINES)
def test_any_number_of_tasks_of_mpi_writes_the_same_bytes(
    cases: list[Path],
    in_one_process: Callable[[Sequence[Path]], Bytes],
    run_command: Run,
    tmp_path: Path,
    workers: int,
    count: int,
) -> None:
    program = [sys.executable, LAB / "merging_many.py", tmp_path / "out", *cases[-count:]]
    done = run_command(
        [*MPIRUN, "-n", str(workers + 1), *program],
        env={**AS_ROOT, "PYTHONPATH": str(LAB.parent)},
    )
    assert done.returncode == 0, done
    assert "MPI" not in done.stderr
    assert merging_many.written(tmp_path / "out") == in_one_process(cases[-count:])


@pytest.fixture
def failing(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Read, dict[int, str]], Gathered]]:
    """Read by `read`, while this happens to who reads these ranks' reports."""
    marked: list[Path] = []

    def fails(read: Read, happens: dict[int, str]) -> Gathered:
        for rank, what in happens.items():
            marked.append(reading.fails(reports / f"rank{rank}.sqlite.xz"))
            marked[-1].write_text(what)
        monkeypatch.setattr(gathered, "_attempt", read)
        return gather([reports], engine=Processes(2, always=True))

    yield fails
    for each in marked:
        each.unlink(missing_ok=True)


#: of each rank's report
HAPPENS = {1: "killed", 2: "out of memory", 3: "hanging"}
WHY = {1: "was killed", 2: "ran out of memory", 3: "took longer than 3 s"}


def test_what_a_process_did_not_hand_back_another_one_reads(
    failing: Callable[[Read, dict[int, str]], Gathered],
    here: Gathered,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = engines._limit_s

    def limited(source: Source) -> float:
        hangs = source.path.name.startswith("rank3") and reading.fails(source.path).exists()
        return 3.0 if hangs else limit_s(source)

    monkeypatch.setattr(engines, "_limit_s", limited)
    found = failing(reading.failing, HAPPENS)
    assert [tables.rank for tables in found.ranks] == [0, 1, 2, 3]
    warnings = [each for each in found.warnings if "reading process" in each]
    assert len(warnings) == len(WHY)
    for rank, why in WHY.items():
        (warning,) = [each for each in warnings if why in each]
        assert warning.startswith(f"rank {rank}: its reading process on ")
    for one, other in zip(here.ranks, found.ranks, strict=True):
        assert all(getattr(one, name).equals(getattr(other, name)) for name in SCHEMAS)


def test_a_report_that_kills_whoever_reads_it_costs_no_other(
    failing: Callable[[Read, dict[int, str]], Gathered],
) -> None:
    found = failing(reading.dying_always, {2: "always"})
    assert [tables.rank for tables in found.ranks] == [0, 1, 3]
    reasons = [each["reason"] for each in found.missing if "rank2" in each["source"]]
    assert len(reasons) == 1
    assert "could not be read: its reading process was killed" in reasons[0]


def test_a_reading_process_does_without_pandas(
    reports: Path, here: Gathered, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")  # pyarrow loads it wherever it is
    monkeypatch.setattr(gathered, "_attempt", reading.loading)
    found = gather([reports], engine=Processes(1, always=True))
    assert [each["source"] for each in found.missing] == [each["source"] for each in here.missing]
    assert [each.warnings for each in found.ranks] == [each.warnings for each in here.ranks]


# -- over MPI


MPIRUN = [Path(sys.executable).parent / "mpirun", "--oversubscribe"]
#: Open MPI will not start as root unless it is told to
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def documented(program: str) -> list[str]:
    """The command of the page that begins so, without what it merges."""
    page = (LAB.parents[1] / "docs" / "cluster.md").read_text()
    (line,) = re.findall(rf"^({program} .*?)(?: +#.*)?$", page, re.MULTILINE)
    return [str(word) for word in line.split()]


def test_every_command_of_the_page_is_one_that_a_test_runs() -> None:
    page = (LAB.parents[1] / "docs" / "cluster.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    others = [line.split(" -")[0] for line in lines if not line.startswith("clusterprof ")]
    # those of clusterprof: test_documentation.py; of srun: test_batch.py; of mpirun: here
    assert others == ["srun", "mpirun", "mpirun"]


@pytest.mark.long
@pytest.mark.needs_openmpi
def test_over_mpi_the_first_task_prints_the_same_bytes_and_the_others_end_like_it(
    reports: Path, run_command: Run, run_clusterprof: Run, workdir: Path
) -> None:
    (workdir / "runs").mkdir()
    (workdir / "runs" / "big").symlink_to(reports)
    alone = run_clusterprof([*documented("clusterprof merge runs/big")[1:], "--json"])
    launcher, number, _, verb, *rest = documented("mpirun -n")
    assert (launcher, verb) == ("mpirun", "clusterprof")
    tasks = [*MPIRUN, number, "2"]
    over = run_command([*tasks, *command_line([*rest, "--json"])], env=AS_ROOT)
    assert alone.returncode == over.returncode == 0, over
    assert (over.stdout, over.stderr) == (alone.stdout, alone.stderr)
    failed = run_command([*tasks, *command_line(["merge", "nothing"])], env=AS_ROOT)
    assert failed.returncode == 3, failed
    assert failed.stderr.count("nothing does not exist") == 1


#: Of each rank's report: what happens to who reads it, and what is said of that. Of the report that
#: is none nothing: another task does not see it yet, so that the first one reads it.
EVENTS = {
    0: ("task killed", "was lost with MPI"), 2: ("out of memory", "ran out of memory"),
    3: ("killed", "was killed"),
}  # fmt: skip
UNSEEN = 9


@pytest.mark.needs_openmpi
def test_tasks_of_mpi_that_are_lost_and_reports_that_they_do_not_see_cost_none_and_are_named(
    reports: Path, run_command: Run, here: Gathered
) -> None:
    for rank, (happens, _) in EVENTS.items():
        reading.fails(reports / f"rank{rank}.sqlite.xz").write_text(happens)
    reading.fails(reports / f"rank{UNSEEN}.json").write_text("unseen")
    launcher, continuous, number, _, verb, *_ = documented("mpirun --continuous")
    assert (launcher, verb) == ("mpirun", "clusterprof")
    program = [LAB / "programs" / "merging.py", "failing", LOST_S, "600", reports, "--json"]
    over = run_command(
        [*MPIRUN, continuous, number, "4", sys.executable, *program],
        env={**AS_ROOT, "PYTHONPATH": str(LAB.parent)},
    )
    assert over.returncode == 0, over
    results = json.loads(over.stdout)
    assert results["missing"] == here.missing
    warnings = [each for each in results["warnings"] if "reading process" in each]
    for rank, (_, why) in EVENTS.items():
        named = [each for each in warnings if why in each]
        assert any(str(rank) in each.partition(":")[0] for each in named), warnings
    alone = json.loads(results_json.dumps(study(here.ranks, here.missing, here.warnings).results))
    assert results["findings"] == alone["findings"]
    assert len(results["ranks"]) == 4


@pytest.mark.needs_openmpi
def test_where_the_process_that_hands_out_is_lost_the_first_task_reads_the_rest(
    reports: Path, run_command: Run
) -> None:
    reading.fails(reports / "rank2.sqlite.xz").write_text("first child killed")
    # without it the other tasks end once they have had nothing to read for a while
    program = [LAB / "programs" / "merging.py", "failing", LOST_S, "10", reports, "--json"]
    over = run_command(
        [*MPIRUN, "--continuous", "-n", "3", sys.executable, *program],
        env={**AS_ROOT, "PYTHONPATH": str(LAB.parent)},
    )
    assert over.returncode == 0, over
    results = json.loads(over.stdout)
    assert [each["rank"] for each in results["ranks"]] == [0, 1, 2, 3]
    # a busy machine may have lost another one before
    (warning,) = [each for each in results["warnings"] if "was lost with MPI" in each]
    assert re.match(r"ranks? .*[23]: its reading process on \S+ was lost with MPI", warning)


@pytest.mark.needs_openmpi
@pytest.mark.parametrize(
    ("broken", "why"),
    [("raise ImportError('no such module')", "no such module"),
     pytest.param("import os; os.abort()", "killed by signal 6", marks=pytest.mark.long),
     ("import time; time.sleep(600)", "not within 2 s")],
    ids=["missing", "aborting", "hanging"],
)  # fmt: skip
def test_where_mpi_does_not_start_the_first_task_merges_alone_and_says_so(
    reports: Path, run_command: Run, workdir: Path, broken: str, why: str
) -> None:
    (workdir / "mpi4py.py").write_text(broken)
    (workdir / "merging.py").write_text(
        "import sys\nfrom clusterprof.cli.main import main\nfrom clusterprof.launch import tasks\n"
        f"tasks.START_S = {2.0 if 'sleep' in broken else tasks.START_S}\nsys.exit(main())\n"
    )
    program = [sys.executable, "merging.py", "merge", reports]
    done = run_command([*MPIRUN, "-n", "2", *program], env={**AS_ROOT, "PYTHONPATH": str(workdir)})
    assert done.returncode == 0, done
    assert "MPI does not start" in done.stderr
    assert why in done.stderr
    assert done.stdout.count("Rank 2 delays the other ranks") == 1
