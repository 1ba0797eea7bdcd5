"""The verdict for a terminal."""

from __future__ import annotations

import re

import pytest
import report_sample as sample

from clusterprof.report import summary, text
from clusterprof.report.summary import Summary
from clusterprof.results import Results


def test_the_first_line_is_the_verdict() -> None:
    results = sample.results()
    assert text.render(results).splitlines()[0] == results["verdict"]
    results["verdict"] = "rank 2 delays the other ranks " * 9 + "in every step"
    assert text.render(results, width=80).splitlines()[0] == results["verdict"]


@pytest.mark.parametrize("width", [80, 100])
def test_lines_keep_to_the_width_except_commands_to_copy(width: int) -> None:
    for line in text.render(sample.results(), width=width).splitlines():
        assert len(line) <= width or line.lstrip().startswith("next")


def test_findings_come_by_saving_with_uncertainty_share_recurrence_and_confidence() -> None:
    results = sample.results()
    page = " ".join(text.render(results).split())
    assert page.index("1 critical straggler.host rank 2") < page.index("2 warning input.pageable_")
    facts = ("17.9 ±1.2 ms", "29%", "persistent", "7–9", "97%")
    assert re.search(".{1,28}".join(map(re.escape, facts)), page)
    for finding in results["findings"]:
        assert finding["advice"] in page
        assert finding["next"] in page
    assert page.count("clusterprof explain") == 1


def test_ranks_steps_clock_missing_reports_and_warnings_are_named() -> None:
    page = text.render(sample.results())

    def line(label: str) -> str:
        (found,) = (line for line in page.splitlines() if line.startswith(label))
        return found

    for fact in ("0–3 of 5", "gpu-07", "NVIDIA H200", "nsys 2025.3.2", "3 of 4 steps", "(7–9)"):
        assert fact in line("ranks ")
    assert "rank 0 within ±8.4 µs" in line("clock ")
    assert f"rank 4: {sample.results()['missing'][0]['reason']}" in line("missing ")
    assert "rank 1: nsys said" in line("warning ")


