"""Verifying a repair: the stated saving against what the steps of a run after it show.

The jobs are simulated: their step logs from runs of 80 steps, their findings from the windows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from simulate.cases import MS
from simulate.flight import leave, recorded
from simulate.job import Cause, Job
from studies import studied_job

from clusterprof import comparison, run_directory, verification
from clusterprof.agent.contracts import paths
from clusterprof.arguments import parse_ranks
from clusterprof.cli import verify
from clusterprof.errors import ReportError, UsageError
from clusterprof.report import results_json
from clusterprof.results import Results, Verification
from clusterprof.verification import Asked, asked_for

#: hosts and networks differ from run to run, as on other nodes
JOB = Job(
    dp=4, layers=4, synchronous=True, noise_frac=0.01, host_noise_frac=0.1, host_pace_frac=0.02,
    gpu_speed_frac=0.01, network_noise_frac=0.2,
)  # fmt: skip
LATE_NS = 20 * MS


def late(extra_ns: int, seed: int, **more: Any) -> Job:
    """A job whose host of rank 2 loses `extra_ns` in each step."""
    causes = (Cause("host", 2, extra_ns),) if extra_ns else ()
    return replace(JOB, causes=causes, seed=seed, **more)


def left(folder: Path, job: Job, *, past: int = 80, logs: bool = True) -> Path:
    """A run directory with the step logs and the results of a job's run."""
    run = run_directory.create(folder)
    run.directory.write_manifest(
        {"schema_version": 1, "launcher": "torchrun", "world_size": job.world,
         "window": [past, past + job.steps], "selection": parse_ranks("all")._asdict(),
         "again": ["clusterprof", "torchrun", "{ranks}", "--", "python", "train.py"]}
    )  # fmt: skip
    if logs:
        leave(run, recorded(replace(job, first_step=past), past=past))
    write(run.path, studied_job(job).results)
    return run.path


