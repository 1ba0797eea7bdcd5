"""Words, folders and variables reach every rank as they stand, through every launcher."""

from __future__ import annotations

import ast
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from lab import command
from lab.command import Completed, free_port
from lab.endings import outcomes
from lab.hosts import Hosts
from lab.tiers import few, long_but

Run = Callable[..., Completed]

#: What shells, argparse and C programs like to take for themselves. The last holds bytes that
#: are no UTF-8.
WORDS = [
    "a b", "it's", 'say "x"', "$(id)", "${HOME}", "`id`", "; exit 9", "&& false", "|", "*", "~",
    "two\nlines", "tab\there", "\r", "\\", "\\n", "!!", "#", "", "-n9", "--", "--ranks=7",
    "%q{RANK}", "{rank}", "ünï→日本", b"\xff\xfe-".decode(errors="surrogateescape"),
]  # fmt: skip

#: A folder and a run directory that no shell may touch.
FOLDER = b'it\'s; a "$HOME" `id` *\n\xfcber-\xff folder'.decode(errors="surrogateescape")
RUN_DIR = b"the 'run' $(id);\t\"\xe9\"".decode(errors="surrogateescape")

#: Each rank writes what it got into a file: several ranks share one stdout. A rank that imports
#: what is to be counted ends its run at once, and no one waits for it.
TELL = """\
import os, sys
import loop
name = "told-%s" % next(os.environ[n] for n in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
                                                "SLURM_PROCID") if n in os.environ)
told = [os.fsencode(word) for word in sys.argv[1:]], os.getcwdb(), os.environb.get(b"GIVEN")
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), "w") as file:
    file.write(repr(told))
"""

#: a training with a trace of torch.profiler
ONE_RANK = """
import torch
for _ in range(9):
    torch.ones(2) + torch.ones(2)
    loop.step()
"""

GIVEN = b"a 'value' $HOME\n\xff".decode(errors="surrogateescape")


@pytest.fixture
def folder(workdir: Path) -> Iterator[Path]:
    made = workdir / FOLDER
    made.mkdir()
    (made / "tell me.py").write_text(TELL)
    (made / "loop.py").write_text("def step():\n    pass\n")
    yield made
    # What pytest keeps of a failing test is listed by tools that want UTF-8.
    shutil.rmtree(made)


def stated(folder: Path) -> dict[str, tuple[list[bytes], bytes, bytes | None]]:
    return {path.name: ast.literal_eval(path.read_text()) for path in folder.glob("told-*")}


def expected(folder: Path, ranks: int) -> dict[str, tuple[list[bytes], bytes, bytes]]:
    one = ([os.fsencode(word) for word in WORDS], os.fsencode(folder), os.fsencode(GIVEN))
    return {f"told-{rank}": one for rank in range(ranks)}


OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

COUNT = ("--step-on", "loop:step")

#: One of them under nsys as well, which starts the program anew.
LINES = {
    "srun under nsys": ["srun", "-n2", "--profiler=nsys"],
    "srun": ["srun", "-n2"],
    "srun without the environment": ["srun", "-n2", "--profiler=nsys", "--export=PATH,GIVEN"],
    "torchrun": ["torchrun", "--nproc-per-node=2"],
    "mpirun": ["mpirun", "--oversubscribe", "-np", "2"],
}


