"""What GPUs and nodes said of themselves, and where one differs from the others.

Each rank's writer samples its GPU (NVML, amdgpu) and its node once a second around looks and
captures (`hardware.csv` in its folder, see `agent.guard.hardware_sampler`). Ranks are compared by
medians: a difference counts where it is beyond what the samples vary.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clusterprof import words
from clusterprof.agent.contracts import files, paths
from clusterprof.columns import Bools, Floats, Ints
from clusterprof.results import ClockReason, HardwareEntry, Sampled, XidEntry

#: The columns of hardware.csv, and from where to where their values lie; as the writer has them
#: (`hardware_sampler.COLUMNS`, `gpu.SAMPLED`).
COLUMNS = {
    "time_ns": (0, 1 << 62), "sm_mhz": (1, 10_000), "memory_mhz": (1, 100_000),
    "power_mw": (1, 100_000_000), "limit_mw": (1, 100_000_000), "energy_mj": (0, 1 << 62),
    "reasons": (0, (1 << 32) - 1), "temperature_c": (1, 200), "pcie_generation": (1, 32),
    "pcie_width": (1, 64), "ecc_uncorrected": (0, 1 << 40), "busy_percent": (0, 100),
    "load": (0, 1e7), "steal": (0, 1), "memory_pressure": (0, 100), "cpu_mhz": (0, 100_000),
}  # fmt: skip
#: Why clocks are limited, by the bits of nvmlClocksThrottleReason (NVML API Reference Guide).
REASONS = {
    1: "idle", 2: "applications clocks", 4: "software power cap", 8: "hardware slowdown",
    16: "sync boost", 32: "software thermal slowdown", 64: "hardware thermal slowdown",
    128: "power brake", 256: "display clocks",
}  # fmt: skip
_IDLE = 1
#: bytes; the writer's largest has some 25,000
_MOST_BYTES = 1 << 20
#: fewer samples tell no median, and not how much they vary
LEAST_SAMPLES = 5
#: a difference counts from these shares of a clock, shares of time and percentages on, and from so
#: many times on of what the samples vary
CLOCK_FRAC, STEAL_FRAC, PRESSURE_PERCENT = 0.02, 0.02, 2.0
VARIES_TIMES = 2.0

_SET = "Its applications clocks are set: reset them (nvidia-smi -rac)."
_COOLING = "Check the cooling of that GPU (nvidia-smi -q -d TEMPERATURE,PERFORMANCE)."
_POWER = "Check the power supply of that node (nvidia-smi -q -d POWER,PERFORMANCE)."
#: what to do about it
_ADVICE = {
    "applications clocks": _SET,
    "software power cap": "Compare the power limits (nvidia-smi -q -d POWER); raise that GPU's.",
    "hardware slowdown": _COOLING, "software thermal slowdown": _COOLING,
    "hardware thermal slowdown": _COOLING, "power brake": _POWER,
}  # fmt: skip
_NO_REASON = "Check that GPU's clocks and other processes on it (nvidia-smi -q -d CLOCK)."
#: AMD's driver, which does not tell why clocks are limited
AMDGPU = "amdgpu"
_OF_AMD = "Compare that GPU's clocks, power and temperature with its peers' (amd-smi metric)."
_OF_XIDS = "Look these XIDs up in NVIDIA's list, and in the kernel's log of that node."


class DamagedError(Exception):
    """A file is none that a writer has left; the message says why."""


#: In which step a rank was at a time of its wall clock (ns); None where that is not known.
StepAt = Callable[[int, int], "int | None"]


# --- reading


def of_ranks(
    logs: Mapping[int, Path],
    states: Mapping[int, Mapping[str, Any]],
    step_at: StepAt | None = None,
) -> tuple[list[HardwareEntry], list[str]]:
    """A row for each rank with samples, in order, and warnings.

    `logs`: where each rank's hardware.csv is, if it has left one; `states`: the ranks' states;
    `step_at`: their steps, if they are known. A file that is damaged leaves its rank out, with a
    warning.
    """
    entries, warnings = [], []
    for rank, path in sorted(logs.items()):
        try:
            columns = read(path)
        except FileNotFoundError:
            continue
        except (OSError, DamagedError) as error:
            why = getattr(error, "strerror", None) or error
            warnings.append(f"rank {rank}: {paths.HARDWARE} cannot be read: {why}")
            continue
        state = states.get(rank, {})
        facts = state.get("hardware") or {}
        made = entry(rank, columns, facts, state.get("host"))
        if facts.get("driver") == AMDGPU:
            made["driver"] = AMDGPU
        if xids := _xids(rank, state, step_at):
            made["xids"] = xids
        entries.append(made)
        warnings += [f"rank {rank}: {text}" for text in backwards(columns)]
    return entries, warnings


def read(path: Path) -> dict[str, Floats]:
    """The columns of a hardware.csv, NaN where a value is not known.

    Raises OSError, and DamagedError for what is no such file.
    """
    try:
        text = files.content(path, _MOST_BYTES).decode("ascii")
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedError(f"it is no table: {error}") from None
    if not lines or lines[0] != [*COLUMNS]:
        raise DamagedError("its first line is another one")
    rows = [_values(number, line) for number, line in enumerate(lines[1:], 2)]
    table = np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))
    return dict(zip(COLUMNS, table.T, strict=True))


def _values(number: int, line: Sequence[str]) -> list[float]:
    """The values of one line. Raises DamagedError."""
    if len(line) != len(COLUMNS):
        raise DamagedError(f"line {number} has {len(line)} values of {len(COLUMNS)}")
    values = []
    for cell, (name, (least, most)) in zip(line, COLUMNS.items(), strict=True):
        try:
            value = float(cell) if cell else math.nan
        except ValueError:
            value = math.inf
        if cell and not least <= value <= most:
            raise DamagedError(f"line {number}: {words.plain(cell[:20])} is no {name}")
        values.append(value)
    return values


def backwards(columns: Mapping[str, Floats]) -> Iterator[str]:
    """What is to be said of counters that only go forward while one driver has one GPU."""
    for name, what in (("ecc_uncorrected", "ECC errors"), ("energy_mj", "energy")):
        if (np.diff(_known(columns[name])) < 0).any():
            yield f"its GPU's count of {what} goes backwards: its driver was loaded anew"


def entry(
    rank: int, columns: Mapping[str, Floats], facts: Mapping[str, Any], host: object
) -> HardwareEntry:
    """One rank's row of its samples; `facts` are those of its state."""
    works = _works(columns)
    working = {name: _known(values[works]) for name, values in columns.items()}
    power_w, power_uncertainty_w = _mean(working["power_mw"] / 1e3)
    return {
        "rank": rank,
        "host": str(host) if host else None,
        "uuid": facts.get("uuid"),
        "name": facts.get("name"),
        "note": facts.get("note", ""),
        "samples": len(columns["time_ns"]),
        "working_samples": int(works.sum()),
        "sm_mhz": sampled(working["sm_mhz"]),
        "most_sm_mhz": facts.get("most_sm_mhz"),
        "memory_mhz": _whole(np.median, working["memory_mhz"]),
        "power_w": power_w,
        "power_uncertainty_w": power_uncertainty_w,
        "power_limit_w": _mean(working["limit_mw"] / 1e3)[0],
        "clock_reasons": _reasons(working["reasons"].astype(np.int64)),
        "temperature_c": _whole(np.max, working["temperature_c"]),
        "pcie_generation": _whole(np.max, working["pcie_generation"]),
        "pcie_width": _whole(np.max, working["pcie_width"]),
        "most_pcie_generation": facts.get("most_pcie_generation"),
        "most_pcie_width": facts.get("most_pcie_width"),
        "new_ecc_errors": _new(columns["ecc_uncorrected"]),
        "energy_j_per_step": None,
        "energy_uncertainty_j": None,
        "load": _mean(_known(columns["load"]))[0],
        "steal": sampled(_known(columns["steal"])),
        "memory_pressure": sampled(_known(columns["memory_pressure"])),
        "cpu_mhz": sampled(_known(columns["cpu_mhz"])),
    }