def write(run: Path, results: Results) -> None:
    file = run_directory.Window.at(run).merged / paths.RESULTS
    file.parent.mkdir(parents=True, exist_ok=True)
    results_json.write(file, results)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The runs of this file, each made once and read-only."""
    folder = tmp_path_factory.mktemp("verified")
    jobs = {
        "late": lambda: left(folder / "late", late(LATE_NS, 947_000)),
        "repaired": lambda: left(folder / "repaired", late(0, 947_001)),
        "by half": lambda: left(folder / "half", late(LATE_NS // 2, 947_002)),
        "as before": lambda: left(folder / "before", late(LATE_NS, 947_003)),
        "other job": lambda: left(folder / "other", late(0, 947_004, dp=8)),
        "no logs": lambda: left(folder / "none", late(0, 947_001), logs=False),
        "short": lambda: left(folder / "short", late(0, 947_001), past=10),
    }
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            made[name] = jobs[name]()
        return made[name]

    return run


def checked(a: Path, b: Path, asked: Asked = Asked()) -> Verification:  # noqa: B008 - immutable
    """A verification, which never says what a comparison contradicts."""
    made = verification.verify(a, b, asked)
    results_json.check(Path("x"), json.loads(results_json.dumps(made)), Verification)
    if made["step"] is not None:
        compared = comparison.compare([comparison.measured(a)], [comparison.measured(b)])
        assert made["step"] == compared["step"]
        assert (made["outcome"] == "no change beyond the noise") == (
            compared["step"]["direction"] == "none"
        )
    return made


@pytest.mark.parametrize(
    ("after", "outcome", "note"),
    [
        ("repaired", "as predicted", "straggler.host rank 2 is gone in B"),
        ("by half", "less than predicted", "straggler.host rank 2 is still found in B"),
        ("as before", "no change beyond the noise", "straggler.host rank 2 is still found in B"),
    ],
)
def test_a_late_host_s_saving_is_there_as_far_as_it_was_repaired(
    runs: Callable[[str], Path], after: str, outcome: str, note: str
) -> None:
    made = checked(runs("late"), runs(after))
    assert made["outcome"] == outcome
    assert made["predicted"] is not None
    assert made["predicted"]["findings"] == [{"code": "straggler.host", "ranks": [2]}]
    assert made["predicted"]["saved_ns"] == pytest.approx(LATE_NS, rel=0.1)
    assert any(line.startswith(note) for line in made["notes"])


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("late", "other job", "no runs of one job: A has a world of 4 ranks, B a world of 8"),
        ("late", "no logs", "B has no step log"),
        ("no logs", "late", "A has"),
        ("late", "short", "B has 7 undisturbed steps outside its windows, 16 are needed"),
        ("repaired", "late", "A has"),
    ],
)
def test_what_cannot_be_determined_says_why(
    runs: Callable[[str], Path], before: str, after: str, why: str
) -> None:
    made = checked(runs(before), runs(after))
    assert made["outcome"] == "cannot be determined"
    assert why in made["why"]


# --- several findings


def two_late(seed: int, first_ns: int = LATE_NS, second_ns: int = 8 * MS) -> Job:
    """A job that waits for rank 2, and would for rank 1 if it did not."""
    causes = [Cause("host", rank, ns) for rank, ns in ((2, first_ns), (1, second_ns)) if ns]
    return replace(JOB, causes=tuple(causes), seed=seed)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left(tmp_path_factory.mktemp("both") / "late", two_late(948_000))


@pytest.mark.parametrize(
    ("first_ns", "second_ns", "asked", "basis", "saved_ms"),
    [
        (0, 8 * MS, None, "alone", 12),
        (0, 0, None, "sum", 20),
        (0, 0, "straggler.host:1", "sum", 20),
        (LATE_NS, 0, "straggler.host:1", "alone", 0),
    ],
)
def test_what_is_predicted_is_of_what_was_repaired(
    both: Path, tmp_path: Path, first_ns: int, second_ns: int, asked: str | None,
    basis: str, saved_ms: float,
) -> None:  # fmt: skip
    after = left(tmp_path / "after", two_late(948_001, first_ns, second_ns))
    made = checked(both, after, asked_for(asked))
    assert made["predicted"] is not None
    assert made["predicted"]["basis"] == basis
    assert made["predicted"]["saved_ns"] == pytest.approx(saved_ms * MS, abs=MS)
    assert made["outcome"] == ("as predicted" if saved_ms else "no change beyond the noise")
    # what is stated once the other is repaired is said not to be compared
    stated = "after the repair of straggler.host rank 2, which is not gone in B"
    assert any(note.endswith(stated) for note in made["notes"]) == (not saved_ms)


def edited(both: Path, folder: Path, edit: str) -> Path:
    """The run with both stragglers, what it states of them changed by hand."""
    results: Any = studied_job(two_late(948_000)).results
    first, second = results["findings"][:2]
    match edit:
        case "a third before the second":
            second["saving"]["net_of"].append({"code": "input.stall", "ranks": [0]})
        case "a third, and no replay":
            second["saving"]["net_of"].append({"code": "input.stall", "ranks": [0]})
            results["combined"] = None
        case "unknown":
            first |= {"code": "straggler.shallow", "saved_ns_per_step": 0, "saving": None}
            results["findings"] = [first]
        case "at most":
            first["code"] = "communication.exposed"
            results["findings"] = [first]
        case "choices":
            results["combined"]["remaining_ns"].pop()
        case "centuries":
            first["saved_most_ns"] = 2**60
    copytree(both, folder)
    write(folder, results)
    return folder


def test_repairs_that_no_order_holds_are_replayed_at_once(
    runs: Callable[[str], Path], both: Path, tmp_path: Path
) -> None:
    asked = asked_for("straggler.host:1")
    run = edited(both, tmp_path / "run", "a third before the second")
    made = checked(run, runs("repaired"), asked)
    assert made["predicted"] is not None
    assert made["predicted"]["basis"] == "replay"
    assert made["predicted"]["saved_ns"] == pytest.approx(LATE_NS, abs=MS)
    assert made["outcome"] == "as predicted"
    run = edited(both, tmp_path / "other", "a third, and no replay")
    made = checked(run, runs("repaired"), asked)
    assert made["why"] == (
        "asked for is straggler.host rank 1, and straggler.host rank 2 is gone in B as well: "
        "A does not state what all of them save at once"
    )


def test_all_that_is_stated_at_once_is_verified_at_once(
    runs: Callable[[str], Path], both: Path, tmp_path: Path
) -> None:
    every = asked_for(None, at_once=True)
    made = checked(both, runs("repaired"), every)
    assert made["predicted"] is not None
    assert len(made["predicted"]["findings"]) > 1
    run = edited(both, tmp_path / "run", "a third, and no replay")
    made = checked(run, runs("repaired"), every)
    assert made["why"] == "A states no saving of several findings at once"


def test_a_saving_that_is_unknown_cannot_be_verified(
    runs: Callable[[str], Path], both: Path, tmp_path: Path
) -> None:
    run = edited(both, tmp_path / "run", "unknown")
    for asked in (None, "straggler.shallow:2"):
        made = checked(run, runs("repaired"), asked_for(asked))
        assert made["why"] == "the saving of straggler.shallow rank 2 is unknown in A"


def test_a_saving_that_is_the_most_there_can_be_is_said_to_be(
    runs: Callable[[str], Path], both: Path, tmp_path: Path
) -> None:
    made = checked(edited(both, tmp_path / "run", "at most"), runs("as before"))
    assert any("the most that can be saved" in note for note in made["notes"])


@pytest.mark.parametrize("edit", ["choices", "centuries"])
def test_savings_that_none_can_have_are_a_named_error(
    runs: Callable[[str], Path], both: Path, tmp_path: Path, edit: str
) -> None:
    run = edited(both, tmp_path / "run", edit)
    with pytest.raises(ReportError, match="is damaged"):
        verification.verify(run, runs("repaired"), Asked())


# --- the verb


def test_the_verb_prints_one_line_first_and_ends_with_0(
    runs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(runs("late")), str(runs("repaired"))]
    assert verify.main("verify", line, None) == 0
    text = capsys.readouterr().out
    number = r"[0-9]+\.[0-9] ±[0-9]\.[0-9] ms"
    first_line = rf"predicted {number}, measured {number} of each 35\.[0-9] ms step: as predicted\n"
    assert re.match(first_line, text), text
    assert max(map(len, text.splitlines())) <= 100
    assert verify.main("verify", [*line, "--json"], None) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["verdict"] == text.splitlines()[0]
    assert made["verification_version"] == verification.VERIFICATION_VERSION
    assert verify.main("verify", [str(runs("late")), str(runs("no logs"))], None) == 0
    assert capsys.readouterr().out.startswith("cannot be determined: B has no step log")
    # results alone have no step log
    file = runs("repaired") / "merged" / "results.json"
    assert verify.main("verify", [str(runs("late")), str(file)], None) == 0


def test_what_is_asked_for_must_be_there(runs: Callable[[str], Path], tmp_path: Path) -> None:
    line = [str(runs("late")), str(runs("repaired")), "--finding"]
    with pytest.raises(UsageError, match=r"no finding straggler\.host of rank 3") as caught:
        verify.main("verify", [*line, "straggler.host:3"], None)
    assert "straggler.host:2" in str(caught.value)
    with pytest.raises(UsageError, match="cannot read"):
        verify.main("verify", [*line, "rank 3"], None)
    with pytest.raises(ReportError, match="has not been merged"):
        verify.main("verify", [str(tmp_path), line[1]], None)
