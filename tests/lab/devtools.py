"""Chromium by its own protocol over two pipes: touch, media and time as on a real screen.

`--dump-dom` runs in virtual time, in which nothing is painted and no finger can be put down.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.command import PATIENCE_S


class Tab:
    """One tab of a headless Chromium."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._count = write, read, b"", 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        self.call("Page.enable")

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            more = os.read(self._read, 1 << 20) if ready else b""
            if not more:
                raise TimeoutError("Chromium has ended, or does not answer")
            self._rest += more
        head, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(head))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command of the protocol returns."""
        self._count += 1
        asked = {"id": self._count, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            got = self._message()
            if got.get("id") == self._count:
                assert "error" not in got, got
                return dict(got["result"])
            self._events.append(got)

    def script(self, code: str) -> Any:
        """The value of an expression in the page; of a promise what it becomes."""
        found = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, page: Path, width: int, height: int, *, touch: bool = False) -> None:
        """Open a page at this size, until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=touch,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.call("Page.navigate", url=page.as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self._events):
            self._events.append(self._message())
        self._events.clear()
        self.script("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def fingers(self, kind: str, *places: tuple[float, float]) -> None:
        """`touchStart`, `touchMove` or `touchEnd` with fingers at these places of the window."""
        points = [{"x": x, "y": y, "id": at} for at, (x, y) in enumerate(places)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)


@contextlib.contextmanager
def tab(program: str, profile: Path, *flags: str) -> Iterator[Tab]:
    """A tab of a Chromium that runs as long as the context."""
    read, its_write = os.pipe()
    its_read, write = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4
    shell = f'exec "$0" "$@" 3<&{its_read} 4>&{its_write}'
    flags = (*flags, "--remote-debugging-pipe", f"--user-data-dir={profile}")
    browser = subprocess.Popen(
        ["bash", "-c", shell, program, *flags],
        pass_fds=(its_read, its_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(its_read)
    os.close(its_write)
    try:
        yield Tab(write, read)
    finally:
        browser.terminate()
        browser.wait(PATIENCE_S)
        os.close(write)
        os.close(read)
