"""A launch is a value before it is an action: `--dry-run`, the tests and the real run share it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof import masking
from clusterprof.launch.capture import CapturePlan
from clusterprof.launchers.job import Job
from clusterprof.ranks import Selection
from clusterprof.step_window import StepWindow

#: Put first on PYTHONPATH: the sitecustomize in it starts the agent in every interpreter.
INJECT = Path(__file__).resolve().parents[1] / "agent" / "inject"


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that will be run, decided."""

    job: Job
    environment: Mapping[str, str]
    run: Path
    selection: Selection
    window: StepWindow
    step_on: str | None
    capture: CapturePlan
    #: where each value came from: {"steps": "default"}
    origins: Mapping[str, str]

    def for_agent(self) -> dict[str, Any]:
        """plan.json: what the agent in every rank reads."""
        return {
            "schema_version": 1,
            "run": str(self.run),
            "selection": self.selection.as_json(),
            "identity": self.job.identity,
            "window": [self.window.first, self.window.end],
            "step_on": self.step_on,
            **self.capture.agent,
        }

    def command_line(self) -> str:
        """The command with its added environment, to be pasted into a shell; secrets masked."""
        added = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*added, shlex.join(masking.words(self.job.command))])

    def command_lines(self) -> list[str]:
        """What will run where: one line, or one for each host."""
        there = self.job.over_ssh
        if there is None:
            return [self.command_line()]
        variables = " ".join([*self.environment, *there.environment])
        lines = [
            f"{host.name}: cd {shlex.quote(there.folder)} && {shlex.join(masking.words(command))}"
            for host, command in zip(there.hosts, there.commands, strict=True)
        ]
        lines.append(
            f"with {variables} set; the agent and the reports are in a temporary folder of each "
            "host, which is removed once the reports are here"
        )
        return lines

    def shown(self) -> str:
        """What `--dry-run` prints."""
        expected = self.selection.expected(self.job.world_size)
        which = self.selection.text
        if expected is not None and self.selection.kind != "ranks":
            which += f" ({','.join(map(str, expected))})"
        world = f"{self.job.world_size} ranks" if self.job.world_size else "known to the ranks only"
        rows = [
            ("run directory", str(self.run), self.origins.get("run_dir", "default")),
            ("world", world, self.job.told_by),
            ("ranks", which, self.origins.get("ranks", "default")),
            ("steps", str(self.window), self.origins.get("steps", "default")),
            ("steps counted by", self.step_on or "torch optimizer steps",
             self.origins.get("step_on", "default")),
            ("profiler", f"{self.capture.name} {self.capture.version}", self.capture.because),
        ]  # fmt: skip
        width = max(len(value) for _, value, _ in rows)
        lines = [f"{name:<17} {value:<{width}}  {origin}".rstrip() for name, value, origin in rows]
        lines += ["", "will run:", *(f"  {line}" for line in self.command_lines())]
        commands = self.capture.shown()
        if commands:
            lines += ["", "in each chosen rank, around the program:"]
            lines += [f"  {shlex.join(command)}" for command in commands]
        remarks = [*self.job.remarks, *([self.job.closed] if self.job.closed else [])]
        if remarks:
            lines += ["", "to know:", *(f"  {remark}" for remark in remarks)]
        return "\n".join(lines)


def injected(environ: Mapping[str, str], plan_file: Path) -> dict[str, str]:
    """The two variables that bring the agent into every interpreter of the job."""
    before = environ.get("PYTHONPATH")
    return {
        "CLUSTERPROF_PLAN": str(plan_file),
        "PYTHONPATH": f"{INJECT}:{before}" if before else str(INJECT),
    }
