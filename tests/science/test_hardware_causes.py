"""What GPUs and nodes say of themselves, joined to stragglers."""

from __future__ import annotations

from typing import Any

import pytest
from hardware_sample import row
from simulate import Cause, Job, simulate
from simulate.flight import recorded

from clusterprof.align.lateness import host_clock
from clusterprof.analysis.model.shallow import all_ranks
from clusterprof.results import Finding, HardwareEntry
from clusterprof.study import study

MS = 1_000_000


def straggler(kind: Any, rows: list[HardwareEntry]) -> Finding:
    job = Job(synchronous=True, steps=6, causes=(Cause(kind, 2, 12 * MS),))
    results = study(simulate(job)[0], hardware=rows).results
    top = results["findings"][0]
    assert (top["code"].startswith("straggler."), top["ranks"]) == (True, [2])
    assert [entry["rank"] for entry in results.get("hardware", [])] == [r["rank"] for r in rows]
    return top


def gpus(**late: Any) -> list[HardwareEntry]:
    """One node's four ranks, of which the third one's GPU has these columns."""
    return [row(rank, **(late if rank == 2 else {})) for rank in range(4)]


def nodes(**late: Any) -> list[HardwareEntry]:
    """The same ranks, each on a node of its own."""
    return [row(rank, f"node{rank}", **(late if rank == 2 else {})) for rank in range(4)]


def test_a_slow_gpu_s_clock_stands_beside_its_cause_with_what_to_do() -> None:
    found = straggler("gpu_slow", gpus(sm_mhz=1410, reasons=(4, 4, 4, 0)))
    assert found["code"] == "straggler.gpu"
    of_its_clock = "Its SM clock is 1,410 MHz, its peers' 1,755 (software power cap in 75% of 12 "
    assert of_its_clock in found["summary"]
    assert "raise that GPU's" in found["advice"]
    assert {"rank": 2, "sm_mhz": 1410, "peers_sm_mhz": 1755, "samples": 12} in found["evidence"]


def test_a_gpu_that_is_slow_at_its_peers_clocks_is_told_apart() -> None:
    found = straggler("gpu_slow", gpus())
    assert "Its clocks are its peers': 1,755 MHz." in found["summary"]
    assert "power limits" not in found["advice"]


def test_more_work_draws_more_power_and_its_clock_gives_no_advice() -> None:
    found = straggler("gpu_more", gpus(sm_mhz=1410, reasons=4))
    assert "Its SM clock is 1,410 MHz" in found["summary"]
    assert "power limits" not in found["advice"]


def test_a_late_host_has_its_node_s_differences_and_not_its_gpu_s() -> None:
    found = straggler("host", nodes(steal=0.2, cpu_mhz=2000.0, sm_mhz=1410))
    assert found["code"] == "straggler.host"
    assert "virtual machines take 20% of its node's processor time" in found["summary"]
    assert "Its processors run at 2,000 MHz" in found["summary"]
    assert "SM clock" not in found["summary"]
    assert "whose processors are shared" in found["advice"]


@pytest.mark.parametrize("kind", ["host", "gpu_slow"])
def test_without_samples_a_finding_says_nothing_of_hardware(kind: str) -> None:
    plain = straggler(kind, [])
    idle = straggler(kind, gpus(reasons=1))
    assert plain["summary"] == idle["summary"]
    assert "MHz" not in plain["summary"]


def test_a_rank_that_flight_recorders_alone_show_has_what_its_hardware_says() -> None:
    job = Job(
        dp=8, steps=12, first_step=10, synchronous=True, tear_ns=0,
        causes=(Cause("host", 3, 8 * MS),),
    )  # fmt: skip
    made = recorded(job)
    clock = host_clock(made.flight, made.readings, made.probe)
    shallow = all_ranks(made.flight, clock, made.steps, {})
    rows = [row(rank, f"node{rank}", **({"steal": 0.3} if rank == 3 else {})) for rank in range(8)]
    rows[3]["xids"] = [{"xid": 63, "after_ns": 1, "until_ns": 2, "first_step": 14, "last_step": 14}]
    results = study([], shallow=shallow, hardware=rows).results
    (found,) = results["findings"]
    assert (found["code"], found["ranks"]) == ("straggler.shallow", [3])
    assert "Its GPU reported XID 63 in step 14." in found["summary"]
    assert "XIDs" in found["advice"]
    assert "Its clocks are its peers': 1,755 MHz." in found["summary"]
    assert "take 30% of its node's processor time" in found["summary"]
    assert found["advice"].startswith("Profile the rank and a peer")
    assert results["hardware"][0]["energy_j_per_step"] == pytest.approx(
        0.6 * results["shallow"]["step_ns"] / 1e6,
        rel=0.01,  # type: ignore[index]
    )
