"""Record the conversations anew: `python tests/golden/record.py`, with nsys and torch.

A copy of the product with `tap` in it runs real jobs. What depends on time, process, host or path
is replaced, so that two recordings of one product differ in little but how steps came together.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusterprof

RECORDED = Path(__file__).resolve().parent / "conversations"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
#: by what is recorded its command line; {python} is this interpreter
JOBS = {
    "nsys": "run --ranks 0 --profiler nsys --steps 3:6 --step-on loop:step -- {python} train.py 40",
    "torch": "torchrun --nproc-per-node 2 --ranks 0 --profiler torch --steps 3:6 -- {example} "
    "--steps 10",
    "none": "run --profiler none --steps 3:6 --step-on loop:step -- {python} train.py 10",
}
LOOP = "import time\n\ndef step():\n    time.sleep(0.05)\n"
TRAIN = "import sys, loop\nfor _ in range(int(sys.argv[1])):\n    loop.step()\nsys.exit(3)\n"
#: the times of a recording: this, and so much more with each message or step
WALL_NS, EACH_NS = 1_700_000_000_000_000_000, 50_000_000


def main() -> None:
    """Run all jobs, and write one file for each conversation."""
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        product = tapped_product(Path(folder))
        for name, line in JOBS.items():
            for conversation, lines in sorted(recorded(product, name, line).items()):
                (RECORDED / f"{conversation}.jsonl").write_text("\n".join(lines) + "\n")


def tapped_product(folder: Path) -> Path:
    """A copy of the product, in a folder for PYTHONPATH, whose writers and guards are tapped."""
    package = folder / "product" / "clusterprof"
    shutil.copytree(Path(clusterprof.__file__).parent, package)
    parts = package / "agent" / "guard"
    shutil.copy(Path(__file__).with_name("tap.py"), parts)
    for name in ("writer", "guard"):
        with (parts / f"{name}.py").open("a") as module:
            module.write(f"\nimport sys\nfrom . import tap\ntap.{name}(sys.modules[__name__])\n")
    return package.parent


def recorded(product: Path, name: str, line: str) -> dict[str, list[str]]:
    """Run a job with the tapped product; what its writers and guards received and answered."""
    job = product.parent / name
    job.mkdir()
    (job / "loop.py").write_text(LOOP)
    (job / "train.py").write_text(TRAIN)
    environment = {
        **os.environ, "PYTHONPATH": str(product), "CLUSTERPROF_NSYS_START_S": "60",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    if line.startswith("run "):
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    verb, *words = line.format(python=sys.executable, example=EXAMPLE).split()
    own = [sys.executable, "-m", "clusterprof", verb, "--no-merge", "--run-dir=run"]
    subprocess.run([*own, *words], cwd=job, env=environment, check=False)
    conversations = {}
    tapped = product / "clusterprof" / "agent" / "guard" / "tapped"
    for file in tapped.iterdir():
        text = file.read_text().replace(str(job / "run"), "{RUN}")
        process = file.name.partition("-")[0]
        rank = re.search(r"ranks/0*(\d+)", text)
        lines = [json.loads(line) for line in text.splitlines()]
        messages = of_writer(lines) if process == "writer" else of_guard(lines)
        conversations[f"{name}-{process}-{rank[1] if rank else 0}"] = list(messages)
    shutil.rmtree(tapped)
    return conversations


def of_guard(lines: list[list[str]]) -> Iterator[str]:
    """Requests and replies, one a line; ids of processes are replaced."""
    for side, text in lines:
        shown = re.sub(r"^(hello|pid) \d+", r"\1 PID", text.rstrip("\n"))
        yield json.dumps({side: shown})


def of_writer(lines: list[tuple[int, str, str]]) -> Iterator[str]:
    """Messages and answers, one a line."""
    names: dict[str, str] = {}
    steps: dict[str, Any] | None = None
    answers: dict[int, str] = {}
    for number, (peer, kind, text) in enumerate(lines):
        if kind == "S":
            first, *times = array("q", base64.b64decode(text))
            if steps is None or steps["peer"] != peer:
                if steps is not None:
                    yield json.dumps(steps)
                steps = {"peer": peer, "first": first, "steps": 0}
            steps["steps"] += len(times) // 2
            continue
        if kind == "answer" and (is_progress(json.loads(text)) or answers.get(peer) == text):
            continue
        if steps is not None:
            yield json.dumps(steps)
            steps = None
        if kind == "answer":
            answers[peer] = text
        yield json.dumps({"peer": peer, **_replaced(kind, text, number, names)})
    if steps is not None:
        yield json.dumps(steps)


def is_progress(answer: dict[str, Any]) -> bool:
    """Whether an answer says only that something goes on."""
    return bool({"at", "packed"} & answer.keys())


def _replaced(kind: str, text: str, number: int, names: dict[str, str]) -> dict[str, Any]:
    """One message of a writer, with what differs from run to run replaced."""
    if kind == "F":
        name = base64.b64decode(text).partition(b"\n")[0].decode()
        return {"file": name}
    if kind in ("P", "end"):
        return {"peer is there" if kind == "P" else "end": True}
    content = json.loads(text)
    for key, name in (("private", "{PRIVATE}"), ("folder", "{FOLDER}"), ("session", "SESSION")):
        value = content.get(key)
        if isinstance(value, str) and "{RUN}" not in value:
            names[value] = name
    for value, name in names.items():
        content = json.loads(json.dumps(content).replace(value, name))
    return {"answer" if kind == "answer" else "message": _timeless(content, "", number)}


def _timeless(value: Any, key: str, number: int) -> Any:
    """Times counted by message, and the machine's own facts under one name."""
    if isinstance(value, dict):
        return {name: _timeless(inner, name, number) for name, inner in value.items()}
    if isinstance(value, list):
        return [_timeless(inner, key, number) for inner in value]
    if key == "gap_ns":
        return 1000
    if key.endswith("_ns") and isinstance(value, int):
        return (WALL_NS if value > WALL_NS // 2 else 0) + number * EACH_NS
    replaced = {
        "pid": 4242, "program_pid": 4243, "patience_s": 60, "machine": "MACHINE", "path": None,
        "version": "VERSION", "importer": None, "nsys": None, "torch": "VERSION",
    }  # fmt: skip
    if isinstance(value, str):
        value = re.sub(r"(?<=clock:)\d+", "N", value)
    same = key not in replaced or value is None or (key == "path" and "{" in str(value))
    return value if same else (replaced[key] or key.upper())


if __name__ == "__main__":
    main()
