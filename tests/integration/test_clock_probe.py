"""The clocks of real nodes: over UDP, before a training and beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.command import Completed, clusterprof as command_line, free_port
from lab.endings import PROGRAMS
from lab.hosts import Hosts
from lab.tiers import few

Cli = Callable[..., Completed]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
#: a bound that is one: where all processors are busy an answer takes its time
MOST_NS = 50_000_000
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def bounds(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["bounds"]
    assert all(row["low_ns"] <= row["high_ns"] for row in found)
    return list(found)


def test_the_nodes_of_a_slurm_job_measure_their_clocks_over_udp(
    run_command: Cli, workdir: Path, slurm: dict[str, str]
) -> None:
    for name in ("before.json", "after.json"):
        done = run_command(
            ["srun", "-N4", "--ntasks-per-node=1", *command_line(["clock", "--output", name])],
            env=slurm,
        )
        assert done.returncode == 0, done
        assert "UDP" in json.loads((workdir / name).read_text())["method"]
        rows = bounds(workdir / name)
        assert [row["rank"] for row in rows] == [1, 2, 3]
        # the four nodes of the test Slurm are one machine: the truth is 0
        assert all(row["low_ns"] <= 0 <= row["high_ns"] for row in rows), rows
        assert all(row["high_ns"] - row["low_ns"] < MOST_NS for row in rows)
    assert sorted(path.name for path in workdir.iterdir()) == ["after.json", "before.json"]
    both = run_command(command_line(["clock", "before.json", "after.json", "--json"]))
    assert len(json.loads(both.stdout)["bounds"]) == 6
    assert "ppm" in run_command(command_line(["clock", "before.json", "after.json"])).stdout


def test_a_node_whose_wall_clock_is_off_is_measured_as_that_far_off(
    run_command: Cli, workdir: Path
) -> None:
    # Two ranks of one machine; rank 1's Python says a time that is 250 ms ahead.
    (workdir / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    true = time.time_ns\n"
        "    time.time_ns = lambda: true() + 250_000_000\n"
    )
    line = command_line(["clock", "--output", "clock.json"])
    both = " ".join(f"RANK={rank} {' '.join(line)} &" for rank in (0, 1))
    done = run_command(
        ["bash", "-c", f"{both} wait"],
        env={"WORLD_SIZE": "2", "LOCAL_RANK": "0", "PYTHONPATH": str(workdir)},
    )
    (row,) = bounds(workdir / "clock.json")
    assert row["low_ns"] <= 250_000_000 <= row["high_ns"], done
    assert row["high_ns"] - row["low_ns"] < MOST_NS
    assert f"{(row['low_ns'] + row['high_ns']) // 2 / 1e3:+.1f} µs" in done.stdout


def test_a_rank_that_never_comes_is_named_and_no_rank_waits_for_ever(
    run_command: Cli, workdir: Path
) -> None:
    line = command_line(["clock", "--timeout", "2"])
    here = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    first = run_command(line, env={"RANK": "0", **here})
    assert first.returncode == 125
    assert all(fact in first.stderr for fact in ("rank 1", "2 s"))
    other = run_command(line, env={"RANK": "1", **here})
    assert other.returncode == 125
    assert all(fact in other.stderr for fact in ("rank 1", "rank 0"))
    assert list(workdir.iterdir()) == []


def test_outside_of_a_launcher_the_verb_says_how_it_is_used(run_command: Cli) -> None:
    done = run_command(command_line(["clock"]))
    assert done.returncode == 2
    assert "srun -N4 --ntasks-per-node=1 clusterprof clock" in done.stderr
    missing = run_command(command_line(["clock", "nowhere.json"]))
    assert missing.returncode == 3
    assert "nowhere.json" in missing.stderr


def probers() -> list[str]:
    """The environments of all probers that run on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                shown = (entry / "comm").read_text()
                environ = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if shown == "prober\n":
                found.append(environ)
    return found


