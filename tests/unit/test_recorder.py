"""What is saved of torch's flight recorder, and where it is left alone: torches of many kinds."""

from __future__ import annotations

import gzip
import json
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import outbox as outboxes, paths
from clusterprof.agent.contracts.outbox import Outbox
from clusterprof.agent.contracts.plan import Plan, Selection
from clusterprof.agent.rank import recorder
from clusterprof.agent.rank.recorder import Recorder, UnavailableError, Watching, check_size
from clusterprof.agent.rank.steps import Counter
from clusterprof.agent.rank.window import Window

TEXT = b'{"entries": []}'


class Torch:
    """A torch that has imported itself, with one process group, as the recorder meets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str, backend: str) -> None:
        self.calls: list[tuple[str, dict[str, bool]]] = []
        self.timed = 0
        self.core = SimpleNamespace()
        self.initialised = True
        self.capturing = False
        group = SimpleNamespace(_enable_collectives_timing=self.time)
        torch, dist = ModuleType("torch"), ModuleType("torch.distributed")
        vars(torch).update(
            __version__=version,
            version=SimpleNamespace(hip=None),
            _C=SimpleNamespace(_distributed_c10d=self.core),
            cuda=SimpleNamespace(
                is_initialized=lambda: "nccl" in backend,
                is_current_stream_capturing=lambda: self.capturing,
            ),
        )
        vars(dist).update(
            is_available=lambda: True,
            is_initialized=lambda: self.initialised,
            get_backend_config=lambda group: backend,
            destroy_process_group=self.destroy,
            distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_map=(group,))),
        )
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "torch.distributed", dist)

    def time(self) -> None:
        self.timed += 1

    def destroy(self) -> None:
        self.initialised = False

    def has(self, *names: str, gives: Any = TEXT) -> Torch:
        """Have these functions dump."""

        def make(name: str) -> Any:
            def dump(**arguments: bool) -> Any:
                self.calls.append((name, arguments))
                if isinstance(gives, Exception):
                    raise gives
                return gives

            return dump

        for name in names:
            setattr(self.core, name, make(name))
        return self


class Sent:
    """What a recorder has handed to its writer."""

    def __init__(self, stacks: bool = False, **began_with: str) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(1)
        plan = Plan("run", Selection("0", "ranks", (0,)), (2, 4), "torch", stacks=stacks)
        self.clock = ManualClock()
        outbox = Outbox(ours, self.clock)
        self.counter = Counter(self.clock)
        window = Window(plan, outbox, self.counter)
        self.recorder = Recorder(plan, outbox, began_with, window, clock=False)
        #: the messages by which samples of the hardware were asked for
        self.sampled: list[dict[str, Any]] = []

    def window(self) -> tuple[dict[str, bytes], str]:
        """Run through the window: the files that were sent, and why there is none."""
        self.counter.attend(self.recorder.first, self.recorder.at)
        self.counter.begin()
        for _ in range(6):
            self.clock.sleep(recorder.SETTLE_S)
            self.counter.boundary()
        return self.sent()

    def sent(self) -> tuple[dict[str, bytes], str]:
        files, why, buffer = {}, "", bytearray(self.theirs.recv(1 << 20))
        for kind, body in outboxes.frames(buffer):
            if kind == outboxes.FILE:
                name, _, content = body.partition(b"\n")
                files[name.decode()] = gzip.decompress(content)
            elif b'"do": "hardware"' in body:
                self.sampled.append(json.loads(body))
            else:
                why += body.decode()
        return files, why


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*recorder.SIZES, recorder.TIMING):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("version", "backend", "there", "called"),
    [
        ("2.13.0+cpu", "gloo", ["_dump_fr_trace_json", "_dump_fr_trace"], "_dump_fr_trace_json"),
        ("2.13.0", "cpu:gloo,cuda:nccl", ["_dump_fr_trace_json", "_dump_nccl_trace_json"],
         "_dump_nccl_trace_json"),
        ("2.11.0+cu130", "nccl", ["_dump_nccl_trace", "_dump_nccl_trace_json"],
         "_dump_nccl_trace_json"),
    ],
)  # fmt: skip
def test_the_recorder_of_the_training_s_own_backend_is_saved_after_the_window(
    monkeypatch: pytest.MonkeyPatch, version: str, backend: str, there: list[str], called: str
) -> None:
    torch = Torch(monkeypatch, version, backend).has(*there)
    files, why = Sent().window()
    assert (files, why) == ({paths.FLIGHT: TEXT}, "")
    assert torch.calls == [(called, {"includeCollectives": True, "onlyActive": False})]
    assert torch.timed == 1


def test_the_ranks_of_groups_are_beside_the_dump_of_gloo_which_lists_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for backend, function in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        Torch(monkeypatch, "2.13.0", backend).has(function)
        dist = sys.modules["torch.distributed"]
        world = SimpleNamespace(pg_map=("the group",), pg_names={"the group": "7"})
        monkeypatch.setattr(dist.distributed_c10d, "_world", world)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 4], raising=False)
        files, _ = Sent().window()
        beside = (
            {} if backend == "nccl" else {paths.GROUPS: b'{"pg_config": {"7": {"ranks": [0, 4]}}}'}
        )
        assert files == {paths.FLIGHT: TEXT, **beside}


def test_stacks_and_torch_2_4_have_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["_dump_nccl_trace", "_dump_nccl_trace_json"]
    new = Torch(monkeypatch, "2.12.0", "nccl").has(*both)
    assert Sent(stacks=True).window() == ({paths.FLIGHT_PICKLE: TEXT}, "")
    assert [(name, given["includeStackTraces"]) for name, given in new.calls] == [(both[0], True)]
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "100")
    old = Torch(monkeypatch, "2.4.1", "nccl").has(both[0])
    assert Sent(TORCH_NCCL_TRACE_BUFFER_SIZE="100").window() == ({paths.FLIGHT_PICKLE: TEXT}, "")
    assert [(name, given["includeStackTraces"]) for name, given in old.calls] == [(both[0], False)]


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize("name", recorder.SIZES)
@pytest.mark.parametrize("size", ["0", "-1", "", "many", "20001"])
def test_a_recorder_without_places_is_never_dumped(
    monkeypatch: pytest.MonkeyPatch, began: bool, name: str, size: str
) -> None:
    """Set when the process began, or by the program later: a dump of it aborts the process."""
    torch = Torch(monkeypatch, "2.13.0", "nccl").has("_dump_nccl_trace_json")
    if not began:
        monkeypatch.setenv(name, size)
    files, why = Sent(**({name: size} if began else {})).window()
    assert (files, torch.calls, torch.timed) == ({}, [], 0)
    assert name in why


@pytest.mark.parametrize(
    ("version", "environ", "on"),
    [
        ("2.13.0", {}, True),
        ("2.11.0+cu130", {}, True),
        ("2.11.0a0+a61da4a.nv26.02", {}, False),
        ("2.12.0.dev20260101", {}, True),
        ("2.10.0", {}, False),
        ("2.10.0", {"TORCH_FR_BUFFER_SIZE": "10"}, True),
        ("2.10.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "10"}, True),
        ("2.7.1", {"TORCH_FR_BUFFER_SIZE": "10"}, False),
        ("2.7.1", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "10"}, True),
        ("2.4.0", {}, False),
        ("2.13.0", {"TORCH_FR_BUFFER_SIZE": "10", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, False),
        ("main", {}, False),
    ],
)
def test_what_torch_does_by_default_goes_by_its_version(
    version: str, environ: dict[str, str], on: bool
) -> None:
    try:
        check_size(environ, version)
    except UnavailableError:
        assert not on
    else:
        assert on


@pytest.mark.parametrize("gives", [RuntimeError("no\nway"), None, 7, [b"x"]])
def test_a_function_that_fails_or_gives_anything_else_is_only_reported(
    monkeypatch: pytest.MonkeyPatch, gives: Any
) -> None:
    Torch(monkeypatch, "2.13.0", "gloo").has("_dump_fr_trace_json", gives=gives)
    files, why = Sent().window()
    assert files == {}
    assert '"flight"' in why


def test_without_torch_or_groups_or_a_known_backend_nothing_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    files, why = Sent().window()
    assert (files, "torch" in why) == ({}, True)
    torch = Torch(monkeypatch, "2.13.0", "mpi").has("_dump_fr_trace_json", "_dump_nccl_trace_json")
    files, why = Sent().window()
    assert (files, torch.calls, "mpi" in why) == ({}, [], True)
    torch = Torch(monkeypatch, "2.13.0", "nccl").has("_dump_nccl_trace_json")
    torch.capturing = True
    assert (Sent().window()[0], torch.calls) == ({}, [])


@pytest.mark.parametrize(("backend", "saved"), [("gloo", True), ("nccl", False)])
def test_of_groups_that_are_gone_only_a_recorder_without_cuda_events_is_read(
    monkeypatch: pytest.MonkeyPatch, backend: str, saved: bool
) -> None:
    torch = Torch(monkeypatch, "2.13.0", backend)
    torch.has("_dump_fr_trace_json", "_dump_nccl_trace_json")
    sent = Sent()
    sent.recorder.at(2)
    torch.initialised = False
    sent.recorder.at(4)
    sent.clock.sleep(recorder.SETTLE_S)
    sent.recorder.at(5)
    assert bool(sent.sent()[0]) == bool(torch.calls) == saved


def test_the_user_s_choice_of_timing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recorder.TIMING, "0")
    torch = Torch(monkeypatch, "2.13.0", "nccl").has("_dump_nccl_trace_json")
    assert Sent().window()[0] == {paths.FLIGHT: TEXT}
    assert torch.timed == 0


class Group:
    """A process group with so many collectives in each step."""

    def __init__(self, calls: int) -> None:
        self.calls, self.so_far, self.timed = calls, 1, False

    def _get_sequence_number_for_group(self) -> int:
        return self.so_far

    def _enable_collectives_timing(self) -> None:
        self.timed = True


def trained(
    monkeypatch: pytest.MonkeyPatch,
    calls: list[int],
    step_ms: float,
    first: int = 10,
    backend: str = "nccl",
) -> tuple[list[bool], str]:
    """Which groups are timed after the steps before a window, and what the rank's state says."""
    Torch(monkeypatch, "2.13.0", backend).has("_dump_nccl_trace_json", "_dump_fr_trace_json")
    groups = [Group(each) for each in calls]
    world = SimpleNamespace(pg_map=groups, pg_names={})
    dist = sys.modules["torch.distributed"]
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    rank = Sent()
    rank.recorder.first, rank.recorder.end = first, first + 2
    rank.counter.attend(rank.recorder.due, rank.recorder.at)
    rank.counter.begin()
    for count in range(first + 1):
        # the first steps compile
        rank.clock.sleep(step_ms / 1e3 * (100 if count < 4 else 1))
        for group in groups:
            group.so_far += group.calls
        rank.counter.boundary()
    _, stated = rank.sent()
    return [group.timed for group in groups], stated