@pytest.mark.usefixtures("scripted", "warm_torchrun")
@pytest.mark.needs_torch
@pytest.mark.needs_openmpi
@pytest.mark.parametrize(
    "line", few(LINES, "srun", "srun without the environment", "torchrun", "mpirun")
)
def test_words_reach_each_rank_of_a_launcher_as_they_stand(
    run_clusterprof: Run, folder: Path, slurm: Mapping[str, str], line: list[str]
) -> None:
    done = run_clusterprof(
        [line[0], "--profiler=torch", *line[1:], "--ranks", "1", "--run-dir", RUN_DIR,
         *COUNT, "--", "python", "tell me.py", *WORDS],
        env={**slurm, **OPEN_MPI, "GIVEN": GIVEN}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert stated(folder) == expected(folder, 2), done
    assert "Traceback" not in done.stderr
    assert (folder / RUN_DIR / "run.json").is_file()


def test_words_reach_the_programs_of_srun_multi_prog_as_they_stand(
    run_clusterprof: Run, folder: Path, slurm: Mapping[str, str]
) -> None:
    # srun reads this file itself, with quotes of its own.
    (folder / "which").write_text("0 python 'tell me.py' 'a b'\n1 python 'tell me.py' %t *\n")
    done = run_clusterprof(
        ["srun", "-n2", "--profiler=torch", "--ranks", "1", "--run-dir", RUN_DIR,
         *COUNT, "--multi-prog", "--", "which"],
        env={**slurm, "GIVEN": GIVEN}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done
    words = {name: each[0] for name, each in stated(folder).items()}
    assert words == {"told-0": [b"a b"], "told-1": [b"1", b"*"]}


@pytest.mark.needs_fabric
def test_words_reach_the_ranks_of_ssh_as_they_stand(
    run_clusterprof: Run, folder: Path, ssh_hosts: Hosts, light_python: Path
) -> None:
    done = run_clusterprof(
        ["ssh", "-F", ssh_hosts.config, "--hosts", "h1,h2", "--python", light_python,
         "--profiler=torch", "--ranks", "1", "--run-dir", RUN_DIR, *COUNT, "--env", "GIVEN",
         "--nproc-per-node=1", f"--master-port={free_port()}", "--", "tell me.py", *WORDS],
        env={"GIVEN": GIVEN}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert stated(folder) == expected(folder, 2), done
    assert (folder / RUN_DIR / "run.json").is_file()


def test_words_reach_the_ranks_of_a_batch_job_as_they_stand(
    run_clusterprof: Run, folder: Path, slurm: Mapping[str, str]
) -> None:
    done = run_clusterprof(
        ["sbatch", "-n2", "--output=out", "--no-merge", "--profiler=torch", "--ranks", "1",
         "--run-dir", RUN_DIR, *COUNT, "--", "python", "tell me.py", *WORDS],
        env={**slurm, "GIVEN": GIVEN}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done
    deadline = time.monotonic() + command.PATIENCE_S
    manifest = folder / RUN_DIR / "run.json"
    while time.monotonic() < deadline:
        if len(stated(folder)) == 2 and '"ended": "' in manifest.read_text():
            break
        time.sleep(0.2)
    assert stated(folder) == expected(folder, 2), (folder / "out").read_bytes()


@pytest.mark.usefixtures("scripted")
@pytest.mark.needs_torch
@pytest.mark.parametrize("profiler", long_but(["nsys"], ["torch"]))
def test_a_run_directory_of_any_name_is_merged_and_shown(
    run_clusterprof: Run, folder: Path, profiler: str
) -> None:
    program = {
        "torch": ONE_RANK,
        "nsys": "import time\nfor _ in range(30): loop.step(); time.sleep(0.02)\n",
    }[profiler]
    (folder / "train.py").write_text(f"import loop\n{program}")
    line = [
        "run", f"--profiler={profiler}", "--ranks", "0", "--steps=2:5", "--run-dir", RUN_DIR,
        *COUNT, "--", "python", "train.py",
    ]  # fmt: skip
    dry = run_clusterprof([*line[:1], "--dry-run", *line[1:], *WORDS], cwd=folder)
    assert dry.returncode == 0, dry
    done = run_clusterprof(line, cwd=folder)
    assert done.returncode == 0, done
    assert "error" not in done.stderr, done
    run = folder / RUN_DIR
    assert (run / "report.html").is_file()
    assert outcomes(run) == {0: "collected"}
    for verb in ("report", "collect", "status"):
        again = run_clusterprof([verb, run], cwd=folder)
        assert again.returncode == 0, again
        assert "Traceback" not in again.stderr
