"""Kernels that exchange data between ranks, by their names: NCCL's and other libraries'.

What no name tells may follow from a kernel's arguments or its launch; that is for the readers.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from clusterprof.columns import Bools, Ints
from clusterprof.ingest.operations import kernel_operation, operation
from clusterprof.words import counted, listed

#: in a name of any library: what is done, whatever is written around it
_WORDS = re.compile(r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all")
#: Inductor names its fused kernels after the operators that they come from, collectives among them
_FUSED = re.compile(r"^triton_\w+_fused_")
#: what stands before a kernel's function, and where its template's or call's arguments begin
_BEFORE = re.compile(r"^void |\(anonymous namespace\)::|<unnamed>::|\(anonymous\)::")
_ARGUMENTS = re.compile(r"[<(]")

_NCCL = re.compile(r"^nccl\w*Kernel")
#: kernels that a warning names
_MOST_NAMED = 4

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
    some = listed((name for name, _ in functions.most_common()), _MOST_NAMED)
    text = (
        f"{counted(functions.total(), 'kernel')} of libraries other than NCCL ({some}) count as "
        "communication; flight recorders do not hold them"
    )
    return [text]
