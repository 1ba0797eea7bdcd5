"""One GPU as NVIDIA's driver has it, by NVML (`libnvidia-ml.so.1`) and ctypes: only read.

The driver may keep a caller waiting, for ever where it hangs. It has no count of XID errors, which
are in the kernel's log alone. Source: NVIDIA's NVML API Reference Guide.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

LIBRARY = "libnvidia-ml.so.1"
_TEXT_B = 96
#: Integers of Arrow and JSON go so far.
_FARTHEST = 1 << 62


class Number(NamedTuple):
    """A number that NVML gives: by which function, asked for what, in how many bytes."""

    function: str
    arguments: Tuple[int, ...]
    size: int
    #: what it can be: drivers give 0 or the largest integer for what they do not know
    least: int
    most: int


#: What a sample has: clocks in MHz, power in mW, energy in mJ since the driver was loaded, °C;
#: `reasons` are the bits of nvmlClocksThrottleReason; ECC errors since the driver was loaded.
SAMPLED = {
    "sm_mhz": Number("nvmlDeviceGetClockInfo", (1,), 4, 1, 10_000),
    "memory_mhz": Number("nvmlDeviceGetClockInfo", (2,), 4, 1, 100_000),
    "power_mw": Number("nvmlDeviceGetPowerUsage", (), 4, 1, 100_000_000),
    "limit_mw": Number("nvmlDeviceGetEnforcedPowerLimit", (), 4, 1, 100_000_000),
    "energy_mj": Number("nvmlDeviceGetTotalEnergyConsumption", (), 8, 0, _FARTHEST),
    "reasons": Number("nvmlDeviceGetCurrentClocksThrottleReasons", (), 8, 0, (1 << 32) - 1),
    "temperature_c": Number("nvmlDeviceGetTemperature", (0,), 4, 1, 200),
    "pcie_generation": Number("nvmlDeviceGetCurrPcieLinkGeneration", (), 4, 1, 32),
    "pcie_width": Number("nvmlDeviceGetCurrPcieLinkWidth", (), 4, 1, 64),
    "ecc_uncorrected": Number("nvmlDeviceGetTotalEccErrors", (1, 0), 8, 0, 1 << 40),
}
#: what does not change
_FIXED = {
    "most_sm_mhz": Number("nvmlDeviceGetMaxClockInfo", (1,), 4, 1, 10_000),
    "most_pcie_generation": Number("nvmlDeviceGetMaxPcieLinkGeneration", (), 4, 1, 32),
    "most_pcie_width": Number("nvmlDeviceGetMaxPcieLinkWidth", (), 4, 1, 64),
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
    """One GPU, as NVML has it. Every method but `notes` may wait for the driver."""

    def __init__(
        self, uuid: Optional[str], pid: int, library: str = LIBRARY,
        load: Callable[[str], Any] = ctypes.CDLL,
    ) -> None:  # fmt: skip
        """`uuid` as torch has it; without one, the only GPU that process `pid` runs on.

        `load` opens a library by its name. Raises NoHardwareError.
        """
        self._unknown: Set[str] = set()
        self._impossible: Set[str] = set()
        try:
            self.nvml = load(library)
        except OSError as error:
            raise NoHardwareError("NVML cannot be loaded: %s" % error) from None
        status = self._call("nvmlInit_v2")
        if status != 0:
            raise NoHardwareError("NVML cannot be used: %s" % self._error(status))
        self.device = self._by_uuid(uuid) if uuid else self._of_process(pid)

    def fixed(self) -> Dict[str, Any]:
        """UUID, name, and what is most of it; None for what is not known."""
        facts: Dict[str, Any] = {
            "uuid": self._text("nvmlDeviceGetUUID"), "name": self._text("nvmlDeviceGetName")
        }  # fmt: skip
        facts.update((name, self._number(name, number)) for name, number in _FIXED.items())
        return facts

    def sample(self) -> Dict[str, Optional[int]]:
        """The columns of the GPU; None for what is not known."""
        columns = {name: self._number(name, number) for name, number in SAMPLED.items()}
        rates = (ctypes.c_uint * 2)()  # of the last sampling period: GPU, memory
        status = self._call("nvmlDeviceGetUtilizationRates", self.device, rates)
        columns["busy_percent"] = self._checked("busy_percent", status, rates[0], 0, 100)
        return columns

    def notes(self) -> List[str]:
        """What NVML does not tell of this GPU, and what cannot be as it tells it."""
        kinds = (
            ("NVML does not give %s", self._unknown),
            ("NVML gives impossible values of %s", self._impossible),
        )
        return [text % ", ".join(sorted(names)) for text, names in kinds if names]

    def _call(self, function: str, *arguments: Any) -> Optional[int]:
        """The status of a function of NVML: 0 for success; None where this NVML has none such."""
        call = getattr(self.nvml, function, None)
        return None if call is None else int(call(*arguments))

    def _checked(
        self, name: str, status: Optional[int], value: int, least: int, most: int
    ) -> Optional[int]:
        """A value that was given, if it can be; what is wrong with it is noted."""
        if status != 0:
            self._unknown.add(name)
            return None
        if not least <= value <= most:
            self._impossible.add(name)
            return None
        return value

    def _number(self, name: str, number: Number) -> Optional[int]:
        value = ctypes.c_ulonglong() if number.size == 8 else ctypes.c_uint()
        status = self._call(number.function, self.device, *number.arguments, ctypes.byref(value))
        return self._checked(name, status, value.value, number.least, number.most)

    def _text(self, function: str) -> Optional[str]:
        text = ctypes.create_string_buffer(_TEXT_B)
        if self._call(function, self.device, text, _TEXT_B - 1) != 0:
            return None
        return text.value.decode("utf-8", "replace")

    def _by_uuid(self, uuid: str) -> ctypes.c_void_p:
        """The GPU that has this UUID, or the instance of one: torch leaves the kind out."""
        device, status = ctypes.c_void_p(), None  # type: ctypes.c_void_p, Optional[int]
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else ["GPU-" + uuid, "MIG-" + uuid]
        for name in names:
            status = self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device))
            if status == 0:
                return device
        raise NoHardwareError("NVML does not know GPU %s: %s" % (uuid, self._error(status)))

    def _of_process(self, pid: int) -> ctypes.c_void_p:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        running = []
        for index in range(min(count.value, 64)):
            device = ctypes.c_void_p()
            status = self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
            if status == 0 and pid in self._processes(device):
                running.append(device)
        if len(running) != 1:
            raise NoHardwareError("which GPU the rank uses cannot be determined")
        return running[0]

    def _processes(self, device: ctypes.c_void_p) -> List[int]:
        processes, count = (_Process * 64)(), ctypes.c_uint(64)
        function = "nvmlDeviceGetComputeRunningProcesses_v3"
        if self._call(function, device, ctypes.byref(count), processes) != 0:
            return []
        return [process.pid for process in processes[: min(count.value, 64)]]

    def _error(self, status: Optional[int]) -> str:
        text = getattr(self.nvml, "nvmlErrorString", None)
        if text is None or status is None:
            return "it lacks a function" if status is None else "error %d" % status
        text.restype = ctypes.c_char_p
        return (text(status) or b"").decode("utf-8", "replace")