def test_the_table_has_the_means_over_steady_state_steps_only() -> None:
    rows = re.findall(r"^ +(\d) +(62\.22) .*$", text.render(sample.results()), re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1", "2", "3"]


def test_a_healthy_run_reads_as_a_clean_answer() -> None:
    page = text.render(sample.healthy())
    assert page.startswith(sample.healthy()["verdict"])
    assert "findings  none" in page
    assert "critical  " not in page
    assert "missing" not in page
    assert "clusterprof explain" not in page


def test_a_wait_below_the_clocks_uncertainty_is_not_given_as_a_number() -> None:
    page = text.render(sample.healthy())
    assert page.count("<17 µs") == 4
    assert "0.009" not in page


def test_a_summary_that_is_the_verdict_is_given_once() -> None:
    results = sample.results()
    found = results["findings"][0]
    sample.say(results, (found, found["summary"]))
    assert " ".join(text.render(results).split()).count(results["verdict"]) == 1


def test_the_wait_of_an_operation_below_what_the_clocks_tell_is_given_as_a_bound() -> None:
    results = sample.results()
    results["collectives"]["by_operation"][0]["exposed_wait_ns_per_step"] = 150_000
    assert re.search(r"AllReduce .* 39\.0 ms +24\.0 ms +<0\.20 ms", text.render(results))


def test_no_wait_is_bounded_by_more_than_is_exposed() -> None:
    results = sample.results()
    results["collectives"]["by_operation"][0]["exposed_wait_ns_per_step"] = 150_000
    for entry in results["clock"]["ranks"][1:]:
        entry["uncertainty_ns"] = 3_000_000_000
    assert re.search(r"AllReduce .* 39\.0 ms +24\.0 ms +<24 ms", text.render(results))


def test_without_a_steady_state_step_the_means_are_of_all_steps_and_the_page_tells() -> None:
    results = sample.results()
    usual = text.render(results)
    for step in results["steps"]:
        step["settled"] = False
    page = text.render(results)
    assert "steps 6–9" in page
    assert "(7–9)" not in page
    assert "steady-state steps 7–9" in usual


def test_results_of_nothing_still_render() -> None:
    results = sample.healthy()
    results["ranks"], results["steps"], results["clock"]["ranks"] = [], [], []
    results["collectives"] = {"matched": 0, "incomplete": 0, "unmatched": 0, "by_operation": []}
    results["verdict"] = "cannot be determined: no rank has a report"
    page = text.render(results)
    assert page.startswith(results["verdict"])
    assert "step time breakdown" not in page
    # of no rank there is neither a clock nor a collective
    assert not re.search("^(clock|collectives) ", page, re.MULTILINE)
    assert "no rank was profiled" in page


def test_the_first_finding_does_not_repeat_the_verdict_above_it() -> None:
    results = sample.results()
    first = results["findings"][0]
    first["summary"] = f"{results['verdict']} Group default_pg waits for host vm."
    sample.say(results, (first, results["verdict"]))
    page = text.render(results)
    assert page.count(results["verdict"]) == 1
    assert "    Group default_pg waits for host vm.\n" in page


def test_many_ranks_make_a_short_table_that_keeps_the_straggler() -> None:
    results = sample.results()
    for step in results["steps"]:
        step["ranks"] = [sample.account(rank, late=rank == 97) for rank in range(128)]
    results["findings"][0]["rank"], results["findings"][0]["ranks"] = 97, [97]
    page = text.render(results)
    assert re.search(r"^ +97 ", page, re.MULTILINE)
    assert "112 more ranks" in page
    assert len(page.splitlines()) < 75


def test_plain_text_has_no_escape_sequences_even_from_a_report() -> None:
    page = text.render(sample.results(host="gpu\x1b]0;owned\x07"))
    assert "\x1b" not in page
    assert "gpu?]0;owned?" in page


def test_colour_changes_no_character_of_the_text() -> None:
    results = sample.results()
    coloured = text.render(results, colour=True)
    assert "\x1b[1;31mcritical\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text.render(results)


@pytest.mark.parametrize("width", [60, 70, 80, 100, 140, 200])
def test_no_line_but_the_verdict_and_commands_is_wider_than_the_page(width: int) -> None:
    made = sample.results()
    verdict, *lines = text.render(made, width=width).splitlines()
    assert verdict == made["verdict"]
    long = [line for line in lines if len(line) > width and not line.startswith("    next: ")]
    assert long == []
    header = next(line for line in lines if line.split()[:2] == ["rank", "step"])
    assert header.split()[-1] == "idle"
    shares = any(line.endswith("3.6%") for line in lines)
    assert shares == (width >= 80)


def test_the_groups_of_the_ranks_are_listed_with_how_many_of_their_ranks_are_unprofiled() -> None:
    def groups(results: Results) -> str:
        return " ".join(text.render(results).partition("\ngroups ")[2].partition("\n\n")[0].split())

    made = sample.results()
    made["missing"], made["capture"], made["shallow"] = [], None, None
    assert groups(made) == "data mesh_dp {0–3 of 5} (confidence 90%)"
    (data,) = made["topology"]["groups"]
    chain = data | {"kind": "pipeline", "ranks": [0, 4], "size": 2, "description": ""}
    odd = data | {"kind": "unknown", "size": None, "confidence": 0.5}
    made["topology"]["groups"] = [chain, *[data] * 6, odd]  # type: ignore[list-item]
    four = ", ".join(["mesh_dp {0–3 of 5}"] * 4)
    assert groups(made) == (
        f"pipeline {{0→4}} (confidence 90%); data {four} and 2 more (confidence 90%); "
        "unknown mesh_dp {0–3}"
    )
    made["topology"]["groups"] = []
    assert "groups" not in text.render(made)


def test_the_critical_path_is_shown_with_its_rank_and_what_its_imbalance_costs() -> None:
    page = " ".join(text.render(sample.results()).split())
    facts = ("critical path", "61.6 ms", "host 34.1 ms (55%)", "100% on rank 2", "60.4 ms")
    assert re.search(".{1,120}".join(map(re.escape, facts)), page)
    assert "of 61.6 ms per step:" in page
    assert "1.31 times as long as with the same work on the 4 profiled ranks of " in page
    other = sample.results()
    assert other["critical_path"] is not None
    other["critical_path"] |= {"without_profiler": True, "steps": [8, 9]}
    page = " ".join(text.render(other).split())
    assert "of 61.6 ms per step without the profiler (steps 8–9): host" in page
    other["what_if"]["S"] = 0.96
    assert "steps take no longer than with the same work on the 4 " in text.render(other, width=200)
    nothing = sample.results()
    nothing["critical_path"] = None
    nothing["what_if"] |= {"S": None, "S_t": [], "S_w": []}
    assert "critical path" not in text.render(nothing)


def test_what_a_repair_saves_is_shown() -> None:
    results = sample.results()
    straggler, copies = results["findings"]
    assert "17.9 ±1.2 ms" in summary.saved(straggler)
    straggler["saved_least_ns"] = 16_000_000
    assert "17.9 (16.0 to 19.0) ms" in summary.saved(straggler)
    straggler["saved_ns_per_step"], straggler["saved_most_ns"] = -100_000, 1_100_000
    assert "1.10 ms" in summary.saved(straggler)
    straggler["saved_most_ns"] = -100_000
    assert "nothing" in summary.saved(straggler)
    assert "straggler.host (rank 2)" in " ".join(summary.saving(copies))


def test_both_paces_are_shown_where_the_window_has_another_than_the_job() -> None:
    results = sample.results()
    assert Summary(results).pace == ""
    results["pace"] = {
        "step_ns": 58 * 10**6,
        "without_profiler": True,
        "window_step_ns": 105 * 10**6,
    }
    assert re.search("58.0 ms.* 105 ms", Summary(results).pace)
    assert "\npace " in text.render(results)


def test_of_several_profilers_each_has_its_ranks() -> None:
    results = sample.results()
    assert ", nsys 2025.3.2, " in Summary(results).ranks
    results["ranks"][1]["profiler"] = "torch.profiler"
    assert ", nsys 2025.3.2 (ranks 0, 2–3), torch.profiler (rank 1), " in Summary(results).ranks


def test_the_pauses_of_a_run_are_told_with_their_share_and_cost() -> None:
    page = " ".join(text.render(sample.paused()).split())
    assert "pauses 9.3% of the run of 4 h" in page
    assert (
        "every 500 steps (a checkpoint or an evaluation): 11 pauses, mean 41.0 s (40.0 s to "
        "43.0 s), steps 500 to 5500; 3.1% of the run, 0.63 rank hours"
    ) in page
    assert "start: compilation and warm-up, 3 steps: 41.0 s" in page
    assert "restart after attempt 1: 41.0 s" in page
    assert "- pause: every 500 steps" in text.markdown(sample.paused())
    assert "pause" not in text.render(sample.results())


def test_a_name_of_a_pause_out_of_a_report_stays_text() -> None:
    results = sample.paused()
    results["pauses"]["entries"][1]["name"] = "save\x1b[31m|<b>"
    assert "(save?[31m|<b>)" in " ".join(text.render(results).split())
    assert r"(save?\[31m\|\<b\>)" in text.markdown(results)


def test_of_many_kinds_of_pauses_the_costliest_are_told() -> None:
    results = sample.paused()
    results["pauses"]["entries"] = [
        sample.pause("regular", every_steps=100 + n, gpu_ns=n * sample.MS) for n in range(40)
    ]
    page = " ".join(text.render(results).split())
    assert page.count(" pauses, mean ") == summary.MOST_PAUSES
    assert "every 139 steps" in page
    assert "28 more kinds are in results.json" in page


def test_a_saving_that_may_be_none_is_in_words_and_without_a_confidence() -> None:
    results = sample.results()
    results["findings"][0] |= {"saved_least_ns": 0, "saved_most_ns": 21_000_000}  # type: ignore[typeddict-item]
    page, markdown = text.render(results, width=300), text.markdown(results)
    assert "saves 0 to 21.0 ms (best guess 17.9) per step" in page
    assert "may save nothing" in page
    assert "confidence 97%" not in page
    assert "| may save nothing |" in markdown
    assert "97%" not in markdown


def test_a_share_of_another_step_than_the_usual_one_names_it() -> None:
    results, found = sample.results(), sample.results()["findings"][0]
    assert found["saving"] is not None
    assert results["pace"] is not None
    assert Summary(results).share(found) == "29%"
    found["saving"] |= {"stated": "long_run"}
    found["saving"]["long_run"]["step_ns"] = 2 * results["pace"]["step_ns"]
    results["pace"]["without_profiler"] = False
    assert re.fullmatch(r"29% of \S+ ms steps in the long run", Summary(results).share(found))
    found["share_of_step"] = 0.0
    assert Summary(results).share(found) == ""


def test_a_path_of_another_length_than_the_step_says_so() -> None:
    results = sample.results()
    assert results["critical_path"] is not None
    assert results["pace"] is not None
    results["critical_path"]["step_ns"] = results["pace"]["step_ns"] * 21 // 20
    assert "by the replay along it (savings are of " in Summary(results).path_of
