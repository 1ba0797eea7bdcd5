"""Jobs that hang, over gloo: `torchrun --nproc-per-node 8 hang.py DIR SCENARIO...`.

Each rank forks one process for each scenario, so that torch is imported once a rank. The rank
`world // 2 + 1` does what the scenario says in the third step, once all ranks have come to it; five
seconds later every process writes its flight recorder's dumps, `DIR/SCENARIO/rank_3` (a pickle with
frames) and `DIR/SCENARIO/rank_3.json`, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._inductor.codecache  # what naming frames imports, which takes seconds: once a rank
import torch.distributed as dist

SCENARIOS = ("skip", "other", "size", "send", "sleep", "died", "tensor")
AFTER_S = 5
PATIENCE_S = 600


def main(into: Path, scenarios: list[str]) -> int:
    """Run all scenarios at once and wait for their ends."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    children = []
    for scenario in scenarios:
        (into / scenario).mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            job(into / scenario, rank, world)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return 0


def job(into: Path, rank: int, world: int) -> None:
    """One rank of one scenario; never returns."""
    own = into / f"rank_{rank}"
    threading.Thread(target=dump_after, args=(own, world), daemon=True).start()
    dist.init_process_group(
        "gloo", init_method=f"file://{into}/store", rank=rank, world_size=world,
        timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    pairs = [[first, first + 1] for first in range(0, world, 2)]
    tensor, _ = dist.new_subgroups_by_enumeration(pairs)
    with contextlib.suppress(RuntimeError):  # a rank that died ends the others' collectives
        for _ in range(2):
            step(tensor, world)
        (into / f"begun_{rank}").touch()
        if rank == world // 2 + 1:
            wait_for_all("begun_*", own, world)
            planted(into.name, tensor, world, own)
        else:
            # gloo aborts a rank that receives more than it expects: it has to have dumped by then
            last = into / f"rank_{world // 2 + 1}.json" if into.name == "size" else None
            step(tensor, world, after=last)
    time.sleep(PATIENCE_S)
    os._exit(1)


def step(
    tensor: dist.ProcessGroup, world: int, *, without: str = "", after: Path | None = None
) -> None:
    """What all ranks do; what they do together once the file `after` is there."""
    gradient = torch.ones(64)
    dist.all_reduce(gradient, group=tensor)
    while after is not None and not after.exists():
        time.sleep(0.05)
    if without != "all_reduce":
        dist.all_reduce(gradient)
    shards = [torch.empty(64) for _ in range(world)]
    dist.all_gather(shards, gradient)
    dist.broadcast(gradient, 0)


def planted(scenario: str, tensor: dist.ProcessGroup, world: int, own: Path) -> None:
    """What the guilty rank does in place of a step."""
    gradient = torch.ones(64)
    if scenario == "skip":
        step(tensor, world, without="all_reduce")
    if scenario == "tensor":
        dist.barrier(group=tensor)
    if scenario in {"sleep", "tensor"}:
        time.sleep(PATIENCE_S)
    if scenario == "died":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(gradient, group=tensor)
    if scenario == "other":
        dist.reduce(gradient, 0)
    if scenario == "size":
        work = dist.all_reduce(torch.ones(32), async_op=True)
        # gloo says that a collective has ended shortly before its record says so
        while not all(each["retired"] for each in json.loads(records())["entries"][:-1]):
            time.sleep(0.01)
        dump(own)
        work.wait()
    if scenario == "send":  # more than the sockets' buffers hold
        dist.send(torch.ones(1 << 24), world // 2)


def wait_for_all(names: str, own: Path, ranks: int) -> None:
    """Until there are the files of so many ranks in the folder of that one."""
    until = time.monotonic() + PATIENCE_S
    while len([*own.parent.glob(names)]) < ranks and time.monotonic() < until:
        time.sleep(0.05)


def dump_after(own: Path, world: int) -> None:
    """Write the dumps some seconds after all ranks have come to the third step, and end.

    On a slow machine that is as long as they took to come there.
    """
    began = time.monotonic()
    wait_for_all("begun_*", own, world)
    time.sleep(max(AFTER_S, time.monotonic() - began))
    dump(own)
    # The end of one ends the others' collectives, and gloo may abort.
    wait_for_all("rank_*.json", own, world - (own.parent.name == "died"))
    os._exit(0)


def dump(name: Path) -> None:
    """Write both dumps, the JSON last."""
    if not name.exists():
        name.write_bytes(torch._C._distributed_c10d._dump_fr_trace(True, True, False))
        name.with_suffix(".json").write_bytes(records())


def records() -> bytes:
    """What the flight recorder holds, as JSON."""
    return torch._C._distributed_c10d._dump_fr_trace_json(True, False)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(SCENARIOS)))