@pytest.mark.parametrize(
    ("calls", "step_ms", "timed"),
    [
        ([10], 20.0, [True]),  # 90 µs of 20 ms
        ([10], 10.0, [False]),
        ([10, 2, 0], 10.0, [False, True, True]),  # those with few calls as long as that holds
        ([3, 2], 10.0, [True, True]),
        ([3, 3], 10.0, [True, False]),
        ([0], 0.0, [True]),
    ],
)
def test_collectives_are_timed_where_that_takes_little_of_a_step(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], step_ms: float, timed: list[bool]
) -> None:
    measured, stated = trained(monkeypatch, calls, step_ms)
    assert measured == timed
    assert ("untimed" in stated) != all(timed)


def test_what_is_not_timed_and_what_it_would_take_is_in_the_rank_s_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, stated = trained(monkeypatch, [26, 0], 3.7)
    sentence = (
        "26 collectives in each step of 3.7 ms are not timed, which might take 6.3% of it: "
        "TORCH_NCCL_ENABLE_TIMING=1 times them"
    )
    assert sentence in stated


@pytest.mark.parametrize("first", [0, 1, 2])
def test_all_are_timed_where_no_step_tells_what_that_takes(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    assert trained(monkeypatch, [1000], 1.0, first)[0] == [True]


def test_gloo_times_nothing_and_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "untimed" not in trained(monkeypatch, [1000], 1.0, backend="gloo")[1]


def test_groups_that_do_not_count_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Group, "_get_sequence_number_for_group")
    assert trained(monkeypatch, [1000], 1.0)[0] == [True]


