"""Says to the product's own processes what was said in a recording, and keeps what they answer.

All is said on the wire and read from files, so that nothing here names what is inside of them.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import termios
import time
from array import array
from pathlib import Path
from typing import Any

from clusterprof.agent.contracts import processes
from golden.record import EACH_NS, WALL_NS, is_progress

#: a message's length and kind, before its body
_HEAD = struct.Struct("<Ic")
#: after so long what is waited for hangs, on whatever machine
PATIENCE_S = 300
_TRACE = '{"traceEvents": []}'

Entry = dict[str, Any]


class WriterReplay:
    """A writer, and the peers that a recording has; `{RUN}` and its like are folders here."""

    def __init__(self, folder: Path) -> None:
        self.run, self.private = folder / "run", folder / "private"
        for new_folder in (self.run, self.private):
            new_folder.mkdir()
        self.names = {"{RUN}": str(self.run), "{PRIVATE}": str(self.private)}
        #: when the steps begin: later than any step could seem to hang
        self.begin_ns = time.monotonic_ns() + 10**9 * 3600
        ours, theirs = socket.socketpair()
        self.peers = {0: ours}
        self.buffers: dict[int, bytearray] = {0: bytearray()}
        self.answers: dict[int, list[Entry]] = {0: []}
        with theirs:
            self.process = subprocess.Popen(
                [*processes.part("writer"), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], env={**os.environ, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def play(self, entries: list[Entry]) -> str:
        """Say all that was said, wait for all that was answered; all answers, and what is left."""
        due: dict[int, list[Entry]] = {}
        for entry in entries:
            peer = entry["peer"]
            if "answer" in entry:
                recorded = due.setdefault(peer, [])
                if not repeats(entry["answer"], recorded):
                    recorded.append(entry["answer"])
                self.wait(peer, len(recorded))
            elif "end" in entry:
                self.end(peer)
            else:
                self.say(peer, entry)
        self.process.wait(PATIENCE_S)
        return f"{self.answered()}\n{files_text(self.run, self.names)}{self.left()}"

    def close(self) -> None:
        """End the writer, whatever it waits for."""
        for peer in self.peers.values():
            peer.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def say(self, peer: int, entry: Entry) -> None:
        """Send one entry, and wait until the writer has taken it: it comes before the next one."""
        connection = self.peers[peer]
        if "peer is there" in entry:
            number = len(self.peers)
            self.peers[number], theirs = socket.socketpair()
            self.buffers[number], self.answers[number] = bytearray(), []
            with theirs:
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))]
                connection.sendmsg([_HEAD.pack(0, b"P")], beside)
        elif "steps" in entry:
            first, last = entry["first"], entry["first"] + entry["steps"]
            ends = [end for step in range(first, last) for end in (step, step + 1)]
            body = array("q", [first, *(self.begin_ns + EACH_NS * end for end in ends)]).tobytes()
            connection.sendall(_HEAD.pack(len(body), b"S") + body)
        elif "file" in entry:
            body = f"{entry['file']}\n".encode() + gzip.compress(b"a file", mtime=0)
            connection.sendall(_HEAD.pack(len(body), b"F") + body)
        else:
            body = json.dumps(self.here(entry["message"])).encode()
            self.leave_files(entry["message"])
            connection.sendall(_HEAD.pack(len(body), b"J") + body)
        until = time.monotonic() + PATIENCE_S
        while array("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
            assert time.monotonic() < until, f"the writer does not take {entry}"
            time.sleep(0.001)

    def here(self, value: Any) -> Any:
        """A message with the folders of this replay, and steps by its own clock."""
        if isinstance(value, dict) and value["do"] == "begin":
            value = {**value, "wall_ns": WALL_NS - self.begin_ns}
        text = json.dumps(value)
        for name, folder in self.names.items():
            text = text.replace(name, folder)
        return json.loads(text)

    def leave_files(self, message: Entry) -> None:
        """What profilers leave before a message is sent."""
        if message["do"] == "keep":
            (self.private / "report.nsys-rep").write_text("a report[END]")
            (self.private / "log").write_text("what nsys printed\n")
        elif message["do"] == "trace":
            Path(self.here(message["path"])).write_text(_TRACE)

    def wait(self, peer: int, count: int) -> None:
        """Until a peer has so many answers."""
        while len(self.answers[peer]) < count:
            assert self.receive(peer), f"no answer {count} for peer {peer}: {self.answered()}"

    def end(self, peer: int) -> None:
        """A peer ends; what it was answered until then counts."""
        self.peers[peer].shutdown(socket.SHUT_WR)
        while self.receive(peer):
            pass

    def receive(self, peer: int) -> bool:
        """One piece of what a peer is answered; False where nothing more comes."""
        ready = select.select([self.peers[peer]], [], [], PATIENCE_S)[0]
        piece = self.peers[peer].recv(65536) if ready else b""
        buffer, answers = self.buffers[peer], self.answers[peer]
        buffer += piece
        while len(buffer) >= _HEAD.size:
            size, _ = _HEAD.unpack_from(buffer)
            if len(buffer) < _HEAD.size + size:
                break
            answer = json.loads(buffer[_HEAD.size : _HEAD.size + size])
            del buffer[: _HEAD.size + size]
            if "folder" in answer:
                self.names["{FOLDER}"] = answer["folder"]
            answer = {key: self.names_of(value) for key, value in answer.items()}
            if not is_progress(answer) and not repeats(answer, answers):
                answers.append(answer)
        return bool(piece)

    def names_of(self, value: Any) -> Any:
        """A value with the recording's names for the folders of this replay."""
        return {folder: name for name, folder in self.names.items()}.get(value, value)

    def answered(self) -> str:
        """All answers, one a line."""
        return answers_text(self.answers)

    def left(self) -> str:
        """Which folders of the node are still there."""
        left = [name for name, folder in self.names.items() if Path(folder).exists()]
        return f"folders that are left: {', '.join(left)}\n"


def repeats(answer: Entry, before: list[Entry]) -> bool:
    """Whether a peer has been told this: how often it is, depends on how long things take.

    While a window is open, whether there is an order to close it is answered again and again.
    """
    return answer in before[-1:] or (answer == {"order": None} and answer in before)


def answers_text(answers: dict[int, list[Entry]]) -> str:
    """Answers by peer, one a line."""
    return "".join(
        f"peer {peer}: {json.dumps(answer)}\n"
        for peer, given in sorted(answers.items())
        for answer in given
    )


def files_text(run: Path, names: dict[str, str]) -> str:
    """All files of a run directory, as text without what differs from run to run."""
    text = ""
    for file in sorted(run.rglob("*")):
        if file.is_file() and file.name != "plan.json":
            content = file.read_bytes()
            if file.suffix == ".gz":
                content = gzip.decompress(content)
            if file.suffix == ".json":
                content = json.dumps(_timeless(json.loads(content)), indent=1).encode()
            text += f"== {file.relative_to(run)}\n{content.decode(errors='replace').rstrip()}\n"
    for name, folder in names.items():
        text = text.replace(folder, name)
    return text


def _timeless(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _timeless(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_timeless(inner, key) for inner in value]
    if isinstance(value, int) and value > WALL_NS + 10**13:
        return "NOW"
    if key == "session":
        return re.sub(r"-[0-9a-f]{8}-(\d+)-\d+$", r"-HASH-\1-PID", str(value))
    return {"host": "HOST", "machine": "MACHINE", "pid": "PID"}.get(key, value)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
