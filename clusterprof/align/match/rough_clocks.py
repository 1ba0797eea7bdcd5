"""How ranks' clocks lie to each other, roughly, as far as calls already matched tell."""

from __future__ import annotations


class RoughClocks:
    """Offsets between pairs of ranks, carried on through chains of ranks."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, int]] = {}

    def tell(self, a: int, b: int, offset_ns: int) -> None:
        """Note that a's clock is ahead of b's by about `offset_ns`; the first word stands."""
        if b not in self._known.get(a, {}):
            self._known.setdefault(a, {})[b] = offset_ns
            self._known.setdefault(b, {})[a] = -offset_ns

    def between(self, a: int, b: int) -> int | None:
        """Return by how much a's clock is ahead of b's (ns); None where no chain leads there."""
        reached = {a: 0}
        waiting = [a]
        while waiting and b not in reached:
            rank = waiting.pop(0)
            for other, ahead in self._known.get(rank, {}).items():
                if other not in reached:
                    reached[other] = reached[rank] + ahead
                    waiting.append(other)
        return reached.get(b)
