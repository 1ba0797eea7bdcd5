"""One name for an operation, whatever NCCL, gloo or a kernel calls it."""

from __future__ import annotations

import re

#: keys are lower case without separators: `ncclAllReduce`, `all_reduce`, `_allgather_base`
_OPERATIONS = {
    "allreduce": "AllReduce",
    "allreducesparse": "AllReduce",
    "allreducecoalesced": "AllReduce",
    "allgather": "AllGather",
    "allgatherbase": "AllGather",
    "allgatherv": "AllGather",
    "allgathercoalesced": "AllGather",
    "allgatherintotensor": "AllGather",
    "allgatherintotensorcoalesced": "AllGather",
    "reducescatter": "ReduceScatter",
    "reducescatterbase": "ReduceScatter",
    "reducescattertensor": "ReduceScatter",
    "reducescattertensorcoalesced": "ReduceScatter",
    "broadcast": "Broadcast",
    "bcast": "Broadcast",
    "broadcastoop": "Broadcast",
    "reduce": "Reduce",
    "reduceoop": "Reduce",
    "alltoall": "AllToAll",
    "alltoallv": "AllToAll",
    "alltoallbase": "AllToAll",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
    "send": "Send",
    "recv": "Recv",
    "recvanysource": "Recv",
    "sendrecv": "SendRecv",
}

#: NCCL's own host calls that are collectives; `ncclGroupStart`, `ncclCommInitRank` are not
NCCL_CALL = r"^nccl(AllReduce|AllGatherV?|ReduceScatter|Broadcast|Bcast|Reduce|AllToAllv?|AlltoAllv?|Gather|Scatter|Send|Recv)$"  # fmt: skip # noqa: E501

#: kernels of NCCL: ncclDevKernel_*, older ncclKernel_*, symmetric memory ncclSymkDevKernel_*
NCCL_KERNEL = r"^(void )?nccl\w*Kernel"


def operation(name: str) -> str:
    """Return the normalised operation of a host call's or process group's name, or `Unknown`.

    >>> operation("ncclAllReduce"), operation("_allgather_base"), operation("gloo:all_reduce")
    ('AllReduce', 'AllGather', 'AllReduce')
    """
    word = name.rpartition(":")[2] if ":" in name else name
    word = word.strip().partition(" ")[0]  # "send 0->2"
    key = word.replace("_", "").lower()
    return _OPERATIONS.get(key.removeprefix("nccl"), "Unknown")


def kernel_operation(name: str) -> str:
    """Return the operation that a NCCL kernel's name states, or `Unknown` (`..._Generic`).

    >>> kernel_operation("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    'AllReduce'
    >>> kernel_operation("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    'SendRecv'
    """
    for word in re.split(r"[^A-Za-z]+", name)[1:]:
        found = _OPERATIONS.get(word.lower())
        if found is not None:
            return found
    return "Unknown"
