"""What is simulated: a training job, its clocks, and the causes planted in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: a batch
COPY_BYTES = 33_554_432

CauseKind = Literal["host", "input", "gpu_more", "gpu_slow", "link"]


@dataclass(frozen=True)
class Cause:
    """One planted cause: `rank` loses `extra_ns` in each of `steps` (None: in every step).

    `host`: its host sleeps before the forward; `input`: it waits for its batch; `gpu_more`: its
    GPU has more kernels; `gpu_slow`: its kernels take longer, by `extra_ns` over the whole step;
    `link`: the transfers of its tensor group in the forward do.
    """

    kind: CauseKind
    rank: int
    extra_ns: int
    steps: tuple[int, ...] | None = None

    def at(self, step: int) -> int:
        """What it costs in this step (ns)."""
        return self.extra_ns if self.steps is None or step in self.steps else 0


@dataclass(frozen=True)
class Job:
    """A job of `dp * tp * pp` ranks (tensor parallel fastest, then data, then pipeline).

    Times in ns. Steps `first_step` to `first_step + steps` are the window; before it `warm_steps`
    are run without being captured, so that queues are as deep as they would be.
    """

    dp: int = 4
    tp: int = 1
    pp: int = 1
    microbatches: int = 4
    layers: int = 6
    steps: int = 5
    first_step: int = 6
    warm_steps: int = 2
    layer_ns: int = 1_200_000
    #: layers of each pipeline stage; None: all alike
    stage_layers: tuple[int, ...] | None = None
    kernels_per_layer: int = 3
    #: what a kernel costs the host; each host's pace and each launch differ by such parts
    launch_ns: int = 250_000
    host_noise_frac: float = 0.0
    host_pace_frac: float = 0.0
    #: the host is at most so many steps ahead of its device: then a launch blocks
    ahead_steps: int = 4
    #: transfer of a bucket, and of the last small one
    transfer_ns: int = 250_000
    latency_ns: int = 12_000
    #: members of one large collective end apart by up to this; small ones by 0.4 µs
    phase_ns: int = 20_000
    copy_ns: int = 400_000
    pageable: bool = False
    #: the host waits for the GPU at the end of each step (`.item()`)
    synchronous: bool = False
    #: `.item()` between forward and backward of every this many steps; 0: of none
    item_every: int = 0
    #: what tracing adds to each launch inside the window; the usual step is then known (step logs)
    traced_ns: int = 0
    #: the host waits so long for the interpreter lock before each launch
    gil_ns: int = 0
    small_calls: bool = True
    #: one AllReduce per layer after the backward, overlapped with nothing
    serial: bool = False
    #: parameters sharded: AllGather before each layer, ReduceScatter behind its backward
    sharded: bool = False
    #: experts on all ranks of a data group: an AllToAll before and after each layer's, to which
    #: tokens are routed unevenly, by a log-normal of this sigma
    experts_frac: float = 0.0
    #: kernels run on the host itself, as with gloo
    on_host: bool = False
    #: pipeline: one forward, one backward, instead of all forwards first
    one_f_one_b: bool = False
    #: interleaved 1F1B: each rank has so many chunks of layers (microbatches: a multiple of pp)
    chunks: int = 1
    noise_frac: float = 0.01
    #: kernels take longer by such a part while a collective is on their GPU, waiting or not
    contention_frac: float = 0.0
    #: each GPU's speed differs by up to such a part from the others'
    gpu_speed_frac: float = 0.0
    #: sequences are as long as a log-normal of such a sigma says, by replica and step
    varied_frac: float = 0.0
    #: for so many steps a replica's sequences have one length
    varied_steps: int = 1
    #: transfers take longer by such parts, now and then by far (a shared network)
    network_noise_frac: float = 0.0
    #: any host stalls now and then: once in so many steps, for so long
    hiccup_steps: int = 0
    hiccup_ns: int = 0
    causes: tuple[Cause, ...] = ()
    #: how far apart the ranks resume when the capture starts
    tear_ns: int = 120_000_000
    #: each rank's wall clock: true time plus offset, and drift about the window's middle
    offset_ns: tuple[int, ...] = ()
    drift_ppm: tuple[float, ...] = ()
    communicator_ids: bool = True
    #: calls that each rank's report lacks at its begin (windows that begin at different calls)
    lost_calls: tuple[int, ...] = ()
    with_steps: bool = True
    ranks_per_host: int = 8
    seed: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class Truth:
    """What is true of a simulated job."""

    causes: tuple[Cause, ...]
    offset_ns: tuple[int, ...]
    drift_ppm: tuple[float, ...]
    #: true time about which the drift is counted
    middle_ns: int
    #: ranks by group, named `data0`, `tensor0`, `pipeline0` and so on; a pipeline's by stage
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
