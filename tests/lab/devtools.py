"""Chromium by its own protocol over two pipes: pages are painted, touched and timed as on a screen.

One Chromium takes seconds to start: its tabs are opened in moments, each as if it were the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.command import PATIENCE_S


class Browser:
    """A headless Chromium, whose tabs are used one at a time."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._count = write, read, b"", 0
        #: of each tab, by its session, what has happened in it
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def message(self) -> dict[str, Any]:
        """The next thing that Chromium says; an event is kept with its tab's."""
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            more = os.read(self._read, 1 << 20) if ready else b""
            if not more:
                raise TimeoutError("Chromium has ended, or does not answer")
            self._rest += more
        head, _, self._rest = self._rest.partition(b"\0")
        message = dict(json.loads(head))
        if "id" not in message:
            self.events[message.get("sessionId", "")].append(message)
        return message

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """What a command of the protocol returns."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while (answer := self.message()).get("id") != self._count:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    @contextlib.contextmanager
    def tab(self, **context: Any) -> Iterator[Tab]:
        """A tab that shares nothing with others; `context` as for `createBrowserContext`."""
        own = self.call("Target.createBrowserContext", **context)["browserContextId"]
        try:
            yield Tab(self, own)
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=own)


class Tab:
    """One tab of a headless Chromium."""

    def __init__(self, browser: Browser, context: str) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command of the protocol for this tab returns."""
        return self._browser.call(method, self._session, **params)

    def _happened(self, method: str) -> list[dict[str, Any]]:
        events = self._browser.events[self._session]
        return [event["params"] for event in events if event["method"] == method]

    def script(self, code: str) -> Any:
        """The value of an expression in the page; of a promise what it becomes."""
        answer = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(
        self,
        page: Path | str,
        width: int,
        height: int,
        *,
        touch: bool = False,
        scripts: bool = True,
    ) -> None:
        """Open a page, by its path or address, at this size, until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=touch,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._browser.events[self._session].clear()
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        while not self._happened("Page.loadEventFired"):
            self._browser.message()
        if scripts:
            self.script("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def complaints(self) -> list[dict[str, Any]]:
        """All that the page has written to its console, and each error in it that none caught."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for kind in kinds for event in self._happened(kind)]

    def fingers(self, kind: str, *places: tuple[float, float]) -> None:
        """`touchStart`, `touchMove` or `touchEnd` with fingers at these places of the window."""
        points = [{"x": x, "y": y, "id": at} for at, (x, y) in enumerate(places)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)


@contextlib.contextmanager
def browser(program: str, profile: Path, *flags: str) -> Iterator[Browser]:
    """A Chromium that runs as long as the context, and no longer than this process."""
    read, its_write = os.pipe()
    its_read, write = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4
    shell = f'exec "$0" "$@" 3<&{its_read} 4>&{its_write}'
    flags = (*flags, "--remote-debugging-pipe", f"--user-data-dir={profile}")
    process = subprocess.Popen(
        ["bash", "-c", shell, program, *flags], pass_fds=(its_read, its_write),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    os.close(its_read)
    os.close(its_write)
    try:
        yield Browser(write, read)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        os.close(write)
        os.close(read)


@contextlib.contextmanager
def tab(program: str, profile: Path, *flags: str) -> Iterator[Tab]:
    """The only tab of a Chromium that runs as long as the context."""
    with browser(program, profile, *flags) as started, started.tab() as opened:
        yield opened