def xids_of(state: Mapping[str, Any]) -> list[dict[str, int]]:
    """The errors of a rank's GPU, as its state has them; what is of another form is left out."""
    form = {"xid": range(1, 100_000), "after_ns": int, "until_ns": int}
    errors = state.get("hardware", {}).get("xids", [])
    return [error for error in errors if files.fits(error, form)]


def _xids(rank: int, state: Mapping[str, Any], step_at: StepAt | None) -> list[XidEntry]:
    """The same with the rank's steps."""
    return [
        {
            "xid": error["xid"],
            "after_ns": error["after_ns"],
            "until_ns": error["until_ns"],
            "first_step": step_at(rank, error["after_ns"]) if step_at else None,
            "last_step": step_at(rank, error["until_ns"]) if step_at else None,
        }
        for error in xids_of(state)
    ]


def _works(columns: Mapping[str, Floats]) -> Bools:
    """In which samples the GPU certainly works: an idle one's clocks and power say nothing."""
    reasons, busy = columns["reasons"], columns["busy_percent"]
    idle = (np.nan_to_num(reasons).astype(np.int64) & _IDLE > 0) | (busy == 0)
    return np.asarray((~np.isnan(reasons) | ~np.isnan(busy)) & ~idle)


def sampled(values: Floats) -> Sampled | None:
    """The middle of the values and how much they vary; None for fewer than `LEAST_SAMPLES`."""
    if len(values) < LEAST_SAMPLES:
        return None
    low, middle, high = np.percentile(values, [16, 50, 84]).tolist()
    return {"median": round(middle, 4), "spread": round((high - low) / 2, 4)}


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _whole(of: Any, values: Floats) -> int | None:
    return round(float(of(values))) if len(values) else None


