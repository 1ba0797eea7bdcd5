"""What a rank's writer samples of GPU and node, and that no driver is ever waited for."""

from __future__ import annotations

import csv
import ctypes
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts import paths, states
from clusterprof.agent.contracts.outbox import CUDA, Outbox
from clusterprof.agent.guard import hardware_sampler
from clusterprof.agent.guard.gpu import SAMPLED, NoHardwareError
from clusterprof.agent.guard.hardware_sampler import (
    COLUMNS,
    EVERY_S,
    GOES_ON_S,
    LATEST_S,
    MOST_XIDS,
    Asked,
    HardwareSampler,
)
from clusterprof.agent.guard.nvml import NvmlGpu

#: what an H100 under load gave
VALUES = {
    "nvmlDeviceGetClockInfo": 1350,
    "nvmlDeviceGetPowerUsage": 697064,
    "nvmlDeviceGetEnforcedPowerLimit": 700000,
    "nvmlDeviceGetTotalEnergyConsumption": 123456789,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
    "nvmlDeviceGetTemperature": 55,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
}
#: functions that give something else than a number
_OTHERS = {
    "nvmlErrorString": "_error",
    "nvmlDeviceGetHandleByUUID": "_by_uuid",
    "nvmlDeviceGetUUID": "_uuid",
    "nvmlDeviceGetName": "_device_name",
    "nvmlDeviceGetUtilizationRates": "_rates",
    "nvmlDeviceGetCount_v2": "_count",
    "nvmlDeviceGetHandleByIndex_v2": "_by_index",
    "nvmlDeviceGetComputeRunningProcesses_v3": "_processes",
    "nvmlEventSetCreate": "_listen",
    "nvmlDeviceRegisterEvents": "_listen",
    "nvmlEventSetWait_v2": "_event",
}
UUID = "GPU-5d8f3a4e-0000-1111-2222-333344445555"
NOT_SUPPORTED, NOT_FOUND, NO_MORE, GPU_IS_LOST = 3, 6, 10, 15
GPU = Asked(CUDA, UUID)


class Nvml:
    """A libnvidia-ml that gives `values`, lacks functions and fails as a test wants it."""

    def __init__(self, lacks: str = "", fails: str = "", **values: int) -> None:
        self.values = {**VALUES, **values}
        self.lacks, self.fails = lacks.split(), fails.split()
        #: process ids by GPU
        self.running: list[list[int]] = [[1], [os.getpid()]]
        self.known = UUID
        #: events that were not read: kind and number, and what the driver says after them
        self.events: list[tuple[int, int]] = []
        self.after_events = NO_MORE

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.lacks:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if name in self.fails:
                return NOT_SUPPORTED
            return getattr(self, _OTHERS.get(name, "_number"))(name, *arguments)

        return call

    def _number(self, name: str, *arguments: Any) -> int:
        if name in self.values:
            value = arguments[-1]._obj
            value.value = self.values[name]
        return 0

    def _error(self, name: str, status: int) -> bytes:
        return {NOT_SUPPORTED: b"Not Supported", NOT_FOUND: b"Not Found"}[status]

    def _listen(self, name: str, *arguments: Any) -> int:
        return 0

    def _event(self, name: str, events: Any, event: Any, wait_ms: int) -> int:
        assert wait_ms == 0
        if not self.events:
            return self.after_events
        event._obj.kind, event._obj.number = self.events.pop(0)
        return 0

    def _by_uuid(self, name: str, uuid: bytes, device: Any) -> int:
        return 0 if uuid.decode() == self.known else NOT_FOUND

    def _uuid(self, name: str, device: Any, text: Any, size: int) -> int:
        text.value = UUID.encode()
        return 0

    def _device_name(self, name: str, device: Any, text: Any, size: int) -> int:
        text.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def _rates(self, name: str, device: Any, rates: Any) -> int:
        rates[0] = self.values.get("busy", 100)
        return 0

    def _count(self, name: str, count: Any) -> int:
        count._obj.value = len(self.running)
        return 0

    def _by_index(self, name: str, index: int, device: Any) -> int:
        device._obj.value = 1 + index
        return 0

    def _processes(self, name: str, device: Any, count: Any, processes: Any) -> int:
        pids = self.running[device.value - 1]
        for place, pid in enumerate(pids):
            processes[place].pid = pid
        count._obj.value = len(pids)
        return 0


def gpu(library: Any, uuid: str | None = UUID) -> NvmlGpu:
    return NvmlGpu(uuid, os.getpid(), load=lambda name: library)