#: what is counted and profiled, and the program; of either's reports less is known of the clocks
RUNS = {
    "nsys": (["--step-on=loop:step"], ["train.py", "3", "shared"]),
    "torch": (["--profiler=torch"], [str(EXAMPLE), "--steps", "40"]),
}

#: Steps of 20 ms without torch. The probers end with their ranks, and measure after the window: all
#: ranks wait until so many have. Before the first step they wait for that of the reference rank,
#: which the others look for no longer than a second and a half.
TRAINING = """
import glob, os, sys, time
import loop
ranks = os.path.join(os.path.dirname(os.environ["CLUSTERPROF_PLAN"]), "ranks")
while "shared" in sys.argv and not os.path.exists(ranks + "/00000/probe-address.json"):
    time.sleep(0.05)
for _ in range(12):
    loop.step()
for _ in range(4000):
    for path in glob.glob(ranks + "/*/probe.json"):
        open("measured-" + path.split("/")[-2], "w").close()
    if len(glob.glob("measured-*")) >= int(sys.argv[1]):
        break
    time.sleep(0.05)
"""


@pytest.mark.needs_torch
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("options", "program"), few(RUNS, "nsys"))
def test_a_run_over_several_nodes_measures_their_clocks_and_merges_with_a_tighter_bound(
    run_clusterprof: Cli,
    workdir: Path,
    slurm: dict[str, str],
    options: list[str],
    program: list[str],
) -> None:
    write_training(workdir)
    done = run_clusterprof(
        ["srun", "--ranks", "0,2,3", "--steps", "4:9", *options, "--run-dir=auto",
         "-N4", "--ntasks-per-node=1", "--", "python", *program],
        env=slurm,
    )  # fmt: skip
    assert done.returncode == 0, done
    tight = uncertainty_ns(workdir / "auto")
    rows = bounds(workdir / "auto" / "clock_probe.json")
    # at both ends of the window, where a busy processor answers within a third of a second
    assert {row["rank"] for row in rows} == {1, 2, 3}
    assert {row["when"] for row in rows} == {"open", "close"}
    assert all(row["low_ns"] <= 0 <= row["high_ns"] for row in rows), rows
    assert not list((workdir / "auto").rglob("probe-address.json"))
    assert not (workdir / "auto" / "probe").exists()
    assert [environ for environ in probers() if str(workdir) in environ] == []
    # gloo on busy cores tells milliseconds, the exchange of datagrams microseconds
    for measured in (workdir / "auto").rglob("*probe*.json"):
        measured.unlink()
    assert run_clusterprof(["merge", "auto"]).returncode == 0
    assert tight < uncertainty_ns(workdir / "auto") / 2


