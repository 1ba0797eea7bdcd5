"""The first line: the straggler, unless something else costs many times as much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lab.tiers import long_but
from simulate import Cause, Job, simulate
from simulate.cases import KINDS
from studies import NAMES, SEED, Simulated, gathered

from clusterprof.analysis.findings import registry
from clusterprof.analysis.findings.finding import SENTENCE_LENGTH, named
from clusterprof.analysis.findings.straggler import delays
from clusterprof.analysis.findings.verdict import headline, verdict
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.report import html, text
from clusterprof.results import Finding
from clusterprof.study import Study, study
from clusterprof.tables import RankTables

MS = 1_000_000


class _Nothing(dict[Any, Any]):
    """As if all had been computed, and nothing been found."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> None:
        return None


def dataset(ranks: tuple[int, ...] = (0, 1)) -> Dataset:
    two = np.array([0, 1])
    calls = SimpleNamespace(
        rank=two, collective=two * 0, matched=two >= 0, synchronising=two < 0, step=two,
        last_rank=two, wait=two,
    )  # fmt: skip
    made = SimpleNamespace(
        ranks=ranks, steady_steps=(3, 4, 5), step_ns=40e6, collectives=calls, world_size=None,
        known=_Nothing(), unlike_profilers=False, shallow=None,
    )  # fmt: skip
    return cast("Dataset", made)


def finding(
    code: str, cost_ms: float, severity: str = "critical", recurrence: str = "persistent"
) -> Finding:
    unsure = severity == "info" and recurrence == "persistent"
    made: dict[str, Any] = {
        "code": code,
        "recurrence": recurrence,
        "share_of_step": cost_ms / 40,
        "severity": severity,
        "summary": f"Of {code}. More of it.",
        "evidence": [],
        "ranks": [],
        "saved_ns_per_step": cost_ms * 1e6,
        "saved_least_ns": 0.0 if unsure else cost_ms * 1e6,
    }
    return cast("Finding", made)


HOST, STALL = "straggler.host", "input.stall"


@pytest.mark.parametrize(
    ("findings", "named"),
    [
        ([finding(HOST, 10), finding(STALL, 3)], [HOST]),
        ([finding(STALL, 15), finding(HOST, 10)], [HOST]),
        ([finding(STALL, 30), finding(HOST, 3)], [STALL, HOST]),
        ([finding(STALL, 30), finding(HOST, 3, "info")], [STALL, HOST]),
        ([finding(HOST, 3, "info")], []),
        ([finding(STALL, 15, "info", "once")], [STALL]),
    ],
)
def test_the_verdict_is_the_straggler_or_what_costs_far_more(
    findings: list[Finding], named: list[str]
) -> None:
    line = " ".join(sentence["text"] for sentence in verdict(dataset(), findings))
    assert re.findall(f"{re.escape(HOST)}|{re.escape(STALL)}", line) == named
    # with the straggler alone comes why
    assert ("More of it." in line) is (named == [HOST])
    assert ("3 steady-state steps of 40.0 ms" in line) is (named == [])


def test_what_a_window_shows_once_heads_the_verdict_where_it_is_the_largest() -> None:
    found = [finding(STALL, 30, "info", "once"), finding("host.sync", 10)]
    first, second = verdict(dataset(), found)
    assert (first["code"], second["code"]) == (STALL, "host.sync")
    assert second["text"] == "Also, of host.sync."


def test_of_one_rank_the_verdict_names_it_and_what_costs_most() -> None:
    unknown, of_finding = verdict(dataset((7,)), [finding(STALL, 30)])
    assert unknown["code"] == "unknown"
    assert "only rank 7 " in unknown["text"].lower()
    assert (of_finding["code"], of_finding["text"]) == (STALL, f"Of {STALL}.")


def is_short(line: str) -> None:
    """The line is two sentences of a hundred characters at most."""
    parts = re.split(r"(?<=[.!?]) (?=[A-Z0-9])", line)
    assert len(parts) <= 2, line
    assert max(map(len, parts)) <= SENTENCE_LENGTH, line
    assert all(part[0].isupper() and part[-1] == "." for part in parts), line


