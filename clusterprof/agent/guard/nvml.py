"""One GPU as NVIDIA's driver has it, by NVML (`libnvidia-ml.so.1`) and ctypes: only read.

The driver may keep a caller waiting, for ever where it hangs. It has no count of XID errors: it
tells of those that happen from when it was asked to on. Source: NVIDIA's NVML API Reference Guide.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from .gpu import Gpu, NoHardwareError

LIBRARY = "libnvidia-ml.so.1"
_TEXT_B = 96
#: nvmlEventTypeXidCriticalError; NVML_ERROR_TIMEOUT, where there are no more events
_XID, _NO_MORE = 8, 10
#: more are not read at once
_MOST_EVENTS = 16


class Number(NamedTuple):
    """A number that NVML gives: by which function, asked for what, in how many bytes."""

    function: str
    arguments: Tuple[int, ...]
    size: int


#: the columns of a sample that are numbers
_SAMPLED = {
    "sm_mhz": Number("nvmlDeviceGetClockInfo", (1,), 4),
    "memory_mhz": Number("nvmlDeviceGetClockInfo", (2,), 4),
    "power_mw": Number("nvmlDeviceGetPowerUsage", (), 4),
    "limit_mw": Number("nvmlDeviceGetEnforcedPowerLimit", (), 4),
    "energy_mj": Number("nvmlDeviceGetTotalEnergyConsumption", (), 8),
    "reasons": Number("nvmlDeviceGetCurrentClocksThrottleReasons", (), 8),
    "temperature_c": Number("nvmlDeviceGetTemperature", (0,), 4),
    "pcie_generation": Number("nvmlDeviceGetCurrPcieLinkGeneration", (), 4),
    "pcie_width": Number("nvmlDeviceGetCurrPcieLinkWidth", (), 4),
    "ecc_uncorrected": Number("nvmlDeviceGetTotalEccErrors", (1, 0), 8),
}
#: what does not change
_FIXED = {
    "most_sm_mhz": Number("nvmlDeviceGetMaxClockInfo", (1,), 4),
    "most_pcie_generation": Number("nvmlDeviceGetMaxPcieLinkGeneration", (), 4),
    "most_pcie_width": Number("nvmlDeviceGetMaxPcieLinkWidth", (), 4),
}


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("number", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class NvmlGpu(Gpu):
    """One GPU, as NVML has it."""

    driver = "NVML"

    def __init__(
        self, uuid: Optional[str], pid: int, library: str = LIBRARY,
        load: Callable[[str], Any] = ctypes.CDLL,
    ) -> None:  # fmt: skip
        """`uuid` as torch has it; without one, the only GPU that process `pid` runs on.

        `load` opens a library by its name. Raises NoHardwareError.
        """
        super().__init__()
        try:
            self.nvml = load(library)
        except OSError as error:
            raise NoHardwareError("NVML cannot be loaded: %s" % error) from None
        status = self._call("nvmlInit_v2")
        if status != 0:
            raise NoHardwareError("NVML cannot be used: %s" % self._error(status))
        self.device = self._by_uuid(uuid) if uuid else self._of_process(pid)
        #: has the XIDs until they are read
        self.events = ctypes.c_void_p()
        self.listens = self._listen()

    def fixed(self) -> Dict[str, Any]:
        """See `Gpu.fixed`."""
        facts: Dict[str, Any] = {
            "uuid": self._text("nvmlDeviceGetUUID"), "name": self._text("nvmlDeviceGetName")
        }  # fmt: skip
        facts.update((name, self._number(name, number)) for name, number in _FIXED.items())
        return facts

    def sample(self) -> Dict[str, Optional[int]]:
        """See `Gpu.sample`."""
        columns = {name: self._number(name, number) for name, number in _SAMPLED.items()}
        rates = (ctypes.c_uint * 2)()  # of the last sampling period: GPU, memory
        status = self._call("nvmlDeviceGetUtilizationRates", self.device, rates)
        columns["busy_percent"] = self.checked("busy_percent", rates[0] if status == 0 else None)
        return columns

    def xids(self) -> List[int]:
        """See `Gpu.xids`. Of several since the call before NVML may give the last one's number for
        each.
        """
        numbers: List[int] = []
        for _ in range(_MOST_EVENTS if self.listens else 0):
            event = _Event()
            status = self._call("nvmlEventSetWait_v2", self.events, ctypes.byref(event), 0)
            if status != 0:
                if status != _NO_MORE:
                    self._unknown.add("xids")
                break
            if event.kind == _XID:
                numbers.append(event.number)
        return numbers

    def _listen(self) -> bool:
        """Have the driver keep XIDs from now on; whether it does."""
        if self._call("nvmlEventSetCreate", ctypes.byref(self.events)) == 0:
            kinds = ctypes.c_ulonglong(_XID)
            if self._call("nvmlDeviceRegisterEvents", self.device, kinds, self.events) == 0:
                return True
        self._unknown.add("xids")
        return False

    def _call(self, function: str, *arguments: Any) -> Optional[int]:
        """The status of a function of NVML: 0 for success; None where this NVML has none such."""
        call = getattr(self.nvml, function, None)
        return None if call is None else int(call(*arguments))

    def _number(self, name: str, number: Number) -> Optional[int]:
        value = ctypes.c_ulonglong() if number.size == 8 else ctypes.c_uint()
        status = self._call(number.function, self.device, *number.arguments, ctypes.byref(value))
        return self.checked(name, value.value if status == 0 else None)

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