@pytest.mark.usefixtures("scripted")
def test_a_run_over_several_nodes_measures_no_clock_where_it_is_told_not_to(
    run_clusterprof: Cli, workdir: Path, slurm: dict[str, str]
) -> None:
    write_training(workdir)
    done = run_clusterprof(
        ["srun", "--ranks", "0", "--steps", "2:4", "--step-on=loop:step", "--clock-probe=off",
         "--run-dir=off", "--no-merge", "-N2", "--ntasks-per-node=1", "--", "python", "train.py",
         "0"],
        env=slurm,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert not (workdir / "off" / "clock_probe.json").exists()


def uncertainty_ns(run: Path) -> int:
    """The largest of the ranks' clocks in a run's results."""
    results = json.loads((run / "merged" / "results.json").read_text())
    return max(each["uncertainty_ns"] for each in results["clock"]["ranks"])


def write_training(folder: Path) -> None:
    """`train.py`, whose word is how many ranks measure."""
    shutil.copy(PROGRAMS / "loop.py", folder)
    (folder / "train.py").write_text(TRAINING)


@pytest.mark.needs_openmpi
@pytest.mark.usefixtures("scripted")
def test_ranks_of_one_node_start_no_prober(run_clusterprof: Cli, workdir: Path) -> None:
    write_training(workdir)
    done = run_clusterprof(
        ["mpirun", "--ranks", "0", "--steps", "2:4", "--step-on=loop:step", "--run-dir=run",
         "--no-merge", "--oversubscribe", "-n", "2", "--", "python", "train.py", "0"],
        env=AS_ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert not list((workdir / "run").rglob("probe*.json"))
    assert not (workdir / "run" / "clock_probe.json").exists()


@pytest.mark.needs_fabric
@pytest.mark.usefixtures("scripted")
def test_hosts_that_share_no_folder_find_the_reference_rank_and_measure_their_clocks(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts, light_python: Path
) -> None:
    write_training(workdir)
    done = run_clusterprof(
        ["ssh", "-F", ssh_hosts.config, "--hosts", "h1,h2,h3", "--ranks", "1,2", "--steps", "3:6",
         "--step-on=loop:step", "--clock-probe=on", "--run-dir=run", "--nproc-per-node", "1",
         "--python", light_python, "--master-port", str(free_port()), "--", "python", "train.py",
         "2"],
    )  # fmt: skip
    assert done.returncode == 0, done
    rows = bounds(workdir / "run" / "clock_probe.json")
    # the reference is rank 1, on h2: not the first host; rank 0, on h1, is not profiled
    assert sorted((row["rank"], row["other"], row["when"]) for row in rows) == [
        (0, 1, "close"), (0, 1, "open"), (2, 1, "close"), (2, 1, "open"),
    ]  # fmt: skip
    assert all(row["low_ns"] <= 0 <= row["high_ns"] for row in rows), rows
    results = json.loads((workdir / "run" / "merged" / "results.json").read_text())
    assert re.search("host|probe", results["clock"]["method"]), results["clock"]
    for path in (workdir / "run").rglob("*.json"):
        assert '"secret"' not in path.read_text(), path
    assert [environ for environ in probers() if str(ssh_hosts.state) in environ] == []


def test_of_a_prober_that_is_killed_nothing_is_left(run_command: Cli, workdir: Path) -> None:
    """What it writes into the run directory apart: that is removed with the run."""
    code = (
        "import os, signal, sys, time\n"
        "from clusterprof.agent.contracts.identity import Identity\n"
        "from clusterprof.agent.contracts import beside\n"
        "from clusterprof.agent.contracts import clocks\n"
        "from clusterprof.agent.contracts.plan import Plan, Selection\n"
        "plan = Plan(sys.argv[1], Selection('0,1', 'ranks', (0, 1)), (2, 4), 'torch')\n"
        "with beside.prepared():\n"
        "    pass\n"
        "clocks.start_prober(plan._replace(clock_probe='on'), Identity(0, 2, 0, 'torchrun'))\n"
        "address = sys.argv[1] + '/ranks/00000/probe-address.json'\n"
        "while not os.path.exists(address):\n"
        "    time.sleep(0.01)\n"
        "for entry in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        shown = open('/proc/%s/comm' % entry).read()\n"
        "        words = open('/proc/%s/environ' % entry, errors='replace').read().split('\\0')\n"
        "    except OSError:\n"
        "        continue\n"
        "    if 'TMPDIR=' + os.environ['TMPDIR'] in words and shown == 'prober\\n':\n"
        "        os.kill(int(entry), signal.SIGKILL)\n"
        "        print('killed')\n"
        "clocks.notify_prober('open')\n"
    )
    own = workdir / "temporary"
    own.mkdir()
    (workdir / "run").mkdir()
    done = run_command([sys.executable, "-c", code, workdir / "run"], env={"TMPDIR": str(own)})
    assert (done.returncode, done.stdout.split()) == (0, ["killed"]), done
    assert list(own.iterdir()) == []
    assert [environ for environ in probers() if str(workdir) in environ] == []


def test_the_machine_of_a_reading_is_this_one(run_command: Cli, workdir: Path) -> None:
    code = (
        "from clusterprof.agent.contracts import clocks\n"
        "print(clocks.machine()); print(clocks.kernel())"
    )
    done = run_command([sys.executable, "-c", code])
    assert done.stdout.splitlines()[0].split()[1] == socket.gethostname()
    assert ("'maxerror_ns'" in done.stdout) == (os.uname().sysname == "Linux")
