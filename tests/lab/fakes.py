"""Stand-ins for the endings that the real parts cannot be made to show."""

from __future__ import annotations

import json
import py_compile
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

_NSYS = Path(__file__).with_name("nsys_script.py")
_TORCHRUN = Path(__file__).with_name("torchrun_script.py")

#: An nsys that says a version and does nothing that it is asked to.
FAKE_NSYS = """#!/bin/sh
case "$1" in
  --version) echo "NVIDIA Nsight Systems version {version}" ;;
  profile|launch|start) case "$2" in --help) echo "--trace= cuda nvtx osrt";; *) exit 1;; esac ;;
esac
"""

#: The real one, but for what a rank's own lines say: `"$@"` are the arguments, `$real` the program.
_FAULTY = """#!/bin/bash
real={real}
case "$SLURM_PROCID:${{1:-}}${{2:+:$2}}" in
{cases}
esac
exec "$real" "$@"
"""


def fake_nsys(folder: Path, version: str) -> Path:
    """An nsys in `folder` that answers as `version` and fails at everything else."""
    return _script(folder / "nsys", FAKE_NSYS.format(version=version))


def faulty_nsys(folder: Path, real: Path, faults: Mapping[tuple[int, str], str]) -> Path:
    """The nsys `real`, but for what (rank, verb) has here: shell lines of bash."""
    cases = [f"{rank}:{verb}*)\n{lines}\n;;" for (rank, verb), lines in faults.items()]
    text = _FAULTY.format(real=shlex.quote(str(real)), cases="\n".join(cases))
    return _script(folder / "bin/nsys", text)


def scripted_nsys(
    folder: Path, faults: Mapping[str, str] | None = None, *, imports: bool = False
) -> Path:
    """An nsys in `folder`, by `nsys_script.py`, and its importer.

    `faults` has lines of Python by "RANK:VERB" or "*:VERB" ("0:stop", "*:export", "1:import",
    "2:launch:--help"), run before that verb with all that is in the script, as `hang()`.
    `imports`: it finds its importer, as NVIDIA's installation does and Debian's does not.
    """
    processes = folder / "process"
    processes.mkdir(parents=True)
    for name in ("nsys", "nsys-launcher", "QdstrmImporter"):
        (processes / name).symlink_to(Path(sys._base_executable).resolve())
    (folder / "faults.json").write_text(json.dumps({"imports": imports, **(faults or {})}))
    # Compiled once: a rank starts it five times.
    compiled = py_compile.compile(str(_NSYS), str(folder / "nsys_script.pyc"), doraise=True)
    line = f"exec {{}} -ISE {shlex.quote(compiled)} {shlex.quote(str(folder))}"
    for path, verb in (("bin/nsys", ""), ("host-linux-x64/QdstrmImporter", " import")):
        python = shlex.quote(str(processes / path.rpartition("/")[2]))
        _script(folder / path, f'#!/bin/sh\n{line.format(python)}{verb} "$@"\n')
    return folder / "bin/nsys"


def scripted_torchrun(folder: Path) -> Path:
    """A Python in `folder` whose torchrun is `torchrun_script.py`: for `clusterprof ssh --python`.

    Beside it is a `torchrun` of that kind.
    """
    python = shlex.quote(sys.executable)
    torchrun = f'exec {python} -IS {shlex.quote(str(_TORCHRUN))} "$@"'
    _script(folder / "torchrun", f"#!/bin/sh\n{torchrun}\n")
    is_torchrun = '[ "$1 $2" = "-m torch.distributed.run" ]'
    lines = f'if {is_torchrun}; then shift 2; {torchrun}; fi\nexec {python} "$@"'
    return _script(folder / "python", f"#!/bin/sh\n{lines}\n")


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