def in_place(work: Callable[[], None]) -> None:
    """A thread that has ended before it is looked at."""
    work()


def sampler(
    clock: ManualClock, library: Any, start: Callable[[Callable[[], None]], None] = in_place
) -> HardwareSampler:
    return HardwareSampler(os.getpid(), clock, start, lambda asked, pid: gpu(library, asked.uuid))


def run(sampled: HardwareSampler, clock: ManualClock, seconds: float) -> int:
    """Let the time pass; how often the samples were to be written."""
    ended, until = 0, clock.now() + seconds
    while clock.now() < until:
        ended += sampled.turn()
        clock.sleep(0.25)
    return ended


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# --- NVML


def test_a_gpu_is_read_as_nvml_has_it() -> None:
    made = gpu(Nvml())
    assert made.sample() == {
        "sm_mhz": 1350, "memory_mhz": 1350, "power_mw": 697064, "limit_mw": 700000,
        "energy_mj": 123456789, "reasons": 4, "temperature_c": 55, "pcie_generation": 5,
        "pcie_width": 16, "ecc_uncorrected": 0, "busy_percent": 100,
    }  # fmt: skip
    assert made.fixed() == {
        "uuid": UUID, "name": "NVIDIA H100 80GB HBM3", "most_sm_mhz": 1980,
        "most_pcie_generation": 5, "most_pcie_width": 16,
    }  # fmt: skip
    assert made.notes() == []


@pytest.mark.parametrize("kind", ["lacks", "fails"])
def test_what_nvml_does_not_give_is_left_out_and_said(kind: str) -> None:
    names = "nvmlDeviceGetTotalEccErrors nvmlDeviceGetUtilizationRates nvmlDeviceGetName"
    made = gpu(Nvml(**{kind: names}))  # type: ignore[arg-type]
    sample = made.sample()
    assert (sample["ecc_uncorrected"], sample["busy_percent"]) == (None, None)
    assert sample["sm_mhz"] == 1350
    assert made.fixed()["name"] is None
    assert made.notes() == ["NVML does not give busy_percent, ecc_uncorrected"]


@pytest.mark.parametrize("value", [0, (1 << 32) - 1])
def test_values_that_cannot_be_are_left_out_and_said(value: int) -> None:
    made = gpu(Nvml(nvmlDeviceGetClockInfo=value, nvmlDeviceGetPowerUsage=value))
    sample = made.sample()
    assert [sample[name] for name in ("sm_mhz", "memory_mhz", "power_mw")] == [None] * 3
    assert sample["limit_mw"] == 700000
    assert made.notes() == ["NVML gives impossible values of memory_mhz, power_mw, sm_mhz"]


def test_a_gpu_is_known_by_the_uuid_as_torch_has_it_or_by_its_process() -> None:
    device = gpu(Nvml(), UUID.removeprefix("GPU-")).device
    assert isinstance(device, ctypes.c_void_p)
    instance = Nvml()
    instance.known = "MIG-5d8f"
    gpu(instance, "5d8f")
    assert gpu(Nvml(), None).device.value == 2
    several = Nvml()
    several.running = [[os.getpid()], [os.getpid()]]
    with pytest.raises(NoHardwareError, match="cannot be determined"):
        gpu(several, None)
    with pytest.raises(NoHardwareError, match="does not know GPU 77: Not Found"):
        gpu(Nvml(), "77")


def test_a_library_that_is_not_there_or_cannot_be_used_is_said() -> None:
    with pytest.raises(NoHardwareError, match=r"cannot be loaded: .*libnvidia-none"):
        NvmlGpu(UUID, 1, "libnvidia-none.so.1")
    with pytest.raises(NoHardwareError, match="cannot be used: Not Supported"):
        gpu(Nvml(fails="nvmlInit_v2"))
    with pytest.raises(NoHardwareError, match="it lacks a function"):
        gpu(Nvml(lacks="nvmlInit_v2 nvmlErrorString"))


XID, CLOCK_CHANGE = 8, 16


def test_xids_are_those_since_they_were_last_asked_for() -> None:
    library = Nvml()
    made = gpu(library)
    assert made.xids() == []
    library.events = [(XID, 31), (CLOCK_CHANGE, 7), (XID, 79)]
    assert made.xids() == [31, 79]
    assert made.xids() == []
    assert made.notes() == []
    library.events = [(XID, 13)] * 1000  # a driver that does not stop
    assert len(made.xids()) < 1000


