"""What GPUs and nodes say of themselves, as it is read, compared and shown."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import report_sample as sample
from hardware_sample import FACTS, lines, load, row

from clusterprof import hardware, merge_run
from clusterprof.agent.contracts import paths, states
from clusterprof.agent.guard import gpu, hardware_sampler
from clusterprof.arguments import price
from clusterprof.collect.outcomes import Outcome
from clusterprof.hardware import COLUMNS, REASONS, Compared, Difference
from clusterprof.report import anonymous, panels, summary, text
from clusterprof.report.summary import Summary
from clusterprof.results import HardwareEntry, Results
from clusterprof.run_directory import Window

# --- reading


def test_the_reader_knows_the_columns_and_values_that_the_writer_has() -> None:
    assert tuple(COLUMNS) == hardware_sampler.COLUMNS
    assert {name: COLUMNS[name] for name in gpu.SAMPLED} == gpu.SAMPLED


def test_a_rank_s_samples_become_one_row(tmp_path: Path) -> None:
    samples = load(
        10, reasons=(4, 4, 0, 4, 4), sm_mhz=(1350, 1400), ecc_uncorrected=(2, 2, 2, 5, 5)
    )
    (tmp_path / "0.csv").write_text(lines(samples[:5]))
    state = {"hardware": FACTS, "host": "node7"}
    (made,), warnings = hardware.of_ranks({3: tmp_path / "0.csv"}, {3: state})
    assert warnings == []
    assert (made["rank"], made["host"], made["uuid"]) == (3, "node7", FACTS["uuid"])
    assert (made["samples"], made["working_samples"]) == (5, 5)
    assert made["sm_mhz"] == {"median": 1350.0, "spread": 25.0}
    assert made["clock_reasons"] == [{"reason": "software power cap", "share": 0.8}]
    assert (made["power_w"], made["power_uncertainty_w"], made["power_limit_w"]) == (600, 0, 700)
    assert made["new_ecc_errors"] == 3
    assert (made["pcie_generation"], made["pcie_width"], made["temperature_c"]) == (5, 16, 55)
    assert made["cpu_mhz"] == {"median": 3200.0, "spread": 0.0}


def test_an_idle_gpu_s_samples_tell_nothing_of_its_clocks_or_power() -> None:
    idle = {"sm_mhz": 210, "power_mw": 70_000}
    for more in ({"reasons": 1}, {"busy_percent": 0}, {"reasons": None, "busy_percent": None}):
        made = row(**idle, **more)
        assert (made["samples"], made["working_samples"]) == (12, 0)
        assert (made["sm_mhz"], made["power_w"], made["clock_reasons"]) == (None, None, [])
        assert made["steal"] is not None  # the node's do
    some = row(reasons=(0, 1), sm_mhz=(1755, 210))
    assert some["working_samples"] == 6
    assert some["sm_mhz"] == {"median": 1755.0, "spread": 0.0}


def test_few_samples_tell_no_median() -> None:
    assert row(count=hardware.LEAST_SAMPLES - 1)["sm_mhz"] is None
    assert row(count=hardware.LEAST_SAMPLES)["sm_mhz"] is not None
    assert row(count=2)["power_uncertainty_w"] is None
    assert row(count=0)["new_ecc_errors"] is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "its first line is another one"),
        ("rank,sm\n1,2\n", "its first line is another one"),
        (lines(load(3))[:-40], "line 4"),
        (lines(load(2, sm_mhz=4294967295)), "line 2: 4294967295 is no sm_mhz"),
        (lines(load(2, sm_mhz="fast")), "line 2: fast is no sm_mhz"),
        (lines(load(2, power_mw="nan")), "line 2: nan is no power_mw"),
        (lines(load(2, busy_percent=-1)), "line 2: -1 is no busy_percent"),
        (lines(load(2, steal="1e999")), "line 2: 1e999 is no steal"),
        (lines(load(2, load="\x1b[31m")), "is no load"),
        ("\0\0\0", "cannot be read"),
        ('"' * 200_000, "cannot be read"),
        ("\xff", "it is no table"),
        ("x" * (1 << 21), "larger than 1 MB"),
    ],
)  # fmt: skip
def test_a_damaged_file_leaves_its_rank_out_with_a_warning(
    tmp_path: Path, content: str, why: str
) -> None:
    (tmp_path / "0.csv").write_bytes(content.encode("latin-1"))
    (tmp_path / "1.csv").write_text(lines(load()))
    made, warnings = hardware.of_ranks({0: tmp_path / "0.csv", 1: tmp_path / "1.csv"}, {})
    assert [entry["rank"] for entry in made] == [1]
    (warning,) = warnings
    assert warning.startswith("rank 0: hardware.csv cannot be read: ")
    assert why in warning
    assert "\x1b" not in warning


def test_a_rank_without_a_file_has_no_row_and_a_folder_is_none(tmp_path: Path) -> None:
    assert hardware.of_ranks({0: tmp_path / "0.csv"}, {}) == ([], [])
    (tmp_path / "0.csv").mkdir()
    made, warnings = hardware.of_ranks({0: tmp_path / "0.csv"}, {})
    assert (made, len(warnings)) == ([], 1)


def test_counters_that_go_backwards_are_said(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text(
        lines(load(4, ecc_uncorrected=(7, 7, 1, 2), energy_mj=(5, 6, 1, 2)))
    )
    (made,), warnings = hardware.of_ranks({0: tmp_path / "0.csv"}, {})
    assert made["new_ecc_errors"] == 1
    assert warnings == [
        "rank 0: its GPU's count of ECC errors goes backwards: its driver was loaded anew",
        "rank 0: its GPU's count of energy goes backwards: its driver was loaded anew",
    ]


def test_each_reason_has_its_name() -> None:
    every = row(reasons=sum(bit for bit in REASONS if bit > 1))
    assert {entry["reason"] for entry in every["clock_reasons"]} == {*REASONS.values()} - {"idle"}


def test_energy_per_step_is_mean_power_times_the_step() -> None:
    varied = row(power_mw=(590_000, 610_000))
    (made,) = hardware.with_energy([varied], 50_000_000)
    assert made["energy_j_per_step"] == pytest.approx(30.0)
    assert made["energy_uncertainty_j"] == pytest.approx(0.05 * 2 * 10.445 / 12**0.5, rel=0.01)
    (unknown,) = hardware.with_energy([varied], None)
    assert unknown["energy_j_per_step"] is None


def test_the_errors_of_a_gpu_have_their_time_and_the_rank_s_steps(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text(lines(load()))
    xids = [
        {"xid": 31, "after_ns": 10, "until_ns": 20},
        {"xid": 31, "after_ns": 20, "until_ns": 30},
        {"xid": 79, "after_ns": 20, "until_ns": 25},
        {"xid": "many", "after_ns": 0, "until_ns": 1},
        {"xid": 0, "after_ns": 0, "until_ns": 1},
        [],
    ]
    state = {"hardware": {**FACTS, "xids": xids}}
    (made,), _ = hardware.of_ranks(
        {3: tmp_path / "0.csv"}, {3: state}, lambda rank, ns: 100 * rank + ns // 10
    )
    assert [error["xid"] for error in made["xids"]] == [31, 31, 79]
    assert (made["xids"][0]["first_step"], made["xids"][0]["last_step"]) == (301, 302)
    sentence = "its GPU reported XID 31 in steps 301 to 302 and XID 79 in step 302"
    (difference,) = Compared([made]).of_errors(3)
    assert difference.text == sentence
    assert difference.evidence == {"rank": 3, "xids": [31, 31, 79]}
    assert hardware.differing([made]) == {3: [sentence]}
    assert Compared([made]).of_errors(4) == Compared(peers()).of_errors(1) == []
    (unknown,), _ = hardware.of_ranks({3: tmp_path / "0.csv"}, {3: state})
    assert "XID 79 until " in hardware.differing([unknown])[3][0]


# --- comparing


def of_gpu(rows: list[HardwareEntry], rank: int) -> Difference | None:
    return Compared(rows).of_gpu(rank)


def of_node(rows: list[HardwareEntry], rank: int) -> list[Difference]:
    return Compared(rows).of_node(rank)


def test_amdgpu_s_clocks_differ_without_a_reason_and_with_amd_s_advice() -> None:
    def of_amd(rank: int, mhz: int) -> HardwareEntry:
        return {**row(rank, sm_mhz=mhz, reasons=None), "driver": "amdgpu"}

    difference = of_gpu([of_amd(0, 1400), *(of_amd(rank, 2100) for rank in range(1, 8))], 0)
    assert difference is not None
    assert difference.text == (
        "its GFX clock is 1,400 MHz, its peers' 2,100 (amdgpu does not tell why)"
    )
    assert "nvidia" not in difference.advice


def peers(count: int = 7, **columns: Any) -> list[HardwareEntry]:
    return [row(rank, **columns) for rank in range(1, 1 + count)]


def test_a_gpu_whose_clock_is_lower_is_said_with_the_reason_and_what_to_do() -> None:
    late = row(0, sm_mhz=1410, reasons=(4, 4, 4, 0))
    difference = of_gpu([late, *peers()], 0)
    assert difference is not None
    assert difference.differs
    assert difference.text == (
        "its SM clock is 1,410 MHz, its peers' 1,755 (software power cap in 75% of 12 samples)"
    )
    assert "power limits" in difference.advice
    assert difference.evidence == {
        "rank": 0, "sm_mhz": 1410, "peers_sm_mhz": 1755, "samples": 12
    }  # fmt: skip
    hot = of_gpu([row(0, sm_mhz=1410, reasons=64), *peers()], 0)
    assert hot is not None
    assert "cooling" in hot.advice
    silent = of_gpu([row(0, sm_mhz=1410), *peers()], 0)
    assert silent is not None
    assert silent.text == "its SM clock is 1,410 MHz, its peers' 1,755"
    assert "other processes" in silent.advice


@pytest.mark.parametrize(
    ("own", "theirs", "differs"),
    [
        (1755, 1755, False),
        (1722, 1755, False),  # within 2%
        (1715, 1755, True),
        ((1600, 1700, 1650), 1755, True),
        ((1500, 1700, 1600), (1500, 1755), False),  # within what both vary
        (1650, (1500, 1755), False),
    ],
)
def test_a_difference_counts_beyond_two_percent_and_twice_what_samples_vary(
    own: Any, theirs: Any, differs: bool
) -> None:
    difference = of_gpu([row(0, sm_mhz=own), *peers(sm_mhz=theirs)], 0)
    assert difference is not None
    assert difference.differs == differs
    if not differs:
        assert difference.text.startswith("its clocks are its peers': ")
        assert difference.advice == ""


def test_a_clock_above_its_peers_is_said_and_is_no_difference_that_slows_a_rank() -> None:
    rows = [row(0, sm_mhz=1980), row(1)]
    difference = of_gpu(rows, 0)
    assert difference is not None
    assert (difference.differs, difference.advice) == (False, "")
    assert difference.text == "its SM clock is 1,980 MHz, its peers' 1,755"
    assert [*hardware.differing(rows)] == [1]


def test_gpus_that_differ_among_each_other_make_no_one_of_them_slow() -> None:
    clocks = [1500, 1550, 1600, 1650, 1700, 1750, 1800, 1850]
    rows = [row(rank, sm_mhz=mhz) for rank, mhz in enumerate(clocks)]
    assert hardware.differing(rows) == {}


def test_clocks_are_compared_with_other_gpus_of_the_same_kind_alone() -> None:
    own = row(0)
    assert of_gpu([own], 0) is None
    assert of_gpu(peers(), 0) is None
    other = {**row(1, sm_mhz=1410), "name": "NVIDIA A100-SXM4-80GB"}
    assert of_gpu([own, other], 0) is None  # type: ignore[list-item]
    same_gpu = {**row(1, sm_mhz=1410), "uuid": own["uuid"]}
    assert of_gpu([own, same_gpu], 0) is None  # type: ignore[list-item]
    assert of_gpu([row(0, reasons=1), *peers()], 0) is None


def nodes(**columns: Any) -> list[HardwareEntry]:
    """Ranks 0 and 1 on a node with these columns, 2 to 7 on three others."""
    return [row(k, "node0", **columns) for k in (0, 1)] + [
        row(k, f"node{k // 2}") for k in range(2, 8)
    ]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"steal": (0.12, 0.14)}, "take 13% of its node's processor time, 0% of the other nodes'"),
        ({"cpu_mhz": 2100.0}, "its processors run at 2,100 MHz, those of the other nodes at 3,200"),
        ({"memory_pressure": 30.0}, "wait for memory in 30% of the time, on the other nodes in 0%"),
    ],
)
def test_a_node_that_differs_from_the_others_is_said(
    columns: dict[str, Any], expected: str
) -> None:
    (difference,) = of_node(nodes(**columns), 1)
    assert expected in difference.text
    assert difference.advice
    assert of_node(nodes(**columns), 2) == []


@pytest.mark.parametrize(
    "columns",
    [
        {}, {"steal": 0.01}, {"steal": (0.0, 0.3)}, {"cpu_mhz": 3180.0}, {"cpu_mhz": 3600.0},
        {"cpu_mhz": (800.0, 3200.0)}, {"memory_pressure": 1.0}, {"steal": None}, {"load": 99.0},
    ],
)  # fmt: skip
def test_a_node_that_differs_no_more_than_it_varies_is_not(columns: dict[str, Any]) -> None:
    assert of_node(nodes(**columns), 0) == []


def test_a_job_of_one_node_has_no_other_to_compare_with() -> None:
    assert of_node([row(0, steal=0.5), row(1, steal=0.0)], 0) == []
    assert of_node([{**row(0), "host": None}, row(1)], 0) == []  # type: ignore[list-item]


def test_errors_of_memory_and_a_narrow_link_are_said_of_any_gpu() -> None:
    odd = row(2, pcie_generation=3, pcie_width=8, ecc_uncorrected=(0, 0, 1))
    odd["new_ecc_errors"] = 1
    assert hardware.differing([row(0), row(1), odd]) == {
        2: [
            "its GPU had 1 new uncorrected ECC error",
            "its PCIe generation is 3 of 5",
            "its PCIe width is 8 of 16",
        ]
    }


# --- shown


def results(*rows: HardwareEntry, **size: Any) -> Results:
    made = copy.deepcopy(sample.results())
    if rows:
        made["hardware"] = list(rows)
    if size:
        made["run_size"] = {"steps": 1000, "gpus": 64, "gpu_hour": None, **size}  # type: ignore[typeddict-item]
    return made


def test_the_text_has_a_line_where_something_differs_and_none_else() -> None:
    page = text.render(results(row(0, sm_mhz=1410, reasons=4), *peers()), width=200)
    assert "\nhardware  rank 0: its SM clock is 1,410 MHz, its peers' 1,755" in page
    assert "\nhardware" not in text.render(results(*peers()))
    assert "hardware: rank 0" in text.markdown(results(row(0, sm_mhz=1410), *peers()))


def test_what_could_not_be_read_is_one_line_for_all_ranks() -> None:
    unread = [{**row(rank, count=0), "note": "NVML cannot be loaded"} for rank in range(8)]
    page = text.render(results(*unread), width=200)  # type: ignore[arg-type]
    assert page.count("NVML cannot be loaded") == 1
    assert "hardware  ranks 0–7: NVML cannot be loaded" in page


def test_the_table_has_the_ranks_first_that_differ_and_a_dash_for_what_is_not_known() -> None:
    nothing = row(9, count=0)
    run = Summary(results(*peers(), row(8, sm_mhz=1410, reasons=4), nothing))
    assert [cells[0] for cells in run.hardware_rows][:2] == ["8", "1"]
    assert {len(cells) for cells in run.hardware_rows} == {len(summary.HARDWARE_COLUMNS)}
    first = dict(zip([name for name, _ in summary.HARDWARE_COLUMNS], run.hardware_rows[0],
                     strict=True))  # fmt: skip
    assert first["SM clock"] == "1,410 ±0 of 1,980"
    assert first["clocks limited by"] == "software power cap 100%"
    assert first["power"] == "600 ±0 of 700"
    assert first["PCIe"] == "5 × 16"
    assert first["samples"] == "12, 12"
    last = dict(zip(first, run.hardware_rows[-1], strict=True))
    assert {last[name] for name in ("SM clock", "power", "energy", "PCIe")} == {"-"}


def test_what_differs_of_a_whole_node_is_said_once() -> None:
    page = text.render(results(*nodes(steal=0.2)), width=250)
    assert "hardware  ranks 0–1: other virtual machines take 20% of its node's" in page
    assert page.count("virtual machines") == 1


def test_gpu_hours_of_the_leading_finding_are_said_once_with_their_ends_and_price() -> None:
    # 17.87 (16.74 to 19.00) ms of 61.6 a step, in 1,000,000 steps of 64 GPUs
    made = results(steps=1_000_000)
    page = text.render(made, width=200)
    assert page.count("GPU hours") == 1
    assert "saves 318 (298 to 338) of 1,0" in page
    assert "in a run of 1,000,000 steps on 64 GPUs\n" in page
    priced = text.render(merge_run.priced(made, 2.5), width=250)
    assert "794 (744 to 844) at 2.5 per GPU hour" in priced
    (saving,) = [tile for tile in panels.tiles(Summary(made)) if "saves" in tile.name]
    assert "318 (298 to 338) GPU hours of this run" in saving.more
    assert "GPU hours" not in text.render(results())


def test_a_run_of_seconds_is_worth_no_line_unless_its_price_is_asked_for() -> None:
    made = results(steps=20, gpus=2)
    assert "GPU hours" not in text.render(made)
    assert "GPU hours" in text.render(merge_run.priced(made, 2.5))


def test_a_price_where_the_run_s_size_is_not_known_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = results()
    assert merge_run.priced(made, 2.5) is made
    assert "--gpu-hour: the run's GPU hours cannot be determined" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["0", "-1", "1e3", "free", "", "nan", "2.5$", "99999999"])
def test_what_is_no_price_is_refused(given: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a price"):
        price(given)


def test_an_anonymous_copy_has_no_uuids_and_other_hosts() -> None:
    noted = {**row(1), "note": f"NVML does not know GPU {FACTS['uuid']}: Not Found"}
    made = results(row(0, "node17.example", sm_mhz=1410), noted)  # type: ignore[arg-type]
    hidden = anonymous.anonymous(made)
    shown = json.dumps(hidden)
    assert "5d8f3a4e" not in shown
    assert "node17" not in shown
    assert hidden["hardware"][0]["host"].startswith("host-")  # type: ignore[union-attr]
    assert Summary(hidden).differing.keys() == Summary(made).differing.keys()


# --- of a run


def test_a_run_s_ranks_have_their_hardware_in_the_results_and_on_the_page(run: Window) -> None:
    for rank in range(3):
        states.advance(str(run.rank(rank)), None, hardware=FACTS, host=f"node{rank}")
        (run.rank(rank) / "steps.csv").write_text("step,begin_ns,end_ns\n7,100,200\n8,200,300\n")
        if rank < 2:
            (run.rank(rank) / paths.HARDWARE).write_text(lines(load()))
    manifest = run.directory.read_manifest()
    manifest.record(began="2026-01-02T03:04:05+00:00", ended="2026-01-02T03:05:05+00:00")
    outcomes = [Outcome(rank, run.rank(rank) / paths.TRACE) for rank in range(3)]
    made = merge_run.merge_run(run, outcomes, gpu_hour=2.0)
    assert [entry["rank"] for entry in made.results["hardware"]] == [0, 1]
    assert made.results["run_size"] == {"steps": 9, "gpus": 3, "gpu_hour": 2.0}
    page = run.html.read_text()
    assert '<section id="hardware"' in page
    assert "NVIDIA H100 80GB HBM3" in page


def test_an_error_s_steps_are_those_of_the_rank_s_logs(run: Window) -> None:
    folder = run.rank(0)
    xids = [
        {"xid": xid, "after_ns": after, "until_ns": until}
        for xid, after, until in ((1, 150, 250), (2, 1050, 1990), (3, 10, 9_000))
    ]
    states.advance(str(folder), None, hardware={**FACTS, "xids": xids})
    (folder / "steps.csv").write_text("step,begin_ns,end_ns\n7,100,200\n8,200,300\n")
    (folder / "pace.csv").write_text(
        "first_step,count,begin_ns,end_ns,median_ns,q1_ns,q3_ns,longest_ns\n"
        "9,10,1000,2000,100,100,100,100\n"
    )
    (folder / paths.HARDWARE).write_text(lines(load()))
    ((made,), _) = merge_run.sampled_hardware(run, merge_run.job_record(run))
    between = [(error["first_step"], error["last_step"]) for error in made["xids"]]
    assert between == [(7, 8), (9, 18), (None, 19)]  # the last one: in the step that did not end


def test_a_run_without_samples_has_no_such_rows(run: Window) -> None:
    assert merge_run.sampled_hardware(run, merge_run.job_record(run)) == ([], [])
