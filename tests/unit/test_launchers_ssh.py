"""What `clusterprof ssh` makes of a command line, and how it carries words, bytes and files."""

from __future__ import annotations

import base64
import builtins
import hashlib
import io
import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, strategies
from lab import lies
from lab.clock import ManualClock

from clusterprof.collect import answers, connection, over_ssh
from clusterprof.collect.answers import Description
from clusterprof.collect.connection import Answer, command_line, reason
from clusterprof.collect.host_keys import HostKeys, Known, decoded
from clusterprof.collect.over_ssh import RemoteHost
from clusterprof.errors import HostError, LaunchError, RunDirectoryError, UsageError
from clusterprof.jobs import CommandLine, Host, Job, OverSsh
from clusterprof.launch import over_hosts, planning
from clusterprof.launch.over_hosts import PIECE_B, Prefixed
from clusterprof.launchers import ssh
from clusterprof.run_directory import Manifest, Window, create

WORDS = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "-n9",
    "--",
    "two\nlines",
    "`id`",
    "ünï→",
    "",
    "*",
    "\\",
]


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "hostname", lambda name, path: f"{name}.address")


def job(line: str, program: list[str] | None = None, **environ: str) -> Job:
    words = ["--python", "/env/bin/python", *shlex.split(line)]
    return ssh.job(CommandLine(words, program or ["train.py", "--lr", "1"], environ, {}))


def remote(made: Job) -> OverSsh:
    assert made.over_ssh is not None
    return made.over_ssh


def test_each_host_gets_the_same_line_but_for_its_node_rank() -> None:
    made = job("--hosts a,b --nproc-per-node 8")
    start = ("/env/bin/python", "-m", "torch.distributed.run")
    rest = (
        "--master-addr=a.address", "--master-port=29500", "--nnodes=2", "--nproc-per-node", "8",
        "train.py", "--lr", "1",
    )  # fmt: skip
    assert remote(made).commands == (
        (*start, "--node-rank=0", *rest), (*start, "--node-rank=1", *rest),
    )  # fmt: skip
    assert (made.world_size, made.identity) == (16, "torchrun")
    assert made.size_source == "--nnodes=2 --nproc-per-node=8"


def test_what_the_user_says_of_the_meeting_is_not_said_again() -> None:
    first = remote(job("--hosts a,b --master-addr x --master-port 1")).commands[0]
    assert [word for word in first if "master" in word] == ["--master-addr", "--master-port"]
    first = remote(job("--hosts a,b --rdzv-backend c10d --rdzv-endpoint=x:1")).commands[0]
    assert [word for word in first if "rdzv" in word or "master" in word] == [
        "--rdzv-backend", "--rdzv-endpoint=x:1",
    ]  # fmt: skip


def test_a_range_of_nodes_meets_where_torchrun_lets_the_order_of_arrival_decide() -> None:
    there = remote(job("--hosts a,b,c --nnodes 2:4"))
    assert there.fewest == 2
    words = list(there.commands[2])
    assert "--rdzv-backend=c10d" in words
    assert "--rdzv-endpoint=a.address:29500" in words
    assert not any(word.startswith("--node-rank") for word in words)
    assert words[words.index("train.py") - 1] == "--nnodes=2:3", "no waiting for a fourth"
    left = ssh.without(there, [there.hosts[0]], 4711)
    assert [host.name for host in left.hosts] == ["b", "c"]
    assert "--rdzv-endpoint=b.address:4711" in left.commands[0]
    assert "--nnodes=2:2" in left.commands[0]


@pytest.mark.parametrize("python", ["python", "python3.11"])
def test_a_python_before_the_script_is_the_hosts_own(python: str) -> None:
    command = remote(job("--hosts a", [python, "-u", "train.py"])).commands[0]
    assert command[-4:] == ("--no-python", "/env/bin/python", "-u", "train.py")


