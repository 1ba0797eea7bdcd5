"""What a GPU's driver is asked for, and what of its answers can be; see `nvml` and `amdgpu`."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Set

#: Integers of Arrow and JSON go so far.
_FARTHEST = 1 << 62
#: The columns of a sample, and from where to where their values lie: drivers give 0 or the largest
#: integer for what they do not know. Clocks in MHz, power in mW, energy in mJ since the driver was
#: loaded, °C; `reasons` are the bits of nvmlClocksThrottleReason; ECC errors since the driver was
#: loaded.
SAMPLED = {
    "sm_mhz": (1, 10_000), "memory_mhz": (1, 100_000), "power_mw": (1, 100_000_000),
    "limit_mw": (1, 100_000_000), "energy_mj": (0, _FARTHEST), "reasons": (0, (1 << 32) - 1),
    "temperature_c": (1, 200), "pcie_generation": (1, 32), "pcie_width": (1, 64),
    "ecc_uncorrected": (0, 1 << 40), "busy_percent": (0, 100),
}  # fmt: skip
#: what does not change, and is of the same kind as a column
_FIXED = {
    "most_sm_mhz": "sm_mhz", "most_pcie_generation": "pcie_generation",
    "most_pcie_width": "pcie_width",
}  # fmt: skip


class NoHardwareError(Exception):
    """A driver cannot be asked; the message says why, in one line."""


class Gpu:
    """One GPU, as its driver has it. Every method but `notes` may wait for the driver."""

    #: which one, in a sentence
    driver = ""

    def __init__(self) -> None:
        self._unknown: Set[str] = set()
        self._impossible: Set[str] = set()

    def fixed(self) -> Dict[str, Any]:
        """UUID, name, and what is most of it; None for what is not known."""
        raise NotImplementedError

    def sample(self) -> Dict[str, Optional[int]]:
        """The columns `SAMPLED`; None for what is not known."""
        raise NotImplementedError

    def xids(self) -> List[int]:
        """The errors (numbers, NVIDIA's XIDs) since the call before, or since it was opened."""
        return []

    def notes(self) -> List[str]:
        """What the driver does not tell of this GPU, and what cannot be as it tells it."""
        kinds = (("%s does not give %s", self._unknown),
                 ("%s gives impossible values of %s", self._impossible))  # fmt: skip
        return [text % (self.driver, ", ".join(sorted(names))) for text, names in kinds if names]

    def checked(self, name: str, value: Optional[int]) -> Optional[int]:
        """A value (None: there is none), if it can be; what is wrong with it is noted."""
        if value is None:
            self._unknown.add(name)
            return None
        least, most = SAMPLED[_FIXED.get(name, name)]
        if not least <= value <= most:
            self._impossible.add(name)
            return None
        return value
