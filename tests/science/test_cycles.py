"""Steps and lateness of a job that left nothing but dumps of its flight recorders."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulate import Cause, Job
from simulate.flight import recorded

from clusterprof import merge_run
from clusterprof.cli import attach
from clusterprof.errors import ReportError
from clusterprof.ingest.flight.all_dumps import Flight, find_dumps, read_dumps
from clusterprof.ingest.flight.cycles import cycles, within

DUMPS = Path(__file__).parent.parent / "data" / "flight"
MS = 1_000_000
JOB = Job(
    dp=8, steps=40, first_step=10, synchronous=True, tear_ns=0, causes=(Cause("host", 3, 8 * MS),)
)


def test_cycles_of_a_simulated_job_are_its_steps() -> None:
    made = recorded(JOB)
    found = cycles(made.flight)
    assert [*found] == [*range(8)]
    steps = {rank: log.num_rows for rank, log in found.items()}
    assert {*steps.values()} <= {38, 39, 40}
    for rank, log in found.items():
        own, true = (table["end_ns"].to_numpy() - table["begin_ns"].to_numpy()
                     for table in (log, made.steps[rank]))  # fmt: skip
        assert np.median(own) == pytest.approx(np.median(true), rel=0.02)
    numbers = {tuple(log["step"].to_pylist()) for log in found.values()}
    assert len(numbers) == 1


def test_calls_of_one_size_are_told_into_steps_by_their_pauses() -> None:
    found = cycles(read_dumps(find_dumps(DUMPS / "pipe" / "timed")))
    calls = {rank: log.num_rows for rank, log in found.items()}
    # four calls a step, of those that both ranks have: one was dumped a second before the other
    assert calls[0] == calls[1] == pytest.approx(466, abs=5)
    log = found[0]
    took = log["end_ns"].to_numpy() - log["begin_ns"].to_numpy()
    assert np.median(took) == pytest.approx(13.8 * MS, rel=0.02)


def test_who_is_late_in_a_recorded_job_by_its_dumps_alone() -> None:
    """Rank 1's host slept for 8 ms before each step."""
    study = merge_run.merge_cycles(find_dumps(DUMPS / "pipe" / "timed"), {0: "n1", 1: "n1"})
    (finding,) = study.results["findings"]
    assert (finding["rank"], finding["severity"]) == (1, "critical")
    low, high = finding["saved_least_ns"], finding["saved_most_ns"]
    assert 8 * MS <= finding["saved_ns_per_step"] == pytest.approx(8 * MS, rel=0.03)
    assert low <= finding["saved_ns_per_step"] <= high


@pytest.mark.parametrize(
    ("dumps", "reason"),
    [
        ("pipe/plain", "no durations of collectives"),
        ("gloo/sleep", "the dumps show no steps"),
        ("nccl/sleep", "the dumps show no steps"),
    ],
)
def test_what_dumps_do_not_tell_is_refused_with_the_reason(dumps: str, reason: str) -> None:
    with pytest.raises(ReportError, match=reason):
        merge_run.merge_cycles(find_dumps(DUMPS / dumps), {})


def test_steps_in_which_a_dump_was_asked_for_are_left_out() -> None:
    logs = cycles(recorded(JOB).flight)
    log = logs[0]
    begin, end = (int(log[name][5].as_py()) for name in ("begin_ns", "end_ns"))
    assert within({0: log}, [(begin + 1, end - 1)]) == {log["step"][5].as_py()}
    assert log["step"][5].as_py() in within(logs, [(begin + 1, end - 1)])
    assert within(logs, []) == set()


@pytest.mark.parametrize("change", ["none alike", "too few", "none of all ranks"])
def test_without_a_cycle_there_are_no_steps(change: str) -> None:
    flight = recorded(replace(JOB, causes=())).flight
    entries = flight.entries
    if change == "too few":
        entries = entries.filter(np.asarray(entries["sequence"]) < 12)
    elif change == "none alike":
        sizes = np.asarray(entries["sequence"])
        column = entries.schema.get_field_index("bytes")
        entries = entries.set_column(column, "bytes", [sizes])
    else:
        entries = entries.filter(np.asarray(entries["rank"]) != 7)
    assert cycles(replace(flight, entries=entries)) == {}


def test_no_dump_at_all_has_no_steps() -> None:
    flight = recorded(replace(JOB, steps=2)).flight
    empty: Flight = replace(flight, entries=flight.entries.slice(0, 0))
    assert cycles(empty) == {}


# -- two rounds of dumps -------------------------------------------------------------------------


def laid(folder: Path, change: Callable[[int, dict[str, Any]], object] = lambda *_: None) -> Path:
    """The recorded dumps as `clusterprof attach` gathers them: all but the last 400 calls before,
    then all.
    """
    for number, left_out in (("1", 400), ("2", 0)):
        (folder / number).mkdir(parents=True)
        for rank in (0, 1):
            packed = (DUMPS / "pipe" / "timed" / f"rank_{rank}.gz").read_bytes()
            dump = pickle.loads(gzip.decompress(packed))
            dump["entries"] = dump["entries"][: len(dump["entries"]) - left_out]
            if number == "2":
                change(rank, dump)
            (folder / number / f"rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    about = {"host": "n1", "ranks": [0, 1], "asked_ns": []}
    (folder / "host-n1.json").write_text(json.dumps(about))
    return folder


def test_without_its_host_a_lateness_has_no_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether hosts that run ahead carry it on is told by their clocks."""
    folder = laid(tmp_path / "x")
    (folder / "host-n1.json").unlink()
    assert attach.shown(folder, as_json=False) == 0
    assert capsys.readouterr().out.startswith("Stragglers cannot be determined")


def test_a_job_whose_ranks_all_go_on_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attach.shown(laid(tmp_path / "x"), as_json=False) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Rank 1 delays the other ranks by 8.12 ms of each 13.8 ms step (59%).")
    assert "the job runs: each rank made 400 calls between the two dumps" in err


def test_a_rank_that_made_no_call_between_two_dumps_is_named_and_the_hang_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(rank: int, dump: dict[str, Any]) -> None:
        if rank == 1:
            del dump["entries"][-400:]

    assert attach.shown(laid(tmp_path / "x", stop), as_json=False) == 0
    out, err = capsys.readouterr()
    assert "rank 1 made no call between the two dumps" in err
    assert "rank 1" in out.splitlines()[0].lower()
    assert "delays" not in out


def test_one_dump_alone_is_no_proof_of_a_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = laid(tmp_path / "x")
    for file in (folder / "2").iterdir():
        file.unlink()
    (folder / "2").rmdir()
    assert attach.shown(folder, as_json=True) == 0
    out, err = capsys.readouterr()
    assert "a call that was on its way looks like one that does not end" in err
    assert '"waiting"' in out


def test_a_damaged_dump_is_a_missing_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = laid(tmp_path / "x")
    dump = folder / "2" / "rank_1"
    dump.write_bytes(dump.read_bytes()[:1000])
    assert attach.shown(folder, as_json=False) == 0
    out, err = capsys.readouterr()
    assert "rank 1 left no second dump that can be read" in err
    assert "the job runs" not in err
    assert "who is late cannot be determined from one rank\n  rank 0 alone has a dump" in err
    assert "rank_1" in err
    assert not out


def test_a_folder_that_attach_has_not_filled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds no dumps that clusterprof attach has gathered"):
        attach.main("attach", [str(tmp_path)], None)
