"""The doctor's parts: bounded checks, what processes mean, and what nodes have in common."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import clocks
from clusterprof.doctor import cluster, leftovers, table, this_host
from clusterprof.doctor.leftovers import Process
from clusterprof.doctor.table import BAD, OK, WARN, Check, from_json


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_check_that_hangs_or_fails_is_a_bad_line_and_delays_no_other() -> None:
    def fails() -> Check:
        raise OSError("input/output error")

    over = threading.Event()
    found = list(
        this_host.look(
            [
                ("hangs", lambda: over.wait(100) and Check("hangs", OK, "")),
                ("fails", fails),
                ("good", lambda: [Check("good", OK, "a"), Check("better", OK, "b")]),
            ],
            patience_s=1,
        )
    )
    assert not over.is_set()
    over.set()
    assert [(check.name, check.level) for check in found] == [
        ("hangs", BAD), ("fails", BAD), ("good", OK), ("better", OK),
    ]  # fmt: skip
    assert " 1 s" in found[0].found
    assert "input/output error" in found[1].found


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (["/usr/bin/nv-hostengine", "-n"], "DCGM"),
        (["nsys", "profile", "python", "train.py"], "nsys"),
        (["/opt/ncu", "python"], "Nsight Compute"),
    ],
)
def test_programs_that_hold_the_profiling_interface_are_named(line: list[str], kind: str) -> None:
    found = leftovers.other_profilers([Process(7, 1, tuple(line))])
    assert found.level == WARN
    assert kind in found.found
    assert "pid 7" in found.found
    assert found.advice


def test_our_own_questions_to_nsys_and_other_programs_are_no_profilers() -> None:
    asked = [
        Process(7, 5, ("/usr/bin/nsys", "--version")),
        Process(8, 5, ("/usr/bin/nsys", "start", "--help")),
        Process(9, 1, ("python", "nsys.py")),
    ]
    assert leftovers.other_profilers(asked).level == OK


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node on which nothing is left."""
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(leftovers, "_FIXED", tmp_path)
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", str(tmp_path / "shm"))
    return tmp_path


def test_a_daemon_of_nsys_without_a_session_is_a_leftover_and_one_at_work_is_not(
    temporary: Path,
) -> None:
    daemon = ("/opt/nsys", "--start-agent", "--session-name=x")
    found = leftovers.leftovers([Process(40, 1, daemon), Process(41, 39, daemon)])
    assert (found.level, found.advice) == (WARN, "kill 40")
    assert leftovers.leftovers([Process(41, 39, daemon)]).level == OK


def test_a_daemon_of_our_own_is_held_by_its_nsys_and_not_by_its_parent(temporary: Path) -> None:
    daemon = ("/opt/nsys", "--start-agent", "--session-name=clusterprof-run-0")
    nsys = Process(39, 1, ("/opt/nsys", "launch", "--session-new=clusterprof-run-0", "python"))
    assert leftovers.leftovers([nsys, Process(41, 1, daemon)]).level == OK
    found = leftovers.leftovers([Process(41, 500, daemon)])
    assert (found.level, found.advice) == (WARN, "kill 41")


def test_folders_of_ours_that_are_older_than_a_day_are_leftovers(temporary: Path) -> None:
    for name, days in (("clusterprof-old", 2), ("clusterprof-new", 0), ("other", 9)):
        (temporary / name).mkdir()
        then = time.time() - days * 86400
        os.utime(temporary / name, (then, then))
    found = leftovers.leftovers([Process(41, 39, ("nsys", "--start-agent"))])
    assert found.level == WARN
    assert found.advice == f"rm -r {temporary}/clusterprof-old"


def test_what_another_user_left_is_not_ours_to_remove(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / "clusterprof-old").mkdir()
    (temporary / "injection_config_1").touch()
    for path in temporary.iterdir():
        os.utime(path, (0, 0))
    assert leftovers.leftovers([]).level == WARN
    other = os.getuid() + 1
    monkeypatch.setattr(leftovers.os, "getuid", lambda: other)
    assert leftovers.leftovers([]).level == OK


