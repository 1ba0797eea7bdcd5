"""What NCCL 2.28 tells a profiler of three steps, without NCCL and without a GPU.

NVTX has no library: a program asks the profiler's injection library for its functions. This does
that from Python, for the four functions that NCCL's ranges take: its domain, registered names, and
ranges with a payload of communicator, message size and root or peer, under NCCL's own numbers.
Without a profiler it does nothing. Run it under `nsys profile --trace=nvtx`.
"""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_uint, c_void_p

COMMUNICATOR = 0xA1B2C3D4E5F60718
PIPELINE = 0x2BE99AC413CC7B82
STEPS = 3

#: NVTX's numbers (nvtxDetail/nvtxTypes.h) of the table of callbacks and of the functions in it
CALLBACKS, CORE2 = 1, 5
PUSH, POP, REGISTER_STRING, CREATE_DOMAIN = 4, 5, 10, 12
#: module -> how many functions it has, the one before the first included
MODULES = {1: 16, 2: 9, 3: 15, 4: 7, CORE2: 16, 6: 7}
REGISTERED_STRING, PAYLOAD_EXTENSION = 3, 0xDFBD0009 - (1 << 32)
#: NCCL's schemas are counted from NVTX's first static one
FIRST_SCHEMA = 1 << 24

GetTable = CFUNCTYPE(c_int, c_int, POINTER(c_void_p), POINTER(c_uint))
GetExportTable = CFUNCTYPE(c_void_p, c_uint)


class Callbacks(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("get_table", GetTable))


class Payload(ctypes.Structure):
    _fields_ = (("schema", ctypes.c_uint64), ("size", ctypes.c_size_t), ("data", c_char_p))


class Attributes(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint16), ("size", ctypes.c_uint16), ("category", ctypes.c_uint32),
        ("color_type", ctypes.c_int32), ("color", ctypes.c_uint32),
        ("payload_type", ctypes.c_int32), ("payloads", ctypes.c_int32),
        ("payload", POINTER(Payload)), ("message_type", ctypes.c_int32), ("message", c_void_p),
    )  # fmt: skip


class Nccl:
    """NCCL's domain in the profiler that this process runs under."""

    def __init__(self, profiler: str) -> None:
        self.functions = {module: (c_void_p * count)() for module, count in MODULES.items()}
        # The profiler writes its functions to where these point.
        size = ctypes.sizeof(c_void_p)
        self.tables = {
            module: (c_void_p * len(mine))(
                *(ctypes.addressof(mine) + size * n for n in range(len(mine)))
            )
            for module, mine in self.functions.items()
        }
        self.get_table = GetTable(self._get_table)
        self.callbacks = Callbacks(ctypes.sizeof(Callbacks), self.get_table)
        self.get_export_table = GetExportTable(self._get_export_table)
        self.library = ctypes.CDLL(profiler)
        assert self.library.InitializeInjectionNvtx2(self.get_export_table), "not injected"
        mine = self.functions[CORE2]
        create = CFUNCTYPE(c_void_p, c_char_p)(mine[CREATE_DOMAIN])
        self.register = CFUNCTYPE(c_void_p, c_void_p, c_char_p)(mine[REGISTER_STRING])
        self.push = CFUNCTYPE(c_int, c_void_p, POINTER(Attributes))(mine[PUSH])
        self.pop = CFUNCTYPE(c_int, c_void_p)(mine[POP])
        self.domain = create(b"NCCL")
        self.names: dict[str, int] = {}

    def _get_export_table(self, which: int) -> int | None:
        return ctypes.addressof(self.callbacks) if which == CALLBACKS else None

    def _get_table(self, module: int, table: object, size: object) -> int:
        if module not in self.tables:
            return 0
        table[0] = ctypes.addressof(self.tables[module])  # type: ignore[index]
        size[0] = MODULES[module]  # type: ignore[index]
        return 1

    def call(self, name: str, schema: int = 0, body: bytes = b"") -> None:
        """One range as NCCL makes it; without `body` it has no payload."""
        if name not in self.names:
            self.names[name] = self.register(self.domain, name.encode())
        attributes = Attributes(version=3, size=ctypes.sizeof(Attributes))
        attributes.message_type, attributes.message = REGISTERED_STRING, self.names[name]
        payload = Payload(FIRST_SCHEMA + schema, len(body), body)
        if body:
            attributes.payload_type, attributes.payloads = PAYLOAD_EXTENSION, 1
            attributes.payload = ctypes.pointer(payload)
        self.push(self.domain, byref(attributes))
        self.pop(self.domain)


def main() -> None:
    profiler = os.environ.get("NVTX_INJECTION64_PATH")
    if profiler is None:
        return
    nccl = Nccl(profiler)
    for step in range(STEPS):
        nccl.call("ncclAllReduce", 5, struct.pack("<QQi4x", COMMUNICATOR, 5 << 30, 4))
        nccl.call("ncclAllGather", 4, struct.pack("<QQ", COMMUNICATOR, 1000 + step))
        nccl.call("ncclBroadcast", 6, struct.pack("<QQi4x", COMMUNICATOR, 8, 3))
        nccl.call("ncclGroupStart")
        nccl.call("ncclSend", 9, struct.pack("<QQi4x", PIPELINE, 4096, 1))
        nccl.call("ncclRecv", 10, struct.pack("<QQi4x", PIPELINE, 2048, 0))
        nccl.call("ncclGroupEnd")


if __name__ == "__main__":
    main()