def _mean(values: Floats) -> tuple[float | None, float | None]:
    """The mean, and twice its standard error, which fewer than `LEAST_SAMPLES` do not tell."""
    if not len(values):
        return None, None
    enough = len(values) >= LEAST_SAMPLES
    error = 2 * float(values.std(ddof=1)) / math.sqrt(len(values)) if enough else None
    return round(float(values.mean()), 3), None if error is None else round(error, 3)


def _reasons(bits: Ints) -> list[ClockReason]:
    shares = {name: float((bits & bit > 0).mean()) for bit, name in REASONS.items() if len(bits)}
    seldom_last = sorted(shares.items(), key=lambda item: -item[1])
    return [{"reason": name, "share": round(share, 4)} for name, share in seldom_last if share]


def _new(counts: Floats) -> int | None:
    """By how much a counter has grown; one that begins anew grows from there on."""
    known = _known(counts)
    return int(np.diff(known).clip(0).sum()) if len(known) > 1 else None


def with_energy(entries: Iterable[HardwareEntry], step_ns: float | None) -> list[HardwareEntry]:
    """The rows with each GPU's energy per step (J): its mean power times the step."""
    return [
        {
            **row,
            "energy_j_per_step": _energy(row["power_w"], step_ns),
            "energy_uncertainty_j": _energy(row["power_uncertainty_w"], step_ns),
        }
        for row in entries
    ]


def _energy(power_w: float | None, step_ns: float | None) -> float | None:
    return round(power_w * step_ns / 1e9, 3) if power_w is not None and step_ns else None


# --- comparing


class Difference(NamedTuple):
    """What of one rank differs from its peers', in words; and what to do about it."""

    text: str
    advice: str
    evidence: dict[str, Any]
    #: it explains a slower rank; else it says that its clocks are not the reason
    differs: bool = True


def apart(own: Sampled, medians: Floats, spreads: Floats, least: float) -> float | None:
    """The others' usual value, where one differs from it beyond chance; else None.

    It differs by more than `least`, and by more than twice what the samples vary: its own, those of
    the others in the middle, and the others among each other.
    """
    usual = float(np.median(medians))
    low, high = np.percentile(medians, [16, 84]).tolist()
    varies = max(own["spread"], float(np.median(spreads)), (high - low) / 2)
    return usual if abs(own["median"] - usual) > max(least, VARIES_TIMES * varies) else None


class _OfNode(NamedTuple):
    """A column of the node: which difference counts, how it reads, and what to do about it."""

    name: str
    least: float
    #: what counts is that it is more than the others'; else that it is less
    more: bool
    text: str
    advice: str