def test_what_the_program_destroys_is_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(monkeypatch, "2.13.0", "nccl").has("_dump_nccl_trace_json")
    sent = Sent()
    sent.recorder.at(2)
    sys.modules["torch.distributed"].destroy_process_group()
    assert not torch.initialised
    sent.recorder.finish(3)
    assert sent.sent() == ({paths.FLIGHT: TEXT}, "")
    assert len(torch.calls) == 1


def test_the_dump_waits_until_the_last_durations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(monkeypatch, "2.13.0", "nccl").has("_dump_nccl_trace_json")
    sent = Sent()
    assert (sent.recorder.at(2), sent.recorder.at(4), sent.recorder.at(5)) == (4, 5, 6)
    assert torch.calls == []
    sent.clock.sleep(recorder.SETTLE_S - 0.01)
    assert (sent.recorder.at(6), torch.calls) == (7, [])
    sent.clock.sleep(0.01)
    assert (sent.recorder.at(7), len(torch.calls)) == (-1, 1)


@pytest.mark.parametrize("count", [1, 3])
def test_a_program_that_ends_early_leaves_what_it_has_of_an_open_window(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    torch = Torch(monkeypatch, "2.13.0", "gloo").has("_dump_fr_trace_json")
    sent = Sent()
    if count > 2:
        sent.recorder.at(2)
    sent.recorder.finish(count)
    files, why = sent.sent()
    assert bool(files) == bool(torch.calls) == (count > 2)
    assert bool(why) == (count < 2)


@pytest.mark.parametrize(
    ("hip", "uuid", "sent"),
    [
        (None, "5d8f", {"uses": "cuda", "uuid": "5d8f"}),
        (None, None, {"uses": "cuda", "uuid": None}),
        ("6.2", "5d8f", {"uses": "rocm", "uuid": "5d8f"}),
    ],
)
def test_samples_of_the_hardware_are_asked_for_where_the_window_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, uuid: str | None, sent: dict[str, Any]
) -> None:
    Torch(monkeypatch, "2.13.0", "nccl").has("_dump_nccl_trace_json")
    torch = sys.modules["torch"]
    torch.version.hip = hip
    device = SimpleNamespace(uuid=uuid) if uuid else SimpleNamespace()
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda index: device
    rank = Sent()
    rank.window()
    assert rank.sampled == [{"do": "hardware", **sent}] * 2


