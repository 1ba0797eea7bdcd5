"""A program with the agent in it, between a guard and a writer that answer as recorded."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from clusterprof.agent.contracts import identity
from clusterprof.launch.planning import INJECT
from golden.record import LOOP, TRAIN, of_writer
from golden.replay import PATIENCE_S, end_group

_HEAD = struct.Struct("<Ic")


def environment_of_a_rank(plan: Path, *folders: Path) -> dict[str, str]:
    """That of the only rank of a job with this plan; it imports from these folders as well."""
    return {
        **os.environ, "PYTHONPATH": ":".join(map(str, [INJECT, *folders])),
        identity.PLAN: str(plan), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
    }  # fmt: skip


class Program:
    """The program of a recorded job, its guard and writer being ours."""

    def __init__(self, folder: Path, plan: Path, steps: int) -> None:
        (folder / "loop.py").write_text(LOOP)
        (folder / "train.py").write_text(TRAIN)
        self.guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.guard.bind(str(folder / "socket"))
        self.guard.listen()
        self.writer, self.its_writer = socket.socketpair()
        self.buffer = bytearray()
        #: what it asked its guard, and sent to its writer
        self.requests: list[str] = []
        self.sent: list[tuple[int, str, str]] = []
        self.connections: list[socket.socket] = []
        environment = environment_of_a_rank(plan, folder)
        identity.set_field(environment, identity.PROFILED, f"session:{folder / 'socket'}")
        identity.set_field(environment, identity.GIVEN, "0,1,2")
        self.process = subprocess.Popen(
            [sys.executable, "train.py", str(steps)], cwd=folder, env=environment,
            start_new_session=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, replies: dict[str, str]) -> int:
        """Answer until it ends; returns its status. `replies` are those of the guard."""
        until = time.monotonic() + PATIENCE_S
        listening = [self.guard, self.writer]
        while self.process.poll() is None and time.monotonic() < until:
            for ready in select.select(listening, [], [], 0.05)[0]:
                if ready is self.guard:
                    self.reply(replies)
                elif not self.hear():
                    listening.remove(self.writer)
        while self.writer in listening and self.hear():
            pass
        return self.process.wait(1)

    def close(self) -> None:
        """End the program, if it still runs."""
        end_group(self.process)
        for connection in (self.guard, self.writer, self.its_writer, *self.connections):
            connection.close()

    def reply(self, replies: dict[str, str]) -> None:
        """One request to the guard."""
        connection, _ = self.guard.accept()
        self.connections.append(connection)
        self.requests.append(connection.recv(64).decode().strip())
        if self.requests[-1] == "writer":
            number = self.its_writer.fileno()
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [number]))]
            connection.sendmsg([b"%d\n" % number], beside)
            connection.sendall(b"ok\n")
            self.its_writer.close()
        elif reply := replies[self.requests[-1]]:
            connection.sendall(f"{reply}\n".encode())

    def hear(self) -> bool:
        """One piece of what it sends to its writer; False where nothing more comes."""
        piece = self.writer.recv(1 << 18)
        self.buffer += piece
        while len(self.buffer) >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self.buffer)
            if len(self.buffer) < _HEAD.size + size:
                break
            body = bytes(self.buffer[_HEAD.size : _HEAD.size + size])
            del self.buffer[: _HEAD.size + size]
            text = body if kind == b"J" else base64.b64encode(body)
            self.sent.append((0, kind.decode(), text.decode()))
            if kind == b"J" and json.loads(body)["do"] == "watch":
                answer = json.dumps({"order": None}).encode()
                self.writer.sendall(_HEAD.pack(len(answer), b"J") + answer)
        return bool(piece)

    def messages(self, run: Path) -> str:
        """What it sent to its writer, as a recording has it."""
        sent = [(peer, kind, text.replace(str(run), "{RUN}")) for peer, kind, text in self.sent]
        return without_times([json.loads(line) for line in of_writer(sent)])


def without_times(entries: list[dict[str, Any]]) -> str:
    """Messages, one a line, and how many steps; when they were said does not count.

    Nor do those by which hardware is sampled: a writer's samples are of the machine that it is on.
    """
    messages = [
        json.dumps(entry["message"])
        for entry in entries
        if "message" in entry and entry["message"].get("do") != "hardware"
    ]
    steps = sum(entry.get("steps", 0) for entry in entries)
    return re.sub(r'_ns": \d+', '_ns": 0', "\n".join([*messages, f"{steps} steps"]))
