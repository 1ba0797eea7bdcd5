"""A communicator that transfers more slowly than its siblings, and what is compared with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulate import Cause, Job, simulate
from simulate.cases import saved_ns, straggler_named
from studies import found_in

from clusterprof.results import Finding
from clusterprof.tables import RankTables

MS = 1_000_000
#: its tensor groups transfer 0.75 ms in a step, that of rank 2 six more
SLOW = Job(
    dp=3, tp=2, layers=6, steps=6, synchronous=True, causes=(Cause("link", 2, 21 * MS // 4),)
)


def _links(ranks: Sequence[RankTables]) -> list[Finding]:
    return [each for each in found_in(ranks) if each["code"] == "straggler.link"]


def _on(hosts: str, ranks: Sequence[RankTables]) -> list[RankTables]:
    """The ranks on hosts of these names, a letter each."""
    return [
        replace(tables, info=replace(tables.info, host=host))
        for tables, host in zip(ranks, hosts, strict=True)
    ]


def test_a_slow_link_has_its_communicator_its_node_and_its_saving() -> None:
    (top, *others) = found_in(_on("aabbcc", simulate(SLOW)[0]))
    assert (top["code"], top["rank"], top["ranks"]) == ("straggler.link", None, [2, 3])
    assert "Transfers of ranks 2–3 take 7.5" in top["summary"]
    assert "Their tensor communicator transfers 6.0" in top["summary"]
    assert top["summary"].endswith("All are on b.")
    assert top["saved_ns_per_step"] == pytest.approx(saved_ns(SLOW)[0], rel=0.05)
    assert [row["communicator"] for row in top["evidence"]] == ["0xtensor1"]
    # what is left of these transfers is weighed without what the link costs
    (exposed,) = [each for each in others if each["code"] == "communication.exposed"]
    assert exposed["saving"]["net_of"] == [{"code": "straggler.link", "ranks": [2, 3]}]
    assert exposed["saved_ns_per_step"] < 1 * MS


@pytest.mark.parametrize(("hosts", "named"), [("aabbcc", True), ("aabcdd", False)])
def test_groups_inside_a_node_and_over_two_are_no_siblings(hosts: str, named: bool) -> None:
    assert bool(_links(_on(hosts, simulate(SLOW)[0]))) is named


def test_slow_siblings_of_one_kind_are_one_finding_and_most_of_them_are_none() -> None:
    slow = [Cause("link", rank, 6 * MS) for rank in (2, 4, 6)]
    two = replace(SLOW, dp=5, causes=tuple(slow[:2]))
    (found,) = _links(simulate(two)[0])
    assert found["ranks"] == [2, 3, 4, 5]
    assert "2 tensor communicators" in found["summary"]
    assert not _links(simulate(replace(two, causes=tuple(slow)))[0])


@pytest.mark.parametrize(("times", "named"), [(1.8, False), (2.3, True)])
def test_transfers_that_are_not_twice_as_long_vary_as_networks_do(
    times: float, named: bool
) -> None:
    job = replace(SLOW, transfer_ns=1 * MS)
    more = (times - 1) * job.layers * job.transfer_ns / 2
    assert bool(_links(simulate(replace(job, causes=(Cause("link", 2, int(more)),)))[0])) is named


def test_a_group_with_an_unprofiled_member_may_wait_for_that_one() -> None:
    """Rank 3's host is late, so that rank 2 waits for it in each AllReduce of their group."""
    late = replace(SLOW, causes=(Cause("host", 3, 12 * MS),))
    ranks = [each for each in simulate(late)[0] if each.rank != 3]
    assert not _links(ranks)


def test_a_late_member_makes_no_link_slow() -> None:
    late = replace(SLOW, causes=(Cause("host", 3, 12 * MS),))
    found = found_in(simulate(late)[0])
    assert straggler_named(found)
    assert not [each for each in found if each["code"] == "straggler.link"]


def test_a_congested_step_is_no_slow_link() -> None:
    once = replace(SLOW, causes=(Cause("link", 2, 12 * MS, (8,)),))
    assert not [each for each in _links(simulate(once)[0]) if each["severity"] != "info"]


def test_of_unknown_communicators_no_rank_is_waited_for_that_is_not_there() -> None:
    found = found_in(simulate(replace(SLOW, communicator_ids=False))[0])
    (exposed,) = [each for each in found if each["code"] == "communication.exposed"]
    assert exposed["severity"] == "warning"
    assert "unprofiled" not in exposed["summary"]
