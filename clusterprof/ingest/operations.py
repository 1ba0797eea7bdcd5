"""One name for an operation, whatever NCCL, gloo or a kernel calls it."""

from __future__ import annotations

import re

#: operation -> what it is called, in lower case and without separators: `ncclAllReduce`,
#: `all_reduce`, `_allgather_base`
_NAMES = {
    "AllReduce": "allreduce allreducesparse allreducecoalesced",
    "AllGather": "allgather allgatherbase allgatherv allgathercoalesced allgatherintotensor"
    " allgatherintotensorcoalesced",
    "ReduceScatter": "reducescatter reducescatterbase reducescattertensor"
    " reducescattertensorcoalesced",
    "Broadcast": "broadcast bcast broadcastoop",
    "Reduce": "reduce reduceoop",
    "AllToAll": "alltoall alltoallv alltoallbase",
    "Gather": "gather",
    "Scatter": "scatter",
    "Barrier": "barrier",
    "Send": "send",
    "Recv": "recv recvanysource",
    "SendRecv": "sendrecv",
}
_OPERATIONS = {name: operation for operation, names in _NAMES.items() for name in names.split()}

#: of a kernel that no name tells of, and that was seen to wait for the other members
EXCHANGE = "Exchange"

#: operations whose member cannot end before every member has started, because each member's
#: output depends on each member's input
SYNCHRONISING = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Barrier", EXCHANGE)

#: NCCL's own host calls that are collectives; `ncclGroupStart`, `ncclCommInitRank` are not. In its
#: domain, nsys' advanced tracing leaves the prefix out.
NCCL_CALL = r"^(nccl)?(AllReduce|AllGatherV?|ReduceScatter|Broadcast|Bcast|Reduce|AllToAllv?|AlltoAllv?|Gather|Scatter|Send|Recv)$"  # fmt: skip # noqa: E501


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
    words = (word.lower() for word in re.split(r"[^A-Za-z]+", name)[1:])
    return next((_OPERATIONS[word] for word in words if word in _OPERATIONS), "Unknown")
