"""Which flags nsys is given, by what it offers."""

from __future__ import annotations

import argparse

import pytest

from clusterprof.agent import nsys
from clusterprof.cli.launch import parser
from clusterprof.launch.profiling import choose

HELP = "--trace= cuda nvtx osrt --sample= --session-new= --output="


def asked(*words: str) -> argparse.Namespace:
    return parser("run").parse_args(["--profiler=nsys", "--nsys=/bin/sh", *words])


def planned(monkeypatch: pytest.MonkeyPatch, offered: str, *given: str) -> dict[str, list[str]]:
    """The words of each verb, with an nsys whose `profile` and `launch` offer `offered` as well."""
    printed = {"version": "version 2025.6.1.190-1", "profile": f"{HELP} {offered}",
               "launch": f"{HELP} {offered}", "start": "--session= --output="}  # fmt: skip
    monkeypatch.setattr(nsys, "ask", lambda command, _: printed.get(command[1].lstrip("-"), ""))
    plan = choose(asked(*(f"--nsys-arg={flag}" for flag in given))).nsys
    assert plan is not None
    return {verb: getattr(plan, verb) for verb in ("profile", "launch", "start")}


def test_the_environment_is_left_out_where_nsys_can(monkeypatch: pytest.MonkeyPatch) -> None:
    words = planned(monkeypatch, "--discard-environment=")
    having = [verb for verb in words if "--discard-environment=true" in words[verb]]
    assert having == ["profile", "launch"]
    assert not any("discard" in each for verb in planned(monkeypatch, "").values() for each in verb)


def test_what_the_user_says_of_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = "--discard-environment=false"
    words = planned(monkeypatch, "--discard-environment=", kept)
    assert [each for each in words["profile"] if "discard" in each] == [kept]


@pytest.mark.parametrize(
    ("given", "seconds", "right"),
    [
        (None, 6, True), ("", 6, True), ("1", 1, True), ("60", 60, True), ("600", 600, True),
        *((wrong, 6, False)
          for wrong in ("0", "601", "-1", "7.5", "60s", " 60", "soon\n\x1b[2J", "\u0666")),
    ],
)  # fmt: skip
def test_nsys_has_the_time_to_start_that_the_user_gives_it(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seconds: int, right: bool
) -> None:
    monkeypatch.setattr(nsys, "ask", lambda *_: f"version 2025.6.1.190-1 {HELP}")
    monkeypatch.delenv("CLUSTERPROF_NSYS_START_S", raising=False)
    if given is not None:
        monkeypatch.setenv("CLUSTERPROF_NSYS_START_S", given)
    plan = choose(asked())
    assert plan.nsys is not None
    wrong = f"CLUSTERPROF_NSYS_START_S={given!r} is not a number of seconds from 1 to 600"
    remarks = () if right else (f"{wrong}: nsys has 6 s to start a program",)
    assert (plan.nsys.start_s, plan.remarks) == (seconds, remarks)