@pytest.mark.parametrize(
    ("program", "script"),
    [
        (["train.py", "-x"], "train.py"),
        (["python", "sub/train.py"], "sub/train.py"),
        (["./run.sh"], None),
    ],
)
def test_the_script_that_every_host_must_have(program: list[str], script: str | None) -> None:
    assert remote(job("--hosts a", program)).script == script
    assert remote(job("--hosts a -m", ["package.train"])).script is None


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", Host("a", "a")),
        ("me@a:2222", Host("me@a:2222", "a", "me", 2222)),
        ("[::1]:22", Host("[::1]:22", "::1", None, 22)),
        ("me@[fe80::1%eth0]", Host("me@[fe80::1%eth0]", "fe80::1%eth0", "me")),
    ],
)
def test_a_host_may_have_a_user_and_a_port(text: str, host: Host) -> None:
    assert ssh.read_host(text) == host


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=id", "a b", "a:x", "a:0", "a:99999", "@a", "me@-x", "::1", "a@b@c"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        ssh.read_host(text)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--nproc-per-node 2", "--hosts a,b"),
        ("--hosts a,a", "--hosts a,a"),
        ("--hosts a,b --node-rank=1", "--node-rank=1"),
        ("--hosts a --standalone", "--standalone"),
        ("--hosts a,b --nnodes 3", "--nnodes 3 .* 2 hosts"),
        ("--hosts a,b --nnodes 1:x", "--nnodes 1:x"),
        ("--hosts a --env NOT_SET_HERE", "--env NOT_SET_HERE=VALUE"),
        ("--hosts a --env =x", "--env '=x'"),
        ("--hosts a --connect-timeout soon", "--connect-timeout: .*soon"),
    ],
)
def test_a_line_that_cannot_work_is_refused(line: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        job(line)


def test_only_the_named_variables_go_along_and_their_values_are_not_shown() -> None:
    made = job("--hosts a --env ONE --env 'TWO=a=b c'", ONE="1", SECRET="x")
    assert remote(made).environment == {"ONE": "1", "TWO": "a=b c"}
    assert not any("a=b c" in word for word in made.command)


def test_what_starts_the_job_again_has_the_names_of_variables_alone() -> None:
    options = ["--hosts", "a", "--env", "TWO=a=b c", "--env=THREE=3", "--env", "ONE"]
    made = job(shlex.join(options), ONE="1")
    shown = ["--hosts", "a", "--env", "TWO", "--env=THREE", "--env", "ONE"]
    assert planning.without_values(options, made) == shown


def test_words_come_out_of_a_shell_as_they_went_in() -> None:
    odd = [*WORDS, b"\xff".decode(errors="surrogateescape")]
    assert shlex.split(os.fsdecode(command_line(odd))) == odd
    assert remote(job("--hosts a", ["train.py", *WORDS])).commands[0][-len(WORDS) :] == tuple(WORDS)


def test_without_fabric_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "fabric":
            raise ImportError("No module named 'fabric'")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LaunchError, match="needs Fabric") as caught:
        ssh.fabric()
    assert "pip install clusterprof[ssh]" in str(caught.value)


# --- output


def test_lines_of_a_host_carry_its_name_and_stay_whole() -> None:
    stream = io.BytesIO()
    out = Prefixed(stream, "h1: ", threading.Lock())
    for part in (b"on", b"e\ntwo\n\nth", b"ree 1%\rthree 2%\rfo", b"ur\r\nfive\r", b"\n\0six"):
        out(part)
    assert stream.getvalue() == (
        b"h1: one\nh1: two\nh1: \nh1: three 1%\rh1: three 2%\rh1: four\r\nh1: five\r\n"
    )
    out.finish()
    assert stream.getvalue().endswith(b"\nh1: \0six\n")


def test_a_line_without_an_end_is_passed_on_in_pieces_and_in_linear_time() -> None:
    stream = io.BytesIO()
    out = Prefixed(stream, "h1: ", threading.Lock())
    begin = time.process_time()
    for _ in range(1024):
        out(b"x" * 32768)
        assert len(out._rest) < PIECE_B
    out(b"end\n")
    # 0.05 s; it took 7 s where each part was joined to all before it
    assert time.process_time() - begin < 2
    lines = stream.getvalue().split(b"\n")
    assert lines[:-2] == [b"h1: " + b"x" * PIECE_B] * 512
    assert lines[-2:] == [b"h1: end", b""]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_no_line_of_a_host_begins_with_the_name_of_another(size: int) -> None:
    stream = io.BytesIO()
    out = Prefixed(stream, "h1: ", threading.Lock())
    message = b"\nh2: a\rh2: b\r\nh2: c\r\r\n\n\rh2: d\x1b[1mbold\x0bh2: e\n\r"
    for start in range(0, len(message), size):
        out(message[start : start + size])
    out.finish()
    lines = re.split(rb"\r\n|\r|\n", stream.getvalue().removesuffix(b"\r"))
    assert all(line.startswith(b"h1: ") for line in lines)
    assert stream.getvalue().replace(b"h1: ", b"") == message, "all else as the job wrote it"


