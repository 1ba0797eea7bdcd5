"""Completion as a real bash does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.command import Completed

Run = Callable[..., Completed]


@pytest.fixture
def completes(
    run_clusterprof: Run, run_command: Run, workdir: Path
) -> Callable[[list[str]], set[str]]:
    """What bash offers for the last word of a line."""
    made = run_clusterprof(["completion", "bash"])
    (workdir / "script").write_text(made.stdout)

    def complete(words: list[str]) -> set[str]:
        line = " ".join(json.dumps(each) for each in words)
        shell = (
            f"source ./script; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
            "_shtab_clusterprof; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = run_command(["bash", "-euc", shell])
        assert done.returncode == 0, done
        return set(done.stdout.split())

    return complete


def test_bash_completes_verbs_options_and_values_up_to_the_program(
    completes: Callable[[list[str]], set[str]],
) -> None:
    assert completes(["clusterprof", "mer"]) == {"merge"}
    assert completes(["clusterprof", "help", "torch"]) == {"torchrun"}
    assert {"--ranks", "--steps", "--stacks"} <= completes(["clusterprof", "srun", "--"])
    assert completes(["clusterprof", "srun", "--profiler", "t"]) == {"torch"}
    assert completes(["clusterprof", "runs", "c"]) == {"clean"}
    assert completes(["clusterprof", "explain", "host.g"]) == {"host.gc", "host.gil"}
    assert completes(["clusterprof", "--v"]) == {"--version"}
    # the program and its own arguments: files, and no option of ours
    assert completes(["clusterprof", "srun", "--", "python", "scr"]) == {"script"}
    assert completes(["clusterprof", "srun", "--", "python", "--"]) == {"script"}
    assert completes(["clusterprof", "merge", "scr"]) == {"script"}