def test_a_rank_s_folder_is_a_leftover_as_soon_as_its_guard_is_gone(temporary: Path) -> None:
    folder = temporary / "clusterprof-x"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
        guard.bind(str(folder / "socket0"))
        guard.listen(1)
        assert leftovers.leftovers([]).level == OK
    found = leftovers.leftovers([])
    assert (found.level, found.advice) == (WARN, f"rm -r {folder}")
    (folder / "report.nsys-rep").write_bytes(b"kept")
    found = leftovers.leftovers([])
    assert re.search(f"1 report .*{folder}", found.found)
    assert "clusterprof collect" in found.advice
    assert "rm -r" not in found.advice


def test_what_nsys_left_in_shared_memory_and_tmp_is_named_with_the_command_that_clears_it(
    temporary: Path,
) -> None:
    (temporary / "shm").mkdir()
    (temporary / "shm/NSys-2022.4").touch()
    (temporary / "shm/nccl-x").touch()
    (temporary / "shm/quadd-agent-instance-41").touch()
    (temporary / "shm/sem.nsys_sem_41").touch()
    (temporary / "injection_config_1").touch()
    shm = temporary / "shm"
    names = ("NSys-2022.4", "quadd-agent-instance-41", "sem.nsys_sem_41")
    assert leftovers.leftovers([]).advice == f"rm {' '.join(str(shm / name) for name in names)}"
    os.utime(temporary / "injection_config_1", (0, 0))
    running = [Process(41, 39, ("nsys", "launch"))]
    assert "-name 'injection_config_*'" in leftovers.leftovers(running).advice
    assert "shm" not in leftovers.leftovers(running).advice
    other = leftovers.leftovers([Process(42, 39, ("nsys", "launch"))]).advice
    assert other.startswith(f"rm {shm}/quadd-agent-instance-41 {shm}/sem.nsys_sem_41;")


@pytest.mark.parametrize(
    ("free", "kind", "level"),
    [(5e10, "ext4", OK), (1e9, "ext4", WARN), (1e8, "ext4", BAD), (5e10, "nfs4", WARN)],
)
def test_the_temporary_folder_needs_space_on_the_nodes_own_disk(
    monkeypatch: pytest.MonkeyPatch, free: float, kind: str, level: str
) -> None:
    monkeypatch.setattr(this_host, "free_bytes", lambda folder: free)
    monkeypatch.setattr(this_host, "file_system", lambda folder: kind)
    found = this_host.temporary_folder()
    assert found.level == level
    assert bool(found.advice) == (level != OK)


def test_a_temporary_folder_that_cannot_lock_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(this_host.fcntl, "flock", refuses)
    found = this_host.temporary_folder()
    assert found.level == BAD
    assert "No locks available" in found.found


def test_a_folder_that_another_node_cannot_see_is_bad(tmp_path: Path, clock: ManualClock) -> None:
    probe, began = tmp_path / "probe", clock.now()
    found = this_host.probed_folder(probe, "n1", clock)
    assert clock.now() - began == pytest.approx(this_host.VISIBLE_S)
    assert (found.level, str(tmp_path) in found.found) == (BAD, True)
    assert "--run-dir" in found.advice
    probe.mkdir()
    clock.plan(this_host.VISIBLE_S - 0.05, (probe / this_host.TOKEN).touch)
    assert this_host.probed_folder(probe, "n1", clock).level == OK
    assert (probe / "n1").exists()


@pytest.mark.parametrize(
    ("state", "level", "shown", "amount"),
    [
        (None, WARN, "", None),
        ({"synchronised": False, "maxerror_ns": 16_000_000_000}, WARN, "", None),
        ({"synchronised": True, "maxerror_ns": 1_500_000}, OK, "1.5 ms", -1_500_000.0),
    ],
)
def test_the_clock_is_as_good_as_the_kernel_says(
    monkeypatch: pytest.MonkeyPatch, state: Any, level: str, shown: str, amount: float | None
) -> None:
    monkeypatch.setattr(clocks, "kernel", lambda: state)
    found = this_host.clock_error()
    assert (found.level, found.amount) == (level, amount)
    assert shown in found.found