@pytest.mark.parametrize(
    "lacks", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"]
)
@pytest.mark.parametrize("kind", ["lacks", "fails"])
def test_xids_that_cannot_be_had_are_said_to_be_missing(kind: str, lacks: str) -> None:
    made = gpu(Nvml(**{kind: lacks}))  # type: ignore[arg-type]
    assert made.xids() == []
    assert made.notes() == ["NVML does not give xids"]
    assert made.sample()["sm_mhz"] == 1350


def test_a_gpu_that_is_lost_has_the_xids_until_then() -> None:
    library = Nvml()
    made = gpu(library)
    library.events, library.after_events = [(XID, 79)], GPU_IS_LOST
    assert made.xids() == [79]


# --- samples


def test_samples_are_taken_at_once_and_every_second_for_a_while(clock: ManualClock) -> None:
    sampled, began_ns = sampler(clock, Nvml()), clock.wall_ns()
    assert run(sampled, clock, 5) == 0  # none were asked for
    assert not sampled.samples
    began_ns = clock.wall_ns()
    sampled.go_on(GPU)
    assert run(sampled, clock, 3 * GOES_ON_S) == 1
    table = rows(sampled.csv())
    assert tuple(table[0]) == COLUMNS
    after_s = [(int(row["time_ns"]) - began_ns) / 1e9 for row in table]
    assert after_s == [EVERY_S * k for k in range(int(GOES_ON_S / EVERY_S))]
    assert {row["sm_mhz"] for row in table} == {"1350"}
    assert all(float(row["load"]) >= 0 for row in table)
    assert sampled.state()["uuid"] == UUID
    assert "note" not in sampled.state()


def test_a_capture_after_a_look_goes_on_with_the_samples_within_bounds(clock: ManualClock) -> None:
    sampled = sampler(clock, Nvml())
    for _ in range(60):
        sampled.go_on(GPU)
        run(sampled, clock, GOES_ON_S + 1)
    assert len(sampled.samples) == hardware_sampler.MOST_SAMPLES
    assert len(sampled.csv()) < 64_000


def test_a_window_that_ends_within_a_second_is_one_sample(clock: ManualClock) -> None:
    sampled = sampler(clock, Nvml())
    for _ in range(3):
        sampled.go_on(Asked())
        sampled.turn()
        clock.sleep(0.1)
    assert len(sampled.samples) == 1


def test_a_driver_that_hangs_leaves_the_node_s_columns_and_is_asked_by_one_thread(
    clock: ManualClock,
) -> None:
    waiting: list[Callable[[], None]] = []
    sampled = sampler(clock, Nvml(), waiting.append)
    sampled.go_on(GPU)
    assert run(sampled, clock, GOES_ON_S + 1) == 1
    assert len(waiting) == 1
    table = rows(sampled.csv())
    assert len(table) == 10
    assert {row["sm_mhz"] for row in table} == {""}
    assert all(row["load"] for row in table)
    assert sampled.state() == {"note": "NVML did not always answer in time"}


def test_an_answer_that_comes_late_is_of_no_sample_and_the_next_one_counts(
    clock: ManualClock,
) -> None:
    library, waiting = Nvml(), list[Callable[[], None]]()
    sampled = sampler(clock, library, waiting.append)
    sampled.gpu = gpu(library)
    sampled.go_on(GPU)
    assert not sampled.turn()
    clock.sleep(3)
    sampled.turn()
    waiting.pop()()  # the first question's answer
    sampled.start = in_place
    clock.sleep(1)
    sampled.turn()
    assert [sample.get("sm_mhz") for sample in sampled.samples] == [None, None, 1350]
    assert sampled.state()["note"] == "NVML did not always answer in time"


