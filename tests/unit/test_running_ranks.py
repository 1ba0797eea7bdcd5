"""Ranks that run without clusterprof: how they are found, asked, and what is copied of them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lab.clock import ManualClock

from clusterprof.cli import attach
from clusterprof.collect import running_ranks
from clusterprof.errors import ReportError, UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x"}
DUMP = pickle.dumps({"version": "2.10", "entries": []}, 2)


def process(
    proc: Path,
    pid: int,
    environ: Mapping[str, str],
    line: str = "python train.py",
    parent: int = 1,
    exe: str = "/usr/bin/python3.11",
) -> None:
    """Lay down what /proc shows of a process."""
    folder = proc / str(pid)
    (folder / "cwd").mkdir(parents=True)
    (folder / "environ").write_bytes(
        b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
    )
    (folder / "cmdline").write_bytes(line.replace(" ", "\0").encode() + b"\0")
    (folder / "stat").write_text(f"{pid} (py) th) S {parent} 1 1")
    (folder / "exe").symlink_to(exe)
    (folder / "root").symlink_to("/")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe that is read, as the watchdog reads it."""
    path = tmp_path / "pipe_3.pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path
    os.close(reader)


def test_a_rank_is_found_by_its_environment_with_what_it_allows(tmp_path: Path) -> None:
    given = {
        running_ranks.PIPES: "/x/pipe_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/dump_",
        "TORCH_FR_BUFFER_SIZE": "500", running_ranks.TIMING: "1", "SECRET": "hunter2",
    }  # fmt: skip
    process(tmp_path, 10, TORCHRUN | given)
    (rank,) = running_ranks.running_ranks(tmp_path)
    assert (rank.pid, rank.rank, rank.world_size, rank.launcher) == (10, 3, 8, "torchrun")
    assert (rank.pipe, rank.dump) == (Path("/x/pipe_3.pipe"), Path("/x/dump_3"))
    assert (rank.calls, rank.timed) == (500, True)
    assert "hunter2" not in repr(rank)


def test_what_is_not_set_is_torch_s_own_default(tmp_path: Path) -> None:
    process(tmp_path, 10, TORCHRUN | {"HOME": "/home/u"})
    (rank,) = running_ranks.running_ranks(tmp_path)
    assert (rank.pipe, rank.calls, rank.timed) == (None, None, False)
    assert rank.dump == Path("/home/u/.cache/torch/comm_lib_trace_rank_3")


def test_a_name_without_a_folder_is_in_the_process_s_own(tmp_path: Path) -> None:
    process(tmp_path, 10, TORCHRUN | {running_ranks.PIPES: "pipe_"})
    (rank,) = running_ranks.running_ranks(tmp_path)
    assert rank.pipe == tmp_path / "10" / "cwd" / "pipe_3.pipe"


def test_a_container_s_files_are_seen_through_its_process(tmp_path: Path) -> None:
    process(tmp_path, 10, TORCHRUN | {running_ranks.PIPES: "/tmp/pipe_"})
    root = tmp_path / "10" / "root"
    root.unlink()
    root.mkdir()
    (rank,) = running_ranks.running_ranks(tmp_path)
    assert rank.pipe == root / "tmp/pipe_3.pipe"


def test_what_is_no_rank_is_left_out(tmp_path: Path) -> None:
    process(tmp_path, 10, TORCHRUN)
    process(tmp_path, 11, TORCHRUN, "python -c worker", parent=10)  # a DataLoader's
    process(tmp_path, 12, TORCHRUN, "python -m torch.distributed.run train.py")
    process(tmp_path, 13, TORCHRUN, "bash run.sh", exe="/bin/bash")
    process(tmp_path, 14, {"HOME": "/"})
    process(tmp_path, 15, TORCHRUN | {"RANK": "x"})
    (tmp_path / "16").mkdir()  # it has ended meanwhile
    process(tmp_path, 17, TORCHRUN)
    (tmp_path / "17" / "stat").write_text("17 (py")
    (tmp_path / "self").mkdir()
    process(tmp_path, os.getpid(), TORCHRUN)  # clusterprof itself, as a task of srun
    assert [rank.pid for rank in running_ranks.running_ranks(tmp_path)] == [10]


