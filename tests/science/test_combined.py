"""What remains if several findings are repaired: the replay's own numbers, for each choice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from studies import gathered

from clusterprof.study import Study, study


@pytest.mark.parametrize("recording", ["nsys-2025.3/pipeline-imbalance"])
def test_the_chain_of_savings_is_among_the_choices(
    studied: Callable[[str], Study], recording: str
) -> None:
    results = studied(recording).results
    found = results["combined"]
    assert found is not None
    first, second = (each for each in results["findings"] if each["severity"] != "info")
    assert [each["code"] for each in found["findings"]] == [first["code"], second["code"]]
    assert first["saving"] is not None
    assert second["saving"] is not None
    assert found["view"] == first["saving"]["stated"] == second["saving"]["stated"] == "window"
    nothing, one, other, both = found["remaining_ns"]
    assert nothing == first["saving"]["window"]["step_ns"]
    assert one == first["saving"]["window"]["without_ns"]
    # the second saving is net of the first
    assert second["saving"]["net_of"][0]["code"] == first["code"]
    assert both == second["saving"]["window"]["without_ns"]
    assert both < other < nothing


def test_nothing_to_repair_is_nothing_to_combine() -> None:
    results = study(gathered("nsys-2025.3/item-sync").ranks[:1]).results
    worth = [f for f in results["findings"] if f["severity"] != "info" and f["saving"]]
    found = results["combined"]
    assert (found is None) == (not worth)
    if found:
        assert len(found["remaining_ns"]) == 2 ** len(found["findings"])
