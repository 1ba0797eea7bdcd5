"""Samples of hardware as a rank's writer leaves them, and rows that are made of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from clusterprof import hardware
from clusterprof.hardware import COLUMNS
from clusterprof.results import HardwareEntry

#: a sample of an H100 under load
LOAD: dict[str, Any] = {
    "time_ns": 1_790_000_000_000_000_000, "sm_mhz": 1755, "memory_mhz": 2619, "power_mw": 600_000,
    "limit_mw": 700_000, "energy_mj": 10, "reasons": 0, "temperature_c": 55, "pcie_generation": 5,
    "pcie_width": 16, "ecc_uncorrected": 0, "busy_percent": 100, "load": 3.5, "steal": 0.0,
    "memory_pressure": 0.0, "cpu_mhz": 3200.0,
}  # fmt: skip
FACTS = {
    "uuid": "GPU-5d8f3a4e-0000-1111-2222-333344445555", "name": "NVIDIA H100 80GB HBM3",
    "most_sm_mhz": 1980, "most_pcie_generation": 5, "most_pcie_width": 16,
}  # fmt: skip


def lines(samples: list[dict[str, Any]]) -> str:
    rows = [",".join(COLUMNS)]
    rows += [",".join("" if s[name] is None else str(s[name]) for name in COLUMNS) for s in samples]
    return "\n".join(rows) + "\n"


def load(count: int = 12, **columns: Any) -> list[dict[str, Any]]:
    """Samples a second apart; a column is one value, or one a sample."""
    return [
        {
            **LOAD,
            "time_ns": LOAD["time_ns"] + 1_000_000_000 * k,
            **{n: v[k % len(v)] if isinstance(v, (list, tuple)) else v for n, v in columns.items()},
        }
        for k in range(count)
    ]


def row(rank: int = 0, host: str = "node1", count: int = 12, **columns: Any) -> HardwareEntry:
    samples = load(count, **columns)
    values = {n: np.array([np.nan if s[n] is None else s[n] for s in samples]) for n in COLUMNS}
    facts = {**FACTS, "uuid": f"{str(FACTS['uuid'])[:-4]}{rank:04d}"}
    return hardware.entry(rank, values, facts, host)