def test_the_job_of_a_process_has_the_ranks_whose_files_are_named_alike(tmp_path: Path) -> None:
    own = TORCHRUN | {running_ranks.PIPES: "/x/pipe_"}
    process(tmp_path, 10, own)
    process(tmp_path, 11, own | {"RANK": "4"})
    process(tmp_path, 12, TORCHRUN | {"RANK": "5", running_ranks.PIPES: "/y/pipe_"})
    ranks = running_ranks.running_ranks(tmp_path)
    job = attach._job_of_process("11", ranks)
    assert {*job.pipes} == {*job.dumps} == {3, 4}
    with pytest.raises(ReportError, match="99 is neither a folder nor a Python process"):
        attach._job_of_process("99", ranks)


def test_without_a_pipe_the_lines_for_the_next_time_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process(tmp_path, 10, TORCHRUN | {"SECRET": "hunter2", "HOME": str(tmp_path)})
    ranks = running_ranks.running_ranks(tmp_path)
    assert attach.listed(ranks) == 0
    with pytest.raises(ReportError, match="has left no dump on this host either"):
        attach._job_of_process("10", ranks)
    shown = capsys.readouterr()
    assert "torchrun  no " in shown.out
    assert "export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=" in shown.err
    assert "hunter2" not in shown.out + shown.err
    assert attach.listed([]) == 0
    assert "has a rank" in capsys.readouterr().err
    assert attach.listed(ranks, as_json=True) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (rank["pid"], rank["pipe"], rank["can_be_asked"]) == (10, None, False)


def test_a_pipe_is_written_to_and_none_is_waited_for(pipe: Path, tmp_path: Path) -> None:
    assert running_ranks.ask(pipe) is None
    unread = tmp_path / "unread.pipe"
    os.mkfifo(unread)
    assert running_ranks.ask(unread) == (
        f"no process here reads {unread}: its rank has ended, or runs on another host"
    )
    assert running_ranks.ask(tmp_path / "none") == f"{tmp_path / 'none'}: No such file or directory"
    (tmp_path / "file").write_text("")
    assert running_ranks.ask(tmp_path / "file") == f"{tmp_path / 'file'} is no named pipe"
    link = tmp_path / "link"
    link.symlink_to(pipe)
    assert running_ranks.ask(link) == f"{link} is no named pipe"


def test_a_pipe_that_is_full_is_not_waited_for(pipe: Path) -> None:
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"1" * 4096):
            pass
    os.close(writer)
    assert running_ranks.ask(pipe) is None


