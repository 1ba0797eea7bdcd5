"""An nsys whose program asks its guard what a recording has: NSYS RECORDING REPLIES.

`launch` becomes that program; `stop` leaves a report. What the guard replies is written to REPLIES.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from array import array
from pathlib import Path
from typing import Any

#: the nsys: what it is asked besides ends well
SCRIPT = """#!/bin/sh
case "$1:$2" in
  --version:*) echo "NVIDIA Nsight Systems version 2022.4.2.1" ;;
  *:--help) echo "--trace= cuda nvtx osrt --sample= --cpuctxsw= --output=" ;;
  launch:*) exec {python} {file} {recording} {replies} "$@" ;;
  stop:*) echo "a report[END]" > report.nsys-rep ;;
esac
"""


def main(recording: str, target: str, words: list[str]) -> int:
    """Ask in order; returns the status with which the recorded program has ended."""
    address = words[words.index("trampoline") + 1]
    entries = [json.loads(line) for line in Path(recording).read_text().splitlines()]
    requests = [entry["request"] for entry in entries if "request" in entry]
    read, write = os.pipe()
    program = os.fork()
    if not program:  # it runs until we close the pipe
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    connections: list[Any] = []
    guard, status = None, 0
    with Path(target).open("a") as answers:
        for request in requests:
            if not request.startswith("pid "):
                guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                guard.connect(address)
                connections.append(guard)
            assert guard is not None
            number = program if request.startswith("pid ") else os.getpid()
            guard.sendall(request.replace("PID", str(number)).encode() + b"\n")
            answers.write(json.dumps({"request": request}) + "\n")
            replies = replies_of(guard, request)
            answers.writelines(json.dumps({"reply": reply}) + "\n" for reply in replies)
            if request.startswith("ended "):
                status = int(request.split()[1])
    os.close(write)
    os.waitpid(program, 0)
    return status


def replies_of(guard: socket.socket, request: str) -> list[str]:
    """The guard's replies to one request, as a recording has them."""
    if request.startswith(("pid ", "ended ", "size", "stop")):
        return []
    descriptors, text = array("i"), b""
    while not text.endswith(b"ok\n") or not request.startswith(("hello ", "writer")):
        piece, beside, _, _ = guard.recvmsg(4096, socket.CMSG_SPACE(800))
        text += piece
        for _, _, data in beside:
            descriptors.frombytes(data)
        if not piece or (text.endswith(b"\n") and not request.startswith(("hello ", "writer"))):
            break
    if descriptors:
        return [f"{len(descriptors)} descriptors", "ok"]
    return text.decode().splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
