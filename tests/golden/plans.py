"""The plan of a command line, without running it."""

from __future__ import annotations

from typing import Any
from unittest import mock

from clusterprof.cli import main
from clusterprof.launch import planning


def planned(words: list[str]) -> tuple[int, list[planning.LaunchPlan]]:
    """What `--dry-run` of these words ends with, and the plan that it shows, if there is one."""
    plans: list[planning.LaunchPlan] = []
    make_plan = planning.make_plan

    def keep(*arguments: Any) -> planning.LaunchPlan:
        plans.append(make_plan(*arguments))
        return plans[-1]

    with mock.patch.object(planning, "make_plan", keep):
        return main.main([words[0], "--dry-run", *words[1:]]), plans