def test_a_pipe_without_permission_says_so(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may open it all the same
    assert running_ranks.ask(pipe) == f"{pipe}: Permission denied"


def gathered(pipe: Path, folder: Path, clock: ManualClock, wait_s: float = 20) -> dict[int, str]:
    folder.mkdir(exist_ok=True)
    dump = folder.parent / "dump_3"
    return running_ranks.gather({3: pipe}, {3: dump}, folder, wait_s, clock)


def test_a_new_dump_is_copied_once_it_is_whole(pipe: Path, tmp_path: Path) -> None:
    dump, clock = tmp_path / "dump_3", ManualClock()
    dump.write_bytes(b"the one before.")
    # written in place, in parts: for two seconds it does not change, and is no whole dump
    clock.plan(3, lambda: dump.write_bytes(DUMP[:10]))
    clock.plan(5, lambda: dump.write_bytes(DUMP))
    assert gathered(pipe, tmp_path / "1", clock) == {}
    assert (tmp_path / "1" / "rank_3").read_bytes() == DUMP
    assert sum(clock.slept) < 8


def test_a_rank_that_does_not_dump_is_waited_for_no_longer_than_asked(
    pipe: Path, tmp_path: Path
) -> None:
    clock, dump = ManualClock(), tmp_path / "dump_3"
    why = gathered(pipe, tmp_path / "1", clock)
    assert why == {3: f"no new dump at {dump} within 20 s"}
    assert 20 <= sum(clock.slept) < 21
    clock.plan(1, lambda: dump.write_bytes(DUMP[:10]))
    assert gathered(pipe, tmp_path / "1", clock) == {3: f"after 20 s {dump} is cut short"}
    clock.plan(19.9, lambda: dump.write_bytes(DUMP))
    assert gathered(pipe, tmp_path / "1", clock) == {}


def test_a_folder_in_the_place_of_a_dump_is_said(pipe: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    clock.plan(1, (tmp_path / "dump_3").mkdir)
    (reason,) = gathered(pipe, tmp_path / "1", clock).values()
    assert reason.startswith("after 20 s ")


def test_pipes_and_dumps_are_found_by_what_their_names_begin_with(tmp_path: Path) -> None:
    for name in ("p_0.pipe", "p_12.pipe", "p_x.pipe", "q_1.pipe", "p_3", "p_12", "p_12.gz"):
        (tmp_path / name).touch()
    assert {*running_ranks.pipes_of(f"{tmp_path}/p_")} == {0, 12}
    assert {*running_ranks.dumps_at(f"{tmp_path}/p_")} == {3, 12}


def test_prefixes_without_a_pipe_are_refused_in_words(tmp_path: Path) -> None:
    for prefix in (f"{tmp_path}/p_", f"{tmp_path}/none/p_"):
        arguments = attach.parser("attach").parse_args(["--pipes", prefix])
        with pytest.raises(ReportError, match=r"no named pipe|cannot be read"):
            attach.job_of(arguments)
    with pytest.raises(UsageError, match="leave out --pipes"):
        attach.main("attach", ["4711", "--pipes", "x"], None)


def test_files_that_are_no_dumps_are_named_as_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--dumps", f"{tmp_path}/dump_", "-o", f"{tmp_path}/out"]
    for rank in range(2):
        (tmp_path / f"dump_{rank}").touch()
    assert attach.main("attach", line, None) == 1
    assert "dump_1 is empty" in capsys.readouterr().err
    (tmp_path / "dump_0").write_text("hello")
    with pytest.raises(ReportError, match=r"no file in .*/out/1 is a dump of a flight recorder"):
        attach.main("attach", line, None)


def test_two_rounds_are_gathered_with_when_and_where(
    pipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, clock, folder = tmp_path / "dump_3", ManualClock(), tmp_path / "out"
    clock.plan(2, lambda: dump.write_bytes(DUMP))
    clock.plan(40, lambda: dump.write_bytes(DUMP + b"\n"))
    other = {4: tmp_path / "none.pipe"}
    job = attach.Job({3: pipe} | other, {3: dump, 4: tmp_path / "dump_4"}, 8)
    assert attach.gather(job, folder, 30, 20, clock) == [3]
    assert sorted(path.name for path in folder.iterdir()) == [
        "1", "2", f"host-{socket.gethostname()}.json",
    ]  # fmt: skip
    hosts, spans = attach._hosts(folder)
    assert hosts == {3: socket.gethostname()}
    assert [(end - begin) // 10**9 for begin, end in spans] == [2, 8]
    assert "none.pipe: No such file or directory" in capsys.readouterr().err


def test_what_is_no_host_file_is_left_out(tmp_path: Path) -> None:
    for number, content in enumerate(("", "{}", '{"host": 1, "ranks": [], "asked_ns": []}', "[")):
        (tmp_path / f"host-{number}.json").write_text(content)
    assert attach._hosts(tmp_path) == ({}, [])


@pytest.mark.parametrize("text", ["off", "0s", "3x", "", "99h"])
def test_a_time_between_two_dumps_is_a_time(text: str) -> None:
    with pytest.raises(UsageError, match="--every"):
        attach.main("attach", ["--every", text], None)
