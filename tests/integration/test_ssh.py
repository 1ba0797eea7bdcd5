"""`clusterprof ssh` on real sshds: whole runs, and hosts that do what hosts do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lab import command
from lab.command import Completed, free_port
from lab.endings import PROGRAMS
from lab.hosts import Hosts
from lab.tiers import long_but

Cli = Callable[..., Completed]
pytestmark = [pytest.mark.needs_fabric, pytest.mark.needs_torch]


def state(run: Path, rank: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / f"ranks/{rank:05d}/state.json").read_text())
    return read


def left_on(hosts: Hosts) -> list[Path]:
    """Our temporary folders that are still on a host."""
    folders = (hosts.state / "local").glob("*/clusterprof-*")
    return [path for path in folders if re.fullmatch(r"clusterprof-[0-9a-f]{16}", path.name)]


def guests(hosts: Hosts) -> list[str]:
    """What still runs on the hosts, sshd's own processes excepted."""
    mark = f"CLUSTERPROF_LAB_HOSTS_GUEST={hosts.state}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words:  # no zombie
                    found.append(words)
    return found


def soon(true: Callable[[], bool], seconds: float = command.PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_two_hosts_train_and_one_of_them_has_no_nsys(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts, nsys_script: Path
) -> None:
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "train.py").write_text(
        "import loop\nfor _ in range(20): loop.step()\nprint('trained')\n"
    )
    # A path that exists here and on h1, and not on h2.
    nsys = ssh_hosts.state / "scratch" / "nsys-of-h1"
    for folder in (nsys.parent, ssh_hosts.local("h1")):
        (folder / nsys.name).symlink_to(nsys_script)
    done = run_clusterprof(
        ["ssh", "-F", ssh_hosts.config, f"--master-port={free_port()}",
         "--hosts", "h1,h2", "--ranks", "all", "--steps", "3:6", "--step-on=loop:step",
         "--nsys", nsys, "--run-dir=run", "--nproc-per-node", "1", "--", "python", "train.py"],
    )  # fmt: skip
    for folder in (nsys.parent, ssh_hosts.local("h1")):
        (folder / nsys.name).unlink()
    run = workdir / "run"
    assert done.returncode == 0, done
    assert {"h1: trained", "h2: trained"} <= set(done.stdout.splitlines()), done
    assert any("h2" in line and str(nsys) in line for line in done.stderr.splitlines()), done
    assert (run / "ranks/00000/report.nsys-rep").stat().st_size > 0
    assert (state(run, 0)["host"], state(run, 1)["host"]) == ("h1", "h2")
    assert "nsys" in state(run, 1)["reason"]
    results = json.loads((run / "merged/results.json").read_text())
    assert [each["rank"] for each in results["missing"]] == [1]
    logs = {
        log.parent.name: len(log.read_text().splitlines()) for log in run.glob("ranks/*/steps*.csv")
    }
    assert logs == {"00000": 21, "00001": 21}
    assert (run / "report.html").exists()
    assert (left_on(ssh_hosts), guests(ssh_hosts)) == ([], [])


