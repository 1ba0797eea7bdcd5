"""What the looks at a running job say of the stragglers of its capture, on simulated jobs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from simulate import Cause, Job, simulate
from simulate.flight import recorded

from clusterprof import watched, words
from clusterprof.align.lateness import host_clock
from clusterprof.analysis.findings import undisturbed
from clusterprof.analysis.model.shallow import Shallow, all_ranks
from clusterprof.analysis.model.what_if import what_ifs
from clusterprof.report import html, results_json, summary, text
from clusterprof.results import Finding, Results
from clusterprof.study import Study, study
from clusterprof.watched import Row

MS = 1_000_000
JOB = Job(
    dp=8, steps=10, first_step=500, synchronous=True, tear_ns=0, causes=(Cause("host", 3, 8 * MS),)
)
STEP = 30 * MS
#: profiled ranks: the straggler and a peer
PROFILED = (3, 5)


def looks(rank: int, late_ms: float, count: int = 4, delays: int = 1) -> list[Row]:
    """Looks of a hundred steps each, all before the window, in which a rank was late (-1: none)."""
    return [
        Row(
            (k + 1) * 60_000 * MS, k * 100, k * 100 + 99, 100, STEP, rank, "n", "default_pg 0",
            round(late_ms * MS), MS // 5, delays, k * 100, k * 100 + 99,
        )
        if rank >= 0
        else Row((k + 1) * 60_000 * MS, k * 100, k * 100 + 99, 100, STEP)
        for k in range(count)
    ]  # fmt: skip


@cache
def shallow_of(job: Job) -> Shallow:
    made = recorded(job)
    every = all_ranks(
        made.flight, host_clock(made.flight, made.readings, made.probe), made.steps, {}
    )
    return replace(every, results={**every.results, "suspects": []})


def study_with(job: Job, rows: list[Row]) -> Study:
    """The study of the profiled ranks beside these looks, which alone show who is late."""
    shallow = shallow_of(job)
    ranks = [tables for tables in simulate(job)[0] if tables.rank in PROFILED]
    shallow = replace(shallow, results=watched.over_the_run(shallow.results, rows))
    return study(ranks, shallow=shallow)


def straggler(results: Results) -> Finding:
    (found,) = [f for f in results["findings"] if f["code"] == "straggler.host"]
    return found


def test_the_saving_is_that_part_of_the_looks_lateness_that_the_step_loses() -> None:
    plain, made = study_with(JOB, []), study_with(JOB, looks(3, 5.0))
    window, found = straggler(plain.results), straggler(made.results)
    assert window["saved_ns_per_step"] == pytest.approx(8 * MS, rel=0.1)
    assert found["saved_ns_per_step"] == pytest.approx(5 * MS, rel=0.1)
    saving = found["saving"]
    assert saving is not None
    assert saving["stated"] == "looks"
    assert (saving["looks"]["steps"], saving["looks"]["lateness_ns"]) == (400, 5 * MS)
    assert saving["looks"]["share"] == pytest.approx(1.0, abs=0.1)
    # the window's stays beside it
    assert window["saving"] is not None
    assert saving["window"] == window["saving"]["window"]
    assert found["saved_least_ns"] < 5 * MS < found["saved_most_ns"]
    assert found["saved_least_ns"] <= found["saved_ns_per_step"] - MS // 10
    assert f"{found['saved_ns_per_step'] / MS:.2f} ms" in found["summary"]
    assert found["saved_alone_ns"] == pytest.approx(found["saved_ns_per_step"], rel=0.01)


def test_a_choice_of_repairs_leaves_what_the_stated_saving_says() -> None:
    made = study_with(JOB, looks(3, 5.0))
    combined, found = made.results["combined"], straggler(made.results)
    assert combined is not None
    assert combined["findings"][0]["ranks"] == [3]
    saved = combined["remaining_ns"][0] - combined["remaining_ns"][1]
    assert saved == pytest.approx(found["saved_ns_per_step"], rel=0.1)


def test_of_what_queued_work_hides_the_step_loses_a_part() -> None:
    """The saving of equal lateness is that of the window, whatever the hosts' lead hides."""
    job = replace(JOB, synchronous=False, ahead_steps=1, launch_ns=200_000, steps=14)
    plain = study_with(job, [])
    window = straggler(plain.results)
    whatifs = what_ifs(plain.dataset)
    assert whatifs is not None
    caused = undisturbed.lateness_ns(plain.dataset, whatifs, 3, whatifs.base)
    found = straggler(study_with(job, looks(3, float(caused.mean()) / MS)).results)
    assert found["saved_ns_per_step"] == pytest.approx(window["saved_ns_per_step"], rel=0.01)