@pytest.mark.parametrize("start", [in_place, None])
def test_what_goes_wrong_with_the_gpu_is_said_and_the_node_is_sampled(
    clock: ManualClock, start: Callable[[Callable[[], None]], None] | None
) -> None:
    def no_thread(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    sampled = sampler(clock, Nvml(fails="nvmlInit_v2"), start or no_thread)
    sampled.go_on(GPU)
    assert run(sampled, clock, GOES_ON_S + 1) == 1
    why = "NVML cannot be used: Not Supported" if start else "NVML did not always answer in time"
    assert why in sampled.state()["note"]
    assert len(sampled.samples) == 10


def test_a_rank_without_a_gpu_has_the_node_s_columns_alone(clock: ManualClock) -> None:
    def never(work: Callable[[], None]) -> None:
        raise AssertionError("NVML is asked")

    sampled = sampler(clock, Nvml(), never)
    sampled.go_on(Asked())
    run(sampled, clock, 2)
    assert sampled.state() == {}
    (row, *_) = rows(sampled.csv())
    assert [name for name in SAMPLED if row[name]] == []


def test_a_program_that_turns_to_its_gpu_later_has_it_sampled(clock: ManualClock) -> None:
    sampled = sampler(clock, Nvml())
    sampled.go_on(Asked())
    run(sampled, clock, 1)
    sampled.go_on(GPU)
    run(sampled, clock, 2)
    assert [row["sm_mhz"] for row in rows(sampled.csv())][-1] == "1350"


def test_errors_have_the_times_between_which_they_were_within_bounds(clock: ManualClock) -> None:
    library = Nvml()
    sampled = sampler(clock, library)
    sampled.go_on(GPU)
    began_ns = clock.wall_ns()
    sampled.turn()
    assert "xids" not in sampled.state()
    clock.sleep(1.0)
    library.events = [(XID, 31)]
    assert not sampled.turn()
    assert sampled.turn()  # to be written before the last sample
    error = {"xid": 31, "after_ns": began_ns, "until_ns": clock.wall_ns()}
    assert sampled.state()["xids"] == [error]
    library.events = [(XID, 13)] * 1000
    run(sampled, clock, GOES_ON_S)
    assert len(sampled.state()["xids"]) == MOST_XIDS
    assert sampled.state()["xids"][0] == error


def test_what_a_gpu_reports_until_the_rank_s_end_is_asked_for_once_more(clock: ManualClock) -> None:
    library = Nvml()
    sampled = sampler(clock, library)
    sampled.end()  # no GPU was sampled
    sampled.go_on(GPU)
    run(sampled, clock, GOES_ON_S + 1)
    library.events = [(XID, 79)]
    samples = len(sampled.samples)
    sampled.end()
    assert [error["xid"] for error in sampled.state()["xids"]] == [79]
    assert (len(sampled.samples), sampled.is_new) == (samples, True)


def test_a_driver_that_hangs_at_the_rank_s_end_is_waited_for_half_a_second(
    clock: ManualClock,
) -> None:
    sampled = sampler(clock, Nvml())
    sampled.go_on(GPU)
    sampled.turn()
    sampled.start = lambda work: None
    before = clock.now()
    sampled.end()
    assert clock.now() - before == pytest.approx(LATEST_S)
    sampled.end()  # it has not answered the question before
    assert clock.now() - before == pytest.approx(LATEST_S)


def test_steal_is_a_share_of_all_processors_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([[10] * 8, [20, 10, 10, 70, 10, 10, 10, 40], []])
    monkeypatch.setattr(hardware_sampler, "_ticks", lambda: next(ticks))
    node = hardware_sampler.Node(os.getpid())
    assert node.sample()["steal"] == pytest.approx(0.3)
    assert node.sample()["steal"] is None  # a kernel that tells nothing any more


# --- in the rank's writer


def test_the_samples_are_beside_the_step_log_and_what_they_are_of_in_the_state(
    outbox: Outbox, rank_folder: Path, clock: ManualClock, written: Callable[[], None]
) -> None:
    outbox.say("hardware", uses="", uuid=None)
    clock.sleep(2.0)
    written()
    table = rows((rank_folder / paths.HARDWARE).read_text())
    assert len(table) >= 2
    assert states.read(str(rank_folder))["hardware"] == {}


def test_a_state_is_written_again_only_where_it_says_something_else(
    outbox: Outbox, rank_folder: Path, clock: ManualClock, written: Callable[[], None]
) -> None:
    for _ in range(5):
        outbox.say("hardware", uses="", uuid=None)
        clock.sleep(GOES_ON_S + 2)
        written()
    assert len((rank_folder / paths.HARDWARE).read_text().splitlines()) > 5 * GOES_ON_S
    assert len(states.read(str(rank_folder))["history"]) == 1


def test_a_rank_without_samples_leaves_no_file(
    outbox: Outbox, rank_folder: Path, written: Callable[[], None]
) -> None:
    written()
    assert not (rank_folder / paths.HARDWARE).exists()


def test_what_a_state_says_of_hardware_in_another_form_is_left_out(tmp_path: Path) -> None:
    for members in ({"uuid": 3}, {"most_sm_mhz": "many"}, {"note": None}, []):
        (tmp_path / paths.STATE).write_text(f'{{"hardware": {members!r}}}'.replace("'", '"')
                                            .replace("None", "null"))  # fmt: skip
        assert "hardware" not in states.read(str(tmp_path))