def test_a_gpu_of_amd_s_has_the_pci_address_by_which_the_kernel_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Torch(monkeypatch, "2.13.0", "nccl")
    torch = sys.modules["torch"]
    device = SimpleNamespace(uuid="5d8f", pci_domain_id=0, pci_bus_id=193, pci_device_id=0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda index: device
    assert "pci" not in recorder.gpu()
    torch.version.hip = "6.4"
    assert recorder.gpu() == {"uses": "rocm", "uuid": "5d8f", "pci": "0000:c1:00.0"}


def test_a_rank_without_a_gpu_has_its_node_sampled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch, "2.13.0", "gloo").has("_dump_fr_trace_json")
    rank = Sent()
    rank.window()
    assert rank.sampled == [{"do": "hardware", "uses": "", "uuid": None}] * 2


# --- `--watch`: at the same times on all ranks, and cheaply

S = 1_000_000_000


class Watched:
    """A rank that takes steps of `step_s`; `calls` are the counts at which the watch was called."""

    def __init__(self, step_s: float, every_s: int = 60) -> None:
        self.clock = ManualClock()
        self.recorder = SimpleNamespace(is_open=False)
        outbox = SimpleNamespace(clock=self.clock)
        self.watching = Watching(
            every_s, cast("Any", [self.recorder]), cast("Any", outbox), cast("Any", None)
        )
        self.watching.save = self.save  # type: ignore[method-assign]
        self.step_s, self.count, self.due = step_s, 0, 0
        self.calls: list[int] = []
        self.saved_s: list[float] = []

    def save(self) -> None:
        self.saved_s.append(self.clock.wall_ns() / S)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.clock.sleep(self.step_s)
            self.count += 1
            if 0 <= self.due <= self.count:
                self.calls.append(self.count)
                self.due = self.watching.at(self.count)


def test_it_is_saved_at_the_first_step_after_each_multiple_of_the_time() -> None:
    rank = Watched(0.5)
    rank.train(1000)
    assert len(rank.saved_s) == 8
    assert all(0 <= second % 60 <= 0.5 for second in rank.saved_s), rank.saved_s


def test_between_two_times_the_clock_is_read_in_few_of_the_steps() -> None:
    rank = Watched(0.1, 600)
    rank.train(12_000)
    assert len(rank.saved_s) == 2
    assert len(rank.calls) < 100


def test_steps_that_become_long_do_not_make_it_late() -> None:
    rank = Watched(0.01, 60)
    rank.train(1_000)
    rank.step_s = 1.0
    rank.train(300)
    assert all(second % 60 <= 31 for second in rank.saved_s), rank.saved_s
    assert all(second % 60 <= 1 for second in rank.saved_s[1:]), rank.saved_s


def test_a_window_that_is_open_has_a_dump_of_its_own() -> None:
    rank = Watched(0.5)
    rank.recorder.is_open = True
    rank.train(300)
    assert rank.saved_s == []
    rank.recorder.is_open = False
    rank.train(300)
    assert rank.saved_s


def test_a_recorder_that_cannot_be_had_is_tried_again_at_the_next_time() -> None:
    rank = Watched(0.5)
    rank.watching.save = lambda: (_ for _ in ()).throw(OSError)  # type: ignore[method-assign]
    rank.train(200)
    rank.watching.save = rank.save  # type: ignore[method-assign]
    rank.train(200)
    assert len(rank.saved_s) == 2


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_is_set_does_not_end_it(jump_s: int) -> None:
    rank = Watched(0.5)
    rank.train(200)
    rank.clock.wall_ahead_ns += jump_s * S
    rank.train(2_000)
    assert len(rank.saved_s) > 10
