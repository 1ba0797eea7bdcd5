"""The clock by which all of us wait: a parameter, so that a test can have it stand, or pass."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional

if TYPE_CHECKING:
    import threading


class Clock:
    """The machine's."""

    #: monotonic, in s and ns, and the time of day
    now = staticmethod(time.monotonic)
    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)
    sleep = staticmethod(time.sleep)

    def wait(
        self, readers: Iterable[Any], seconds: Optional[float] = None, writers: Iterable[Any] = ()
    ) -> List[Any]:
        """Those files, sockets or descriptors that can be read, or written to, within so long."""
        import select  # an interpreter that is no rank never waits: it starts without

        files: Dict[int, Any] = {}
        events: Dict[int, int] = {}
        for group, event in ((readers, select.POLLIN), (writers, select.POLLOUT)):
            for file in group:
                number = file if isinstance(file, int) else file.fileno()
                files[number], events[number] = file, events.get(number, 0) | event
        poll = select.poll()
        for number, event in events.items():
            poll.register(number, event)
        ready = poll.poll(None if seconds is None else 1000 * max(0.0, seconds))
        return [files[number] for number, _ in ready]

    def happens(self, event: threading.Event, seconds: float) -> bool:
        """Whether another thread sets it within so long."""
        return event.wait(seconds)

    def until(self, holds: Callable[[], Any], seconds: float, every_s: float = 0.02) -> bool:
        """Whether `holds()` within so long; asked so often, and once more at the end."""
        deadline = self.now() + seconds
        while not holds():
            left_s = deadline - self.now()
            if left_s <= 0:
                return False
            self.sleep(min(every_s, left_s))
        return True


#: what whoever is given no other clock goes by
REAL = Clock()