def plain(value: object) -> bool:
    """Whether it holds Python's own numbers, and none of numpy's."""
    if isinstance(value, dict):
        return all(plain(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return all(plain(each) for each in value)
    return type(value) in (str, int, float, bool, type(None))


@pytest.mark.parametrize("recording", NAMES)
def test_the_first_line_of_a_recording_is_short_and_its_numbers_are_plain(
    studied: Callable[[str], Study], recording: str
) -> None:
    results = studied(recording).results
    is_short(results["verdict"])
    assert plain(results)


@pytest.mark.parametrize("recording", long_but(NAMES[::5], NAMES))
def test_the_first_line_of_a_single_rank_is_short_and_its_numbers_are_plain(recording: str) -> None:
    results = study(gathered(recording).ranks[:1]).results
    is_short(results["verdict"])
    assert plain(results)


@pytest.mark.parametrize("seed", long_but([SEED], [0, 1]))
@pytest.mark.parametrize("job_kind", KINDS)
def test_a_simulated_job_has_a_short_first_line_plain_numbers_and_codes_that_are_described(
    simulated: Callable[..., Simulated], job_kind: str, seed: int
) -> None:
    results = simulated(job_kind, seed).study.results
    is_short(results["verdict"])
    assert plain(results)
    assert {each["code"] for each in results["findings"]} <= registry.CODES.keys()


def texts(summary: str, most: int) -> list[str]:
    found = cast("Finding", finding(HOST, 1) | {"summary": summary})
    return [sentence["text"] for sentence in headline(found, most)]


def test_a_sentence_that_is_too_long_loses_its_parenthesis_and_names_are_cut() -> None:
    first = "GPUs idle 19.1 ms of each step waiting for launches"
    assert texts(f"{first} ({'x' * 80}). Second one.", 1) == [f"{first}."]
    three = ["A first (in y).", "A second.", "A third."]
    assert texts(" ".join(three), 2) == three[:2]
    assert len(named("n" * 500)) <= 40


@pytest.mark.parametrize("job_kind", long_but(["GPU with more work", "slow link"], KINDS))
def test_of_a_job_without_gpus_no_sentence_speaks_of_them(
    simulated: Callable[..., Simulated], job_kind: str
) -> None:
    """As torch.profiler has it on processors with gloo."""
    done = study([_on_processors(tables) for tables in simulated(job_kind).ranks])
    results = {name: done.results[name] for name in ("findings", "verdict", "warnings")}
    page = html.render(done.results, done.collectives, title="a job")
    page = re.sub(r"[A-Za-z0-9+/=]{100,}", "", page)  # what can be saved from it, packed
    for shown in (json.dumps(results), page, text.render(done.results)):
        assert re.findall(r"(?:GPU|nvidia|straggler\.gpu).{0,40}", shown) == []


def _on_processors(tables: RankTables) -> RankTables:
    """A rank's report without anything that only a GPU has."""
    activity = tables.activity
    for name in ("correlation", "launch_start_ns", "launch_end_ns", "launch_thread"):
        at = activity.schema.get_field_index(name)
        field = activity.schema.field(at)
        activity = activity.set_column(at, field, pa.nulls(activity.num_rows, field.type))
    kind = tables.host_calls["kind"].cast(pa.string())
    host = tables.host_calls.filter(pc.not_equal(kind, "cuda"))
    info = replace(tables.info, backend="gloo", device="")
    return replace(tables, info=info, activity=activity, host_calls=host)


def cut(tables: RankTables, steps: int) -> RankTables:
    """The report as it is where the capture ended after so many steps."""
    end = tables.steps["end_ns"][steps - 1].as_py()

    def before(table: pa.Table, name: str) -> pa.Table:
        return table.filter(pc.less(table[name], end))

    return replace(
        tables,
        steps=tables.steps.slice(0, steps),
        activity=before(tables.activity, "launch_start_ns"),
        collective_calls=before(tables.collective_calls, "issue_start_ns"),
        host_calls=before(tables.host_calls, "start_ns"),
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_of_a_single_step_the_verdict_has_its_account_and_that_it_is_no_evidence(
    steps: int,
) -> None:
    ranks, _ = simulate(Job(causes=(Cause("host", 2, 30 * MS),)))
    results = study([cut(tables, steps) for tables in ranks]).results
    assert f"({steps - 1} of 2)" in results["verdict"]
    assert "no evidence" in results["verdict"]
    shares = [int(share) for share in re.findall(r"(\d+)%", results["verdict"])]
    assert len(shares) == 4
    assert 98 <= sum(shares) <= 102
    assert not [f for f in results["findings"] if f["code"].startswith("straggler")]


def test_of_a_window_without_steps_the_verdict_has_its_account() -> None:
    verdict = study(simulate(Job(with_steps=False))[0]).results["verdict"]
    assert verdict.startswith("No report has steps")
    assert "The window (" in verdict
    assert "no evidence" in verdict


def test_no_rank_is_said_to_be_on_time_that_cannot_be_compared() -> None:
    ranks, _ = simulate(Job())
    bare = [replace(r, collective_calls=r.collective_calls.slice(0, 0)) for r in ranks]
    assert "cannot be determined" in study(bare).results["verdict"]
    one = study([*ranks[:3], bare[3]]).results["verdict"]
    assert re.search(r"\b3 ranks; cannot be determined\b.* rank 3 ", one)


def test_a_rank_for_which_all_others_wait_half_of_the_step_is_named() -> None:
    # all hosts are alike; the one that resumed last stays last
    causes = tuple(Cause("host", rank, 60 * MS) for rank in range(4))
    results = study(simulate(Job(steps=6, causes=causes))[0]).results
    first = "No stragglers: most of a step is spent waiting for rank 3, but fixing it saves little."
    assert first in results["verdict"]


def test_a_rank_that_is_late_while_the_others_compute_costs_little_and_is_named() -> None:
    # its host sleeps longer than its device has work queued, the others' reductions hide most
    job = Job(layer_ns=4_000_000, ahead_steps=1, causes=(Cause("host", 1, 24 * MS),))
    results = study(simulate(job)[0]).results
    late = [f for f in results["findings"] if f["code"] == "straggler.host"]
    assert [f["rank"] for f in late[:1]] == [1]
    assert "rank 1 " in results["verdict"].lower()
    assert not delays(late[:1]) or late[0]["severity"] != "info"


def test_gpus_that_idle_with_work_launched_already_wait_for_what_no_report_shows() -> None:
    ranks, _ = simulate(Job(launch_ns=30_000, steps=6))
    # what the profiler has dropped: half of the backward, on all ranks
    names = [t.activity["name"].cast(pa.string()) for t in ranks]
    kept = [pc.invert(pc.match_substring(name, "backward_1")) for name in names]
    poor = [replace(t, activity=t.activity.filter(k)) for t, k in zip(ranks, kept, strict=True)]
    results = study(poor).results
    (found,) = [f for f in results["findings"] if f["code"] == "gpu.idle"]
    assert found["rank"] is None
    assert 0.2 < found["share_of_step"] < 0.4
    (first,) = headline(found, 1)
    assert {**first, "rows": found["rows"]} in results["headline"]
    assert not [f for f in study(ranks).results["findings"] if f["code"] == "gpu.idle"]
