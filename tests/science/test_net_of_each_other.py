"""Repairs are weighed in one loop: none counts a millisecond that one before it has saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from contradictions import contradictions
from simulate import Job
from studies import simulated_job, studied_job

from clusterprof.analysis.findings import registry
from clusterprof.analysis.findings.finding import Code, Repair, Tier, Words, of_step
from clusterprof.analysis.model.dataset import Dataset
from clusterprof.analysis.model.replay import Lengths
from clusterprof.analysis.model.what_if import Saved
from clusterprof.report import summary, text
from clusterprof.results import Results
from clusterprof.study import study

#: its hosts take longer to launch its kernels than these take
JOB = Job(layers=24, layer_ns=20_000, launch_ns=40_000, transfer_ns=15_000, copy_ns=20_000)


@dataclass
class Hosts:
    """A module that proposes to make all hosts faster, by several names."""

    #: of each its name, what is left of hosts' times, and its turn
    faster: Sequence[tuple[str, float, int]]
    TIER: Tier = Tier.EVERYONE
    CODES: tuple[Code, ...] = ()

    def repairs(
        self, dataset: Dataset, lengths: Lengths, _before: Sequence[Repair]
    ) -> list[Repair]:
        def repair(name: str, left: float, turn: int) -> Repair:
            code, ranks = Code(name, "", "", "", "Do nothing."), tuple(dataset.ranks)

            def apply(any_: Lengths) -> Lengths:
                most = (left * lengths.own).astype(lengths.own.dtype)
                return replace(any_, own=most.clip(max=any_.own))

            def words(saved: Saved) -> Words:
                return Words(f"It costs {of_step(dataset, saved)}.", evidence=[])

            return Repair(code, ranks, apply, words, turn=turn)

        return [repair(*each) for each in self.faster]


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """A study of `JOB` with these modules alone."""

    def of(*modules: Hosts) -> Results:
        monkeypatch.setattr(registry, "MODULES", [*modules])
        return study(simulated_job(JOB)).results

    return of


def chain(results: Results) -> list[tuple[str, int, int, list[str]]]:
    """Each finding's code, its saving net and alone, and what it is net of, in that order."""
    rows = [
        (f["code"], f["saved_ns_per_step"], f["saved_alone_ns"],
         [one["code"] for one in f["saving"]["net_of"]])
        for f in results["findings"] if f["saving"]
    ]  # fmt: skip
    return sorted(rows, key=lambda row: len(row[3]))


def test_what_saves_most_comes_first_and_the_same_is_not_saved_twice(
    weighed: Callable[..., Results],
) -> None:
    results = weighed(Hosts([("half", 0.5, 0), ("nearly all", 0.1, 0)]))
    (first, net, alone, before), (second, rest, also, after) = chain(results)
    assert (first, before, second, after) == ("nearly all", [], "half", ["nearly all"])
    assert net == alone > also > 0
    # all that it would save is saved: it stays a finding, and says both numbers
    assert rest == pytest.approx(0, abs=1_000)
    (found,) = (f for f in results["findings"] if f["code"] == second)
    assert found["severity"] == "info"
    assert "0.00 ms of each" in found["summary"] or "0 ms of each" in found["summary"]
    assert found["summary"].endswith(" ms alone).")
    shown = " once nearly all is repaired, "
    assert shown in summary.saved(found)
    assert shown in " ".join(text.render(results).split())
    assert not contradictions(results)


def test_an_earlier_turn_or_tier_comes_first_whatever_it_saves(
    weighed: Callable[..., Results],
) -> None:
    small, large = ("half", 0.5, 0), ("nearly all", 0.1, 1)
    in_turns = chain(weighed(Hosts([small, large])))
    in_tiers = chain(weighed(Hosts([large]), Hosts([small], Tier.STAGES)))
    for rows in (in_turns, in_tiers):
        assert [row[0] for row in rows] == ["half", "nearly all"]
        assert rows[0][1] == rows[0][2]
        # together they save what the second would alone
        assert sum(row[1] for row in rows) == pytest.approx(rows[1][2], rel=0.01)


def test_savings_of_a_job_with_several_causes_add_up_to_no_more_than_its_step() -> None:
    job = Job(layers=4, transfer_ns=3_000_000, pageable=True, copy_ns=5_000_000)
    results = studied_job(job).results
    rows = chain(results)
    assert {row[0] for row in rows} == {"communication.exposed", "input.pageable_copy"}
    steps = [f["saving"]["window"] for f in results["findings"] if f["saving"]]
    for one, following in pairwise(sorted(steps, key=lambda step: -step["step_ns"])):
        assert one["without_ns"] == following["step_ns"]
    assert sum(row[1] for row in rows) < results["pace"]["step_ns"]