def test_without_a_prefix_bytes_pass_as_they_come() -> None:
    stream = io.BytesIO()
    out = Prefixed(stream, "", threading.Lock())
    out(b"half a li")
    out(b"ne\xff")
    out.finish()
    assert stream.getvalue() == b"half a line\xff"


def test_output_that_no_process_reads_stops_nothing() -> None:
    stream = io.BytesIO()
    stream.close()
    Prefixed(stream, "h1: ", threading.Lock())(b"line\n")


# --- fetching


class FakeSsh:
    """A host that offers `files`, and of each what `claims` says instead of the truth."""

    def __init__(self, files: dict[str, bytes], claims: dict[str, dict[str, Any]]) -> None:
        self.files = files
        self.claims = claims
        self.asked: list[str] = []
        self.timeout_s = 1.0
        self.connected = True

    def ask(self, argv: list[str], stdin: bytes = b"", *, within_s: float = 1) -> Answer:
        verb = argv[argv.index("-") + 1]
        self.asked.append(verb)
        listed = [
            {
                "path": path,
                "size": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                **self.claims.get(path, {}),
            }
            for path, data in self.files.items()
        ]
        return Answer(0, b"Welcome to this host\n" + json.dumps(listed).encode(), b"")

    def read(self, path: str, most: int) -> Iterator[bytes]:
        before, _, name = path.removeprefix("/tmp/clusterprof-1/").partition("ranks/")
        yield self.files[before + name][:most]


def fetched(
    run: Window, files: dict[str, bytes], **claims: dict[str, Any]
) -> tuple[RemoteHost, FakeSsh]:
    fake = FakeSsh(files, {path.replace("_at_", "/"): what for path, what in claims.items()})
    each = RemoteHost(Host("h1", "h1"), fake, "python", Description("h1"), "/tmp/clusterprof-1")  # type: ignore[arg-type]
    over_ssh.gather(run, [each])
    return each, fake


