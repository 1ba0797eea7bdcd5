"""One GPU as NVIDIA's driver has it, by NVML (`libnvidia-ml.so.1`) and ctypes: only read.

The driver may keep a caller waiting, for ever where it hangs. Source: NVIDIA's NVML API Reference
Guide.
"""

from __future__ import annotations

import ctypes
from typing import Any, Dict, List, Optional, Tuple

LIBRARY = "libnvidia-ml.so.1"
_TEXT_B = 96

#: What a sample has, by the function of NVML that gives it and what it is asked for: clocks in MHz,
#: power in mW, energy in mJ since the driver was loaded, °C; unsigned integers of so many bytes.
SAMPLED = {
    "sm_mhz": ("nvmlDeviceGetClockInfo", (1,), 4),
    "memory_mhz": ("nvmlDeviceGetClockInfo", (2,), 4),
    "power_mw": ("nvmlDeviceGetPowerUsage", (), 4),
    "limit_mw": ("nvmlDeviceGetEnforcedPowerLimit", (), 4),
    "energy_mj": ("nvmlDeviceGetTotalEnergyConsumption", (), 8),
    "reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons", (), 8),
    "temperature_c": ("nvmlDeviceGetTemperature", (0,), 4),
    "pcie_generation": ("nvmlDeviceGetCurrPcieLinkGeneration", (), 4),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", (), 4),
    "ecc_uncorrected": ("nvmlDeviceGetTotalEccErrors", (1, 0), 8),
}
#: what does not change
_FIXED = {
    "most_sm_mhz": ("nvmlDeviceGetMaxClockInfo", (1,), 4),
    "most_pcie_generation": ("nvmlDeviceGetMaxPcieLinkGeneration", (), 4),
    "most_pcie_width": ("nvmlDeviceGetMaxPcieLinkWidth", (), 4),
}


class NoHardwareError(Exception):
    """NVML cannot be asked; the message says why, in one line."""


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Gpu:
    """One GPU, as NVML has it. Every method may wait for the driver."""

    def __init__(self, uuid: Optional[str], pid: int, library: str = LIBRARY) -> None:
        """`uuid` as torch has it; without one, the only GPU that process `pid` runs on.

        Raises NoHardwareError.
        """
        try:
            self.nvml = ctypes.CDLL(library)
        except OSError as error:
            raise NoHardwareError("NVML is not there: %s" % error) from None
        status = self.nvml.nvmlInit_v2()
        if status:
            raise NoHardwareError("NVML cannot be used: %s" % self._error(status))
        self.device = self._by_uuid(uuid) if uuid else self._of_process(pid)

    def fixed(self) -> Dict[str, Any]:
        """UUID, name, and what is most of it."""
        texts = {"uuid": self._text("nvmlDeviceGetUUID"), "name": self._text("nvmlDeviceGetName")}
        return dict(texts, **{name: self._number(*asked) for name, asked in _FIXED.items()})

    def sample(self) -> Dict[str, Optional[int]]:
        """The columns of the GPU; None for what it does not tell."""
        numbers = {name: self._number(*asked) for name, asked in SAMPLED.items()}
        busy = (ctypes.c_uint * 2)()  # of the last sampling period: GPU, memory
        told = self.nvml.nvmlDeviceGetUtilizationRates(self.device, busy) == 0
        return dict(numbers, busy_percent=busy[0] if told else None)

    def _number(self, function: str, arguments: Tuple[int, ...], size: int) -> Optional[int]:
        value = ctypes.c_ulonglong() if size == 8 else ctypes.c_uint()
        ask = getattr(self.nvml, function, None)
        told = ask is not None and ask(self.device, *arguments, ctypes.byref(value)) == 0
        return value.value if told else None

    def _text(self, function: str) -> Optional[str]:
        text = ctypes.create_string_buffer(_TEXT_B)
        told = getattr(self.nvml, function)(self.device, text, _TEXT_B) == 0
        return text.value.decode("utf-8", "replace") if told else None

    def _by_uuid(self, uuid: str) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else "GPU-" + uuid
        status = self.nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
        if status:
            raise NoHardwareError("NVML does not know GPU %s: %s" % (uuid, self._error(status)))
        return device

    def _of_process(self, pid: int) -> ctypes.c_void_p:
        count = ctypes.c_uint()
        self.nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        running = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            if self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                running += [device] * (pid in self._processes(device))
        if len(running) != 1:
            raise NoHardwareError("which GPU this rank has cannot be told")
        return running[0]

    def _processes(self, device: ctypes.c_void_p) -> List[int]:
        processes, count = (_Process * 64)(), ctypes.c_uint(64)
        ask = getattr(self.nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None or ask(device, ctypes.byref(count), processes):
            return []
        return [process.pid for process in processes[: count.value]]

    def _error(self, status: int) -> str:
        tell = self.nvml.nvmlErrorString
        tell.restype = ctypes.c_char_p
        return (tell(status) or b"").decode("utf-8", "replace")
