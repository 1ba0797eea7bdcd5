"""What a collective call does, by its name: of NCCL, of gloo, or of a kernel of any library.

What no name tells may follow from a kernel's arguments or its launch; that is for the readers.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from clusterprof.columns import Bools, Ints
from clusterprof.words import counted, listed

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


#: in a name of any library: what is done, whatever is written around it
_WORDS = re.compile(r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all")
#: Inductor names its fused kernels after the operators that they come from, collectives among them
_FUSED = re.compile(r"^triton_\w+_fused_")
#: what stands before a kernel's function, and where its template's or call's arguments begin
_BEFORE = re.compile(r"^void |\(anonymous namespace\)::|<unnamed>::|\(anonymous\)::")
_ARGUMENTS = re.compile(r"[<(]")

_NCCL = re.compile(r"^nccl\w*Kernel")

#: kernels that exchange data between ranks, by their functions' names, and the operation where no
#: word of `_WORDS` states it: `Unknown` of those that need not wait for every member
_FAMILIES = [
    (re.compile(pattern), stated)
    for pattern, stated in (
        # NCCL: ncclDevKernel_*, older ncclKernel_*, symmetric memory ncclSymkDevKernel_*
        (_NCCL.pattern, ""),
        # RCCL's own algorithms, and MSCCL++
        (r"^msccl", "Unknown"),
        # symmetric memory of PyTorch
        (r"^multimem_one_shot_reduce", "Reduce"),
        (r"^multimem_", "Unknown"),
        (r"^(put|wait)_signal_kernel", "Unknown"),
        (r"^barrier_kernel", "Barrier"),
        # vLLM, SGLang, AITER; FlashInfer and TensorRT-LLM
        (r"\bcross_device_reduce_", "AllReduce"),
        (r"(?i)lamport", "AllReduce"),
        (r"\bmoeA2A|\bfusedMoeComm", "AllToAll"),
        # Transformer Engine's user buffers
        (r"^userbuffers_\w+_rs(_|$)", "ReduceScatter"),
        (r"^userbuffers_\w+_ag(_|$)", "AllGather"),
        (r"^userbuffers_fp16_sum_inplace_gpu_(rw|rr|mc)", "AllReduce"),
        (r"^k?userbuffers_", "Unknown"),
        # DeepEP and HybridEP; the low-latency ones may send without waiting
        (r"\binternode_ll::", "Unknown"),
        (r"\bget_dispatch_layout$", None),
        (r"\bdeep_ep::|\bhybrid_ep::|\b(intra|inter)node::", "AllToAll"),
        # NVSHMEM and ROCSHMEM
        (r"^(nvshmem|rocshmem)\w*(barrier|sync)", "Barrier"),
        (r"^(nvshmem|rocshmem)", "Unknown"),
        # oneCCL, HCCL
        (r"(?i)^(oneccl|hccl|hcom)|\bccl::", "Unknown"),
    )
]


def _function(name: str) -> str:
    return _ARGUMENTS.split(_BEFORE.sub("", name), maxsplit=1)[0]


@functools.lru_cache(maxsize=1 << 14)
def exchange_of(name: str) -> str | None:
    """Return the operation of a kernel that exchanges data between ranks; None of any other.

    >>> exchange_of("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 4>(vllm::RankData*)")
    'AllReduce'
    >>> exchange_of("ncclDevKernel_Broadcast_RING_LL"), exchange_of("void gemm<AllReduce>(float*)")
    ('Broadcast', None)
    """
    function = _function(name)
    of_family = next((stated for pattern, stated in _FAMILIES if pattern.search(function)), None)
    if of_family == "":
        return kernel_operation(function)
    word = None if _FUSED.search(function) else _WORDS.search(function)
    return operation(word[0]) if word else of_family


def exchanging_names(names: Sequence[str], codes: Ints) -> Bools:
    """Return which kernels exchange data between ranks, `names[codes[i]]` by its name."""
    used = np.unique(codes[codes >= 0])
    table = np.zeros(len(names) + 1, bool)
    table[used] = [exchange_of(names[code]) is not None for code in used.tolist()]
    return table[codes]


def without_nccl(names: Sequence[str]) -> list[str]:
    """Return the warning about calls whose kernels (`names`) are not NCCL's: at most one."""
    functions = Counter(name for name in map(_function, names) if not _NCCL.search(name))
    if not functions:
        return []
    some = listed((name for name, _ in functions.most_common()), 4)
    text = (
        f"{counted(functions.total(), 'kernel')} of libraries other than NCCL ({some}) count as "
        "communication; flight recorders do not hold them"
    )
    return [text]