def test_what_steps_were_longer_by_is_the_saving() -> None:
    found = straggler(study_with(JOB, looks(3, 4.0, delays=watched.BY_PACE)).results)
    assert found["saved_ns_per_step"] == 4 * MS
    assert found["saving"] is not None
    assert found["saving"]["looks"]["share"] == 1.0


def test_a_straggler_that_becomes_later_after_the_window_is_told_both() -> None:
    """What began after the window shows neither who is late in it, nor why it is so since."""
    rows = [replace(row, first_step=row.first_step + 600, last_step=row.last_step + 600,
                    since_step=row.since_step + 600, until_step=row.until_step + 600)
            for row in looks(3, 12.0)]  # fmt: skip
    before = [*looks(-1, 0.0, 1)]
    made = study_with(JOB, [*before, *(replace(row, wall_ns=2 * row.wall_ns) for row in rows)])
    by_code = {found["code"]: found for found in made.results["findings"]}
    assert by_code["straggler.host"]["saved_ns_per_step"] <= 8.8 * MS
    since = by_code["straggler.shallow"]
    assert (since["ranks"], since["saved_ns_per_step"]) == ([3], 12 * MS)
    assert "since step 600" in since["summary"]
    alike = study_with(replace(JOB, causes=()), [*before, *rows])
    assert {found["code"] for found in alike.results["findings"]} >= {"straggler.shallow"}
    assert "straggler.host" not in {found["code"] for found in alike.results["findings"]}


def test_a_rank_that_is_late_in_the_window_alone_is_the_profilers() -> None:
    results = study_with(JOB, looks(-1, 0.0)).results
    found = straggler(results)
    assert (found["severity"], found["ranks"]) == ("info", [3])
    assert "in no look without a profiler" in found["summary"]
    assert "in no look without a profiler" in results["verdict"]


def test_a_rank_that_looks_show_late_for_a_time_costs_as_often() -> None:
    """Whether it delayed anybody in the looks is not known: the window tells what that costs."""
    results = study_with(JOB, [*looks(3, 5.0, 1, delays=0), *looks(-1, 0.0)[1:]]).results
    found = straggler(results)
    assert found["saved_ns_per_step"] == pytest.approx(8 * MS / 4, rel=0.1)
    assert (found["severity"], found["recurrence"]) == ("info", "intermittent")
    assert found["saved_least_ns"] == 0
    first = "In about 100 of 400 steps without a profiler rank 3 delays the other ranks by"
    assert found["summary"].startswith(first)


@pytest.mark.parametrize(
    "rows",
    [looks(-1, 0.0, 1)[:0], [replace(looks(-1, 0.0, 1)[0], steps=20, last_step=19)],
     looks(3, 5.0, delays=0)],
    ids=["no look", "few steps", "shown, with what effect is not known"],
)  # fmt: skip
def test_looks_that_could_not_show_it_contradict_no_window(rows: list[Row]) -> None:
    found = straggler(study_with(JOB, rows).results)
    assert found["severity"] == "critical"
    assert found["saved_ns_per_step"] == pytest.approx(8 * MS, rel=0.1)


def test_the_page_and_the_text_say_what_a_saving_by_looks_rests_on() -> None:
    made = study_with(JOB, looks(3, 5.0))
    found = straggler(made.results)
    sentences = " ".join(summary.saving(found))
    assert "In 400 steps without a profiler the rank was late by 5.00 ±" in sentences
    page = html.render(made.results, made.collectives, made.lanes, title="run")
    assert "of the lateness in 400 steps (stated)" in page


# --- the table of all evidence


def rows_named(results: Results, numbers: list[int]) -> list[tuple[str, str, list[int], bool]]:
    rows = {row["number"]: row for row in results["evidence_table"]}
    return [
        (row["source"], row["what"], row["ranks"], row["profiler"])
        for row in (rows[number] for number in numbers)
    ]