def test_what_arrives_whole_is_kept_and_then_removed_there(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    each, fake = fetched(run, {"00001/state.json": b"{}", "00001/trace.json.gz": b"abc"})
    assert (each.reason, each.folder) == ("", "")
    assert (run.rank(1) / "trace.json.gz").read_bytes() == b"abc"
    assert fake.asked == ["list", "remove"]


def test_what_a_later_attempt_left_comes_to_its_place(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    each, _ = fetched(run, {"00001/log": b"first", "attempt-2/00001/log": b"second"})
    assert each.reason == ""
    assert (run.path / "ranks/00001/log").read_bytes() == b"first"
    assert (run.path / "attempt-2/ranks/00001/log").read_bytes() == b"second"


def test_a_file_that_does_not_arrive_whole_is_not_taken_and_stays_there(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    files = {"00001/state.json": b"{}", "00001/trace.json.gz": b"abc"}
    each, fake = fetched(run, files, **{"00001/trace.json.gz": {"sha256": "0" * 64}})
    assert "00001/trace.json.gz" in each.reason
    assert "h1:/tmp/clusterprof-1 " in each.reason
    assert f"clusterprof collect {run.path}" in each.reason
    assert sorted(path.name for path in run.rank(1).iterdir()) == ["state.json"]
    assert fake.asked == ["list"]


@pytest.mark.parametrize(
    "path",
    [
        "../../escape",
        "/etc/passwd",
        "00001/../../x",
        "00001/.hidden",
        "1/x",
        "00001/a/b",
        "00001/reduced/a/b",
        "00001/reduced/../x",
        "00001/reduced/.x",
    ],
)
def test_a_host_cannot_have_a_file_written_where_none_belongs(tmp_path: Path, path: str) -> None:
    run = create(tmp_path / "run")
    each, _ = fetched(run, {path: b"x"})
    assert repr(path) in each.reason
    assert [entry.name for entry in (tmp_path / "run" / "ranks").iterdir()] == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "path",
    ["0x0001/log", "000001/log", "00001/lo\ng", "attempt-1/00001/log", "attempt-02/00001/log",
     "\uff10\uff10\uff10\uff10\uff11/log", "9999999999/log", "00001/" + "x" * 101],
)  # fmt: skip
def test_a_file_has_one_name_only(path: str) -> None:
    listing = [{"path": path, "size": 1, "sha256": "0" * 64}]
    files, (problem,) = answers.offered(json.dumps(listing).encode())
    assert files == []
    assert "unknown name" in problem
    assert problem.isprintable()


def test_a_rank_s_reduced_tables_are_fetched_into_their_folder(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    fetched(run, {"00001/reduced/rank.json": b"{}", "00001/log": b"x"})
    assert (run.rank(1) / "reduced" / "rank.json").read_bytes() == b"{}"
    assert sorted(each.name for each in run.rank(1).iterdir()) == ["log", "reduced"]


LOOK = {
    "host": "h1", "machine": "1-2 h1", "temporary": "/tmp", "folder": True, "program": True,
    "nsys": True, "other_nsys": "/opt/nsys", "port": 29500,
}  # fmt: skip


def read(function: Callable[..., Any], answer: bytes, *more: Any) -> tuple[Any, str]:
    """What a reader makes of an answer, and the words with which it refuses it."""
    try:
        return function(answer, *more), ""
    except HostError as error:
        return None, error.what


def test_what_a_host_says_of_itself_is_typed_or_refused() -> None:
    assert answers.description(
        b"hello\n" + json.dumps(LOOK).encode() + b"\n", 29500
    ) == Description(**LOOK)  # type: ignore[arg-type]
    for name, answer in lies.ANSWERS.items():
        value, message = read(answers.description, answer, 29500)
        assert value is None, name
        assert message.isprintable(), name
    accepted = []
    for what, answered in lies.changed(LOOK):
        value, message = read(answers.description, json.dumps(answered).encode(), 29500)
        assert message.isprintable(), what
        assert len(message) < 200, what
        if value is not None:
            accepted.append(what)
    # another value of the same type may be the truth
    assert set(accepted) == {
        "machine is ''", "no other_nsys", "other_nsys is None",
        "folder is True", "program is True", "nsys is True",
    }  # fmt: skip


def test_what_a_host_says_of_a_file_is_typed_or_refused() -> None:
    entry = {"path": "00001/log", "size": 1, "sha256": "0" * 64}
    accepted = []
    for what, answered in lies.changed(entry):
        files, problems = answers.offered(json.dumps([answered, entry]).encode())
        assert files[-1].sha256 == "0" * 64
        assert all(len(each) < 200 and each.isprintable() for each in problems), what
        if not problems:
            accepted.append(what)
    assert accepted == [], "two files of one name are none"
    for name, answer in lies.ANSWERS.items():
        claims, message = read(answers.offered, answer)
        if claims is None:
            assert message == answers.UNLISTED, name
        else:
            assert claims[0] == [], name
            assert len(claims[1]) >= 1, name


_TEXT = strategies.text(max_size=20)
_JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | _TEXT,
    lambda inner: strategies.lists(inner) | strategies.dictionaries(
        strategies.sampled_from([*LOOK, "path", "size", "sha256"]) | _TEXT, inner
    ),
    max_leaves=20,
)  # fmt: skip


@given(_JSON.map(lambda value: json.dumps(value).encode()) | strategies.binary())
def test_an_answer_is_read_or_refused_whatever_it_is(answer: bytes) -> None:
    for function, more in ((answers.description, [29500]), (answers.offered, [])):
        _, message = read(function, answer, *more)
        assert message.isprintable()


@given(strategies.text(), strategies.lists(strategies.text()))
def test_a_known_hosts_file_may_hold_anything(text: str, words: list[str]) -> None:
    known = Known()
    known.read(text + "\n" + " ".join(words))
    decoded(words)


def test_only_keys_of_lines_that_say_so_are_accepted() -> None:
    key = b"\0\0\0\x07ssh-abc123"
    text = base64.b64encode(key).decode()
    known = Known()
    known.read(
        f"# Host h found: line 1 REVOKED\n@revoked h ssh-abc {text}\nh ssh-abc {text} comment\n"
        f"@cert-authority h ssh-abc {text}\nh ssh-xyz {text}\nh ssh-abc {text[:-4]}%%%%\nh\n"
    )
    assert known == Known({key: "ssh-abc"}, {key}, authority=True)


@pytest.mark.needs_fabric
def test_a_key_of_a_type_that_is_known_is_asked_for_first() -> None:
    keys = HostKeys.__new__(HostKeys)
    keys.known = [Known({b"": "ssh-rsa"}), Known({b"": "ecdsa-sha2-nistp384"})]
    near, far = socket.socketpair()
    with near, far:
        types = keys.transport(near).get_security_options().key_types
    assert set(types[:3]) == {"rsa-sha2-512", "rsa-sha2-256", "ecdsa-sha2-nistp384"}


def test_a_host_brings_no_more_than_the_limit_which_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLUSTERPROF_MAX_FETCH_MB", "1")
    run = create(tmp_path / "run")
    each, _ = fetched(run, {"00001/a": b"", "00001/b": b""}, **{"00001/a": {"size": 2_000_000}})
    assert all(each_fact in each.reason for each_fact in ("2 MB", "1 MB", answers.FETCH_MB))
    assert not run.rank(1).exists()


def hosts_with(*offers: dict[str, bytes]) -> list[RemoteHost]:
    return [
        RemoteHost(
            Host(name, name), FakeSsh(files, {}), "python", Description(name), "/tmp/clusterprof-1"
        )  # type: ignore[arg-type]
        for name, files in zip("abc", offers, strict=False)
    ]


@pytest.mark.parametrize(
    ("statuses", "status"), [((0, 0, 0), 0), ((0, 3, 1), 3), ((255, 0, 1), 255), ((0, 0, 143), 143)]
)
def test_the_highest_status_of_its_hosts_is_the_job_s(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], status: int
) -> None:
    def start(each: RemoteHost, there: OverSsh, ends_with: int, output: Any) -> None:
        each.command = cast(
            "Any",
            SimpleNamespace(wait=lambda seconds: True, lost=False, status=lambda: ends_with),
        )

    monkeypatch.setattr(over_hosts, "start", start)
    hosts = hosts_with({}, {}, {})
    there = cast("OverSsh", SimpleNamespace(commands=statuses))
    assert over_hosts.Running(hosts).run(there, cast("Any", None)) == status
    assert [each.status for each in hosts] == list(statuses)


def test_a_host_brings_its_own_ranks_only(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    first, second = hosts_with(
        {"00000/log": b"a"}, {f"{rank:05d}/log": b"b" for rank in (0, 2, 3, 7, 8, 9, 10, 1)}
    )
    first.ranks, second.ranks = frozenset([0, 1]), frozenset([2, 3])
    over_ssh.gather(run, [first, second])
    assert first.reason == ""
    assert "ranks 0–1, 7–10" in second.reason
    assert run.ranks() == [0, 2, 3]
    assert (run.rank(0) / "log").read_bytes() == b"a"


def test_where_only_torchrun_knows_the_ranks_none_is_taken_that_two_hosts_offer(
    tmp_path: Path,
) -> None:
    run = create(tmp_path / "run")
    hosts = hosts_with(
        {"00000/log": b"a", "attempt-2/00001/log": b"a"},
        {"00000/log": b"b", "00001/log": b"b"},
        {"00002/log": b"c"},
    )
    over_ssh.gather(run, hosts)
    assert ["another host" in each.reason for each in hosts] == [True, True, False]
    assert ["rank 0," in each.reason for each in hosts] == [True, True, False]
    assert run.ranks() == [1, 2]
    assert (run.path / "attempt-2/ranks/00001/log").read_bytes() == b"a"
    # A host that brought its own before keeps it, whatever another says afterwards.
    late = hosts_with({"00002/log": b"x"})[0]
    over_ssh.gather(run, [*hosts, late])
    assert re.search("rank 2, .*another host", late.reason)
    assert (run.rank(2) / "log").read_bytes() == b"c"


LEFT = {
    "name": "h1", "address": "h1", "user": None, "port": None, "hostname": "h1",
    "left": "/tmp/clusterprof-0123456789abcdef", "ranks": [0], "brought": [[1, 0]],
}  # fmt: skip


@pytest.mark.needs_fabric
@pytest.mark.parametrize(
    "odd",
    [{"left": "/home/me"}, {"left": 3}, {"address": "-oProxyCommand=id"}, {"name": "\x1b[2J"},
     {"ranks": 1}, {"ranks": ["x"]}, {"brought": [1]}, {"hostname": None}, {"user": ["a"]}],
)  # fmt: skip
def test_a_run_directory_that_says_odd_things_of_its_hosts_is_refused(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    run = create(tmp_path / "run")
    ssh_record = {"config": None, "timeout_s": 1, "python": "python"}
    manifest = Manifest(run.directory.manifest, {"ssh": ssh_record, "hosts": [{**LEFT, **odd}]})
    with pytest.raises(RunDirectoryError, match="hosts are invalid"):
        over_ssh.gather_left(run, manifest, None, "python")


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("--hosts a,b --nproc-per-node 2", [{0, 1}, {2, 3}]),
        ("--hosts a,b", [{0}, {1}]),
        ("--hosts a,b --nproc-per-node gpu", [None, None]),
        ("--hosts a,b --nnodes 1:2", [None, None]),
        ("--hosts a,b --nproc-per-node 2 --rdzv-backend c10d", [None, None]),
        ("--hosts a,b --env PET_NPROC_PER_NODE=2", [{0, 1}, {2, 3}]),
        ("--hosts a,b --env PET_RDZV_BACKEND=c10d", [None, None]),
    ],
)
def test_the_ranks_of_a_host_are_known_where_its_node_rank_decides(
    line: str, ranks: list[set[int] | None]
) -> None:
    made = job(line)
    assert ssh.ranks(remote(made), made.world_size) == ranks


def test_a_lost_host_is_the_reason_of_its_ranks_and_of_no_others(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    (run.rank(1)).mkdir()
    (run.rank(1) / "trace.json.gz").write_bytes(b"abc")
    hosts = hosts_with({}, {})
    hosts[0].reason, hosts[0].ranks, hosts[1].ranks = "it was cut off", {0, 1}, {2, 3}
    over_ssh.name_missing(run, hosts, (0, 1, 2))
    states = run.states()
    assert (states[0]["state"], states[0]["reason"]) == ("lost", "it was cut off")
    assert states[1] == {}, "its report is here"
    assert sorted(states) == [0, 1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TimeoutError("timed out"), " 3 s"),
        (EOFError(), "closed the connection"),
        (OSError(113, "No route"), "No route"),
        (ValueError("something\nlong"), ": something"),
    ],
)
@pytest.mark.needs_fabric
def test_what_goes_wrong_on_the_way_is_said_in_one_line(error: Exception, message: str) -> None:
    text = reason(error, 3)
    assert message in text
    assert "\n" not in text


