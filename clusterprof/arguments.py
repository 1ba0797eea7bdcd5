"""What arguments mean: `--ranks`, `--steps`, and the paths that a user names.

    0,8,16          a list of ranks
    0-63:8          a range with a stride, both ends included
    0,8-15:2        both together
    auto            those that all ranks' flight recorders show to delay the others, and peers
    all             every rank
    one-per-node    local rank 0 of every node
    stages          rank 0 and the first rank of each pipeline stage (--pp, --tp, --cp, --dp)

A selection is a value; each rank decides whether it is in it (`agent.contracts.plan`), since
only the rank knows its place.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clusterprof import words
from clusterprof.agent.contracts import files, plan
from clusterprof.errors import UsageError

#: options that there were, and what there is instead
GONE = {"--beacons": "it is gone: --clock-probe measures the hosts' clocks without it"}

RANKS_GRAMMAR = "a list and ranges as in 0,8-15:2, or all, one-per-node, stages"


class Selection(plan.Selection):
    """The ranks to profile, as a value that is sent to every rank."""

    __slots__ = ()

    def expected(self, world_size: int | None) -> tuple[int, ...] | None:
        """The ranks to profile of `world_size` ranks; None where only the ranks know."""
        if self.kind in ("ranks", "auto"):
            return self.ranks
        size = self.world_size or world_size
        if size is None or self.kind not in ("all", "stages"):
            return None
        return tuple(range(size) if self.kind == "all" else self.stage_ranks(size))

    def check(self, size: int | None, size_source: str) -> None:
        """Raise UsageError where a rank to profile does not exist in a world of known size."""
        if size is None:
            return
        if missing := [rank for rank in self.ranks if rank >= size]:
            raise UsageError(
                f"no such rank: {missing[0]}; the job has ranks 0–{size - 1}",
                f"--ranks {self.text}, and {size_source} makes {words.counted(size, 'rank')}",
                f"choose ranks below {size}, or use --ranks one-per-node",
            )
        if self.kind == "stages" and self.world_size not in (None, size):
            raise UsageError(
                f"--pp, --tp, --cp, --dp make {self.world_size} ranks, {size_source} makes {size}",
                "their product must be the world size",
            )
        if self.kind == "stages" and size % self.pp:
            raise UsageError(
                f"{size} ranks ({size_source}) do not divide into {self.pp} equal pipeline stages",
                "give the --pp that the training itself uses",
            )


def parse_ranks(text: str, **sizes: int | None) -> Selection:
    """Read a `--ranks` argument; `sizes` are pp, tp, cp and dp of stages. Raises UsageError."""
    plain = text.strip()
    if plain in ("all", "auto", "one-per-node"):
        return Selection(plain, plain)
    if plain == "stages":
        return _stages(**sizes)
    chosen: set[int] = set()
    for piece in map(str.strip, plain.split(",")):
        where, match = f"--ranks {text!r}:", re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", piece)
        if match is None:
            raise UsageError(f"{where} cannot read {piece!r}", f"expected {RANKS_GRAMMAR}")
        first = int(match[1])
        last, stride = int(match[2] or first), int(match[3] or 1)
        if last < first or stride == 0:
            upwards = "a range goes upwards and its stride is 1 or more: 0-63:8"
            raise UsageError(f"{where} {piece!r} is empty", upwards)
        if last - first > 10_000_000:
            raise UsageError(f"{where} {piece!r} is too large", "all ranks: --ranks all")
        chosen.update(range(first, last + 1, stride))
    return Selection(plain, "ranks", tuple(sorted(chosen)))


def _stages(pp: int | None = None, **others: int | None) -> Selection:
    if pp is None:
        raise UsageError(
            "--ranks stages needs the number of pipeline stages",
            "add --pp N (and --tp, --cp, --dp)",
        )
    for name, value in {"pp": pp, **others}.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: a parallel size is 1 or more")
    # Only the data-parallel size closes the product: with it the world size is known here.
    is_whole = others.get("dp") is not None
    size = math.prod((pp, *filter(None, others.values()))) if is_whole else None
    return Selection("stages", "stages", pp=pp, world_size=size)


def selected(text: str) -> str:
    """A selection's text as a sentence names it: `rank 3`, `ranks 0,8`, `ranks one-per-node`."""
    return f"rank{'' if text.isdecimal() else 's'} {text}"