def test_each_sentence_and_each_finding_names_the_rows_that_it_rests_on() -> None:
    results = study_with(JOB, looks(3, 5.0)).results
    found = straggler(results)
    assert rows_named(results, found["rows"]) == [
        ("window", "step", [3, 5], True),
        ("looks", "lateness", [3], False),
        ("window", "cost", [3], True),
        ("replay", "saving", [3], True),
    ]
    assert results["headline"][0]["rows"] == found["rows"]
    (lateness,) = [row for row in results["evidence_table"] if row["what"] == "lateness"]
    assert (lateness["first_step"], lateness["last_step"], lateness["steps"]) == (0, 399, 400)
    assert lateness["value_ns"] == 5 * MS
    assert lateness["least_ns"] is not None
    assert lateness["least_ns"] < 5 * MS
    (saving,) = [row for row in results["evidence_table"] if row["source"] == "replay"]
    assert (saving["value_ns"], saving["least_ns"], saving["most_ns"]) == (
        found["saved_ns_per_step"], found["saved_least_ns"], found["saved_most_ns"]
    )  # fmt: skip
    assert [row["number"] for row in results["evidence_table"]] == [
        *range(1, 1 + len(results["evidence_table"]))
    ]


def test_that_no_look_shows_a_rank_late_is_a_row_of_its_finding() -> None:
    results = study_with(JOB, looks(-1, 0.0)).results
    named = rows_named(results, straggler(results)["rows"])
    assert ("looks", "step", [*range(8)], False) in named


def test_a_sentence_of_no_finding_names_what_compared_the_ranks() -> None:
    results = study_with(replace(JOB, causes=()), looks(-1, 0.0)).results
    assert results["headline"][0]["code"] == "none"
    sources = [source for source, *_ in rows_named(results, results["headline"][0]["rows"])]
    assert sources == ["window", "flight recorders", "looks"]


def test_of_reports_alone_all_rows_have_a_profiler_and_the_text_says_so() -> None:
    made = study(simulate(JOB)[0])
    results = made.results
    found = straggler(results)
    assert rows_named(results, found["rows"]) == [
        ("window", "step", [*range(8)], True),
        ("window", "cost", [3], True),
        ("replay", "saving", [3], True),
    ]
    assert results["headline"][0]["rows"] == found["rows"]
    caveat = "no steps without the profiler are known, so what it causes itself cannot be"
    assert caveat in " ".join(text.render(results).split())
    page = html.render(made.results, made.collectives, made.lanes, title="run")
    assert "nothing outside of the window confirms them" in page
    assert caveat not in text.render(study_with(JOB, looks(3, 5.0)).results)


def test_a_replayed_step_of_another_length_is_not_called_one_without_the_profiler() -> None:
    results = study(simulate(JOB)[0]).results
    assert results["pace"]
    results["pace"]["step_ns"] = results["pace"]["window_step_ns"] * 9 // 10
    printed = " ".join(text.render(results).split())
    assert "ms per step in the replay, " in printed
    assert "ms per step without the profiler" not in printed


def test_a_window_without_steady_steps_has_the_one_step_that_its_verdict_shows() -> None:
    results = study(simulate(replace(JOB, steps=1))[0]).results
    assert results["headline"][0]["code"] == "unknown"
    (row,) = results["evidence_table"]
    assert (row["what"], row["steps"]) == ("step, not in steady state", 1)
    assert f"({words.ms(row['value_ns'])}, no evidence)" in results["verdict"]
    assert [sentence["rows"] for sentence in results["headline"]] == [[1], [1]]


@pytest.mark.parametrize("made", [JOB, replace(JOB, causes=()), replace(JOB, steps=1)])
def test_each_row_that_is_named_is_there_and_each_finding_and_sentence_names_one(made: Job) -> None:
    results = study(simulate(made)[0]).results
    numbers = {row["number"] for row in results["evidence_table"]}
    for named in (*results["findings"], *results["headline"]):
        assert named["rows"]
        assert {*named["rows"]} <= numbers


def test_the_page_has_the_rows_and_links_to_them_and_the_text_a_footnote(tmp_path: Path) -> None:
    made = study_with(JOB, looks(3, 5.0))
    page = html.render(made.results, made.collectives, made.lanes, title="run")
    for row in made.results["evidence_table"]:
        assert f'id="evidence-{row["number"]}"' in page
    for number in straggler(made.results)["rows"]:
        assert page.count(f'<a href="#evidence-{number}">') >= 2
    count = len(made.results["evidence_table"])
    printed = text.render(made.results)
    assert f"{count} rows at the end of the page, and in results.json" in " ".join(printed.split())
    results_json.write(tmp_path / "results.json", made.results)
    assert results_json.read(tmp_path / "results.json") == made.results
