"""A GPU of AMD's as it is read from sysfs: files as the kernel's documentation describes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lab.clock import ManualClock

from clusterprof.agent.contracts.outbox import ROCM
from clusterprof.agent.guard.amdgpu import AmdGpu
from clusterprof.agent.guard.gpu import SAMPLED, NoHardwareError
from clusterprof.agent.guard.hardware_sampler import Asked, HardwareSampler

SERIAL = "4b2c1a9f8d3e6f7a"
#: as torch writes what HIP has of it: the bytes of its text
UUID = "34623263-3161-3966-3864-336536663761"
PCI = "0000:c1:00.0"
#: what there is of an accelerator under load
FILES = {
    "vendor": "0x1002",
    "device": "0x74a1",
    "product_name": "AMD Instinct MI300X OAM",
    "unique_id": SERIAL,
    "gpu_busy_percent": "97",
    "pp_dpm_sclk": "0: 132Mhz\n1: 1407Mhz *\n2: 2100Mhz",
    "pp_dpm_mclk": "0: 900Mhz\n1: 1300Mhz *",
    "current_link_speed": "32.0 GT/s PCIe",
    "current_link_width": "16",
    "max_link_speed": "32.0 GT/s PCIe",
    "max_link_width": "16",
    "ras/umc_err_count": "ue: 2\nce: 17",
    "hwmon/hwmon4/name": "amdgpu",
    "hwmon/hwmon4/freq1_input": "1405000000",
    "hwmon/hwmon4/freq2_input": "1300000000",
    "hwmon/hwmon4/power1_average": "705000000",
    "hwmon/hwmon4/power1_cap": "750000000",
    "hwmon/hwmon4/temp1_input": "48000",
    "hwmon/hwmon4/temp2_input": "66000",
}


def card(cards: Path, number: int = 0, pci: str = PCI, **changes: str | None) -> Path:
    """A GPU in a tree of sysfs; a name of `changes` has `__` for `/`, and None for no such file."""
    device = cards.parent / "devices" / pci
    for name, content in {**FILES, **{k.replace("__", "/"): v for k, v in changes.items()}}.items():
        if content is not None:
            (device / name).parent.mkdir(parents=True, exist_ok=True)
            (device / name).write_text(content + "\n")
    (cards / f"card{number}").mkdir(parents=True)
    (cards / f"card{number}" / "device").symlink_to(device)
    (cards / f"card{number}-DP-1").mkdir()
    return device


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    return tmp_path / "drm"


def opened(cards: Path, uuid: str | None = UUID, pci: str | None = PCI) -> AmdGpu:
    return AmdGpu(uuid, pci, str(cards))


def test_a_gpu_is_read_in_the_units_of_a_sample(cards: Path) -> None:
    card(cards)
    gpu = opened(cards)
    assert gpu.sample() == {
        "sm_mhz": 1405, "memory_mhz": 1300, "power_mw": 705_000, "limit_mw": 750_000,
        "temperature_c": 66, "pcie_generation": 5, "pcie_width": 16, "ecc_uncorrected": 2,
        "busy_percent": 97,
    }  # fmt: skip
    assert gpu.fixed() == {
        "uuid": SERIAL, "name": "AMD Instinct MI300X OAM", "driver": "amdgpu", "most_sm_mhz": 2100,
        "most_pcie_generation": 5, "most_pcie_width": 16,
    }  # fmt: skip
    assert gpu.xids() == []
    assert gpu.notes() == ["amdgpu does not tell why clocks are limited"]


@pytest.mark.parametrize(
    ("changes", "column", "value"),
    [
        ({"hwmon__hwmon4__freq1_input": None}, "sm_mhz", 1407),
        ({"hwmon__hwmon4__freq2_input": None}, "memory_mhz", 1300),
        (
            {
                "hwmon__hwmon4__power1_average": None,
                "hwmon__hwmon4__power1_input": "690000000",
            },
            "power_mw",
            690_000,
        ),
        ({"hwmon__hwmon4__temp2_input": None}, "temperature_c", 48),
        ({"current_link_speed": "16 GT/s"}, "pcie_generation", 4),
        ({"current_link_speed": "2.5 GT/s PCIe"}, "pcie_generation", 1),
        ({"current_link_speed": "Unknown"}, "pcie_generation", None),
        ({"ras__umc_err_count": "Query currently inaccessible"}, "ecc_uncorrected", None),
        ({"ras__umc_err_count": None}, "ecc_uncorrected", None),
        ({"gpu_busy_percent": "255"}, "busy_percent", None),
        ({"gpu_busy_percent": "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")},
         "busy_percent", None),
        ({"hwmon__hwmon4__power1_cap": "9" * 4000}, "limit_mw", None),
        ({"pp_dpm_sclk": "", "hwmon__hwmon4__freq1_input": "0"}, "sm_mhz", None),
    ],
)  # fmt: skip
def test_each_file_may_be_missing_or_another(
    cards: Path, changes: dict[str, Any], column: str, value: int | None
) -> None:
    card(cards, **changes)
    gpu = opened(cards)
    sample = gpu.sample()
    assert sample[column] == value
    assert sample["pcie_width"] == 16
    assert (value is not None) == (not any(column in note for note in gpu.notes()))


def test_a_gpu_of_which_nothing_else_is_there_has_no_values(cards: Path) -> None:
    card(cards, **{name.replace("/", "__"): None for name in FILES if name != "vendor"})
    gpu = opened(cards)
    assert set(gpu.sample().values()) == {None}
    facts = gpu.fixed()
    assert (facts["uuid"], facts["name"], facts["most_sm_mhz"]) == (None, "AMD GPU", None)


def test_a_gpu_is_known_by_its_pci_address_or_its_serial_number_or_as_the_only_one(
    cards: Path,
) -> None:
    card(cards, 0, "0000:c1:00.0")
    assert opened(cards, None, None).device.endswith("c1:00.0")
    card(cards, 1, "0000:23:00.0", unique_id="00112233445566ff")
    card(cards, 2, "0000:01:00.0", vendor="0x10de")  # not of AMD's
    assert opened(cards, None, "0000:23:00.0").device.endswith("23:00.0")
    assert opened(cards, UUID, None).device.endswith("c1:00.0")
    # one that has two GPUs' number is neither
    for uuid, pci in ((None, None), ("5d8f", None), (None, "0000:99:00.0"), ("x" * 99, None)):
        with pytest.raises(NoHardwareError, match="cannot be determined"):
            opened(cards, uuid, pci)


def test_an_address_that_is_not_there_is_not_that_of_the_only_gpu(cards: Path) -> None:
    card(cards, 0)
    with pytest.raises(NoHardwareError, match="cannot be determined"):
        opened(cards, None, "0000:99:00.0")


def test_a_node_without_a_gpu_of_amd_s_is_said(cards: Path) -> None:
    with pytest.raises(NoHardwareError, match="amdgpu has no GPU in "):
        opened(cards)
    card(cards, vendor="0x8086")
    with pytest.raises(NoHardwareError, match="amdgpu has no GPU in "):
        opened(cards)


def test_a_sampler_has_the_columns_of_a_gpu_of_amd_s_and_says_what_is_missing(
    cards: Path, clock: ManualClock
) -> None:
    card(cards)
    sampler = HardwareSampler(
        os.getpid(), clock, lambda work: work(),
        lambda asked, pid: AmdGpu(asked.uuid, asked.pci, str(cards)),
    )  # fmt: skip
    sampler.go_on(Asked(ROCM, None, PCI))
    sampler.turn()
    (sample,) = sampler.samples
    assert [name for name in SAMPLED if sample.get(name) is None] == ["energy_mj", "reasons"]
    state = sampler.state()
    assert (state["uuid"], state["driver"]) == (SERIAL, "amdgpu")
    assert state["note"] == "amdgpu does not tell why clocks are limited"


def test_a_gpu_that_is_being_reset_keeps_no_one_waiting(clock: ManualClock) -> None:
    sampler = HardwareSampler(os.getpid(), clock, lambda work: None)
    sampler.go_on(Asked(ROCM, None, PCI))
    sampler.turn()
    clock.sleep(1.0)
    sampler.turn()
    assert sampler.state() == {"note": "amdgpu did not always answer in time"}