@pytest.mark.parametrize(("value", "level"), [("-1\n", OK), ("2\n", OK), ("4\n", WARN)])
def test_paranoia_matters_to_cpu_sampling_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, level: str
) -> None:
    monkeypatch.setattr(this_host, "_PARANOID", tmp_path / "level")
    (tmp_path / "level").write_text(value)
    found = this_host.cpu_sampling()
    assert found.level == level
    assert ("--cpu-sampling" in found.advice) == (level != OK)


def test_nodes_that_agree_share_a_line_and_quantities_show_the_least() -> None:
    lines = table.lines(
        {
            f"n{n}": [Check("loopback", OK, "up"), Check("disk", OK, f"{n} GB free", "", n)]
            for n in (3, 1, 2)
        }
    )
    assert [line.check.amount for line in lines] == [None, 1]
    assert [line.check.found.partition(" at")[0] for line in lines] == ["up", "1 GB free"]
    text = table.render(lines, ["n1", "n2", "n3"])
    assert text.splitlines()[0].split() == ["ok", "loopback", "all", "3", "up"]


@pytest.mark.parametrize("width", [60, 110])
def test_the_table_is_as_wide_as_the_terminal(width: int) -> None:
    hosts = [f"gpu-node-{n:04}.cluster" for n in range(6)]
    found = {
        host: [
            Check("temporary folder", OK, "words of what was found, " * 6),
            Check("nsys", OK if n % 2 else BAD, "2024.2" if n % 2 else "none", "install it " * 9),
        ]
        for n, host in enumerate(hosts)
    }
    text = table.render(table.lines(found), hosts, width)
    assert 40 < max(map(len, text.splitlines())) <= width
    assert text.count("gpu-node-0000.cluster") == text.count("gpu-node-0005.cluster") == 1


def test_nodes_whose_nsys_differs_are_bad_and_both_are_named() -> None:
    lines = table.lines(
        {
            "n1": [Check("nsys", OK, "2024.2")],
            "n2": [Check("nsys", OK, "2025.3")],
            "n3": [Check("nsys", OK, "2024.2")],
        }
    )
    assert [(line.check.level, line.check.found, line.nodes) for line in lines] == [
        (BAD, "2024.2", ("n1", "n3")),
        (BAD, "2025.3", ("n2",)),
    ]
    assert all("--nsys" in line.check.advice for line in lines)


def test_a_node_without_nsys_among_others_that_have_it_is_bad() -> None:
    lines = table.lines(
        {"n1": [Check("nsys", OK, "2024.2")], "n2": [Check("nsys", WARN, "not installed", "x")]}
    )
    assert {line.check.level for line in lines} == {BAD}


def test_what_a_node_sends_is_read_back_as_it_was_and_no_line_is_too_long_for_srun() -> None:
    # srun passes on at most 1024 bytes in one piece; longer lines of two nodes could mix.
    sent = [Check("nsys", OK, "x" * 5000, "y" * 5000), Check("disk", WARN, "é", "", 1.5)]
    answers = cluster.Answers()
    lines = cluster.own_lines("n1", sent)
    assert max(len(line.encode()) for line in lines) < 1000
    for line in [*lines, "a module was loaded", "{}", '{"host": 1}', "[1]"]:
        answers.take(line)
    assert answers.nodes["n1"][1] == sent[1]
    assert answers.done == {"n1"}


def test_a_check_from_elsewhere_that_is_none_is_refused() -> None:
    fields = {"name": "x", "level": "fine", "found": "", "advice": "", "amount": None}
    with pytest.raises(ValueError, match="fine"):
        from_json(fields)
    assert json.loads(json.dumps(asdict(from_json({**fields, "level": OK}))))["name"] == "x"


@pytest.mark.parametrize(
    ("environ", "inside"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "5"}, True),
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "4294967290"}, True),
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}, False),
    ],
)
def test_an_allocation_is_one_outside_of_its_own_tasks(
    environ: dict[str, str], inside: bool
) -> None:
    assert cluster.in_allocation(environ) is inside
