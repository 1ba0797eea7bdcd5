"""Where a page is from: what is known is told, and what is not is left out."""

from __future__ import annotations

import base64
import gzip
from dataclasses import replace

import report_sample as sample

from clusterprof.report import html, panels, results_json
from clusterprof.report.summary import Summary
from clusterprof.report.whole_job import Job

JOB = Job(
    torch=("2.13.0+cu130",),
    hosts={rank: f"gpu-0{rank // 4}" for rank in range(8)},
    command="torchrun --nproc-per-node 4 train.py",
    launcher="torchrun",
    began="2026-11-22T08:08:06.222+00:00",
    ended="2026-11-22T08:09:34.492+00:00",
)


def test_of_a_run_it_says_when_what_where_and_what_the_profiler_cost() -> None:
    results = sample.results(host="")
    results["ranks"][1]["versions"] = {"driver": "570.1", "NCCL": "2.28.9"}
    found = dict(panels.provenance(Summary(results), JOB))
    assert found["recorded"] == "2026-11-22 08:08 UTC, 88 s"
    assert found["command"] == "torchrun --nproc-per-node 4 train.py"
    assert found["launched by"] == "torchrun"
    assert found["ran on"] == "2 hosts × 4 ranks, NVIDIA H200 (gpu-00 and gpu-01)"
    assert found["layout"] == "data mesh_dp {0–3 of 5} (confidence 90%)"
    versions = "torch 2.13.0+cu130, NCCL 2.28.9, driver 570.1 and 580.159.04, nsys 2025.3.2"
    assert found["versions"] == f"{versions}, clusterprof 0.1.0"
    assert found["profiler overhead"].startswith("Profiled ranks stalled for up to 1.15 s")


def test_a_stall_is_told_once_and_no_driver_is_no_version() -> None:
    results = sample.results()
    stall = "a profiled rank stalled once for 1150 ms at its start and 60 ms at its stop"
    own = sample.pageable() | {"code": "profiler.perturbation"}
    results["ranks"][0]["versions"] = {"driver": "0"}
    assert results["capture"] is not None
    for more, left in ("; 1 step of 5 excluded.", "1 step of 5 excluded."), (".", ""):
        results["findings"] = [own | {"summary": f"Profiler overhead: {stall}{more}"}]
        found = dict(panels.provenance(Summary(results), JOB))
        assert "stalled once" not in found["profiler overhead"]
        assert found["profiler overhead"].endswith(left or "after.")
        assert "driver 0" not in found["versions"]


def test_hosts_stand_in_the_order_of_their_numbers() -> None:
    hosts = {rank: f"n{11 - rank}" for rank in range(8)}
    found = dict(panels.provenance(Summary(sample.results(host="")), replace(JOB, hosts=hosts)))
    assert found["ran on"].endswith("(n4, n5, n6, n7 and 4 more)")


def test_of_reports_alone_it_says_no_more_than_they_do() -> None:
    results = sample.results(host="")
    results["capture"] = None
    results["topology"]["groups"] = []
    found = dict(panels.provenance(Summary(results), Job()))
    assert found["recorded"] == "2023-11-14 22:13 UTC (the window)"
    assert found["ran on"] == "8 ranks, NVIDIA H200"
    assert not {"command", "launched by", "layout", "profiler overhead"} & found.keys()
    results["clock"]["middle_ns"] = 5
    assert "recorded" not in dict(panels.provenance(Summary(results), Job(began="yesterday")))


def test_what_the_profiler_did_is_no_finding_to_act_on() -> None:
    results = sample.results()
    own = sample.pageable()
    own |= {"code": "profiler.perturbation", "severity": "info", "summary": "It cost 56.7 ms."}
    results["findings"].append(own)
    page = html.render(results, sample.collectives(), title="x")
    assert page.count("<article") == 2
    assert dict(panels.provenance(Summary(results), Job()))["profiler overhead"].endswith(
        "It cost 56.7 ms."
    )
    own["severity"] = "warning"
    assert html.render(results, sample.collectives(), title="x").count("<article") == 3


def test_the_page_holds_results_json_byte_by_byte() -> None:
    packed = panels.packed_results(sample.results())
    whole = gzip.decompress(base64.b64decode(packed["gzip"]))
    assert whole == results_json.dumps(sample.results())
    assert packed == panels.packed_results(sample.results())