_NODE = (
    _OfNode("steal", STEAL_FRAC, True,
            "other virtual machines take {own} of its node's processor time, {usual} of the other "
            "nodes'", "Move it off a node whose processors are shared."),
    _OfNode("cpu_mhz", CLOCK_FRAC, False,
            "its processors run at {own} MHz, those of the other nodes at {usual}",
            "Check the frequency governor and the cooling of that node's processors."),
    _OfNode("memory_pressure", PRESSURE_PERCENT, True,
            "processes of its node wait for memory in {own} of the time, on the other nodes in "
            "{usual}", "Free memory on that node: check other processes there."),
)  # fmt: skip


class _Clocks(NamedTuple):
    """The SM clocks of all GPUs of one kind, one element for each rank."""

    rank: Ints
    #: its place among the GPUs: ranks that share one have the same
    gpu: Ints
    median: Floats
    spread: Floats

    @classmethod
    def of(cls, rows: Sequence[HardwareEntry]) -> _Clocks:
        """Of those of which there are samples under load."""
        rows = [row for row in rows if row["sm_mhz"]]
        places: dict[object, int] = {}
        gpus = [places.setdefault(row["uuid"] or (row["rank"],), len(places)) for row in rows]
        values = [value for row in rows if (value := row["sm_mhz"])]
        return cls(
            np.array([row["rank"] for row in rows], np.int64),
            np.array(gpus, np.int64),
            np.array([value["median"] for value in values], np.float64),
            np.array([value["spread"] for value in values], np.float64),
        )


class Compared:
    """All ranks' rows, to be compared with each other."""

    def __init__(self, entries: Sequence[HardwareEntry]) -> None:
        self.rows = {row["rank"]: row for row in entries}
        kinds: dict[str | None, list[HardwareEntry]] = {}
        nodes: dict[str, list[HardwareEntry]] = {}
        for row in entries:
            kinds.setdefault(row["name"], []).append(row)
            if row["host"]:
                nodes.setdefault(row["host"], []).append(row)
        self.clocks = {name: _Clocks.of(rows) for name, rows in kinds.items()}
        #: of each column the value of each node where it is known
        self.by_node = {
            column.name: {
                host: value
                for host, rows in nodes.items()
                if (value := _middle(rows, column.name)) is not None
            }
            for column in _NODE
        }

    def of_gpu(self, rank: int) -> Difference | None:
        """How a rank's SM clock differs from that of the other GPUs of its kind, or that it does
        not.

        None where that cannot be determined: too few samples under load, or no other GPU.
        """
        own = self.rows.get(rank)
        if own is None or own["sm_mhz"] is None:
            return None
        clocks, clock = self.clocks[own["name"]], own["sm_mhz"]
        others = clocks.gpu != clocks.gpu[clocks.rank == rank]
        if not others.any():
            return None
        medians, spreads = clocks.median[others], clocks.spread[others]
        usual = float(np.median(medians))
        evidence = {
            "rank": rank, "sm_mhz": round(clock["median"]), "peers_sm_mhz": round(usual),
            "samples": own["working_samples"],
        }  # fmt: skip
        if apart(clock, medians, spreads, CLOCK_FRAC * usual) is None:
            mhz = f"{clock['median']:,.0f} MHz"
            return Difference(f"its clocks are its peers': {mhz}", "", evidence, differs=False)
        return _of_clock(own, clock["median"], usual, evidence)

    def of_errors(self, rank: int) -> list[Difference]:
        """The errors of a rank's GPU, whatever they have to do with its speed."""
        own = self.rows.get(rank)
        if own is None or not own.get("xids"):
            return []
        evidence = {"rank": rank, "xids": [error["xid"] for error in own["xids"]]}
        return [Difference(_of_xids(own), _OF_XIDS, evidence)]

    def of_node(self, rank: int) -> list[Difference]:
        """Where a rank's node differs from the others in what makes a host slower."""
        own = self.rows.get(rank)
        if own is None or not own["host"]:
            return []
        differences = (self._on_node(column, own["host"], rank) for column in _NODE)
        return [difference for difference in differences if difference is not None]

    def _on_node(self, column: _OfNode, host: str, rank: int) -> Difference | None:
        """How a node's column differs from the other nodes'; None where it does not, or that is
        not known.
        """
        by_node = self.by_node[column.name]
        others = [value for name, value in by_node.items() if name != host]
        if host not in by_node or not others:
            return None
        medians = np.array([value["median"] for value in others])
        spreads = np.array([value["spread"] for value in others])
        least = column.least * (float(np.median(medians)) if column.name == "cpu_mhz" else 1.0)
        own_value, usual = by_node[host]["median"], apart(by_node[host], medians, spreads, least)
        if usual is None or (own_value > usual) != column.more:
            return None
        text = column.text.format(
            own=_shown(column.name, own_value), usual=_shown(column.name, usual)
        )
        evidence = {"rank": rank, column.name: own_value, f"other_nodes_{column.name}": usual}
        return Difference(text, column.advice, evidence)


