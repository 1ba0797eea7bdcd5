#!/usr/bin/env -S python3 -I -S
"""Starts ranks in forks of `warm.py`, and nothing else: warm_ranks.py SOCKET COUNT PORT PROGRAM...

It tells each its RANK and where to meet, waits for all, and ends with the highest status, as
`ranks.sh` does. What goes on when it is killed ends with it. COUNT 0: the program as it stands.
A rank that starts its interpreter again, under nsys, comes back here and does not load torch.
"""

import json
import os
import socket
import sys

path, count, port, *program = sys.argv[1:]
meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count}
environments = [
    {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for rank in range(int(count))
] or [dict(os.environ)]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm:
    warm.connect(path)
    # A launcher is known by its own name.
    again = ["-I", "-S", __file__, path, "0", port] if program[0].endswith(".py") else []
    asked = json.dumps([program, os.getcwd(), environments, again]).encode()
    socket.send_fds(warm, [asked], [0, 1, 2])
    statuses = json.loads(warm.recv(1 << 16))
for rank, status in enumerate(statuses):
    if status:
        print(f"rank {rank} ended with {status}", file=sys.stderr)
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
