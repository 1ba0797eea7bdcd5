"""A rank's state only moves forward."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import states
from clusterprof.agent.contracts.states import State
from clusterprof.agent.contracts.timing import Clock
from clusterprof.agent.remote import host


def test_states_move_forward_and_keep_their_history(tmp_path: Path) -> None:
    folder = str(tmp_path / "00003")
    for state in ("armed", "waiting", "capturing", "finishing", "captured", "collected"):
        assert states.advance(folder, state)
    found = states.read(folder)
    assert found["state"] == "collected"
    assert next(state for state, _ in found["history"]) == "armed"


def test_a_state_never_moves_back(tmp_path: Path) -> None:
    folder = str(tmp_path)
    states.advance(folder, "captured")
    assert not states.advance(folder, "waiting", "late news")
    assert states.read(folder)["state"] == "captured"
    assert "reason" not in states.read(folder)


def test_of_two_reasons_for_one_state_the_first_stays(tmp_path: Path) -> None:
    folder = str(tmp_path)
    states.advance(folder, "finishing", "closed within a step")
    states.advance(folder, "finishing", "the program ended", whole=True)
    found = states.read(folder)
    assert (found["reason"], found["whole"]) == ("closed within a step", True)


def test_a_second_attempt_may_follow_a_lost_one(tmp_path: Path) -> None:
    folder = str(tmp_path)
    states.advance(folder, "lost", "the program ended before the window began")
    assert states.advance(folder, "armed")
    assert states.read(folder)["attempt"] == 2
    assert "reason" not in states.read(folder)


class Stands(Clock):
    """No turn is over by it, however long a disk stalls."""

    def now(self) -> float:
        return 0.0


def test_of_two_processes_that_write_one_state_none_loses_an_entry(tmp_path: Path) -> None:
    def write(name: str) -> None:
        for number in range(40):
            states.advance(str(tmp_path), "counting", by=Stands(), **{f"{name}{number}": number})

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, "abc"))
    found = states.read(str(tmp_path))
    assert len(found["history"]) == 120
    assert {f"{name}{number}" for name in "abc" for number in range(40)} <= set(found)


def test_the_history_is_bounded_where_a_state_is_written_again(tmp_path: Path) -> None:
    for number in range(states.MOST_REPEATED + 9):
        states.advance(str(tmp_path), None, hangs={"step": number})
    states.advance(str(tmp_path), "lost")
    found = states.read(str(tmp_path))
    assert len(found["history"]) == states.MOST_REPEATED + 1
    assert found["history"][-1][0] == "lost"


def test_a_state_is_written_beside_a_process_that_hangs_over_it(
    tmp_path: Path, clock: ManualClock
) -> None:
    began = clock.now()
    with states._alone(str(tmp_path)):
        assert states.advance(str(tmp_path), "counting", by=clock)
        assert clock.now() - began == pytest.approx(states.TURN_S)


def test_a_state_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert states.read(str(tmp_path)) == {}
    (tmp_path / "state.json").write_text('{"state": "arm')
    assert states.read(str(tmp_path)) == {}


def test_files_appear_whole_and_nothing_is_left_beside(tmp_path: Path) -> None:
    states.advance(str(tmp_path), "armed", rank=3)
    assert os.listdir(tmp_path) == ["state.json"]
    assert json.loads((tmp_path / "state.json").read_text())["rank"] == 3


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        states.advance(str(tmp_path / "file"), "armed")


def test_what_runs_alone_on_a_host_knows_the_same_ended_states() -> None:
    assert {state.value for state in State if state.ended} == set(host._ENDED)


def test_a_state_is_its_word_wherever_it_is_written() -> None:
    assert json.dumps([State.LOST]) == '["lost"]'
    assert f"{State.LOST}, %s" % State.LOST == "lost, lost"
    assert State.of({"state": "lost"}) is State.LOST
    assert [State.of(odd) for odd in ({}, {"state": "new"}, {"state": []})] == [None] * 3
