"""A data-parallel training whose window of steps is opened and closed in one of several ways.

Run by torchrun, with NCCL where there are GPUs, else with gloo. Every step ends with the GPU
drained, so the times at which steps end show every stall, the host's and the device's. Each rank
writes `RANK.json` into `--folder`: when each step ended, and when the calls that opened and closed
the window began and ended (all in ns of the wall clock).

With `--under` the process first becomes what that says (nsys), with itself as nsys' program.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

#: set for the program under nsys: it must not become nsys once more
_INSIDE = "BENCH_INSIDE"
#: an early, empty capture lies here, after the slow first steps
EARLY = 15


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--window", required=True, help="A:B, in steps")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--open-by", choices=("nothing", "cuda", "session"), default="nothing")
    parser.add_argument("--early", action="store_true", help=f"an empty capture at step {EARLY}")
    parser.add_argument("--wait", action="store_true", help="wait for `nsys stop`")
    parser.add_argument("--barrier", action="store_true", help="all ranks meet after the start")
    parser.add_argument("--small", action="store_true", help="small kernels, bound by launches")
    parser.add_argument(
        "--finalize", action="store_true", help="cuptiFinalize once `nsys stop` has ended"
    )
    parser.add_argument("--captured", default="all", help="which ranks: all, or 0,2")
    parser.add_argument("--nsys", default="nsys")
    parser.add_argument("--under", help="a JSON list of words, {rank} being the rank")
    return parser.parse_args()


class Nothing:
    """The window is somebody else's, or there is none."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def tend(self) -> None:
        """After each step."""

    def finish(self) -> None: ...


class Cuda(Nothing):
    """cudaProfilerStart and -Stop, for `nsys profile --capture-range=cudaProfilerApi`."""

    def start(self) -> None:
        import torch

        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())

    def stop(self) -> None:
        import torch

        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())


class Session(Nothing):
    """`nsys start` and `nsys stop` for the session that this program runs in."""

    def __init__(self, nsys: str, output: Path, rank: int, wait: bool, finalize: bool) -> None:
        self.nsys, self.output, self.wait, self.finalize = nsys, output, wait, finalize
        self.name = f"bench-{rank}"
        self.taken = 0
        self.beside: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.taken += 1
        self.finish()
        self.call(
            ["start", f"--session={self.name}", "--sample=none", "--cpuctxsw=none",
             "--force-overwrite=true", f"--output={self.output}.{self.taken}"], wait=True,
        )  # fmt: skip

    def stop(self) -> None:
        self.call(["stop", f"--session={self.name}"], wait=self.wait)

    def tend(self) -> None:
        if self.finalize and self.beside and self.beside[-1].poll() == 0:
            self.finalize = False
            finalize()

    def finish(self) -> None:
        for each in self.beside:
            each.wait(60)
        self.beside.clear()

    def call(self, words: list[str], wait: bool) -> None:
        process = subprocess.Popen(
            [self.nsys, *words], stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
        )
        if not wait:
            self.beside.append(process)
        elif process.wait(60) != 0:
            raise SystemExit(f"nsys {words[0]} ended with {process.returncode}")


def finalize() -> None:
    """Detach nsys' own CUPTI from this process: a trial, that CUDA graphs do not survive."""
    with Path("/proc/self/maps").open() as maps:
        mapped = {line.split()[-1] for line in maps if "libcupti.so" in line}
    (ours,) = (path for path in mapped if (Path(path).parent / "libToolsInjection64.so").exists())
    status = ctypes.CDLL(ours).cuptiFinalize()
    if status != 0:
        raise SystemExit(f"cuptiFinalize ended with {status}")


def main() -> None:
    """Train, open and close the window, write what it took."""
    chosen = options()
    rank = int(os.environ["RANK"])
    captured = chosen.captured == "all" or str(rank) in chosen.captured.split(",")
    if captured and chosen.under and _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        words = [word.replace("{rank}", str(rank)) for word in json.loads(chosen.under)]
        os.execvp(words[0], [*words, sys.executable, *sys.argv])
    switch: Nothing = Nothing()
    if captured and chosen.open_by == "cuda":
        switch = Cuda()
    elif captured and chosen.open_by == "session":
        switch = Session(
            chosen.nsys, chosen.folder / f"report-{rank}", rank, chosen.wait, chosen.finalize
        )
    write(chosen.folder, rank, train(chosen, rank, switch))
    switch.finish()


def write(folder: Path, rank: int, record: dict[str, object]) -> None:
    """Leave a rank's record, by rename."""
    beside = folder / f"{rank}.tmp"
    beside.write_text(json.dumps(record))
    beside.rename(folder / f"{rank}.json")


def facts() -> dict[str, object]:
    """What it was measured on."""
    import torch

    found: dict[str, object] = {"torch": torch.__version__, "device": "CPU"}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def train(chosen: argparse.Namespace, rank: int, switch: Nothing) -> dict[str, object]:
    """The steps, with the window between two of them."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    gpu = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, batch = workload(device, chosen.small)
    wrapped = DistributedDataParallel(model, device_ids=[local] if gpu else None)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    first, end = map(int, chosen.window.split(":"))
    ends: list[int] = []
    calls: dict[str, list[int]] = {}

    def drain() -> None:
        if gpu:
            torch.cuda.synchronize()
        else:
            time.sleep(0.005)  # a rank on a GPU waits for its device

    def call(name: str, action: object) -> None:
        begin = time.time_ns()
        action()  # type: ignore[operator]
        calls[name] = [begin, time.time_ns()]

    for step in range(chosen.steps):
        if chosen.early and step == EARLY:
            call("early start", switch.start)
            call("early stop", switch.stop)
        if step == first:
            call("start", switch.start)
            if chosen.barrier:
                dist.barrier()
        if step == end:
            call("stop", switch.stop)
        optimizer.zero_grad()
        wrapped(batch).float().square().mean().backward()
        optimizer.step()
        drain()
        ends.append(time.time_ns())
        switch.tend()
    dist.barrier()
    dist.destroy_process_group()
    return {"rank": rank, "ends": ends, "calls": calls, **facts()}


def workload(device: object, small: bool) -> tuple[object, object]:
    """On a GPU four transformer layers (25 ms a step on an H200), on a CPU next to nothing.

    `small`: a hundred tiny layers, whose launches take longer than their kernels.
    """
    import torch

    if small:
        layers = (torch.nn.Linear(64, 64) for _ in range(100))
        return torch.nn.Sequential(*layers).to(device), torch.randn(8, 64, device=device)
    if getattr(device, "type", "cpu") == "cpu":
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        return model, torch.randn(8, 64)
    layer = torch.nn.TransformerEncoderLayer(
        2048, 16, 8192, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    batch = torch.randn(8, 1024, 2048, device=device, dtype=torch.bfloat16)
    return model.to(device, torch.bfloat16), batch


if __name__ == "__main__":
    main()
