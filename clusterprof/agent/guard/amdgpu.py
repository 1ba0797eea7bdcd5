"""One GPU of AMD's as the kernel's driver, amdgpu, has it in sysfs: only read, without a library.

A GPU that is being reset may keep a reader waiting. Why clocks are limited is in `gpu_metrics`
alone, whose form changes with each GPU: it is not read. Sources: "GPU Power/Thermal Controls and
Monitoring", "AMDGPU RAS Support" and "Misc AMDGPU driver information" of the Linux kernel's
documentation. Tested with files written by hand after these: no real GPU was read so far.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Dict, Iterator, List, Optional

from .gpu import Gpu, NoHardwareError

#: a folder `cardN` for each GPU, whose `device` is that of its PCI address
CARDS = "/sys/class/drm"
_VENDOR = "0x1002"
#: GT/s of each generation of PCIe; earlier kernels write "8 GT/s", later ones "8.0 GT/s PCIe"
_GENERATIONS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)
_MOST_B = 4096


class AmdGpu(Gpu):
    """One GPU in sysfs."""

    driver = "amdgpu"

    def __init__(self, uuid: Optional[str], pci: Optional[str], cards: str = CARDS) -> None:
        """The GPU with this PCI address or this UUID, both as torch has them; else the only one.

        HIP's numbers of GPUs are not in the order of PCI addresses, so that no number tells which
        one it is. Raises NoHardwareError.
        """
        super().__init__()
        devices = _devices(cards)
        if not devices:
            raise NoHardwareError("amdgpu has no GPU in %s" % cards)
        serial = _serial(uuid)
        matching = [path for path in devices if os.path.basename(path) == pci]
        if serial and not matching:
            matching = [path for path in devices if _serial_of(path) == serial]
        elif not pci:
            matching = devices
        if len(matching) != 1:
            raise NoHardwareError("which GPU the rank uses cannot be determined")
        self.device = matching[0]
        self.sensors = next(_folders(os.path.join(self.device, "hwmon"), r"hwmon\d+"), self.device)

    def fixed(self) -> Dict[str, Any]:
        """See `Gpu.fixed`; a GPU without a number of its own has no UUID."""
        name = self._text("product_name") or "AMD GPU %s" % (self._text("device") or "")
        levels = _levels(self._text("pp_dpm_sclk"))
        return {
            "uuid": _serial_of(self.device), "name": name.strip(), "driver": self.driver,
            "most_sm_mhz": self.checked("most_sm_mhz", max(levels, default=None)),
            "most_pcie_generation": self.checked(
                "most_pcie_generation", _generation(self._text("max_link_speed"))
            ),
            "most_pcie_width": self.checked("most_pcie_width", self._number("max_link_width")),
        }  # fmt: skip

    def sample(self) -> Dict[str, Optional[int]]:
        """See `Gpu.sample`; power is of all that is in the GPU's package."""
        columns = {
            "sm_mhz": self._sensor("freq1_input", 1_000_000) or self._level("pp_dpm_sclk"),
            "memory_mhz": self._sensor("freq2_input", 1_000_000) or self._level("pp_dpm_mclk"),
            "power_mw": self._sensor("power1_average", 1000) or self._sensor("power1_input", 1000),
            "limit_mw": self._sensor("power1_cap", 1000),
            # the hottest place of the chip, which limits its clocks; else its edge
            "temperature_c": self._sensor("temp2_input", 1000) or self._sensor("temp1_input", 1000),
            "pcie_generation": _generation(self._text("current_link_speed")),
            "pcie_width": self._number("current_link_width"),
            "ecc_uncorrected": _first_number(r"ue: *(\d+)", self._text("ras/umc_err_count")),
            "busy_percent": self._number("gpu_busy_percent"),
        }
        return {name: self.checked(name, value) for name, value in columns.items()}

    def notes(self) -> List[str]:
        """See `Gpu.notes`."""
        return [*super().notes(), "amdgpu does not tell why clocks are limited"]

    def _text(self, name: str) -> Optional[str]:
        return _text_of(os.path.join(self.device, name))

    def _number(self, name: str) -> Optional[int]:
        return _first_number(r"(\d+)", self._text(name))

    def _sensor(self, name: str, unit: int) -> Optional[int]:
        """A value in so many of the sensor's own units (Hz, µW, thousandths of °C)."""
        value = _first_number(r"(\d+)", _text_of(os.path.join(self.sensors, name)))
        return None if value is None else value // unit

    def _level(self, name: str) -> Optional[int]:
        """The clock (MHz) that is marked as the present one."""
        return _first_number(r"(\d+)Mhz *\*", self._text(name))


def _devices(cards: str) -> List[str]:
    """The device of each GPU of AMD's; connectors and parts of GPUs (`amdgpu_xcp`) are none."""
    linked = [os.path.join(folder, "device") for folder in _folders(cards, r"card\d+")]
    paths = [os.path.realpath(path) for path in linked]
    return [path for path in paths if _text_of(os.path.join(path, "vendor")) == _VENDOR]


def _folders(parent: str, pattern: str) -> Iterator[str]:
    """The folders in `parent` with names like this, in order."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(parent)):
            if re.fullmatch(pattern, name):
                yield os.path.join(parent, name)


def _text_of(path: str) -> Optional[str]:
    """What is in a file of the kernel's; None for nothing."""
    with contextlib.suppress(OSError), open(path, "rb") as opened:
        return opened.read(_MOST_B).decode("utf-8", "replace").strip() or None
    return None


def _first_number(pattern: str, text: Optional[str]) -> Optional[int]:
    match = re.search(pattern, text or "")
    return int(match[1][:20]) if match else None


def _levels(text: Optional[str]) -> List[int]:
    """The clocks (MHz) of a table of levels: `1: 600Mhz *`."""
    return [int(number) for number in re.findall(r"(\d{1,6})Mhz", text or "")]


def _generation(text: Optional[str]) -> Optional[int]:
    """The generation of PCIe with this speed ("16.0 GT/s PCIe")."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", text or "")
    speed = float(match[1]) if match else 0.0
    return 1 + _GENERATIONS.index(speed) if speed in _GENERATIONS else None


def _serial_of(device: str) -> Optional[str]:
    """The number that a GPU has of its own, 16 digits; None where it has none."""
    text = (_text_of(os.path.join(device, "unique_id")) or "").lower()
    return text if re.fullmatch("[0-9a-f]{16}", text) and text.strip("0") else None


def _serial(uuid: Optional[str]) -> Optional[str]:
    """The same of torch's UUID: HIP has its digits as text, of which torch writes the bytes."""
    with contextlib.suppress(ValueError):  # a UnicodeDecodeError is one
        text = bytes.fromhex((uuid or "").replace("-", "")).decode("ascii").lower()
        return text if re.fullmatch("[0-9a-f]{16}", text) else None
    return None