def test_words_folders_and_variables_arrive_as_they_stand(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts, light_python: Path
) -> None:
    folder = workdir / "it's a; $HOME folder\nwith a line"
    folder.mkdir()
    (folder / "tell.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]), flush=True)\n"
    )
    words = ["a b", "it's", 'say "x"', "$HOME", "--", "-n9", "two\nlines", "`id`", "ünï→", "", "*"]
    done = run_clusterprof(
        ["ssh", "-F", ssh_hosts.config, f"--master-port={free_port()}",
         "--python", light_python, "--hosts", "root@h3", "--profiler=torch", "--no-prefix",
         "--env", "GIVEN", "--env", "SAID=it's $HOME\n; true", "--", "tell.py", *words],
        env={"GIVEN": "a 'value'", "SECRET_OF_HERE": "x"}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done
    argv, cwd, environ = json.loads(done.stdout)
    assert argv == words
    assert cwd == str(folder)
    assert (environ["GIVEN"], environ["SAID"]) == ("a 'value'", "it's $HOME\n; true")
    assert "SECRET_OF_HERE" not in environ
    manifest = next((folder / "runs").glob("*/run.json")).read_text()
    assert "a 'value'" not in manifest, "a value of the environment has been written"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_all_that_is_wrong_with_the_hosts_is_said_before_anything_is_started(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts, silent_port: int
) -> None:
    closed = 1
    known = ssh_hosts.state / "known_hosts"
    keys = known.read_text()
    swapped = keys.replace(str(ssh_hosts.port("h2")), "0").replace(
        str(ssh_hosts.port("h3")), str(ssh_hosts.port("h2"))
    )
    (ssh_hosts.state / "known_changed").write_text(swapped)
    config = ssh_hosts.changed("config_changed", (str(known), f"{known.parent}/known_changed"))
    line = [
        "ssh", "-F", config, "--connect-timeout", "25", "--profiler=torch", "--run-dir=run",
        "--hosts", f"h1,h2,h3,root@127.0.0.1:{closed},127.0.0.1:{silent_port},no.such.host.invalid",
        "--nproc-per-node", "1", "--", "train.py",
    ]  # fmt: skip
    done = run_clusterprof(line)
    assert done.returncode == 255, done
    for host, facts in (
        ("h1", ("train.py", str(workdir))),
        ("h2", ("known_hosts", "ssh-keygen -R")),
        ("h3", ("known_hosts as ",)),
        (f"root@127.0.0.1:{closed}", ("Connection refused",)),
        (f"127.0.0.1:{silent_port}", (" 25 s",)),
        ("no.such.host.invalid", ()),
    ):
        (line,) = re.findall(rf"^ +{re.escape(host)}: (.+)", done.stderr, re.MULTILINE)
        assert all(fact in line for fact in facts), done
    assert "Traceback" not in done.stderr
    assert not (workdir / "run").exists()
    assert (left_on(ssh_hosts), guests(ssh_hosts)) == ([], [])


@pytest.mark.parametrize("torchrun", long_but(["light"], ["real"]))
def test_a_smaller_nnodes_goes_on_without_the_host_that_is_not_there(
    run_clusterprof: Cli, workdir: Path, ssh_hosts: Hosts, light_python: Path, torchrun: str
) -> None:
    (workdir / "fails.py").write_text("print('here', flush=True); raise SystemExit(3)")
    light = ["--python", light_python] if torchrun == "light" else []
    done = run_clusterprof(
        ["ssh", "-F", ssh_hosts.config, f"--master-port={free_port()}",
         "--hosts", "127.0.0.1:1,h2", "--nnodes", "1:2", *light,
         "--profiler=torch", "--run-dir=run", "--nproc-per-node", "1", "--", "fails.py"]
    )  # fmt: skip
    assert done.returncode == 1, done  # torchrun's own for any failing worker
    assert "127.0.0.1:1 " in done.stderr
    assert "h2: here" in done.stdout
    assert re.search("h2: .* 1$", done.stderr, re.MULTILINE), done
    assert torchrun == "light" or "exitcode  : 3" in done.stderr
    assert (left_on(ssh_hosts), guests(ssh_hosts)) == ([], [])


#: goes on for long once it is inside its window, without torch and torchrun, or with both
TRAININGS = {
    "light": """
        import loop
        for step in range(20000):
            loop.step()
            if step == 10:
                print("inside", flush=True)
    """,
    "torch": """
        import time, torch
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(20000):
            time.sleep(0.02)
            weight.grad = torch.ones(1)
            optimizer.step()
            if step == 10:
                print("inside", flush=True)
    """,
}


@pytest.fixture(params=long_but(["light"], ["torch"]))
def training(
    request: pytest.FixtureRequest, workdir: Path, ssh_hosts: Hosts, light_python: Path
) -> Iterator[subprocess.Popen[str]]:
    """A run on h1 and h2 that is inside its window, and would go on for long."""
    shutil.copy(PROGRAMS / "loop.py", workdir)
    (workdir / "train.py").write_text(dedent(TRAININGS[request.param]))
    light = ["--step-on=loop:step", "--python", light_python]
    line = [
        "ssh", "-F", ssh_hosts.config, f"--master-port={free_port()}",
        "--hosts", "h1,h2", "--ranks", "all", "--steps", "2:19000", "--max-steps=20000",
        *(light if request.param == "light" else []),
        "--profiler=torch", "--run-dir=run", "--nproc-per-node", "1", "--", "train.py",
    ]  # fmt: skip
    with (workdir / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command.clusterprof(line), env=command.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    inside = {process.stdout.readline(), process.stdout.readline()}
    assert inside == {"h1: inside\n", "h2: inside\n"}, (workdir / "stderr").read_text()
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=command.PATIENCE_S)


def test_sigterm_ends_the_training_on_every_host_and_nothing_stays(
    training: subprocess.Popen[str], workdir: Path, ssh_hosts: Hosts
) -> None:
    training.send_signal(signal.SIGTERM)
    assert training.wait(timeout=command.PATIENCE_S) == 1  # torchrun's own when it is told to end
    assert (left_on(ssh_hosts), guests(ssh_hosts)) == ([], [])
    run = workdir / "run"
    assert {state(run, rank)["host"] for rank in (0, 1)} == {"h1", "h2"}
    assert {state(run, rank)["state"] for rank in (0, 1)} == {"lost"}
    printed = (workdir / "stderr").read_text()
    assert re.search("h1: .* 1$", printed, re.MULTILINE), printed
    assert re.search("rank 0 .*h1: ", printed), printed


def test_when_clusterprof_is_killed_the_hosts_end_by_themselves_and_collect_finishes(
    training: subprocess.Popen[str], workdir: Path, ssh_hosts: Hosts, run_clusterprof: Cli
) -> None:
    training.kill()
    assert soon(lambda: not guests(ssh_hosts)), guests(ssh_hosts)
    assert len(left_on(ssh_hosts)) == 2, "no process has fetched the states"
    assert [path.stat().st_mode & 0o777 for path in left_on(ssh_hosts)] == [0o700, 0o700]
    refused = run_clusterprof(["collect", "run"])
    (advised,) = re.findall(
        rf"clusterprof (collect -F {ssh_hosts.config} (?:--python \S+ )?run)$",
        refused.stderr, re.MULTILINE,
    )  # fmt: skip
    done = run_clusterprof(advised.split())
    assert all(f"{host}: " in done.stderr for host in ("h1", "h2")), done
    assert {state(workdir / "run", rank)["state"] for rank in (0, 1)} == {"lost"}
    assert all(each["left"] == "" for each in json.loads(Path("run/run.json").read_text())["hosts"])
    assert left_on(ssh_hosts) == []