@dataclass(frozen=True)
class StepWindow:
    """Steps [first, end), and which steps a capture of them disturbs.

    Profilers start in the first step, and stop between the last one and the next, in which ranks
    wait for the one that stops last; that one's own wait ends in the step after it. By the reports
    of a window alone `analysis.model.timeline.steady_steps` tells.
    """

    first: int
    end: int

    @property
    def switching(self) -> tuple[int, ...]:
        """The steps in which a profiler's start or stop shows."""
        return self.first, self.end, self.end + 1

    @property
    def disturbed(self) -> range:
        """All steps that the profiler makes longer, from its start to its stop."""
        return range(self.first, self.end + 2)

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"

    def __len__(self) -> int:
        return self.end - self.first


def parse_steps(text: str) -> StepWindow:
    """Read `10:15`. Raises UsageError for anything else, an empty window, or one from step 0."""
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if match is None:
        raise UsageError(
            f"--steps {text!r} is not a window of steps",
            "expected FIRST:END: 10:15 profiles the five steps 10 to 14",
        )
    window = StepWindow(int(match[1]), int(match[2]))
    if window.first < 1:
        raise UsageError(
            f"--steps {text}: the window must begin at step 1 or later",
            "in step 0 CUDA, NCCL and the allocator are still being set up",
            f"try --steps 10:{10 + max(1, len(window))}",
        )
    if window.end <= window.first:
        raise UsageError(
            f"--steps {text} contains no step", f"try --steps {window.first}:{window.first + 5}"
        )
    return window


def watch_seconds(text: str) -> int:
    """Read how often all ranks are looked at: `90s`, `10m`, `1h`, `off` (0). Raises UsageError."""
    if text == "off":
        return 0
    match = re.fullmatch(r"([1-9]\d{0,4})([smh])", text)
    seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0
    if not 1 <= seconds <= 86_400:  # there are two looks a day at least
        raise UsageError(
            f"--watch {text!r} is no time between two looks",
            "write 90s, 10m or 1h, a day at most; off: no look",
        )
    return seconds


def path(text: str) -> Path:
    """A path argument, `~` expanded; an empty one (an unset variable) is refused."""
    if not text:
        raise argparse.ArgumentTypeError("a path is empty")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such user: a file may be called so
        return Path(text)


def number_of(noun: str) -> Callable[[str], int]:
    """The type of an argument that counts `noun`: 1 to 9,999."""

    def count(text: str) -> int:
        if not re.fullmatch("[0-9]{1,4}", text) or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {noun}, 1 to 9999")
        return int(text)

    return count


def price(text: str) -> float:
    """The type of an argument that is a price: a number above 0, in any currency."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price, such as 2.50")
    return float(text)


def add_gpu_hour(add: Callable[..., object]) -> None:
    """Give a verb that prints a verdict its `--gpu-hour`, by its parser's `add_argument`."""
    add("--gpu-hour", type=price, metavar="PRICE",
        help="what a GPU costs per hour: what a repair saves of a run is stated in money "
        "too")  # fmt: skip


def shortest(folder: Path) -> str:
    """A path as one would type it here."""
    current = Path.cwd()
    return str(folder.relative_to(current) if folder.is_relative_to(current) else folder)


def beginning(file: Path) -> bytes:
    """How a file begins, by which ours are known; nothing where it cannot be read."""
    try:
        with files.opened(file, links=True) as opened:
            return bytes(opened.read(4096))
    except OSError:
        return b""


def check_free(target: Path, force: bool, ours: Callable[[Path], bool]) -> None:
    """Raise UsageError where `target` exists and may not be replaced.

    `--force` replaces only what clusterprof wrote, which `ours` recognises by its content.
    """
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(f"{target} exists already", "replace it with --force")
    if not ours(target):
        raise UsageError(
            f"{target} exists already, and was not written by clusterprof",
            "--force does not replace it: choose another place, or remove it",
        )