def _of_clock(own: HardwareEntry, mhz: float, usual: float, evidence: dict[str, Any]) -> Difference:
    """A GPU's clock that is not its peers', why the driver limits it, and what to do about it."""
    by_amd = own.get("driver") == AMDGPU
    clock = "GFX clock" if by_amd else "SM clock"
    text = f"its {clock} is {mhz:,.0f} MHz, its peers' {usual:,.0f}"
    if mhz > usual:
        return Difference(text, "", evidence, differs=False)
    if by_amd:
        return Difference(f"{text} (amdgpu does not tell why)", _OF_AMD, evidence)
    if not own["clock_reasons"]:
        return Difference(text, _NO_REASON, evidence)
    first, count = own["clock_reasons"][0], own["working_samples"]
    often = f"{first['reason']} in {words.percent(first['share'])} of {count} samples"
    return Difference(f"{text} ({often})", _ADVICE.get(first["reason"], _NO_REASON), evidence)


def _middle(rows: Sequence[HardwareEntry], name: str) -> Sampled | None:
    """A node's value: that of its middle rank, which varies as the most varying one."""
    values = [row[name] for row in rows if row[name] is not None]  # type: ignore[literal-required]
    if not values:
        return None
    median = float(np.median([value["median"] for value in values]))
    return {"median": median, "spread": max(value["spread"] for value in values)}


def _shown(name: str, value: float) -> str:
    if name == "cpu_mhz":
        return f"{value:,.0f}"
    return words.percent(value if name == "steal" else value / 100)


def _of_xids(row: HardwareEntry) -> str:
    """The errors of a rank's GPU, the same ones once, with when the first of these was."""
    first: dict[int, XidEntry] = {}
    for error in row.get("xids", []):
        first.setdefault(error["xid"], error)
    texts = [f"XID {xid} {_when(error)}" for xid, error in first.items()]
    return f"its GPU reported {words.listed(texts)}" if texts else ""


def _when(error: XidEntry) -> str:
    """When an error was: it was asked for once a second at most."""
    first, last = error["first_step"], error["last_step"]
    if first is None or last is None:
        return f"until {words.wall_time(error['until_ns'])}"
    return f"in step {first}" if first == last else f"in steps {first} to {last}"


def of_links_and_memory(row: HardwareEntry) -> Iterator[str]:
    """What is wrong with a GPU whatever its peers have."""
    if xids := _of_xids(row):
        yield xids
    if row["new_ecc_errors"]:
        yield f"its GPU had {words.counted(row['new_ecc_errors'], 'new uncorrected ECC error')}"
    for name, what in (("pcie_generation", "generation"), ("pcie_width", "width")):
        value, most = row[name], row[f"most_{name}"]  # type: ignore[literal-required]
        if value and most and value < most:
            yield f"its PCIe {what} is {value} of {most}"


def differing(entries: Sequence[HardwareEntry]) -> dict[int, list[str]]:
    """Of each rank what differs from its peers; ranks of which nothing does are left out."""
    compared, by_rank = Compared(entries), {}
    for row in entries:
        gpu = compared.of_gpu(row["rank"])
        differences = [
            *([gpu] if gpu and gpu.differs else []), *compared.of_node(row["rank"])
        ]  # fmt: skip
        texts = [*(difference.text for difference in differences), *of_links_and_memory(row)]
        if texts:
            by_rank[row["rank"]] = texts
    return by_rank