def test_an_unreachable_host_ends_with_ssh_s_own_status() -> None:
    assert HostError("h1: gone").exit_code == 255


class SlowChannel:
    """A connection that brings so many bytes every ten seconds, for ever."""

    def __init__(self, clock: ManualClock, size: int) -> None:
        self.clock, self.size, self.mark = clock, size, b""

    def settimeout(self, seconds: float) -> None:
        """No piece comes later than that."""
        assert seconds > 10

    def exec_command(self, line: bytes) -> None:
        """Begin the file with the line that it is to begin with."""
        self.mark = line.split()[-2] + b"\n"

    def recv(self, most: int) -> bytes:
        """The next bytes, ten seconds later."""
        self.clock.sleep(10)
        mark, self.mark = self.mark, b""
        return mark or bytes(self.size)

    def close(self) -> None:
        """The end."""


def test_a_host_that_brings_a_byte_now_and_then_is_given_up_after_a_minute(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REAL", clock)
    monkeypatch.setattr(connection.SshHost, "open", lambda _: None)
    host = connection.SshHost.__new__(connection.SshHost)
    for size, is_given_up in ((1, True), (1 << 18, False)):
        channel = SlowChannel(clock, size)
        host.connection = SimpleNamespace(create_session=lambda channel=channel: channel)
        began = clock.now()
        if is_given_up:
            with pytest.raises(HostError, match="less than 1 MB a minute"):
                list(host.read("report", 1 << 30))
            assert clock.now() - began == pytest.approx(60)
        else:
            assert sum(map(len, host.read("report", 40 << 18))) == 40 << 18
