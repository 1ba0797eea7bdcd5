"""`--fail-on`: what its conditions are met by, and which are refused."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from report_sample import straggler

from clusterprof import gate
from clusterprof.cli import launch, merge
from clusterprof.errors import UsageError
from clusterprof.results import Finding


def finding(code: str, severity: str, share: float, rank: int | None = None) -> Finding:
    made: Any = straggler()
    return made | {"code": code, "severity": severity, "share_of_step": share, "rank": rank}


STRAGGLER = finding("straggler.host", "critical", 0.32, rank=2)
BUBBLE = finding("pipeline.bubble", "critical", 0.20)
SMALL = finding("straggler.gpu", "info", 0.03, rank=1)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("critical", [STRAGGLER, BUBBLE]),
        ("info", [STRAGGLER, BUBBLE, SMALL]),
        ("straggler.*", [STRAGGLER]),
        ("straggler.gpu", []),
        ("straggler.*>2%", [STRAGGLER, SMALL]),
        ("saved>20%", [STRAGGLER]),
        ("saved>2.5%", [STRAGGLER, BUBBLE, SMALL]),
        ("saved>32%", []),
        ("input.*", []),
    ],
)
def test_a_condition_is_met_by_what_it_says(text: str, met: list[Finding]) -> None:
    (condition,) = gate.parse(text)
    assert [each for each in (STRAGGLER, BUBBLE, SMALL) if condition.met_by(each)] == met


def test_any_of_several_conditions_fails_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    conditions = gate.parse("input.*, straggler.*>5%")
    assert gate.fails(conditions, [BUBBLE, STRAGGLER])
    assert capsys.readouterr().err == (
        "clusterprof: --fail-on straggler.*>5%: straggler.host, rank 2: repair saves 17.9 ±1.2 ms "
        "per step\n"
    )
    assert not gate.fails(conditions, [BUBBLE])
    assert not gate.fails([], [BUBBLE, STRAGGLER])


@pytest.mark.parametrize(
    ("change", "noise", "fails"),
    [(0.05, 0.01, True), (0.05, 0.06, False), (0.02, 0.001, False), (-0.2, 0.01, False)],
)
def test_a_longer_step_fails_beyond_the_limit_and_the_noise(
    change: float, noise: float, fails: bool
) -> None:
    conditions = gate.parse("step>+3%", compares=True)
    assert gate.fails(conditions, [STRAGGLER], (change, noise)) == fails


WRONG = [
    "", "step", "saved", "critical>5%%", "saved>5", "saved>+5%", "a b", "straggler.*>1e3%",
    "SEVERE", "critical,,info", "step>3%",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        gate.check_codes(gate.parse(text))


def test_a_code_that_no_finding_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"stragler\.\*: no finding"):
        gate.check_codes(gate.parse("critical,stragler.*"))


def test_every_verb_reads_the_same_conditions() -> None:
    line = ["--fail-on", "straggler.*,saved>5%", "--fail-on=critical"]
    expected = [*gate.parse("straggler.*,saved>5%"), *gate.parse("critical")]
    assert merge.parser("merge").parse_args(["x", *line]).fail_on == expected
    launching = launch.launching_parser("torchrun", "Run.", "torchrun")
    assert launching.parse_args(line).fail_on == expected
    assert launching.parse_args([]).fail_on == []


def test_the_help_has_no_formatting_left(capsys: pytest.CaptureFixture[str]) -> None:
    this = argparse.ArgumentParser()
    gate.add_option(this.add_argument, compares=True)
    this.print_help()
    shown = " ".join(capsys.readouterr().out.split())
    assert "(step>+3%)" in shown
    assert "straggler.*>5%" in shown
